"""mcq.correct: shared cases, many ways to declare an option, many ways not to; shuffled options."""
# ruff: noqa: E501, RUF001  (tables of replies, in many scripts)

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slmgrpo.rewards.mcq import correct, valid_option
from slmgrpo.rewards.shuffle import one_letter_baseline, shuffle_options

CASES = Path(__file__).parents[2] / "shared" / "cases" / "mcq_cases.jsonl"
CHOICES = ["sugar", "oxygen", "nitrogen", "carbon dioxide"]

# Rows where reasonable people differ, decided once. All others follow the case file.
POLICY = {
    "q023": (True, "a reply that is only a letter is an answer in either case"),
    "q037": (True, "the value of one option, boxed, can mean nothing else"),
    "q043": (True, "the longest option text that fits is what was said"),
    "q056": (True, "C is ruled out by name, so D alone is declared"),
    "q073": (True, "the last of two answers is the declared one, as with boxes"),
    "q087": (True, "an option's text behind a cue declares it"),
    "q101": (True, "a full-width letter is that letter"),
    "q108": (False, "ordinals do not name options: `Option 3` may be a text"),
}


def cases() -> list[dict]:
    if not CASES.is_file():
        return []
    return [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]


@pytest.mark.skipif(not CASES.is_file(), reason="the shared case files are not on this machine")
@pytest.mark.parametrize("row", cases(), ids=lambda row: row["id"])
def test_shared_cases(row: dict) -> None:
    wanted = POLICY[row["id"]][0] if row.get("policy") else row["match"]
    verdict = correct(row["completion"], row["gold"], row["choices"])
    assert verdict.value == float(wanted), verdict


C = [
    "The answer is not B, it's C", "The correct option is (C) nitrogen", "Option C is correct.", "C is the correct answer.",
    "A is incorrect. C is correct.", "I choose C.", "I'd go with C", r"Therefore, the answer is $\boxed{\text{C}}$.",
    r"\boxed{C: nitrogen}", r"\boxed{(C)}", r"\boxed{\textbf{(C)}\ nitrogen}", r"\boxed{nitrogen}", "**Answer:** C", "Answer:\n\n**C**",
    "### Answer\nC", "Final Answer: The final answer is C. I hope it is correct.", 'The answer is "C"', "Answer: `C`", "Answer: [C]",
    "Answer - C", "Answer=C", "答案是C", "正确答案：C", "所以选C", "應選C", "答案：(C)", "Antwort: C", "Die richtige Antwort ist C.",
    "Réponse : C", "La respuesta correcta es la C", "Risposta: C", "Ответ: C", "정답은 C입니다", "答えはC", "正解：Ｃ", "الإجابة: ج", "উত্তর: ড",
    "(c)", "c)", "C.", "It is nitrogen.", "Answer: C. nitrogen", "Answer: A. Actually, answer: C", "<answer>C</answer>",
    "<answer>The answer is C</answer>", r"Answer: \(C\)", "So it must be nitrogen\n\nC", "The answer would be C", "C - nitrogen",
    "Answer: nitrogen, not oxygen", "Eliminating A and B, the answer is C", "The answer is C, because A, B and D are wrong",
    "The answer is C since A or B would not work", "Answer: C\n\nA: sugar is made, not taken in.",
]  # fmt: skip
NOT_C = [
    "The answer is either B or C", "The answer is C (or B)", "Answer: C, but B is also possible", "Answer: C/D", "Answer: A, B, C, or D",
    r"\boxed{C, D}", r"\boxed{A or C}", "答案是B或C", "只有选项C是错的", "Answer: C and D", "Answer: ABCD", "Answer: CD", "It is not nitrogen.",
    "It could be nitrogen or oxygen.", "A. sugar\nB. oxygen\nC. nitrogen", "the answer cannot be C", "the answer isn't C",
    "The answer is neither C nor D", "Answer: Z", "Answer: none", "<answer></answer>", "<answer>B or C</answer>", "<think>Answer: C",
    "Let's see. Carbon... I think it seems hard", "Answer: C\nWait. Answer: D", "", "Answer: [LETTER]", "C D A B",
]  # fmt: skip


def test_a_missing_gold_cannot_be_judged_and_a_list_is_several_labels() -> None:
    choices = ["zero", "one", "None", "two"]
    assert correct(r"\boxed{C}", None, choices).status == "ungradeable"
    assert correct(r"\boxed{None}", None, choices).value is None
    assert correct("Answer: A and C", ["A", "C"], choices).value == 1.0
    assert correct("Answer: A", ["A", "C"], choices).value == 0.0
    assert correct("Answer: A", ["A", None], choices).status == "ungradeable"  # pyright: ignore[reportArgumentType]


def test_options_beyond_z_and_options_that_are_no_text() -> None:
    many = [f"option text {i}" for i in range(30)]
    assert correct("Answer: Z", "Z", many).value == 1.0
    assert correct("Answer: C", "option text 29", many).status == "ungradeable"
    numbers: list = [4, 8, 15]
    assert correct("Answer: 8", "B", numbers).value == 1.0
    assert correct("Answer: True", "A", [True, False]).value == 1.0  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "part", ["(", ")", " ", "\n", "~", "C ", "A ", "C是", "it is C, ", "answer among ", "no, wait, ", "**", "\\boxed{"]
)
def test_a_hundred_thousand_characters_are_read_or_refused(part: str) -> None:
    assert correct("Answer: C" + part * (100_000 // len(part)) + " D", "C", CHOICES).value in (0.0, 1.0)


@pytest.mark.parametrize("reply", C)
def test_a_declared_option_is_read(reply: str) -> None:
    assert correct(reply, "C", CHOICES).value == 1.0, correct(reply, "C", CHOICES)


@pytest.mark.parametrize("reply", NOT_C)
def test_lists_hedges_negations_and_silence_are_not_c(reply: str) -> None:
    assert correct(reply, "C", CHOICES).value == 0.0, correct(reply, "C", CHOICES)


@pytest.mark.parametrize(
    ("reply", "gold", "choices"),
    [
        ("Answer: AB", "C", ["A", "B", "AB", "O"]),
        ("Answer: I and II", "C", ["I only", "II only", "I and II", "none", "a", "b", "c", "d", "e"]),
        (r"\boxed{0.5}", "B", [r"$\frac{1}{3}$", r"$\frac{1}{2}$"]),
        ("Answer: Vitamin A", "B", ["Vitamin B", "Vitamin A"]),
        ("Answer: C and A", "AC", CHOICES),
        ("Answer: B", "oxygen", CHOICES),
    ],
)
def test_texts_and_several_labels(reply: str, gold: str, choices: list[str]) -> None:
    assert correct(reply, gold, choices).value == 1.0


def test_a_gold_that_is_no_option_cannot_be_judged() -> None:
    assert correct("Answer: B", "E", CHOICES).status == "ungradeable"
    assert correct("no idea", "", CHOICES).value == 0.0


def test_a_valid_option_may_be_wrong_but_must_be_one() -> None:
    assert valid_option("Answer: A", CHOICES).value == 1.0
    assert valid_option("Answer: A or B", CHOICES).value == 0.0
    assert valid_option("Answer: E", CHOICES).value == 0.0


words = st.sampled_from(
    ["Answer:", "answer is", "A", "B", "C", "D", "not", "or", "and", "\\boxed{", "}", "<answer>", "</answer>", "答案", "选", "\n", ".",
     "(", ")", "**", "oxygen", "carbon dioxide", "is correct", "I", "n't", "$", "Ａ", "أ", "<think>", "</think>", "because", ","]
)  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(st.one_of(st.text(max_size=80), st.lists(words, max_size=25).map(" ".join)), st.text(max_size=3))
def test_no_text_makes_a_rule_raise(text: str, gold: str) -> None:
    assert correct(text, gold, CHOICES).value in (0.0, 1.0, None)
    assert correct(text, "C").value in (0.0, 1.0)
    assert valid_option(text, CHOICES).value in (0.0, 1.0)


def row(**more: object) -> dict:
    return {"id": "r1", "choices": CHOICES, "answer": "D"} | more


def test_shuffled_options_keep_their_answer_and_record_their_order() -> None:
    seen = set()
    for member in range(8):
        shuffled = shuffle_options(row(), seed=7, member=member)
        assert shuffled["choices"]["ABCD".index(shuffled["answer"])] == "carbon dioxide"
        assert [CHOICES[i] for i in shuffled["option_order"]["order"]] == shuffled["choices"]
        assert shuffled == shuffle_options(row(), seed=7, member=member)
        seen.add(tuple(shuffled["choices"]))
    assert len(seen) > 1


@pytest.mark.parametrize("text", ["all of the above", "none of these", "both A and B", "A and C only"])
def test_options_that_speak_of_others_stay_in_place(text: str) -> None:
    choices = [*CHOICES[:3], text]
    assert all(shuffle_options(row(choices=choices), seed=s)["choices"] == choices for s in range(5))


def test_the_one_letter_baseline_is_the_most_frequent_answer() -> None:
    baseline = one_letter_baseline([{"answer": letter} for letter in "DABDCD"])
    assert (baseline.letter, baseline.share, baseline.rows) == ("D", 0.5, 6)
