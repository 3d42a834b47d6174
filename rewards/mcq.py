"""Rules for multiple choice: the declared option is the right one, or at least one of the options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slmgrpo.rewards.base import Verdict, correctness
from slmgrpo.rewards.extract import after_thinking
from slmgrpo.rewards.letters import NOTHING, Declared, by_text, declared, labels_of, texts_of


def _declared(completion: str, prompt: str, choices: Sequence[str] | None) -> Declared:
    said = after_thinking(completion, prompt)
    return NOTHING if said is None else declared(said, choices)


def _gold(answer: object, choices: Sequence[str] | None) -> frozenset[str]:
    """The gold's labels: C, (C), AC, a list of them, or an option's own text. Empty where it names no option."""
    if isinstance(answer, (list, tuple)):
        parts = [_gold(part, choices) for part in answer]
        return frozenset().union(*parts) if all(parts) else frozenset()
    if answer is None:
        return frozenset()
    labels, text = labels_of(choices), str(answer)
    letters = re.sub(r"[\s,;()]", "", text).upper()
    if letters and set(letters) <= set(labels) and len(set(letters)) == len(letters):
        return frozenset(letters)
    return frozenset(by_text(text, texts_of(choices), labels))


@correctness
def correct(
    completion: str, answer: str | Sequence[str] | None, choices: Sequence[str] | None = None, prompt: str = ""
) -> Verdict:
    """1 if the last declared option is `answer`; two letters, hedges, negated letters and lists are 0."""
    given = _declared(completion, prompt, choices)
    read = "".join(sorted(given.labels))
    if answer is None:
        return Verdict(None, "ungradeable", read or None, "there is no gold answer")
    if not given.labels:
        return Verdict(0.0, "no_answer", why=given.where)
    gold = _gold(answer, choices)
    if not gold:
        return Verdict(None, "ungradeable", read, f"the gold answer {str(answer)[:40]!r} is none of the options")
    right = given.labels == gold
    return Verdict(float(right), "correct" if right else "wrong", read, given.where)


def valid_option(completion: str, choices: Sequence[str] | None = None, prompt: str = "") -> Verdict:
    """1 if exactly one of the item's options is declared, right or wrong."""
    given = _declared(completion, prompt, choices)
    return Verdict(float(len(given.labels) == 1), read="".join(sorted(given.labels)) or None, why=given.where)
