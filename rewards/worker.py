"""A grading process of the pool: a fresh Python without torch that judges in chunks and dies with its parent."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from slmgrpo.rewards.base import Verdict
from slmgrpo.rewards.code import SANDBOX

START_S = 60.0
"""A worker that does not answer by then cannot start at all."""


class Worker:
    """A process that judges chunks; its position in the chunk stands in shared memory."""

    def __init__(self, sandbox: str) -> None:
        memory = os.memfd_create("slmgrpo-pool")
        os.ftruncate(memory, 8)
        self._memory = mmap.mmap(memory, 8)
        self._memory[:] = _NOT_STARTED
        here, there_in = os.pipe()
        there_out, here_in = os.pipe()
        self.connection = Connection(here, writable=False)
        self._requests = Connection(here_in, readable=False)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(there_out), str(there_in), str(memory), str(os.getpid())],
            pass_fds=(there_out, there_in, memory),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the trainer's to handle
            env=os.environ | {"PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path), SANDBOX: sandbox},
        )
        for fd in (memory, there_in, there_out):
            os.close(fd)
        self.chunk: deque[Any] = deque()
        self._sent = 0
        self._mark = 0.0
        self._seen = b""

    @property
    def started(self) -> bool:
        return self._memory[:] != _NOT_STARTED

    def send(self, chunk: Sequence[Any]) -> bool:
        """Hand over a chunk; False where the process is gone."""
        self.chunk, self._sent = deque(chunk), len(chunk)
        if self.started:
            self._memory[:] = struct.pack("q", 0)
        self._mark, self._seen = time.monotonic(), self._memory[:]
        try:
            self._requests.send([(job.reward, job.inputs) for job in chunk])
        except OSError:
            return False
        return True

    def position(self) -> int:
        """Which judgement of `chunk` is under way."""
        return max(struct.unpack("q", self._memory[:])[0], 0) - (self._sent - len(self.chunk))

    def elapsed(self) -> float:
        """Seconds that the present judgement has taken, negative while the process may still be starting."""
        if self._memory[:] != self._seen:
            self._mark, self._seen = time.monotonic(), self._memory[:]
        return time.monotonic() - self._mark - (0.0 if self.started else START_S)

    def end(self) -> None:
        """Let it leave by itself, so that a sandbox can tidy up; kill it where it does not."""
        self._requests.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self.kill()

    def kill(self) -> int | None:
        self._process.kill()
        code = self._process.wait()
        self.connection.close()
        self._requests.close()
        return code


_NOT_STARTED = struct.pack("q", -1)
_START = (
    "import sys; from slmgrpo.rewards.worker import judge_chunks; "
    "judge_chunks(*(int(number) for number in sys.argv[1:5]))"
)

FLUSH_S = 0.02


def judge_chunks(requests_fd: int, results_fd: int, memory_fd: int, parent: int) -> None:
    """A worker's life: judge chunk after chunk until the parent closes the pipe or dies."""
    _die_with(parent)
    requests = Connection(requests_fd, writable=False)
    results = Connection(results_fd, readable=False)
    memory = mmap.mmap(memory_fd, 8)
    memory[:] = struct.pack("q", 0)
    while True:
        try:
            chunk = requests.recv()
        except EOFError:
            return
        said = time.monotonic()
        unsaid: list[tuple[Verdict, float]] = []
        for count, (reward, (prompt, completion, ids, columns)) in enumerate(chunk):
            if unsaid and time.monotonic() - said > FLUSH_S:
                results.send(unsaid)
                said, unsaid = time.monotonic(), []
            memory[:] = struct.pack("q", count)
            start = time.perf_counter()
            verdict = reward.judge(prompt, completion, ids, columns)
            unsaid.append((verdict, time.perf_counter() - start))
        results.send(unsaid)


def _die_with(parent: int) -> None:
    """SIGKILL when the parent dies, also in the middle of a judgement (Linux's PR_SET_PDEATHSIG)."""
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
