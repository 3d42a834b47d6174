"""Rules for programs: they pass the tests, or a share of them; they parse; they are a real attempt."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from slmgrpo.rewards.base import Bounds, Verdict, bounded, correctness
from slmgrpo.rewards.find import Above
from slmgrpo.rewards.programs import asks, completed, defines, handed_in, loose_names, name_of, task_prompt, tree_of
from slmgrpo.rewards.programs import trivial as trivial_because

if TYPE_CHECKING:
    from slmgrpo.rewards.sandbox import Outcome

TestKind = Literal["asserts", "check", "stdio"]
Tests = Sequence[str] | str | Sequence[Mapping[str, str]]
SANDBOX = "SLMGRPO_SANDBOX"
"""Environment variable with the jail's mode; the pool sets it from `grading.sandbox` in its workers."""


@correctness
def passes_tests(
    completion: str,
    tests: Tests,
    entry_point: str = "",
    test_kind: str = "",
    prompt: str = "",
    question: str = "",
    setup: str = "",
    *,
    timeout_s: Annotated[float, Above(0)] = 8.0,
) -> Verdict:
    """1 if the program of the reply passes all `tests` in the sandbox within `timeout_s`."""
    verdict = _graded(completion, tests, entry_point, test_kind, prompt, question, setup, timeout_s)
    if verdict.value is None or verdict.value == 1.0:
        return verdict
    return Verdict(0.0, verdict.status, verdict.read, verdict.why)


@bounded(lambda settings: Bounds(0.0, 1.0, 0.99, 1.0))
@correctness
def fraction_passed(
    completion: str,
    tests: Tests,
    entry_point: str = "",
    test_kind: str = "",
    prompt: str = "",
    question: str = "",
    setup: str = "",
    *,
    timeout_s: Annotated[float, Above(0)] = 8.0,
) -> Verdict:
    """The share of `tests` that the program passes; 1 only where it passes all."""
    return _graded(completion, tests, entry_point, test_kind, prompt, question, setup, timeout_s)


def parses(completion: str, prompt: str = "", entry_point: str = "") -> Verdict:
    """1 if the reply hands in a block of valid Python."""
    program = handed_in(completion, prompt, entry_point or "")
    if program.source is None:
        return Verdict(0.0, why=program.why)
    valid = tree_of(program.source) is not None
    return Verdict(float(valid), why=program.why if valid else "no valid Python")


def not_trivial(completion: str, entry_point: str = "", tests: Any = None, prompt: str = "") -> Verdict:
    """1 if the program is an attempt: it uses its input and does not hold the expected answers."""
    program = handed_in(completion, prompt, entry_point or "")
    if program.source is None:
        return Verdict(0.0, why=program.why)
    reason = trivial_because(program.source, entry_point or "", tests)
    return Verdict(float(not reason), why=reason or "an attempt")


def _kind_of(tests: Tests, test_kind: str) -> TestKind:
    """What the tests are, where the data does not say: inputs and outputs, HumanEval's check, or asserts."""
    if test_kind:
        return cast(TestKind, test_kind)
    if isinstance(tests, str):
        return "check" if "def check(" in tests else "asserts"
    return "stdio" if tests and isinstance(tests[0], Mapping) else "asserts"


def _unusable(tests: Any, test_kind: Any) -> str:
    """Why no program can be judged by these tests, whatever it does; else nothing."""
    if test_kind and test_kind not in get_args(TestKind):
        return f"there is no test_kind {str(test_kind)[:40]!r}; write {', '.join(get_args(TestKind))}"
    if tests is None or tests == "" or tests == []:
        return "the row has no tests"
    if isinstance(tests, str) and test_kind == "stdio":
        return "stdio tests are objects with `input` and `output`"
    if not isinstance(tests, Sequence):
        return f"tests are a {type(tests).__name__}; write a list of texts, or of objects with `input` and `output`"
    if _kind_of(tests, test_kind) != "stdio":
        strange = [type(test).__name__ for test in tests if not isinstance(test, str)]
        if strange:
            return f"a test is a {strange[0]}, no text"
        return "" if any(map(asks, [tests] if isinstance(tests, str) else tests)) else "no test asks anything"
    expected = ""
    for test in tests:
        if not isinstance(test, Mapping) or not all(isinstance(test.get(key), str) for key in ("input", "output")):
            return "a stdio test is no object with the texts `input` and `output`"
        expected += test["output"].strip()
    return "" if expected else "no test expects any output"


def _unbound(tests: Tests, entry_point: str, header: str, setup: str, source: str) -> tuple[str, str]:
    """The tests' setup with the modules that they leave out; and why they cannot be run, which is the data's fault."""
    texts = (tests,) if isinstance(tests, str) else tuple(test for test in tests if isinstance(test, str))
    entry = name_of(entry_point)
    loose = loose_names(texts, tuple(text for text in (setup, header) if text))
    others = [name for name in loose.others if name != entry]
    if entry and tree_of(source) is not None and "import *" not in source:
        others += [name for name in loose.called if name != entry and not defines(source, name)]
    if others:
        return setup, f"the tests use `{others[0]}`, which nothing defines"
    return "\n".join([setup, *(f"import {name}" for name in loose.modules if name != entry)]), ""


def _graded(
    completion: str,
    tests: Tests,
    entry_point: str,
    test_kind: str,
    prompt: str,
    question: str,
    setup: str,
    timeout_s: float,
) -> Verdict:
    """The share of tests passed, 1 only for all of them."""
    entry_point, test_kind, setup = entry_point or "", test_kind or "", setup or ""
    header = task_prompt((prompt, question or ""), entry_point)
    program = handed_in(completion, "" if header else prompt, entry_point)
    if program.source is not None:
        source = completed(program.source, header, entry_point)
    elif header and "```" not in completion and tree_of(header + completion) is not None:
        source = header + completion  # a base model goes on from the header
    else:
        return Verdict(0.0, "no_answer", why=program.why)
    read = source[:200]
    if fault := _unusable(tests, test_kind):
        return Verdict(None, "ungradeable", read, fault)
    kind = _kind_of(tests, test_kind)
    setup, fault = (setup, "") if kind == "stdio" else _unbound(tests, entry_point, header, setup, source)
    if fault:
        return Verdict(None, "ungradeable", read, fault)
    plain = tests if isinstance(tests, str) else list(tests)
    arguments = json.dumps([plain, entry_point, kind, header, setup])
    try:
        outcome = _run(source, arguments, timeout_s, os.environ.get(SANDBOX, "strict"))
    except _UnsettledError as unsettled:
        outcome = unsettled.outcome
    if outcome.status == "error":
        return Verdict(None, "error", read, outcome.why)
    counted = f"{outcome.passed} of {outcome.total} tests"
    if outcome.status == "passed":
        return Verdict(1.0, "correct", read, counted)
    share = min(outcome.passed / max(outcome.total, 1), 0.99)
    status = "timeout" if outcome.status == "timeout" else "wrong"
    return Verdict(share, status, read, f"{counted}; {outcome.why}" if outcome.why else counted)


class _UnsettledError(Exception):
    """An outcome that another run might change; it is not remembered."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.why)
        self.outcome = outcome


@functools.lru_cache(maxsize=256)
def _run(source: str, arguments: str, timeout_s: float, mode: str) -> Outcome:
    """Remembered, so that passes_tests and fraction_passed in one recipe run a program once."""
    from slmgrpo.rewards.sandbox import Limits, run_tests

    tests, entry_point, kind, header, setup = json.loads(arguments)
    outcome = run_tests(
        source,
        tests=tests,
        entry_point=entry_point or None,
        test_kind=kind,
        prompt=header,
        setup=setup,
        limits=Limits(wall_s=timeout_s, call_s=min(timeout_s, 6.0)),
        sandbox=cast(Literal["strict", "best", "off"], mode),
    )
    if outcome.status in ("timeout", "error"):
        raise _UnsettledError(outcome)
    return outcome
