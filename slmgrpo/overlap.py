"""Held-out questions that training has seen: the same text, or a run of 13 words in common; and repeated questions."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slmgrpo.data import Row

WORDS = 13
"""Length of the run, and with COMMON the rule of GPT-3's decontamination (arXiv 2005.14165, appendix C)."""
COMMON = 10
"""A run that more training rows than this have is a turn of phrase or a template, not a leak."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Ids of held-out rows whose whole question is a training question, and of those that share 13 words with one."""

    same: tuple[str, ...]
    similar: tuple[str, ...]


def overlap(train: Sequence[Row], heldout: Sequence[Row]) -> Overlap:
    """Compare questions in lower case, without the punctuation around words."""
    wanted = {run for row in heldout for run in _runs(words(row["question"]))}
    seen: Counter[tuple[str, ...]] = Counter()
    texts = set()
    for row in train:
        own = words(row["question"])
        texts.add(own)
        seen.update(wanted.intersection(_runs(own)))
    same, similar = [], []
    for row in heldout:
        own = words(row["question"])
        if own in texts:
            same.append(row["id"])
        elif any(0 < seen[run] <= COMMON for run in _runs(own)):
            similar.append(row["id"])
    return Overlap(tuple(same), tuple(similar))


def repeated(rows: Iterable[Row]) -> tuple[list[str], list[str]]:
    """(ids of rows whose question and options stood in an earlier row, ids of those with another answer than it)."""
    first: dict[tuple[tuple[str, ...], ...], Row] = {}
    again, contrary = [], []
    for row in rows:
        earlier = first.setdefault((words(row["question"]), *map(words, row.get("choices") or ())), row)
        if earlier is not row:
            again.append(row["id"])
            if earlier.get("answer") != row.get("answer"):
                contrary.append(row["id"])
    return again, contrary


def words(text: str) -> tuple[str, ...]:
    """The words as they are compared. Signs inside a word stay: `54+81` is not `54-81`."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    return tuple(word for part in plain.split() if (word := part.strip(".,;:!?\"'()[]{}`*_")))


def _runs(own: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (own[start : start + WORDS] for start in range(len(own) - WORDS + 1))
