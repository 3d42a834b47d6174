"""Fixtures that several test files share; one thread a test process."""

import os

from jailed import box, strongest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch when it is imported; two processes are busy as it is

__all__ = ["box", "strongest"]
