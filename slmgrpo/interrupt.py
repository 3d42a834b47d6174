"""Ctrl-C and SIGTERM as an exception that never falls into a half-done step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """A signal asked the run to stop; the exit code is 128 + its number (130 or 143)."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        self.saved = ""
        """What was saved and how to go on; the run fills it in."""


class Interrupts:
    """Installs the handlers; inside `held()` a signal waits for the end of the block, a second Ctrl-C does not.

    A second SIGTERM waits too: schedulers and torchrun each send their own.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self._before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._depth and (self._pending is None or number == signal.SIGTERM):
            self._pending = self._pending or number
            return
        self._pending = None
        raise Interrupted(number)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending is not None and not self._depth:
            number, self._pending = self._pending, None
            raise Interrupted(number)

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Inside `held()`: a signal raises again, also one that came before; behind the block it waits as before."""
        depth, self._depth = self._depth, 0
        try:
            if self._pending is not None:
                number, self._pending = self._pending, None
                raise Interrupted(number)
            yield
        finally:
            self._depth = depth
