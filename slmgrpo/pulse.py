"""Signs of life: each rank keeps a small file with its stage in the run directory, and who is late is said."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slmgrpo.callbacks import Observer

PATIENCE_S = 30.0
"""So long others wait for a rank before it is named; then again after twice as long, and so on."""
EVERY_S = 1.0
"""Between two writes of a rank that goes on with the same thing."""


@dataclass(frozen=True)
class Beat:
    """What a rank was doing. since: when that began, time: its last sign of life, both in seconds since the epoch."""

    rank: int
    stage: str
    waiting: bool
    """For the other ranks, in a collective; `stage` is then what it had done before."""
    step: int
    since: float
    time: float
    pid: int
    host: str

    def __str__(self) -> str:
        doing = f"waiting for the others after {self.stage}" if self.waiting else self.stage
        return f"rank {self.rank} ({self.host}, process {self.pid}), step {self.step + 1}, {doing}"


class Pulse:
    """Writes this rank's beats; does nothing until it has a place to write to."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._beat = Beat(0, "starting", False, 0, time.time(), 0.0, os.getpid(), socket.gethostname())

    def start(self, folder: Path, rank: int) -> None:
        folder.mkdir(exist_ok=True)
        self._file = folder / f"rank_{rank}.json"
        self._beat = replace(self._beat, rank=rank)
        self._write()

    def step(self, step: int) -> None:
        """So many steps are finished."""
        self._beat = replace(self._beat, step=step)

    def stage(self, stage: str) -> None:
        now = time.time()
        if stage != self._beat.stage:
            self._beat = replace(self._beat, stage=stage, since=now)
            self._write()
        elif now - self._beat.time > EVERY_S:
            self._write()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        before = self._beat
        self._beat = replace(before, waiting=True, since=time.time())
        self._write()
        try:
            yield
        finally:
            self._beat = replace(before, since=time.time())
            self._write()

    def _write(self) -> None:
        """Without fsync: a beat is only worth something while the machine runs."""
        self._beat = replace(self._beat, time=time.time())
        if self._file is None:
            return
        partial = self._file.with_suffix(".partial")
        with contextlib.suppress(OSError):  # a full disk is for the checkpoint to report
            partial.write_text(json.dumps(asdict(self._beat)) + "\n")
            partial.replace(self._file)


@dataclass(frozen=True)
class Pulsing:
    """An observer whose calls are signs of life too."""

    observer: Observer
    pulse: Pulse

    def stage(self, text: str) -> None:
        self.pulse.stage(text)
        self.observer.stage(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self.pulse.stage(what)
        self.observer.progress(what, done, total)

    def warn(self, text: str) -> None:
        self.observer.warn(text)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.observer.step(metrics)


def read(folder: Path) -> list[Beat]:
    """The last beat of each rank, in rank order."""
    beats = []
    for file in folder.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            beats.append(Beat(**json.loads(file.read_text())))
    return sorted(beats, key=lambda beat: beat.rank)


def awaited(beats: Sequence[Beat], now: float) -> tuple[float, list[Beat]]:
    """Seconds that the longest waiting rank has waited, and the ranks that it waits for."""
    waits = [now - beat.since for beat in beats if beat.waiting]
    return max(waits, default=0.0), [beat for beat in beats if not beat.waiting]


@contextlib.contextmanager
def watched(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Names in the background whoever keeps the other ranks waiting for longer than PATIENCE_S."""
    ended = threading.Event()

    def watch() -> None:
        patience = PATIENCE_S
        while not ended.wait(min(EVERY_S, PATIENCE_S / 4)):
            now = time.time()
            seconds, late = awaited(read(folder), now)
            if seconds < PATIENCE_S:
                patience = PATIENCE_S
            elif late and seconds >= patience:
                patience *= 2
                for beat in late:
                    last = f"its last sign of life is {now - beat.time:.0f} s old"
                    say(f"the other ranks have waited {seconds:.0f} s for {beat}; {last}")

    thread = threading.Thread(target=watch, name="rank-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=5)
