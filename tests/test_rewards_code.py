"""Which program a reply hands in, and rows whose tests cannot judge any program."""

from __future__ import annotations

from typing import Any

import pytest

from slmgrpo.rewards.base import Verdict
from slmgrpo.rewards.code import fraction_passed, not_trivial, parses, passes_tests
from slmgrpo.rewards.programs import Loose, defines, handed_in, loose_names

SOLUTION = "class Solution:\n    def solve(self, n):\n        return 2 * n\n"
DOUBLE = "def f(n):\n    return 2 * n\n"
USAGE = "```python\nprint(Solution().solve(3))\n```"


def fenced(code: str) -> str:
    return f"```python\n{code}```\n"


# ---- what is handed in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "name", "bound"),
    [
        (SOLUTION, "Solution().solve", True),
        (SOLUTION, "Solver().solve", False),
        ("f: int = 3", "f", True),
        ("f: int", "f", False),
        ("e, (f, *g) = 1, (2, 3)", "f", True),
        ("e, (f, *g) = 1, (2, 3)", "g", True),
        ("if True:\n    def f(): pass", "f", True),
        ("if 0:\n    pass\nelse:\n    f = 1", "f", True),
        ("try:\n    from a import f\nexcept ImportError:\n    def g(): pass", "g", True),
        ("with a:\n    for f in b:\n        pass", "f", True),
        ("match a:\n    case 1:\n        f = 1", "f", True),
        ("import a.b as f", "f", True),
        ("import a.b", "a", True),
        ("import a.b", "b", False),
        ("from a import b as f", "f", True),
        ("def g():\n    f = 1", "f", False),
        ("class g:\n    f = 1", "f", False),
        ("x[f] = 1", "f", False),
    ],
)
def test_what_a_program_defines(source: str, name: str, bound: bool) -> None:
    assert defines(source, name) is bound


@pytest.mark.parametrize(
    ("reply", "entry_point", "source"),
    [
        (SOLUTION, "Solution().solve", SOLUTION.strip()),
        (f"{fenced(SOLUTION)}For example:\n{USAGE}", "Solution().solve", SOLUTION),
        ("1. First\n   ```python\n   def f(n):\n       return 2 * n\n   ```\n", "f", DOUBLE),
        ("- a\n\t```\n\tprint(1)\n\t```\n", "", "print(1)\n"),
        ("1. a\n   ```python\n   def f(n):\n       return 2 * n\n   ```\n2. b\n   ```\n   f(2)\n   ```\n", "f", DOUBLE),
        ("```python\n    return 2 * n\n```", "f", "    return 2 * n\n"),
        ("\ufeff" + DOUBLE, "f", DOUBLE.strip()),
        ("\ufeff" + fenced(DOUBLE), "f", DOUBLE),
        (fenced("\ufeff" + DOUBLE), "f", DOUBLE),
        ("<think>a</think>\n\ufeff" + DOUBLE, "f", DOUBLE.strip()),
    ],
)
def test_the_program_of_a_reply(reply: str, entry_point: str, source: str) -> None:
    handed = handed_in(reply, "", entry_point).source
    assert handed is not None and handed.rstrip() == source.rstrip()
    assert parses(reply, "", entry_point).value == float(not source.startswith(" "))


def test_a_block_that_is_indented_without_its_fence_is_no_python() -> None:
    assert parses("```python\n    x = 1\n    print(x)\n```").value == 0.0


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (SOLUTION, "an attempt"),
        ("class Solution:\n    def solve(self, n):\n        return 4\n", "an empty body"),
        ("class Solution:\n    def solve(self, n):\n        x = self\n        return x\n", "it ignores its arguments"),
        ("class Solver:\n    def other(self, n):\n        return n\n", "no Solution().solve"),
    ],
)
def test_a_method_is_an_attempt_by_the_rules_of_functions(program: str, why: str) -> None:
    assert not_trivial(fenced(program), "Solution().solve", ["assert 1"]) == Verdict(
        float(why == "an attempt"), why=why
    )


def test_a_method_is_graded_by_its_tests() -> None:
    check = "def check(candidate):\n    assert candidate(2) == 4\n"
    right = f"{fenced(SOLUTION)}For example:\n{USAGE}"
    assert passes_tests(right, check, "Solution().solve").value == 1.0
    assert passes_tests(right.replace("2 * n", "3 * n"), check, "Solution().solve").value == 0.0


# ---- tests that cannot judge -----------------------------------------------------------------------------------------

PAIR = {"input": "2\n", "output": "4\n"}


@pytest.mark.parametrize(
    ("tests", "more"),
    [
        (None, {}),
        ([], {}),
        ("", {}),
        (5, {}),
        ({"a": "assert f(1) == 2"}, {}),
        ([None], {}),
        ([5], {}),
        ([[]], {}),
        ([["assert f(1) == 2"]], {}),
        (["assert f(1) == 2", None], {}),
        (["assert f(1) == 2", PAIR], {}),
        ([PAIR, "assert f(1) == 2"], {}),
        ([{}], {}),
        ([{"input": "2", "output": None}], {}),
        ([{"input": "2", "output": 4}], {}),
        ([{"input": "2", "output": " \n"}], {}),
        (["assert f(1) == 2"], {"test_kind": "stdio"}),
        ("assert f(1) == 2", {"test_kind": "stdio"}),
        ([PAIR], {"test_kind": "asserts"}),
        (["assert f(1) == 2"], {"test_kind": "banana"}),
        (["assert f(1) == 2"], {"test_kind": ["asserts"]}),
        (["x = 1"], {}),
        (["# nothing", ""], {}),
        (["f"], {"entry_point": "f"}),
        (" ", {}),
        (["assert np.allclose(f(1), 2)"], {}),
        (["assert f(1) == EXPECTED"], {}),
        (["try:\n    f(1)\nexcept Mine:\n    pass"], {}),
        (["assert isclose(f(1), 2)"], {"entry_point": "f"}),
    ],
)
@pytest.mark.parametrize("rule", [passes_tests, fraction_passed])
def test_tests_that_can_judge_no_program_give_none(rule: Any, tests: Any, more: dict[str, Any]) -> None:
    for program in (DOUBLE, "def f(n):\n    return 0\n"):
        verdict = rule(fenced(program), tests, **more)
        assert (verdict.value, verdict.status) == (None, "ungradeable"), verdict
        assert verdict.why


@pytest.mark.parametrize(
    ("tests", "more"),
    [
        (["assert math.isclose(f(4), 8.0)"], {}),
        (["assert collections.Counter([f(1)])[2] == 1", "assert re.match('8', str(f(4)))"], {"entry_point": "f"}),
        (["import math as m\nassert m.isclose(f(1), 2)", "assert m.isclose(f(2), 4)"], {}),
        (["assert isclose(f(1), 2)"], {"entry_point": "f", "setup": "from math import isclose"}),
        (["assert isclose(f(1), 2)"], {"entry_point": "f", "setup": "from math import *"}),
        (["def near(a):\n    return abs(a - 2) < 1\nassert near(f(1))", "assert not near(f(9))"], {"entry_point": "f"}),
        (["assert f(1) == 2"], {"setup": None, "test_kind": None, "entry_point": None}),
    ],
)
def test_tests_may_use_usual_modules_and_what_they_define(tests: list[str], more: dict[str, Any]) -> None:
    assert passes_tests(fenced(DOUBLE), tests, **more).value == 1.0
    assert passes_tests(fenced("def f(n):\n    return 0\n"), tests, **more).value == 0.0


def test_a_missing_function_is_the_programs_fault_where_it_is_asked_for() -> None:
    assert passes_tests(fenced("x = 1\n"), ["assert f(1) == 2"]).value == 0.0
    assert passes_tests(fenced("x = 1\n"), ["assert f(1) == 2"], "f").value == 0.0
    assert passes_tests(fenced(DOUBLE + "def g(n):\n    return f(n)\n"), ["assert g(f(1)) == 4"], "f").value == 1.0


@pytest.mark.parametrize(
    ("test", "given", "loose"),
    [
        ("assert math.pi < f(2)", (), Loose(("math",), ("f",), ())),
        ("assert f(e for e in x)", (), Loose((), ("f",), ("x",))),
        ("assert f(lambda a, *b: a)", ("def f(): pass",), Loose((), (), ())),
        ("def t(a):\n    global n\n    n = a\n    return [i for i in a if g(i)]\nt(n)", (), Loose((), ("g",), ())),
        ("assert copy(f(1)) == copy(2)", (), Loose((), ("copy", "f"), ())),
        ("class A:\n    b = c\nassert f(A.b) or __name__", (), Loose((), ("f",), ("c",))),
        ("assert f(", (), Loose((), (), ())),
    ],
)
def test_the_names_that_tests_leave_open(test: str, given: tuple[str, ...], loose: Loose) -> None:
    assert loose_names((test,), given) == loose
