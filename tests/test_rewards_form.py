"""Rules of form, length and code that need no sandbox; the shared format cases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slmgrpo.rewards import code
from slmgrpo.rewards.format import (
    answer_present,
    boxed_once,
    numeric_answer,
    one_code_block,
    reasoning_present,
    tag_counts,
    tagged,
)
from slmgrpo.rewards.length import cosine, overlong, repetition
from slmgrpo.rewards.programs import completed, handed_in, task_prompt

CASES = Path(__file__).parents[2] / "shared" / "cases" / "format_cases.jsonl"


def cases() -> list[dict]:
    if not CASES.is_file():
        return []
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not CASES.is_file(), reason="the shared case files are not on this machine")
@pytest.mark.parametrize("row", cases(), ids=lambda row: row["id"])
def test_shared_cases(row: dict) -> None:
    if row["style"] == "boxed":
        assert bool(boxed_once(row["completion"])) is row["ok"]
    else:
        assert bool(tagged(row["completion"], style=row["style"])) is row["ok"]


@pytest.mark.parametrize(
    ("completion", "prompt", "value"),
    [
        ("<think>a</think>b", "user: q", 1.0),
        ("a</think>b", "assistant: <think>\n", 1.0),
        ("a</think>b", "user: q", 0.0),
        ("<think>a</think>b", "assistant: <think>\n", 0.0),
        ("a</think>b", "", 1.0),
        ("Sure! <think>a</think>b", "", 0.0),
        ("<think> </think>b", "", 0.0),
        ("<think>a</think> \n", "", 0.0),
        ("<think>a</think>b<think>c</think>d", "", 0.0),
        ("</think>a<think>b", "", 0.0),
    ],
)
def test_thinking_is_tagged_once_around_text(completion: str, prompt: str, value: float) -> None:
    assert tagged(completion, prompt) == value


@pytest.mark.parametrize("blank", ["\u200b", "\ufeff \u2060", "\u2800", "\u3164", "\u0301", "\x00", "\u00ad"])
def test_text_that_cannot_be_seen_is_no_text(blank: str) -> None:
    assert tagged(f"<think>{blank}</think>b") == tagged(f"<think>a</think>{blank}") == 0.0
    assert tagged(f"<think>a</think><answer>{blank}</answer>", style="think_answer") == 0.0
    assert reasoning_present(f"<reasoning>{blank}</reasoning>") == answer_present(f"<answer>{blank}</answer>") == 0.0
    assert boxed_once(f"\\boxed{{{blank}}}") == answer_present(f"\\boxed{{{blank}}}") == 0.0
    assert one_code_block(f"```python\n{blank}\n```") == 0.0


def test_two_tagged_parts_and_nothing_else() -> None:
    full = "<think>a</think>\n<answer>5</answer>"
    assert tagged(full, style="think_answer") == 1.0
    for broken in (full + " done", full + full, "x" + full, full.replace("5", " "), full.replace("</think>", "")):
        assert tagged(broken, style="think_answer") == 0.0
    assert tagged(full.replace("think", "reasoning"), style="reasoning_answer") == 1.0


def test_partial_tags_earn_their_share() -> None:
    full = "<reasoning>a</reasoning><answer>5</answer>"
    assert tag_counts(full) == 1.0
    assert tag_counts(full.replace("</answer>", "")) == 0.75
    assert tag_counts(full + "x" * 100) == pytest.approx(0.9)
    assert tag_counts(full + full) == 0.0
    assert tag_counts("plain") == 0.0
    assert reasoning_present(full) == 1.0 and reasoning_present("<reasoning> </reasoning>") == 0.0


def test_answers_are_present_and_numeric() -> None:
    assert answer_present("<answer>x</answer>") == answer_present(r"\boxed{x}") == 1.0
    assert answer_present("<answer> </answer>") == answer_present("<think><answer>5</answer>") == 0.0
    assert numeric_answer("<answer>-1,200.5</answer>") == numeric_answer(r"\boxed{\frac{1}{2}}") == 1.0
    assert numeric_answer("<answer>x + 1</answer>") == numeric_answer("<answer>five</answer>") == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"<think>\boxed{1}</think>\boxed{2}", 1.0),
        (r"\boxed{1}\boxed{1}", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{\frac{1}{2}}", 1.0),
        (r"\boxed{\boxed{1}}", 0.0),
        (r"\boxed{1} and \boxed{", 0.0),
        ("", 0.0),
    ],
)
def test_one_box(text: str, value: float) -> None:
    assert boxed_once(text) == value


BLOCK = "```python\nx = 1\n```"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (BLOCK, 1.0),
        (f"<think>{BLOCK}</think>{BLOCK}", 1.0),
        (BLOCK + "\n" + BLOCK, 0.0),
        (BLOCK[:-3], 0.0),
        (BLOCK.replace("python", ""), 0.0),
        ("```python\n\n```", 0.0),
        ("x = 1", 0.0),
    ],
)
def test_one_code_block(text: str, value: float) -> None:
    assert one_code_block(text) == value


def test_overlong_falls_only_in_the_margin() -> None:
    values = [overlong([0] * n, max_tokens=100, margin=20) for n in (0, 80, 90, 100, 130)]
    assert values == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_cosine_goes_from_short_to_long() -> None:
    values = [cosine([0] * n, max_tokens=100) for n in (0, 50, 100, 200)]
    assert values == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    assert repetition(list(range(50))) == 0.0
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([7] * 100) == pytest.approx(1 / 93 - 1)


HEADER = "from typing import List\n\ndef helper(x):\n    return x\n\ndef total(xs: List[int]) -> int:\n    '''Sum.'''\n"


@pytest.mark.parametrize(
    ("reply", "source"),
    [
        ("```python\na = 1\n```\n```python\nb = 2\n```", "b = 2\n"),
        ("```python\ndef total(): pass\n```\n```python\nprint(total())\n```", "def total(): pass\n"),
        ("```python\na = 1\n```\n```text\nout\n```", "a = 1\n"),
        ("```\na = 1\n```", "a = 1\n"),
        ("```bash\nls\n```", None),
        ("```python\na = 1\n", None),
        ("```python\na = 1\n```\n```python\nb = 2", None),
        ("<think>```python\na = 1\n```</think>no code", None),
        ("<think>```python\na = 1\n```", None),
        ("def total():\n    return 1", "def total():\n    return 1"),
        ("I cannot do that.", None),
        ("", None),
    ],
)
def test_the_program_handed_in(reply: str, source: str | None) -> None:
    assert handed_in(reply, entry_point="total").source == source


def test_a_header_gives_imports_helpers_or_the_signature() -> None:
    assert task_prompt(("prose <|im_start|>", HEADER), "total") == HEADER
    assert task_prompt(("Write total(xs).",), "total") == ""
    assert completed("def total(xs): return 0", HEADER, "total").startswith("from typing import List\ndef helper")
    assert completed("    return sum(xs)\n", HEADER, "total") == HEADER + "    return sum(xs)\n"


def block(source: str) -> str:
    return f"```python\n{source}\n```"


def test_parses_and_not_trivial() -> None:
    tests = ["assert double(21) == 42", "assert double(50) == 100"]
    assert code.parses(block("def double(n): return 2 * n")).value == 1.0
    assert code.parses(block("def double(n) return")).value == code.parses("no code").value == 0.0
    good = "def double(n):\n    return 2 * n"
    assert code.not_trivial(block(good), "double", tests).value == 1.0
    for trivial in (
        "def double(n):\n    pass",
        "def double(n):\n    '''Twice.'''\n    return 42",
        "def double(n):\n    raise NotImplementedError",
        "def double(n):\n    x = 5\n    return x * 2",
        "def double(n):\n    return {21: 42, 50: 100}[n]",
        "def other(n):\n    return 2 * n",
    ):
        assert code.not_trivial(block(trivial), "double", tests).value == 0.0, trivial


def test_a_row_without_tests_cannot_be_judged() -> None:
    assert code.passes_tests(block("x = 1"), []).status == "ungradeable"
    assert code.passes_tests("no code", []).value == 0.0


pieces = st.sampled_from(
    ["<think>", "</think>", "<answer>", "</answer>", "<reasoning>", "</reasoning>", r"\boxed{", "}", "```",
     "```python\n", "\n", "def f(x):", "    return x", "x", "(", "[", "'''", "\\", "\x00", "print(1)"]
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(
    st.one_of(st.text(max_size=60), st.lists(pieces, max_size=15).map("".join)), st.sampled_from(["", "<think>\n", "q"])
)
def test_no_text_makes_a_rule_raise(text: str, prompt: str) -> None:
    for rule in (tagged, tag_counts, reasoning_present, answer_present, numeric_answer, boxed_once, one_code_block):
        assert 0.0 <= rule(text, prompt) <= 1.0
    assert code.parses(text, prompt).value in (0.0, 1.0)
    assert code.not_trivial(text, "f", ["assert f(1) == 2"], prompt).value in (0.0, 1.0)
