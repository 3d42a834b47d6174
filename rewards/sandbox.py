"""Runs model-written programs against tests in a jail: `run_tests`, and `probe` for the rung of the ladder in use.

The program and the tests run in two separate jailed processes (`judge.py`), forked from warm servers (`zygote.py`)
that are confined as strongly as the host allows (`jail.py`, `cgroup.py`). Only values that the program returns, or
what it prints for a stdin problem, count as answers. It cannot stop a program that holds the expected answers.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Final, Literal

from slmgrpo.errors import RunError
from slmgrpo.rewards import cgroup, jail, zygote
from slmgrpo.rewards.codec import Channel, NotPlain
from slmgrpo.rewards.judge import TEXT

Mode = Literal["strict", "best", "off"]
TestKind = Literal["asserts", "check", "stdio"]
MAX_STDOUT: Final = 1 << 20
GRACE_S: Final = 5.0
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


@dataclass(frozen=True, slots=True)
class Rung:
    number: int
    name: str
    protects: str
    does_not: str


_ALWAYS: Final = "wall, CPU, memory per process and file limits; own session; empty environment; split judge"
_NEVER: Final = "programs that contain the expected answers; bugs of the kernel"
RUNGS: Final = {
    rung.number: rung
    for rung in (
        Rung(
            1,
            "namespaces + cgroup",
            "files, network, processes and users of the host are out of sight (mount, pid, net, ipc, uts and user "
            "namespaces, Landlock, seccomp); processes and memory counted by cgroup; " + _ALWAYS,
            _NEVER,
        ),
        Rung(
            2,
            "namespaces",
            "as 1, but nothing counts processes: programs may start threads and no processes; " + _ALWAYS,
            _NEVER,
        ),
        Rung(
            3,
            "Landlock + seccomp",
            "no file of the host but the interpreter can be read and none written; no connection, signal or new "
            "process; " + _ALWAYS,
            "names of host processes and users are visible; memory of threads is bounded per process only; " + _NEVER,
        ),
        Rung(
            4,
            "limits only",
            "seccomp: no connection, signal or new process; " + _ALWAYS,
            "every file that you can read or write is open to the program; " + _NEVER,
        ),
        Rung(5, "off", _ALWAYS, "a program can do all that you can do; " + _NEVER),
    )
}
_LADDER: Final[dict[Mode, tuple[int, ...]]] = {"strict": (1, 2, 3), "best": (1, 2, 3, 4, 5), "off": (5,)}


class ServerDied(Exception):
    """A fork server ended or does not answer."""


class Sandbox:
    """One pair of fork servers; runs one program at a time."""

    def __init__(self, mode: Mode = "strict", *, python: str = sys.executable, rungs: Sequence[int] = ()) -> None:
        self.mode, self.python = mode, python
        self.rungs = tuple(rungs) or _LADDER[mode]
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
                return self.rung
            except (OSError, ServerDied, NotPlain, TimeoutError, ValueError) as error:
                self.refusals.append(f"rung {number} ({RUNGS[number].name}): {str(error) or type(error).__name__}")
                self.close()
        raise RunError(
            "no jail that is strong enough can be built here:\n  "
            + "\n  ".join(self.refusals)
            + "\nset `grading.sandbox: best` to run model-written programs with weaker protection"
        )

    def _launch(self, number: int) -> None:
        if number == 1:
            for _ in range(2):
                self._groups += cgroup.create(jail.PIDS + 3, jail.GROUP_MEMORY_MB)
        half = len(self._groups) // 2
        groups = [[str(path) for path in part] for part in (self._groups[:half], self._groups[half:])]
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
        rung = self.start()
        assert self._programs is not None and self._tests is not None
        total = len(task["tests"])
        deadline = time.monotonic() + limits.wall_s
        cpu_s = int(limits.wall_s) + 2
        worker, judge = socket.socketpair()
        ours, theirs = socket.socketpair()
        to_worker, to_judge = Channel(os.dup(judge.fileno())), Channel(ours.detach())
        answer, late = None, False
        try:
            self._begin(self._programs, b"P", cpu_s, worker)
            self._begin(self._tests, b"T", cpu_s, judge, theirs)
            for end in (worker, judge, theirs):
                end.close()
            try:
                to_worker.write(program.encode(*TEXT), limits.wall_s)
                to_worker.close()
                full = {**task, "call_s": limits.call_s, "deadline": deadline}
                to_judge.write(json.dumps(full).encode(), limits.wall_s)
                answer = to_judge.read(max(0.0, deadline - time.monotonic()) + REPORT_S)
            except TimeoutError:
                late = True
            except (ConnectionError, NotPlain):
                pass
            self._end(self._programs)
            self._end(self._tests)
        except ServerDied as error:
            self.close()
            return Outcome("error", 0, total, str(error), rung.number)
        finally:
            for end in (worker, judge, theirs, to_worker, to_judge):
                end.close()
        if late:
            return Outcome("timeout", 0, total, f"not finished after {limits.wall_s:g} s", rung.number)
        if answer is None:
            return Outcome("no_report", 0, total, "the judge ended without a report", rung.number)
        status, passed, why = json.loads(answer)
        return Outcome(status, passed, total, why, rung.number)

    def _begin(self, control: socket.socket, kind: bytes, cpu_s: int, *ends: socket.socket | int) -> None:
        fds = [end if isinstance(end, int) else end.fileno() for end in ends]
        try:
            socket.send_fds(control, [zygote.START.pack(kind, cpu_s)], fds)
        except OSError as error:
            raise ServerDied(f"a fork server is gone: {error}") from None

    def _end(self, control: socket.socket) -> tuple[int, int, int]:
        """Has the program's tree killed; its wait status, peak memory in kB and CPU time in ms."""
        try:
            control.sendall(zygote.END)
            control.settimeout(GRACE_S)
            data = control.recv(zygote.RESULT.size, socket.MSG_WAITALL)
        except OSError as error:
            raise ServerDied(f"a fork server is gone: {error}") from None
        if len(data) != zygote.RESULT.size:
            raise ServerDied("a fork server ended")
        return zygote.RESULT.unpack(data)

    def run_stdio(self, program: str, tests: Sequence[Mapping[str, str]], limits: Limits) -> Outcome:
        """One program against pairs of input and output, a fresh process for each."""
        rung = self.start()
        assert self._programs is not None
        passed, why = 0, ""
        deadline = time.monotonic() + limits.wall_s
        for number, test in enumerate(tests, 1):
            left = max(0.001, min(limits.call_s, deadline - time.monotonic()))
            try:
                status, printed = self._run_once(program, test["input"], left)
            except ServerDied as error:
                self.close()
                return Outcome("error", 0, len(tests), str(error), rung.number)
            if status is None:
                why = f"test {number}: not finished in time"
                return Outcome("timeout", passed, len(tests), why, rung.number)
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
        return Outcome("passed" if passed == len(tests) else "failed", passed, len(tests), why, rung.number)

    def _run_once(self, program: str, text: str, seconds: float) -> tuple[int | None, bytes]:
        """Wait status (None: not ended in time) and output of a program that reads stdin."""
        assert self._programs is not None
        ours, theirs = socket.socketpair()
        channel = Channel(ours.detach())
        stdin, stdout = os.memfd_create("stdin"), os.memfd_create("stdout")
        ended = False
        try:
            os.pwrite(stdin, text.encode("utf-8", "surrogateescape"), 0)
            self._begin(self._programs, b"M", int(seconds) + 2, theirs, stdin, stdout)
            theirs.close()
            with suppress(TimeoutError, NotPlain):
                with suppress(ConnectionError):
                    channel.write(program.encode(*TEXT), seconds)
                ended = channel.read(seconds) is None
            status, _, _ = self._end(self._programs)
            printed = os.pread(stdout, MAX_STDOUT + 1, 0)
        finally:
            channel.close()
            theirs.close()
            os.close(stdin)
            os.close(stdout)
        return (status if ended else None), printed


def same_output(printed: bytes, expected: str) -> bool:
    """Equal line by line but for spaces at line ends and blank lines at the end; numbers written with a point may
    differ by 1e-6 (absolute or relative)."""
    lines = [line.rstrip() for line in printed.decode("utf-8", "replace").rstrip().splitlines()]
    wanted = [line.rstrip() for line in expected.rstrip().splitlines()]
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    words, targets = line.split(), wanted.split()
    return len(words) == len(targets) and all(map(_same_word, words, targets))


def _same_word(word: str, target: str) -> bool:
    if word == target:
        return True
    if "." not in target or len(word) > 100 or len(target) > 100:
        return False
    try:
        value, goal = Decimal(word), Decimal(target)
    except InvalidOperation:
        return False
    if not (value.is_finite() and goal.is_finite()):
        return False
    return abs(value - goal) <= Decimal("1e-6") * max(Decimal(1), abs(goal))


# ---- one sandbox a process ---------------------------------------------------------------------------------------

_lock = threading.Lock()
_sandboxes: dict[tuple[int, Mode], Sandbox] = {}


def _shared(mode: Mode) -> Sandbox:
    return _sandboxes.setdefault((os.getpid(), mode), Sandbox(mode))


def probe(mode: Mode = "best") -> Rung:
    """The strongest rung on which a jailed program really runs here; RunError if the mode allows none."""
    with _lock:
        return _shared(mode).start()


def run_tests(
    program: str,
    *,
    tests: Sequence[str] | str | Sequence[Mapping[str, str]],
    entry_point: str | None,
    test_kind: TestKind,
    prompt: str = "",
    setup: str = "",
    limits: Limits = Limits(),
    sandbox: Mode = "strict",
) -> Outcome:
    """Runs a program against tests: assert statements, HumanEval's `check(candidate)`, or inputs and outputs.

    prompt: its helper functions are there for the tests; setup: run before the tests. RunError where no jail of
    the mode can be built. Never raises for anything a program does.
    """
    with _lock:
        box = _shared(sandbox)
        if test_kind == "stdio":
            pairs = [test for test in tests if isinstance(test, Mapping)]
            return box.run_stdio(program, pairs, limits)
        texts = [tests] if isinstance(tests, str) else [str(test) for test in tests]
        task = {"tests": texts, "entry_point": entry_point, "prompt": prompt, "setup": setup}
        return box.run(program, {**task, "check": test_kind == "check"}, limits)
