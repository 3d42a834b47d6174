"""Shuffles the options of multiple-choice rows by a recorded seed, and the score of always naming one letter."""

from __future__ import annotations

import hashlib
import random
import re
import string
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_REFERS = re.compile(
    r"\b(?:all|none|both|neither|either|any|each|two)\b.*\b(?:above|below|these|those|options?|choices?|of\s+them)\b"
    r"|\b[A-J]\b\s*(?:,\s*[A-J]\b\s*)*,?\s*(?:and|or|&)\s*[A-J]\b|\b(?:only|both)\s+[A-J]\b",
    re.IGNORECASE,
)


def refers_to_others(choices: Iterable[str]) -> bool:
    """Whether an option speaks of other options (all of the above, both A and B); such an item keeps its order."""
    return any(_REFERS.search(str(choice)) for choice in choices)


def shuffle_options(row: Mapping[str, Any], *, seed: int, member: int | None = None) -> dict[str, Any]:
    """The row with its options in another order and its answer's letter moved along.

    The order depends on the seed, the row's id and, where given, the group member alone. `option_order` records it:
    the old places in their new order, with the seed and the member.
    """
    choices = list(row["choices"])
    order = list(range(len(choices)))
    if not refers_to_others(choices):
        digest = hashlib.sha256(f"{seed}/{row['id']}/{'' if member is None else member}".encode()).digest()
        random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    moved = {string.ascii_uppercase[old]: string.ascii_uppercase[new] for new, old in enumerate(order)}
    answer = "".join(sorted(moved.get(letter, letter) for letter in str(row["answer"])))
    record = {"seed": seed, "member": member, "order": order}
    return {**row, "choices": [choices[old] for old in order], "answer": answer, "option_order": record}


@dataclass(frozen=True, slots=True)
class OneLetter:
    """The best score that a model without knowledge has: always this letter."""

    letter: str
    share: float
    rows: int


def one_letter_baseline(rows: Iterable[Mapping[str, Any]]) -> OneLetter:
    """Accuracy of always naming the most frequent right letter, to report beside a model's."""
    counts = Counter(str(row["answer"]) for row in rows)
    if not counts:
        return OneLetter("", 0.0, 0)
    letter, most = max(sorted(counts.items()), key=lambda item: item[1])
    return OneLetter(letter, most / counts.total(), counts.total())
