"""Fixtures that several test files share."""

from jailed import box, strongest

__all__ = ["box", "strongest"]
