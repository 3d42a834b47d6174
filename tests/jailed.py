"""For the sandbox's tests: a box on each rung that this host has, programs judged in it, processes counted."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slmgrpo.errors import RunError
from slmgrpo.rewards.sandbox import Limits, Outcome, Sandbox

SHARED = Path(__file__).parents[1].parent / "shared"
HASTY = Limits(wall_s=3.0, call_s=0.5)
"""For programs that must fail either way."""
DOUBLE = ["assert double(2) == 4", "assert double(5) == 10", "assert double(-1) == -2"]


def rows(path: str) -> list[dict[str, Any]]:
    file = SHARED / path
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module", params=[1, 2, 3])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made = Sandbox(rungs=(request.param,))
    try:
        made.start()
    except RunError as error:
        pytest.skip(f"this host has no rung {request.param}: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    made = Sandbox("strict")
    made.start()
    yield made
    made.close()


def judge(
    box: Sandbox, program: str, tests: list[str], name: str = "double", limits: Limits = HASTY, **task: Any
) -> Outcome:
    given = {"tests": tests, "entry_point": name, "prompt": "", "setup": "", "check": False, **task}
    return box.run(textwrap.dedent(program), given, limits)


def value(box: Sandbox, program: str) -> Any:
    """What `look()` of a program gives, through the judge."""
    outcome = judge(box, program, ["raise Exception(repr(look()))"], "look", Limits())
    assert outcome.why.startswith("test 1: Exception: "), outcome
    return outcome.why.removeprefix("test 1: Exception: ")


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> set[int]:
    """All processes below one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, fresh = set(), {pid}
    while fresh := {child for child, parent in parents.items() if parent in fresh} - found:
        found |= fresh
    return found
