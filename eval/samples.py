"""Saved samples: one line a completion, read back at any token budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.eval.complete import Problem, Written
from slmgrpo.eval.grading import Graded


@dataclass(frozen=True)
class Sample:
    """One graded completion at one token budget. label: equal for equal answers among a problem's drawn samples."""

    id: str
    member: int
    greedy: bool
    text: str
    tokens: int
    finished: bool
    correct: bool
    status: str
    read: str | None
    label: int | None
    reward: float | None
    values: Mapping[str, float | None]


def lines_of(graded: Sequence[Graded], problems: Sequence[Problem], *, questions: bool) -> list[dict[str, Any]]:
    """Lines of samples.jsonl, problem by problem; what was cut at a shorter budget stands under `cut`.

    questions: False leaves out what would show the question, for data that must not be published.
    """
    whole = {one.written.key: one for one in graded if one.written.budget is None}
    cuts: dict[tuple[str, int, bool], dict[str, Any]] = {}
    for one in graded:
        if one.written.budget is not None:
            cuts.setdefault(one.written.key, {})[str(one.written.budget)] = _outcome(one, questions)
    place = {problem.id: number for number, problem in enumerate(problems)}
    lines = []
    for key in sorted(whole, key=lambda key: (place[key[0]], not key[2], key[1])):
        row = problems[place[key[0]]].row
        gold = row.get("answer")
        lines.append(
            {
                "id": key[0],
                "member": key[1],
                "greedy": key[2],
                **({"question": row["question"]} if questions else {}),
                "gold": gold if isinstance(gold, str) else None,
                **_outcome(whole[key], questions),
                "cut": cuts.get(key, {}),
                "token_ids": list(whole[key].written.token_ids) if questions else [],
            }
        )
    return lines


def _outcome(one: Graded, questions: bool) -> dict[str, Any]:
    return {
        "text": one.written.text if questions else "",
        "tokens": len(one.written.token_ids),
        "finish_reason": one.written.finish_reason,
        "correct": one.correct,
        "status": one.status,
        "read": one.read,
        "label": one.label,
        "reward": one.reward,
        "verdicts": {name: asdict(verdict) for name, verdict in one.verdicts.items()},
    }


def at_budget(lines: Sequence[Mapping[str, Any]], budget: int) -> list[Sample]:
    """The samples as they are with at most `budget` tokens."""
    samples = []
    for line in lines:
        seen = line | line["cut"].get(str(budget), {})
        values = {name: verdict["value"] for name, verdict in seen["verdicts"].items()}
        finished = seen["finish_reason"] == "stop"
        same = ("id", "member", "greedy", "text", "tokens", "correct", "status", "read", "label", "reward")
        samples.append(Sample(**{name: seen[name] for name in same}, finished=finished, values=values))
    return samples


def written_of(lines: Sequence[Mapping[str, Any]]) -> list[Written]:
    """The completions of saved lines with their shorter versions, to be graded again."""
    found = []
    for line in lines:
        ids = tuple(line["token_ids"])
        found.append(Written(line["id"], line["member"], line["greedy"], ids, line["text"], line["finish_reason"]))
        for budget, cut in line["cut"].items():
            ids_then = ids[: int(budget)]
            found.append(
                Written(line["id"], line["member"], line["greedy"], ids_then, cut["text"], "length", int(budget))
            )
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A jsonl file's objects; a last line that was not written to its end is left out."""
    lines = []
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise RecipeError(
                f"{path}:{number}: not JSON ({error.msg}); was it edited? Remove the file and run again"
            ) from None
    return lines
