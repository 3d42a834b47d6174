"""Rules for multiple choice: the declared option is the right one, or at least one of the options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slmgrpo.rewards.base import Verdict, correctness
from slmgrpo.rewards.extract import after_thinking
from slmgrpo.rewards.letters import NOTHING, Declared, by_text, declared, labels_of


def _declared(completion: str, prompt: str, choices: Sequence[str] | None) -> Declared:
    said = after_thinking(completion, prompt)
    return NOTHING if said is None else declared(said, choices)


def _gold(answer: str, choices: Sequence[str] | None) -> frozenset[str]:
    """The gold's labels: C, (C), AC, or an option's own text. Empty where it names no option of this item."""
    labels = labels_of(choices)
    letters = re.sub(r"[\s,;()]", "", answer).upper()
    if letters and set(letters) <= set(labels) and len(set(letters)) == len(letters):
        return frozenset(letters)
    return frozenset(by_text(answer, tuple(choices or ()), labels))


@correctness
def correct(completion: str, answer: str, choices: Sequence[str] | None = None, prompt: str = "") -> Verdict:
    """1 if the last declared option is `answer`; two letters, hedges, negated letters and lists are 0."""
    given = _declared(completion, prompt, choices)
    if not given.labels:
        return Verdict(0.0, "no_answer", why=given.where)
    read = "".join(sorted(given.labels))
    gold = _gold(str(answer), choices)
    if not gold:
        return Verdict(None, "ungradeable", read, f"the gold answer {str(answer)[:40]!r} is none of the options")
    right = given.labels == gold
    return Verdict(float(right), "correct" if right else "wrong", read, given.where)


def valid_option(completion: str, choices: Sequence[str] | None = None, prompt: str = "") -> Verdict:
    """1 if exactly one of the item's options is declared, right or wrong."""
    given = _declared(completion, prompt, choices)
    return Verdict(float(len(given.labels) == 1), read="".join(sorted(given.labels)) or None, why=given.where)
