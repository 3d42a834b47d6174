"""The judge cannot be fooled, loses no honest program, and tells a program's fault from one of the tests."""

from __future__ import annotations

from typing import Any

import pytest
from jailed import DOUBLE, HASTY, judge, rows

from slmgrpo.rewards.sandbox import Limits, Sandbox, run_tests, same_output


def test_arguments_changed_in_place_are_seen(strongest: Sandbox) -> None:
    program = """
        def change(items, table, chosen, nested):
            items.sort(); items.append(9)
            table["new"] = [1]; table.pop("old")
            chosen.add(5)
            nested[0][0] = "changed"
        """
    tests = [
        "items, table, chosen, inner = [3, 1], {'old': 0, 'kept': 1}, {1}, [0]\n"
        "nested = (inner, 2)\n"
        "assert change(items, table, chosen, nested=nested) is None\n"
        "assert items == [1, 3, 9]\n"
        "assert table == {'kept': 1, 'new': [1]}\n"
        "assert chosen == {1, 5}\n"
        "assert inner == ['changed']"
    ]
    assert judge(strongest, program, tests, "change", Limits()).status == "passed"


def test_helpers_of_the_prompt_and_of_the_program_are_there(strongest: Sandbox) -> None:
    prompt = "def triple(x):\n    return 3 * x\n\ndef six(x):\n    '''Six times x.'''\n"
    program = prompt + "    return 2 * triple(x)\n\ndef twelve(x):\n    return 2 * six(x)\n"
    tests = "def check(candidate):\n    assert candidate(2) == 2 * triple(2)\n    assert twelve(1) == 12\n"
    assert judge(strongest, program, [tests], "six", Limits(), prompt=prompt, check=True).status == "passed"


def test_a_check_of_the_program_does_not_stand_in_for_the_tests(strongest: Sandbox) -> None:
    program = "def check(candidate): return True\ndef double(x): return 0"
    assert judge(strongest, program, ["x = 1"], check=True).status == "error"


def test_an_entry_point_may_be_a_method_of_a_new_object(strongest: Sandbox) -> None:
    program = "class Solution:\n    def double(self, x): return 2 * x\n"
    tests = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(x=3) == 6\n"
    assert judge(strongest, program, [tests], "Solution().double", Limits(), check=True).status == "passed"
    assert judge(strongest, "x = 1", [tests], "Solution().double", check=True).status == "failed"


def test_a_built_in_does_not_stand_in_for_the_program(strongest: Sandbox) -> None:
    assert judge(strongest, "x = 1", ["assert sum([1, 2]) == 3"], "sum").status == "failed"


def test_exceptions_arrive_as_the_built_in_ones(strongest: Sandbox) -> None:
    program = """
        class Odd(KeyError): pass
        def fails(kind):
            if kind == "own": raise Odd("key")
            if kind == "value": raise ValueError("bad")
            return 1 / 0
        """
    tests = [
        "try: fails('own')\nexcept KeyError: pass\nelse: raise AssertionError",
        "try: fails('value')\nexcept ValueError as e: assert str(e) == 'bad'\nelse: raise AssertionError",
        "try: fails('zero')\nexcept ZeroDivisionError: pass\nelse: raise AssertionError",
    ]
    assert judge(strongest, program, tests, "fails", Limits()).status == "passed"


def test_generators_and_counters_are_data(strongest: Sandbox) -> None:
    program = """
        from collections import Counter, OrderedDict
        from decimal import Decimal
        def make(kind):
            return {"gen": (i for i in range(3)), "counter": Counter("aab"), "order": OrderedDict(a=1),
                    "decimal": Decimal("1.5"), "nan": float("nan"), "big": 10 ** 5000, "set": frozenset({1})}[kind]
        """
    tests = [
        "assert list(make('gen')) == [0, 1, 2]",
        "assert make('counter') == {'a': 2, 'b': 1} and make('counter').most_common(1) == [('a', 2)]",
        "assert list(make('order').items()) == [('a', 1)]",
        "assert make('decimal') * 2 == 3",
        "assert make('nan') != make('nan')",
        "assert make('big') == 10 ** 5000",
        "assert make('set') == {1}",
    ]
    assert judge(strongest, program, tests, "make", Limits()).status == "passed"


def test_every_test_counts_even_behind_a_failed_one(strongest: Sandbox) -> None:
    outcome = judge(strongest, "def double(x): return 4", DOUBLE)
    assert (outcome.status, outcome.passed, outcome.total) == ("failed", 1, 3)
    assert outcome.why == "test 2: AssertionError"


def test_each_call_has_its_limit(strongest: Sandbox) -> None:
    program = "import time\ndef double(x):\n if x == 5: time.sleep(60)\n return 2 * x"
    outcome = judge(strongest, program, DOUBLE, limits=Limits(wall_s=30, call_s=0.5))
    assert (outcome.status, outcome.passed) == ("timeout", 1)
    assert outcome.why == "test 2: one call took more than 0.5 s"


def test_all_calls_together_have_one_too(strongest: Sandbox) -> None:
    program = "import time\ndef double(x):\n if x == 5: time.sleep(60)\n return 2 * x"
    outcome = judge(strongest, program, DOUBLE, limits=Limits(wall_s=1.0, call_s=30))
    assert (outcome.status, outcome.passed) == ("timeout", 1)


def test_tests_that_never_end_are_ended(strongest: Sandbox) -> None:
    outcome = judge(strongest, "def double(x): return 2 * x", ["while True: pass"], limits=Limits(1.0, 1.0))
    assert outcome.status == "timeout"


def test_a_missing_report_is_no_pass(strongest: Sandbox) -> None:
    outcome = judge(strongest, "def double(x): return 2 * x", ["import os\nos._exit(0)"])
    assert outcome.status == "no_report"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"tests": ["assert double(2) =="]}, "the tests cannot be set up: SyntaxError"),
        ({"setup": "import no_such_module"}, "the tests cannot be set up: ModuleNotFoundError"),
        ({"tests": ["x = " + "1 + " * (2 << 20) + "1"]}, "more than 4 MB of tests"),
    ],
)
def test_faults_of_the_tests_are_errors(strongest: Sandbox, task: dict[str, Any], why: str) -> None:
    outcome = judge(strongest, "def double(x): return 2 * x", **{"tests": DOUBLE, **task})
    assert outcome.status == "error"
    assert outcome.why.startswith(why)


def test_no_tests_are_no_pass() -> None:
    assert run_tests("x = 1", tests=[], entry_point="f", test_kind="asserts").status == "error"
    assert run_tests("x = 1", tests=["assert 1"], entry_point=None, test_kind="stdio").status == "error"
    for strange in ([None], [5], [[]], ["assert f(1)", None], [{"input": "", "output": ""}]):
        outcome = run_tests("def f(n): return 1", tests=strange, entry_point="f", test_kind="asserts")  # type: ignore
        assert outcome.status == "error"


HUMANEVAL, MBPP = rows("data/code/humaneval.jsonl"), rows("data/code/mbpp_test.jsonl")
OBJECTS = {"mbpp_367"}  # its tests build trees from a class that only the program defines


@pytest.mark.skipif(not HUMANEVAL, reason="the shared data are not beside this checkout")
def test_reference_solutions_pass(strongest: Sandbox) -> None:
    refused = []
    for row in HUMANEVAL + [row for row in MBPP if row["id"] not in OBJECTS]:
        check = row["test_kind"] == "check"
        program = (row["prompt"] if check else "") + row["canonical_solution"]
        tests = [row["tests"]] if check else row["tests"]
        limits = Limits(wall_s=60, call_s=60)
        extra = {"prompt": row["prompt"], "setup": row.get("setup", ""), "check": check}
        if judge(strongest, program, tests, row["entry_point"], limits, **extra).status != "passed":
            refused.append(row["id"])
    assert refused == []


# ---- stdin problems --------------------------------------------------------------------------------------------------

SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4", "output": "6"}]
ANSWERS = {
    "input()": "a, b = map(int, input().split())\nprint(a + b)",
    "sys.stdin": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "file 0": "print(sum(map(int, open(0).read().split())))",
    "write without newline": "import sys\nsys.stdout.write(str(sum(map(int, input().split()))))",
    "main guard": "if __name__ == '__main__':\n print(sum(map(int, input().split())))",
    "exit": "import sys\nprint(sum(map(int, input().split())))\nsys.exit()",
    "thread": "import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()",
    "atexit": "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
    "trailing spaces": "print(sum(map(int, input().split())), end='  \\n\\n')",
}
WRONG = {
    "no output": "x = 1",
    "one line more": "print(sum(map(int, input().split())))\nprint('extra')",
    "same line more": "print(sum(map(int, input().split())), 'extra')",
    "then an error": "print(sum(map(int, input().split())))\nraise ValueError",
    "then a bad status": "import sys\nprint(sum(map(int, input().split())))\nsys.exit(3)",
    "bytes": "import os\nos.write(1, b'\\xff\\xfe')",
    "a flood": "while True: print('x' * 1000)",
    "too much": "print('3' * (2 << 20))",
    "never ends": "print(sum(map(int, input().split())), flush=True)\nwhile True: pass",
    "reads on": "while True: input()",
    "truncates": "import os\nprint(sum(map(int, input().split())), flush=True)\nos.ftruncate(1, 1 << 40)",
}


@pytest.mark.parametrize("program", ANSWERS.values(), ids=ANSWERS)
def test_stdin_programs_are_run_as_scripts(box: Sandbox, program: str) -> None:
    assert box.run_stdio(program, SUM, Limits(), same_output).status == "passed"


@pytest.mark.parametrize("program", WRONG.values(), ids=WRONG)
def test_wrong_stdin_programs_fail(box: Sandbox, program: str) -> None:
    assert box.run_stdio(program, SUM, HASTY, same_output).status in ("failed", "timeout")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \r\n2", "1\n2\n", True),
        ("1", "1\n2", False),
        ("1\n2\n3", "1\n2", False),
        ("2\n1", "1\n2", False),
        ("1\n\n2", "1\n2", False),
        (" 1", "1", True),
        ("YES", "Yes", False),
        ("0.333333334", "0.333333333", True),
        ("0.3334", "0.3333", False),
        ("2.50", "2.5", True),
        ("5.0", "5", False),
        ("nan", "0.5", False),
        ("inf", "1.5", False),
        ("1e400", "1.5", False),
        ("[3]", "[3, 4]", False),
        ("", "", True),
        ("\u0663", "3", False),
    ],
)
def test_outputs_are_compared_line_by_line(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed.encode(), expected) is same
