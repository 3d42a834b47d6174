"""Two models on the same problems: paired tests per suite and budget, corrected for their number, and who flipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.eval import stats
from slmgrpo.eval.samples import at_budget
from slmgrpo.eval.scores import correct_by_problem
from slmgrpo.eval.stats import Difference
from slmgrpo.eval.store import Evaluated, find
from slmgrpo.run import write_text

SAME = (
    "suite_digest",
    "rows_digest",
    "samples",
    "greedy",
    "budgets",
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "best_of",
)
"""Settings that must be equal; seeds and models may differ."""
LEVEL = 0.05


@dataclass(frozen=True)
class Comparison:
    """b against a on one suite at one budget. p: corrected by Holm over all comparisons of the table."""

    suite: str
    budget: int
    a: str
    b: str
    difference: Difference
    p: float
    won: tuple[str, ...]
    """Problems that b does better, by id."""
    lost: tuple[str, ...]

    @property
    def significant(self) -> bool:
        return self.p < LEVEL


def compare(pairs: Sequence[tuple[Evaluated, Evaluated]]) -> list[Comparison]:
    """Compare each pair (a, b) at each budget; refuses what was not evaluated alike."""
    found = []
    for a, b in pairs:
        if why := unlike(a, b):
            raise RecipeError(why)
        for budget in a.settings["budgets"]:
            before, after = (correct_by_problem(at_budget(side.lines, budget)) for side in (a, b))
            ids = list(before)
            difference = stats.paired([before[i] for i in ids], [after[i] for i in ids])
            won = tuple(i for i in ids if after[i] > before[i])
            lost = tuple(i for i in ids if after[i] < before[i])
            found.append((a, b, budget, difference, won, lost))
    corrected = stats.holm([difference.p for _, _, _, difference, _, _ in found])
    return [
        Comparison(a.suite, budget, a.label, b.label, difference, p, won, lost)
        for (a, b, budget, difference, won, lost), p in zip(found, corrected, strict=True)
    ]


def saved_pairs(a: Path, bs: Sequence[Path]) -> tuple[list[Evaluated], list[tuple[Evaluated, Evaluated]]]:
    """(all, pairs) of the suites that folders with saved evaluations share, each named by its folder."""
    sides = [_side(path) for path in (a, *bs)]
    names = [_name(path) for path in (a, *bs)]
    if len(set(names)) < len(names):
        names = [f"{chr(ord('A') + i)}" for i in range(len(names))]
    labelled = [[replace(one, label=name) for one in side] for side, name in zip(sides, names, strict=True)]
    before = {one.suite: one for one in labelled[0]}
    pairs = [(before[one.suite], one) for side in labelled[1:] for one in side if one.suite in before]
    if not pairs:
        there = [", ".join(sorted({one.suite for side in part for one in side})) for part in (sides[:1], sides[1:])]
        raise RecipeError(f"{a} and {bs[0]} share no suite: {there[0]} and {there[1]}")
    shared = {after.suite for _, after in pairs}
    return [one for side in labelled for one in side if one.suite in shared], pairs


def _side(path: Path) -> list[Evaluated]:
    found = find(path)
    if len({one.suite for one in found}) < len(found):
        homes = ", ".join(sorted({str(one.folder.parent) for one in found}))
        raise RecipeError(f"{path}: holds several targets; give one of {homes}")
    return found


def _name(path: Path) -> str:
    """`mine/step_60` for runs/mine/eval/step_60."""
    parts = list(path.absolute().parts)
    return f"{parts[-3]}/{parts[-1]}" if len(parts) > 2 and parts[-2] == "eval" else parts[-1]


def unlike(a: Evaluated, b: Evaluated) -> str:
    """Why two evaluations do not compare; nothing where they do."""
    differing = [name for name in SAME if a.settings[name] != b.settings[name]]
    if differing:
        shown = ", ".join(f"{name}: {a.settings[name]} and {b.settings[name]}" for name in differing)
        return f"{a.folder} and {b.folder} were not evaluated alike ({shown}); evaluate one of them again"
    if a.grader != b.grader:
        return (
            f"{a.folder} and {b.folder} were graded by different versions of the rules; run `slmgrpo eval regrade` on "
            "the older one"
        )
    return ""


def remarks(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """What a reader of the table must not miss: gains that a longer budget takes away, and problems that flipped."""
    by_pair: dict[tuple[str, str, str], list[Comparison]] = {}
    for one in comparisons:
        by_pair.setdefault((one.suite, one.a, one.b), []).append(one)
    for (suite, _, b), own in by_pair.items():
        short, long = own[0], own[-1]
        gained, kept = short.difference.value, long.difference.value
        if short is not long and short.significant and gained > 0 and not (long.significant and kept > gained / 2):
            yield (
                f"{suite}: {b} gains {100 * gained:+.1f} points at {short.budget} tokens and {100 * kept:+.1f} at "
                f"{long.budget}: it learned to stop in time more than to solve"
            )
    for own in by_pair.values():
        last = own[-1]
        for word, ids in (("won", last.won), ("lost", last.lost)):
            if ids:
                more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
                yield f"{last.suite}: {last.b} {word} {', '.join(ids[:3])}{more}"


def save(comparisons: Sequence[Comparison], home: Path) -> None:
    """comparison.json in the folder of the target that was compared, every flipped problem named."""
    value: dict[str, Any] = {"comparisons": [asdict(one) for one in comparisons]}
    write_text(home / "comparison.json", json.dumps(value, indent=2, ensure_ascii=False) + "\n")
