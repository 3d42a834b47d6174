"""Runs model-written programs against tests in a jail: `run_tests`, and `probe` for the rung of the ladder in use.

The program and its tests run in two separate jailed processes (`judge.py`), forked from warm servers (`servers.py`,
`zygote.py`) that are confined as strongly as the host allows (`ladder.py`, `jail.py`, `cgroup.py`). Only values that
the program returns (`codec.py`), or what it prints for a stdin problem, count as answers.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Final, Literal, get_args

from slmgrpo.rewards.ladder import Mode, Rung
from slmgrpo.rewards.servers import Limits, Outcome, Sandbox

TestKind = Literal["asserts", "check", "stdio"]
DEFAULT: Final = Limits()
__all__ = ["Limits", "Mode", "Outcome", "Rung", "Sandbox", "TestKind", "close", "probe", "run_tests", "same_output"]

_lock = threading.Lock()
_sandboxes: dict[Mode, Sandbox] = {}


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
    limits: Limits = DEFAULT,
    sandbox: Mode = "strict",
) -> Outcome:
    """Runs a program against tests: assert statements, HumanEval's `check(candidate)`, or inputs and outputs.

    prompt: its helper functions are there for the tests; setup: run before the tests. RunError where no jail of
    the mode can be built; nothing that a program does raises. One program at a time in each process.
    """
    with _lock:
        box = _shared(sandbox)
        pairs = [test for test in tests if isinstance(test, Mapping)]
        texts = [tests] if isinstance(tests, str) else [test for test in tests if isinstance(test, str)]
        count = 1 if isinstance(tests, str) else len(tests)
        used = pairs if test_kind == "stdio" else texts
        if not tests or len(used) != count or test_kind not in get_args(TestKind):
            why = f"no tests of the kind {test_kind}"
            return Outcome("error", 0, count, why, box.start().number)
        if test_kind == "stdio":
            return box.run_stdio(program, pairs, limits, same_output)
        task = {"tests": texts, "entry_point": entry_point, "prompt": prompt, "setup": setup}
        return box.run(program, {**task, "check": test_kind == "check"}, limits)


def close() -> None:
    """Ends this process's servers; the next run starts new ones."""
    with _lock:
        for box in _sandboxes.values():
            box.close()
        _sandboxes.clear()


def _shared(mode: Mode) -> Sandbox:
    return _sandboxes.setdefault(mode, Sandbox(mode))


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for box in _sandboxes.values():
        box.forget()
    _sandboxes.clear()


atexit.register(close)
os.register_at_fork(after_in_child=_after_fork)


# ---- stdin problems ----------------------------------------------------------------------------------------------


def same_output(printed: bytes, expected: str) -> bool:
    """Equal line by line but for spaces at line ends and blank lines at the end; numbers written with a point may
    differ by 1e-6 (absolute or relative)."""
    lines = [line.rstrip() for line in printed.decode("utf-8", "replace").rstrip().split("\n")]
    wanted = [line.rstrip() for line in expected.rstrip().split("\n")]
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
