from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slmgrpo.gold import Unreadable, gold_letter, gold_text, options

ABCD = ["A", "B", "C", "D"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("He has 3 + 4 = 7.\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("#### -12", "-12"),
        ("#### $1,234.50", "1234.50"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### +5.", "5"),
        ("#### \N{MINUS SIGN}5", "-5"),
        ("#### 25%", "25"),
        ("#### .5", ".5"),
        ("#### 1\n#### 2", "2"),
        ("####7", "7"),
    ],
)
def test_gsm8k_takes_the_number_behind_the_last_mark(written: str, read: str) -> None:
    assert gold_text(written, "gsm8k") == read


@given(st.integers(), st.booleans(), st.text(st.characters(blacklist_characters="#", blacklist_categories=["Cs"])))
def test_gsm8k_reads_any_whole_number(number: int, dollars: bool, reasoning: str) -> None:
    sign, size = "-" if number < 0 else "", f"{abs(number):,}"
    assert gold_text(f"{reasoning}#### {sign}{'$' if dollars else ''}{size}", "gsm8k") == str(number)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"So \boxed{5}.", "5"),
        (r"First \boxed{5}, no: \boxed{6}", "6"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\boxed{4} and then \boxed{}", "4"),
        (r"the answer is $\boxed 2$.", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{a\\}", r"a\\"),
    ],
)
def test_the_last_box_that_closes_wins(written: str, read: str) -> None:
    assert gold_text(written, "boxed") == read


balanced = st.recursive(
    st.text("ab1+ ", min_size=1, max_size=4),
    lambda inner: st.lists(inner, max_size=3).map(lambda p: f"{{{''.join(p)}}}"),
).filter(str.strip)


@given(balanced, st.text("ab{ }", max_size=6))
def test_a_box_gives_back_what_was_put_in(content: str, before: str) -> None:
    assert gold_text(f"{before} \\boxed{{{content}}} done", "boxed") == content.strip()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("1 + 1 = 2.\n#### 2\nThe answer is: 2", "2"),
        ("The answer is: 1. No. The answer is $\\frac{1}{2}$.", "$\\frac{1}{2}$"),
        ("The answer is: 7\nIf X is unknown", "7"),
    ],
)
def test_what_is_stated_last_is_read(written: str, read: str) -> None:
    assert gold_text(written, "stated") == read


@pytest.mark.parametrize("written", ["B", "(B)", "B.", "b", "[B]", "B) 12", "B: twelve", " (b). It is so", "B "])
def test_a_letter_in_front_is_read(written: str) -> None:
    assert gold_letter(written, "letter", ABCD) == "B"


@given(st.sampled_from(ABCD), st.sampled_from(["{}", "({})", "{}.", "{})", " {} ", "[{}]", "{}: text", "({}) text"]))
def test_every_label_survives_every_spelling(letter: str, spelling: str) -> None:
    for written in (letter, letter.lower()):
        assert gold_letter(spelling.format(written), "letter", ABCD) == letter


def test_numbers_from_0_become_letters() -> None:
    assert [gold_letter(value, "index", ABCD) for value in (0, "1", 2, 3.0)] == ABCD
    assert gold_text(2, "index") == "C"


def test_the_datas_own_labels_become_letters() -> None:
    assert gold_letter("2", None, ["1", "2", "3"]) == "B"
    assert gold_letter(2, None, ["1", "2", "3"]) == "B"
    assert gold_letter("(3)", "letter", ["1", "2", "3"]) == "C"
    assert gold_letter("d", None, ABCD) == "D"


@pytest.mark.parametrize(
    ("value", "text"), [(68, "68"), (68.0, "68"), (0.5, "0.5"), (" x ", "x"), (-3, "-3"), (10**400, "1" + "0" * 400)]
)
def test_numbers_are_answers_too(value: object, text: str) -> None:
    assert gold_text(value, None) == text


@pytest.mark.parametrize(
    ("value", "texts", "labels"),
    [
        (["x", "y"], ["x", "y"], ["A", "B"]),
        ([1, 2.5], ["1", "2.5"], ["A", "B"]),
        ({"text": ["x", "y"], "label": ["1", "2"]}, ["x", "y"], ["1", "2"]),
        ([{"text": "x", "label": "A"}, {"text": "y", "label": "B"}], ["x", "y"], ["A", "B"]),
        ([{"text": "x"}, {"text": "y"}], ["x", "y"], ["A", "B"]),
        ('["x", "y"]', ["x", "y"], ["A", "B"]),
    ],
)
def test_options_come_in_many_shapes(value: object, texts: list[str], labels: list[str]) -> None:
    assert options(value) == (texts, labels)


@pytest.mark.parametrize(
    ("answer", "extract", "message"),
    [
        ("7", "gsm8k", "no `####` in `answer`"),
        ("The answer is:", "stated", "no `The answer is ...`"),
        ("#### seven", "gsm8k", "no number behind the last `####` in `answer`, but `seven`"),
        ("#### 1,2", "gsm8k", "no number behind the last `####`"),
        ("#### --5", "gsm8k", "no number behind the last `####`"),
        (r"\boxed{5", "boxed", r"no \boxed{...} with closed braces and content"),
        ("plain", "boxed", r"no \boxed{...} with closed braces and content"),
        ("A cat", "letter", "no letter in front of `answer` `A cat`"),
        (26, "index", "`answer` is `26`; extract: index needs a whole number from 0 to 25"),
        ("-1", "index", "extract: index needs a whole number"),
        (True, None, "`answer` must be text or a number, not true or false"),
        (["5"], None, "`answer` must be text or a number, not a list"),
        (float("inf"), None, "`answer` is inf, which is no number"),
    ],
)
def test_an_unreadable_answer_says_why(answer: object, extract: object, message: str) -> None:
    with pytest.raises(Unreadable) as error:
        gold_text(answer, extract)  # pyright: ignore[reportArgumentType]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("answer", "labels", "message"),
    [
        (0, ABCD, "`answer` is `0`, not one of A, B, C, D; set `extract: index` if it counts from 0"),
        ("(B)", ABCD, "`answer` is `(B)`, not one of A, B, C, D; set `extract: letter`"),
        ("E", ABCD, "`answer` is `E`, not one of A, B, C, D"),
        ("A", ["1", "2"], "`answer` is `A`, not one of 1, 2"),
    ],
)
def test_an_answer_that_is_no_option_says_so(answer: object, labels: list[str], message: str) -> None:
    with pytest.raises(Unreadable) as error:
        gold_letter(answer, None, labels)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("x or y", "`choices` is text and no JSON list"),
        (["x"], "`choices` has 1 options; 2 to 26 can be lettered"),
        ([str(n) for n in range(27)], "`choices` has 27 options"),
        ({"a": "x"}, "`choices` must be a list of texts or {text, label}, not a mapping"),
        (["x", None], "`choices` must be texts, one is nothing"),
        ({"text": ["x", "y"], "label": ["A"]}, "`choices` has labels A for 2 options"),
        ({"text": ["x", "y"], "label": ["A", "A"]}, "`choices` has labels A, A for 2 options"),
    ],
)
def test_unusable_options_say_why(value: object, message: str) -> None:
    with pytest.raises(Unreadable) as error:
        options(value)
    assert message in str(error.value)
