"""math.correct and its siblings: shared cases, kinds of equality, guards, and no text that makes them raise."""
# ruff: noqa: E501, RUF001  (tables of replies, in many scripts)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slmgrpo.rewards import equal
from slmgrpo.rewards.extract import after_thinking, last_box
from slmgrpo.rewards.latex import clean
from slmgrpo.rewards.math import correct, numeric_close, steps_checked

CASES = Path(__file__).parents[2] / "shared" / "cases" / "math_cases.jsonl"

# Rows where reasonable people differ, decided once. All others follow the case file.
POLICY = {
    "m015": (True, "28% is 0.28: both say the same share"),
    "m020": (True, r"\frac13 is valid LaTeX, and several golds of MATH are written so"),
    "m023": (True, "the value counts; a question that wants lowest terms needs a rule of its own"),
    "m039": (False, "33.3 is not 100/3: rounding is for data that ask for it (math.numeric_close)"),
    "m099": (True, "a program's spelling of the same polynomial"),
    "m102": (True, "exp(16) can be read in one way only"),
    "m104": (True, "pi can be read in one way only"),
    "m134": (True, "the base stands in the question; other digits or another base are wrong"),
    "m143": (False, "a box that never closes was cut off: no final answer"),
    "m145": (True, r"\fbox is the same gesture as \boxed"),
    "m149": (False, "no box: only `extract: lenient` reads it, which is for eval"),
    "m150": (False, "no box: only `extract: lenient` reads it, which is for eval"),
    "m163": (False, "hundreds of brackets are refused unread: no honest answer looks so"),
    "m175": (True, "a typed pi is a pi"),
    "m176": (True, "the value counts, reduced or not"),
}


def cases() -> list[dict]:
    if not CASES.is_file():
        return []
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not CASES.is_file(), reason="the shared case files are not on this machine")
@pytest.mark.parametrize("row", cases(), ids=lambda row: f"{row['id']}-{row['kind']}")
def test_shared_cases(row: dict) -> None:
    wanted = POLICY[row["id"]][0] if row.get("policy") else row["match"]
    value = correct(row["pred"], row["gold"]).value
    assert value is None if wanted is None else value == float(wanted), correct(row["pred"], row["gold"])


@pytest.mark.parametrize("row", [row for row in cases() if row["id"] in ("m149", "m150")], ids=lambda row: row["id"])
def test_lenient_extraction_reads_answers_without_a_box(row: dict) -> None:
    assert correct(row["pred"], row["gold"], extract="lenient").value == 1.0


SAME = [
    (r"\{1,2\}", r"\{2,1\}"), (r"\{1,2\}", "2, 1"), ("(1,2)", "1,2"), ("x=1, y=2", "y=2, x=1"), ("1,2,3", "3,2,1"),
    (r"(-\infty, 3) \cup (5, \infty)", r"(5,\infty)\cup(-\infty,3)"), ("x < 3 or x > 5", r"(-\infty, 3) \cup (5, \infty)"),
    ("-2 < x < 7", "(-2,7)"), (r"-2 \le x < 7", "[-2,7)"), (r"x\ge2", r"2\le x"), (r"[ -\frac{1}{2},\infty )", r"[-1/2, \infty)"),
    (r"12 \text{ cm}", "12"), (r"15\mbox{ cm}^2", r"15 \text{ square centimeters}"), (r"90^\circ", r"90 \text{ degrees}"),
    ("3:2", "3/2"), ("5", "5.0"), (r"\sqrt{17}", "4.123105625617661"), ("1e-7", "0.0000001"), (r"6.63 \times 10^{-34}", "6.63e-34"),
    ("2516_8", "2516_{8}"), ("1A_{16}", "1a_{16}"), (r"\text{13}", "13"), ("004", "4"), ("1,000", "1000"), ("4", "8-4=4"),
    (r"3\frac{1}{2}", "3.5"), (r"-2\frac12", "-2.5"), (r"\left(\frac12,\frac13\right)", "(0.5, 1/3)"), ("x^2+y^2=25", "25 = x^2 + y^2"),
    ("y=2x+1", "2x-y+1=0"), ("6 - 5i", "-5i+6"), (r"10\%", "0.1"), (r"10\%", "10"), ("1", r"100\%"),
    (r"\begin{pmatrix} 0.5 \\ 2 \end{pmatrix}", r"\begin{bmatrix} \frac12 \\ 2 \end{bmatrix}"), ("10^{10^{10}}", "10^{10000000000}"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}"), (r"\sin 2x", r"2\sin x\cos x"), (r"\log_{10} 2", r"\frac{\ln 2}{\ln 10}"),
    (r"\text{no solution}", "No solution."), (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"), (r"\arctan 1", r"\frac{\pi}{4}"),
    ("f(x)=2x", "y=2x"), ("-1", "i^2"), (r"e^{x+1}", r"e\cdot e^x"), (r"\frac{270}7\text{ degrees}", r"\dfrac{270}{7}"),
    (r"5\text{ km/h}", r"5 \text{ kilometers per hour}"), ("20 mph", r"20\text{ mi/h}"), (r"5\text{ Pounds}", "5 lbs"), (r"5\text{ cm}^2", r"5\text{ square centimeters}"),
    ("1500000", r"1.5\text{ million}"), (r"1.5\text{ million}", "1500000"), ("2000000", "2 million dollars"), ("24", "2 dozen eggs"), (r"\$5", "5 dollars"), ("5", r"\$5"),
    (r"5\text{ red apples}", r"5\text{ apples}"), (r"10\text{ units}", r"10\text{ cm}"), ("5", r"5\text{ times}"), (r"80\text{ K}", "80"), ("8", r"5\text{ cm} + 3\text{ cm}"), ("6", r"6\quad\text{(verified)}"),
    ("6", "6 个"), ("15", "15元"), ("10", "10 Äpfel"), ("6", "6\u200b"), ("6", "The answer is 6"), (r"\text{ellipse}", r"\text{an ellipse}"), (r"3:00 \text{ p.m.}", "3:00 PM"), (r"\text{June 20}", "june 20"),
    (r"\frac12", r"\cos 60^\circ"), (r"\sin 60^\circ", r"\frac{\sqrt3}{2}"), (r"\tan 45^\circ", "1"), (r"\sin 20^\circ", r"\cos 70^\circ"), ("0.5", r"\sin 30\text{ degrees}"), ("1", r"\sin^2 20^\circ+\cos^2 20^\circ"),
    (r"\angle ABC", r"\angle CBA"), (r"1,2,\ldots,n", "1, 2, ..., n"), (r"\frac13", r"0.333\ldots"), ("10", "10_{10}"), ("6", "6_7"), (r"2\text{ or more}", r"2 \text{ or more}"),
    (r"\begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix}", "(1,2,3)"), (r"(1,\frac12)", r"\begin{bmatrix} 1 \\ 0.5 \end{bmatrix}"),
    (r"0.1\overline{6}", r"\frac16"), (r"\mathbb{R}", r"(-\infty,\infty)"), (r"\pm 3", "3, -3"), ("½", "0.5"), ("x²", "x^2"),
]  # fmt: skip
DIFFERENT = [
    ("(1,2)", "(2,1)"), (r"\{1,2\}", "1"), (r"12 \text{ cm}", r"12 \text{ m}"), (r"17 \text{ minutes}", r"17 \text{ hours}"),
    ("0.333", "1/3"), (r"\sqrt{17}", "4.12"), ("6.63e-34", "6.63e-30"), ("204_5", "204_6"), ("x=5", "y=5"), (r"3\sqrt{13}", "3"),
    ("100", "1"), (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"), ("2^{99}", "2^{98}"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), (r"\frac{1}{2004!}", r"\frac{1}{2006!}"), ("x", "X"), ("1 + i", "1 - i"),
    (r"x \ge 2", "x > 2"), ("3x+2", "3x + 2 = 0"), (r"\sqrt{x^2}", "x"), (r"8 \text{ or } 9", "8"), ("70,000", "70.000"),
    ("10^{10^{10}}", "10^{10^{11}}"), (r"(3, \frac{\pi}{2})", r"(3, \frac{\pi}{2})+1"), (r"\text{north}", r"\text{thorn}"),
    (r"\sqrt{10^{40}+1}", "10^{20}"), ("[1,2]", "(1,2)"), ("1,2", "1,2,3"), ("5", ""),
    *(("2", rf"2\text{{ {remark}}}") for remark in ("(or 3)", "[or 3]", "or three", "possibly 3", "or 3 or 4", "or more", "or less", "at least", "not", "minus one", "times 3", "squared", "million", "dozen", "hundred", "hundredths", "x", "is wrong", "(mod 5)", "for x>0", "hours 30 minutes", "oder drei")),
    ("2", "2 million"), ("2", r"2\text{k}"), ("2", r"2\text{ kilo}"), ("2", r"2\text{..}3"), ("2", r"2\text{-}3"), ("2", "2 oder mehr"), ("2", "2 或更多"), ("2", r"2\text{i}"), ("2", r"2\mathrm{x}"), ("x>2", r"x>2\text{ or more}"), ("5", r"x = 5\text{ or more}"), (r"2\text{ or more}", "2"), (r"\text{at least 2}", "2"),
    (r"-2\text{ cm}", r"2\text{ cm}"), ("0", r"2\text{ or }-2"), ("-1", r"2\text{ times }-3"), ("8", r"5\text{ ft} + 3\text{ in}"), ("6", "The answer is not 6"),
    *((rf"5\text{{ {a}}}", rf"5\text{{ {b}}}") for a, b in (("km/h", "mph"), ("km/h", "m/s"), ("m/s", "m"), ("m/s^2", "m/s"), ("kJ", "J"), ("MHz", "Hz"), ("MW", "mW"), ("nm", "mm"), ("eV", "J"), ("N", "J"), ("mol", "g"), ("liters", "gallons"), ("dollars", "euros"), ("men", "women"), ("degrees", "radians"))),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "(2,1)"), (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "(1,2)"), (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", "[1,2)"),
    (r"\$5", r"5\text{ cents}"), (r"\$5", "€5"), (r"30^\circ C", r"30^\circ F"), (r"30^\circ", r"30\text{ radians}"), (r"\sin 30^\circ", r"\sin 30"), (r"\sin 90", r"\sin 90^\circ"),
    (r"\angle ABC", r"\angle BAC"), (r"\angle ABC", r"\angle CAB"), (r"\overrightarrow{AB}", r"\overrightarrow{BA}"),
    ("2", r"2\ldots"), ("2", "2..."), ("2", r"2,\ldots"), ("2", "2…"), ("10", "10_2"), ("2", "10_2"), ("15", "15_7"), ("7", "7_2"), ("15", r"15_{\text{seven}}"),
]  # fmt: skip


@pytest.mark.parametrize(("gold", "given"), SAME)
def test_one_value_in_two_spellings(gold: str, given: str) -> None:
    assert correct(f"So \\boxed{{{given}}}.", gold).value == 1.0


@pytest.mark.parametrize(("gold", "given"), DIFFERENT)
def test_two_values_that_look_alike(gold: str, given: str) -> None:
    assert correct(f"So \\boxed{{{given}}}.", gold).value == 0.0


def test_the_gold_goes_first_into_math_verify() -> None:
    """math-verify takes a set for a gold relation, and no relation for a gold set."""
    inside, outside = r"x \neq 3", r"(-\infty, 3) \cup (3, \infty)"
    assert equal.compare(inside, outside).why == "equal by math-verify"
    assert equal.compare(outside, inside).same is False


def test_golds_are_read_as_one_whole() -> None:
    r"""A bare gold such as 3\sqrt{13} is 3 to a common wiring, which then pays for 3."""
    for gold in (r"3\sqrt{13}", "6 - 5i", r"\text{Evelyn}", r"11 \sqrt{5} + 11"):
        assert correct(f"\\boxed{{{gold}}}", gold).value == 1.0
        assert correct(r"\boxed{3}", gold).value == 0.0


@pytest.mark.parametrize("gold", ["", "   ", "$$"])
def test_an_empty_gold_cannot_be_judged_and_pays_nothing(gold: str) -> None:
    assert correct(r"\boxed{5}", gold).status == "ungradeable"
    assert correct(r"\boxed{}", gold).value == 0.0


@pytest.mark.parametrize("gold", [None, float("nan"), ["6", "7"], [], {"a": 6}])
def test_a_gold_that_is_no_text_cannot_be_judged(gold: Any) -> None:
    for reply in (r"\boxed{None}", r"\boxed{nan}", r"\boxed{6}", r"\boxed{['6', '7']}"):
        assert correct(reply, gold).status == numeric_close(reply, gold).status == "ungradeable"
    assert correct(r"\boxed{6}", cast(Any, ["6"])).value == correct(r"\boxed{6}", cast(Any, 6)).value == 1.0


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"\boxed{5}. Wait, that is wrong: \boxed{6}", "6"),
        (r"\(\boxed{1}\) and \(\boxed{-2}\)", "1, -2"),
        (r"$x=\boxed{1}$, $y = \boxed{2}$", "1, 2"),
        (r"\boxed{\{1,\frac{1}{2}\}}", r"\{1,\frac{1}{2}\}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed 42$", "42"),
        (r"\boxed{7} then \boxed{", "7"),
        (r"\boxed{ }", None),
        ("no box", None),
    ],
)
def test_the_last_box_is_taken_by_matching_braces(text: str, read: str | None) -> None:
    assert last_box(text) == read


def test_only_what_follows_the_thinking_counts() -> None:
    assert correct(r"<think>\boxed{5}</think>\boxed{6}", "6").value == 1.0
    assert correct(r"<think>\boxed{6}</think>so it is six", "6").status == "no_answer"
    assert correct(r"<think>so \boxed{6}", "6").status == "no_answer"
    assert correct(r"so \boxed{6}", "6", "user: ...\n<think>\n").status == "no_answer"
    assert after_thinking("<think>a</think>b") == "b"


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{1}{" * 60 + "7" + "}" * 60,
        "9^{9^{9^{9}}}",
        "(10^{10^{9}})!",
        "(((7!)!)!)!",
        r"\sum_{n=1}^{10^9} n^{50}",
        "(" * 5000,
        "{" * 5000,
        r"\sqrt{" * 200 + "2" + "}" * 200,
        "1" * 100_000,
        "1e999999999",
        r"\sin(10^{10^{8}})",
        r"2^{2^{2^{2^{2^{2}}}}}",
        "x^{x^{x^{x^{x}}}}",
        r"\prod_{k=1}^{100000} k!",
        "0^{-1}",
        r"\log 0",
        r"\begin{pmatrix}" + "1 &" * 100 + r"\end{pmatrix}",
        "__import__('os').system('true')",
        "\x00\ud800\u202e",
    ],
)
def test_a_pathological_answer_is_wrong_and_not_an_error(text: str) -> None:
    verdict = correct(f"\\boxed{{{text}}}", "7")
    assert verdict.value == 0.0 and verdict.status in ("wrong", "no_answer")


fragments = st.sampled_from(
    [*r"0123456789+-*/^_(){}[]<>=,.;:!|&%$\x'" "\n", r"\frac", r"\sqrt", r"\boxed{", "}", r"\text{", r"\left(", r"\right)",
     r"\pm", r"\infty", r"\cup", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "<think>", "</think>", "<answer>", "</answer>",
     "answer is", "or", "and", "e", "i", r"\pi", r"\overline{3}", r"\circ", r"\leq", "log", "sin", "π", "½", "，", "\x00"]
)  # fmt: skip
texts = st.one_of(st.text(max_size=80), st.lists(fragments, max_size=25).map("".join))


@settings(max_examples=150, deadline=None)
@given(texts, texts)
def test_no_text_makes_a_rule_raise(text: str, gold: str) -> None:
    for completion in (text, f"\\boxed{{{text}}}"):
        assert correct(completion, gold, extract="lenient").status in ("correct", "wrong", "no_answer", "ungradeable")
        numeric_close(completion, gold)
        assert 0.0 <= (steps_checked(completion).value or 0.0) < 1.0


@settings(max_examples=200, deadline=None)
@given(texts)
def test_cleaning_settles(text: str) -> None:
    """A cleaned text may shrink further, but never grows without end."""
    assert len(clean(clean(text))) <= 2 * len(clean(text)) + 20


@settings(max_examples=150, deadline=None)
@given(st.integers(-999, 999), st.integers(1, 99))
def test_every_spelling_of_a_fraction_is_its_value(top: int, bottom: int) -> None:
    gold = f"{top}/{bottom}"
    for spelling in (rf"\frac{{{top}}}{{{bottom}}}", rf"\dfrac{{{2 * top}}}{{{2 * bottom}}}", rf"{top} \div {bottom}"):
        assert equal.compare(gold, spelling).same
    assert not equal.compare(gold, f"{top + 1}/{bottom}").same


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True), st.randoms())
def test_the_order_of_a_list_is_free_and_its_members_are_not(values: list[int], random: object) -> None:
    gold = ", ".join(map(str, values))
    assert equal.compare(gold, ", ".join(map(str, reversed(values)))).same
    assert not equal.compare(gold, ", ".join(map(str, values[:-1]))).same


def test_numeric_close_takes_measured_values() -> None:
    assert numeric_close(r"\boxed{3.14}", r"\pi").value == 1.0
    assert numeric_close(r"\boxed{3.2}", r"\pi").value == 0.0
    assert numeric_close(r"\boxed{3.2}", r"\pi", relative=0.05).value == 1.0
    assert numeric_close(r"\boxed{x}", "3").value == 0.0
    assert numeric_close(r"\boxed{3}", "x").status == "ungradeable"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 = 5", 0.5),
        ("16 - 3 - 4 = <<16-3-4=9>>9 eggs. 9 * 2 = $18", 0.5),
        ("10 / 3 = 3.33\n3 x 4 = 13", 0.25),
        ("3 × 4 = 13\n2 + 2 = 4", 0.0),
        ("1 + 1 = 2\n" * 50, 0.5),
        ("x = 3", 0.0),
        ("", 0.0),
    ],
)
def test_steps_count_up_to_the_first_wrong_one(text: str, value: float) -> None:
    assert steps_checked(text).value == pytest.approx(value)
