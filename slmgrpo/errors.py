"""What a user can do wrong, as three errors that the command line prints without a traceback."""

from __future__ import annotations


class SlmgrpoError(Exception):
    """Base of all errors with a message for the user: where, what, what to do."""

    exit_code = 2


class RecipeError(SlmgrpoError):
    """A recipe, a data file or a command line that cannot be right: fix the input."""


class PlanError(SlmgrpoError):
    """A recipe that is well formed but cannot run with these settings on this machine."""


class RunError(SlmgrpoError):
    """A run that broke after it started: its directory is kept and can be resumed."""

    exit_code = 1
