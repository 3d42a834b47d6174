"""A pair of fork servers, one for programs and one for tests, on the strongest rung that holds; one program at a time.

Whatever a program does ends in an `Outcome`; servers that die or do not answer are ended and started anew.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from slmgrpo.errors import RunError
from slmgrpo.rewards import cgroup, jail, zygote
from slmgrpo.rewards.codec import MAX_BYTES, Channel, NotPlain
from slmgrpo.rewards.judge import TEXT
from slmgrpo.rewards.ladder import LADDER, PROBE, RUNGS, Mode, Rung, probe_tests

MAX_STDOUT: Final = 1 << 20
GRACE_S: Final = 5.0
"""A server that takes longer to kill a program's tree is taken for dead."""
REPORT_S: Final = 0.5
START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    wall_s: float = 10.0
    """One program with all its tests."""
    call_s: float = 6.0
    """One call of the program; loading it counts as one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """status: `failed` is the program's fault, as are `timeout` and `no_report` (the judge was not heard of again);
    `error` is ours or the tests': nothing is known of the program."""

    status: Literal["passed", "failed", "no_report", "timeout", "error"]
    passed: int
    total: int
    why: str
    rung: int


class ServerDied(Exception):
    """A fork server ended or does not answer."""


class Sandbox:
    """One pair of fork servers; runs one program at a time."""

    def __init__(self, mode: Mode = "strict", *, python: str = sys.executable, rungs: Sequence[int] = ()) -> None:
        self.python = python
        self.rungs = tuple(rungs) or LADDER[mode]
        self.rung: Rung | None = None
        self.refusals: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._groups: list[Path] = []
        self._programs: socket.socket | None = None
        self._tests: socket.socket | None = None

    def start(self) -> Rung:
        """Starts the servers on the first rung on which a jailed program really runs; RunError if there is none."""
        if self.rung is not None:
            return self.rung
        self.refusals = []
        for number in self.rungs:
            try:
                self._launch(number)
                self.rung = RUNGS[number]
                self._prove()
                self.rungs = (number,)  # servers that are started anew must not be weaker
                return self.rung
            except (OSError, ServerDied, NotPlain) as error:
                self.refusals.append(f"rung {number} ({RUNGS[number].name}): {str(error) or type(error).__name__}")
                self.close()
        raise RunError(
            "sandbox: no jail that is strong enough can be built here\n  "
            + "\n  ".join(self.refusals)
            + "\n  to run programs with weaker protection use `grading.sandbox: best` in a recipe, `--sandbox best` on "
            "a command line, or SLMGRPO_SANDBOX=best in a program of your own"
        )

    def _prove(self) -> None:
        """Runs a program that tries what the rung forbids."""
        assert self.rung is not None
        with probe_tests(self.rung.number, jail.PIDS) as tests:
            task = {"tests": tests, "entry_point": "reads", "prompt": "", "setup": "", "check": False}
            outcome = self.run(PROBE, task, Limits(wall_s=START_S, call_s=START_S))
        if outcome.status != "passed":
            raise ServerDied(f"a jailed program could do too much, or nothing: {outcome.why}")

    def _launch(self, number: int) -> None:
        groups: list[list[str]] = [[], []]
        if number == 1:
            for group in groups:
                made = cgroup.create(jail.PIDS + 2, jail.GROUP_MEMORY_MB)  # two are the server and its keeper
                self._groups += made
                group += map(str, made)
        ours, theirs = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        servers = [[end.fileno(), group] for end, group in zip(theirs, groups, strict=True)]
        root = str(Path(__file__).parents[2])
        code = "import sys; sys.path.insert(0, sys.argv[2]); from slmgrpo.rewards import zygote; zygote.start()"
        config = json.dumps({"rung": number, "servers": servers})
        environment = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LC_ALL": "C"}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        try:
            self._process = subprocess.Popen(
                [self.python, "-S", "-s", "-P", "-X", "no_debug_ranges", "-c", code, config, root],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[end.fileno() for end in theirs],
                start_new_session=True,
                cwd="/",
            )
            for end in theirs:
                end.close()
            for end in ours:
                problem = Channel(os.dup(end.fileno())).read(START_S)
                if problem is None:
                    raise ServerDied("the fork server ended while it started")
                if problem:
                    raise ServerDied(problem.decode())
        except BaseException:
            for end in ours:
                end.close()
            raise
        finally:
            for end in theirs:
                end.close()
        self._programs, self._tests = ours

    def forget(self) -> None:
        """In a forked copy of this process: leaves the servers to the original."""
        for control in (self._programs, self._tests):
            if control is not None:
                control.close()

    def close(self) -> None:
        """Ends the servers and everything below them."""
        for control in (self._programs, self._tests):
            if control is not None:
                control.close()
        self._programs = self._tests = None
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        cgroup.remove(self._groups)
        self._groups = []
        self.rung = None

    # ---- running -------------------------------------------------------------------------------------------------

    def run(self, program: str, task: Mapping[str, Any], limits: Limits) -> Outcome:
        """One program against asserts or a `check` function."""
        rung, total = self.start(), len(task["tests"])
        if len(json.dumps(task)) + 100 > MAX_BYTES:
            return Outcome("error", 0, total, f"more than {MAX_BYTES >> 20} MB of tests", rung.number)
        try:
            answer = self._judged(program, task, limits)
        except ServerDied as error:
            self.close()
            return Outcome("error", 0, total, str(error), rung.number)
        except TimeoutError:
            return Outcome("timeout", 0, total, f"not finished after {limits.wall_s:g} s", rung.number)
        except OSError as error:
            return Outcome("error", 0, total, f"the host is short of something: {error}", rung.number)
        if answer is None:
            return Outcome("no_report", 0, total, "the judge ended without a report", rung.number)
        status, passed, why = json.loads(answer)
        return Outcome(status, passed, total, why, rung.number)

    def _judged(self, program: str, task: Mapping[str, Any], limits: Limits) -> bytes | None:
        """The judge's report, None where it left none."""
        assert self._programs is not None and self._tests is not None
        deadline = time.monotonic() + limits.wall_s
        with ExitStack() as ends:
            to_worker, worker, judge = _pair(ends)
            to_judge, report, _ = _pair(ends)
            self._begin(self._programs, b"P", limits.wall_s, worker)
            try:
                self._begin(self._tests, b"T", limits.wall_s, judge, report)
                try:
                    _ready(to_worker)
                    _ready(to_judge)
                    with suppress(ConnectionError):
                        to_worker.write(program.encode(*TEXT), limits.wall_s)
                    to_worker.close()
                    judge.close()
                    full = {**task, "call_s": limits.call_s, "deadline": deadline}
                    to_judge.write(json.dumps(full).encode(), limits.wall_s)
                    return to_judge.read(max(0.0, deadline - time.monotonic()) + REPORT_S)
                except (ConnectionError, NotPlain):
                    return None
                finally:
                    self._end(self._tests)
            finally:
                self._end(self._programs)

    def _begin(self, control: socket.socket, kind: bytes, wall_s: float, *fds: socket.socket | int) -> None:
        """Has a child forked that takes over the descriptors; sockets are closed here."""
        numbers = [fd if isinstance(fd, int) else fd.fileno() for fd in fds]
        try:
            socket.send_fds(control, [zygote.START.pack(kind, int(wall_s) + 2)], numbers)
        except OSError as error:
            raise ServerDied(f"a fork server is gone: {error}") from None
        for fd in fds:
            if not isinstance(fd, int):
                fd.close()

    def _end(self, control: socket.socket) -> int:
        """Has the child's whole tree killed; its wait status."""
        try:
            control.sendall(zygote.END)
            control.settimeout(GRACE_S)
            data = control.recv(zygote.RESULT.size, socket.MSG_WAITALL)
        except OSError as error:
            raise ServerDied(f"a fork server is gone: {error}") from None
        if len(data) != zygote.RESULT.size:
            raise ServerDied("a fork server ended")
        return zygote.RESULT.unpack(data)[0]

    def run_stdio(
        self,
        program: str,
        tests: Sequence[Mapping[str, str]],
        limits: Limits,
        same_output: Callable[[bytes, str], bool],
    ) -> Outcome:
        """One program against pairs of input and output, a fresh process for each."""
        rung, total, passed, why = self.start(), len(tests), 0, ""
        deadline = time.monotonic() + limits.wall_s
        for number, test in enumerate(tests, 1):
            left = max(0.001, min(limits.call_s, deadline - time.monotonic()))
            try:
                status, printed = self._printed(program, test["input"], left)
            except ServerDied as error:
                self.close()
                return Outcome("error", 0, total, str(error), rung.number)
            except OSError as error:
                return Outcome("error", 0, total, f"the host is short of something: {error}", rung.number)
            if status is None:
                why = f"test {number}: not finished in time"
                return Outcome("timeout", passed, total, why, rung.number)
            if status != 0:
                problem = "the program failed"
            elif len(printed) > MAX_STDOUT:
                problem = "more than 1 MB printed"
            elif not same_output(printed, test["output"]):
                problem = "wrong output"
            else:
                passed += 1
                continue
            why = why or f"test {number}: {problem}"
        return Outcome("passed" if passed == total else "failed", passed, total, why, rung.number)

    def _printed(self, program: str, text: str, seconds: float) -> tuple[int | None, bytes]:
        """Wait status (None: not ended in time) and output of a program that reads stdin."""
        assert self._programs is not None
        with ExitStack() as ends:
            channel, theirs, _ = _pair(ends)
            stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
            ends.callback(os.close, stdin)
            ends.callback(os.close, stdout)
            os.pwrite(stdin, text.encode(*TEXT), 0)
            self._begin(self._programs, b"M", seconds, theirs, stdin, stdout)
            ended = False
            try:
                _ready(channel)
                with suppress(TimeoutError, NotPlain):
                    with suppress(ConnectionError):
                        channel.write(program.encode(*TEXT), seconds)
                    ended = channel.read(seconds) is None
            finally:
                status = self._end(self._programs)
            return (status if ended else None), os.pread(stdout, MAX_STDOUT + 1, 0)


def _pair(ends: ExitStack) -> tuple[Channel, socket.socket, socket.socket]:
    """A channel, the other end for a child, and the channel's own end for the child that it is handed to."""
    near, far = socket.socketpair()
    channel = Channel(os.dup(near.fileno()))
    for end in (near, far, channel):
        ends.callback(end.close)
    return channel, far, near


def _ready(channel: Channel) -> None:
    """Waits until a child is confined; what ends it before is never the program's doing, which it does not have yet."""
    try:
        if channel.read(START_S) == zygote.READY:
            return
    except (TimeoutError, NotPlain):
        pass
    raise ServerDied("a child could not be confined")
