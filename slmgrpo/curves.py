"""A run's metrics and held-out scores as curves, one value a rollout, and what can be said of a curve's change."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.run import open_run
from slmgrpo.signals import begins_rollout

SURE = 3.0
"""Standard errors by which a change must exceed chance."""
LOST = 0.3
"""Share of the best accuracy or reward (from its lowest) that a fall must take to be called one."""


@dataclass(frozen=True)
class Change:
    """From the mean of a curve's first part to that of its last; z: over its standard error."""

    start: float
    end: float
    z: float

    @property
    def by(self) -> float:
        return self.end - self.start

    def up(self, least: float) -> bool:
        return self.by >= least and self.z >= SURE

    def down(self, least: float) -> bool:
        return self.by <= -least and self.z <= -SURE


@dataclass(frozen=True)
class Curves:
    """A run's numbers, one value a rollout. policy: of the last update on each; broken: updates that were not finite;
    heldout: (step, right, of how many)."""

    state: str
    steps: int
    updates: int
    rollouts: tuple[Mapping[str, Any], ...]
    policy: tuple[Mapping[str, Any], ...]
    broken: int
    heldout: tuple[tuple[int, int, int], ...]
    weights: Mapping[str, float]

    def of(self, value: Callable[[Mapping[str, Any]], float | None]) -> list[float]:
        """The values of one curve; rollouts that do not have it are left out."""
        return [found for line in self.rollouts if (found := value(line)) is not None]

    def signal(self, name: str) -> list[float]:
        return self.of(lambda line: line.get(name))


def read(path: Path) -> Curves:
    """The curves of a run directory, finished or not; a line that is being written is left out."""
    run = open_run(path)
    recipe = run.read_json("recipe.json")
    lines = []
    if run.metrics.exists():
        for number, text in enumerate(run.metrics.read_text().splitlines(keepends=True), 1):
            if not text.endswith("\n"):
                break
            try:
                lines.append(json.loads(text))
            except ValueError:
                raise RecipeError(f"{run.metrics}:{number}: not readable as JSON; was it edited?") from None
    if not lines:
        raise RecipeError(f"{path}: no steps yet; ask again when the first one is done")
    return Curves(
        state=run.state() if (path / "status.json").exists() else "running",
        steps=lines[-1]["step"],
        updates=recipe["train"]["updates_per_rollout"],
        rollouts=tuple(line for line in lines if begins_rollout(line)),
        policy=(*(line for line, after in pairwise(lines) if begins_rollout(after)), lines[-1]),
        broken=sum(bool(line.get("nonfinite")) for line in lines),
        heldout=tuple(sorted(_heldout(path))),
        weights=_weights(recipe),
    )


def _heldout(path: Path) -> Iterator[tuple[int, int, int]]:
    for file in path.glob("eval/step_*/heldout/scores.json"):
        tasks = json.loads(file.read_text())["tasks"].values()
        right = sum(round(task["accuracy"] * task["n"]) for task in tasks)
        yield int(file.parent.parent.name.removeprefix("step_")), right, sum(task["n"] for task in tasks)


def _weights(recipe: Mapping[str, Any]) -> dict[str, float]:
    sets = [source.get("rewards") or recipe["rewards"] for source in recipe["data"]["train"]]
    return {use["use"]: use["weight"] for uses in sets for use in uses}


def change(values: Sequence[float]) -> Change:
    """Between the first and the last quarter of a curve, at least three values each."""
    part = max(3, len(values) // 4)
    first, last = values[:part], values[-part:]
    error = math.hypot(pstdev(first), pstdev(last)) / math.sqrt(max(part - 1, 1))
    by = fmean(last) - fmean(first)
    return Change(fmean(first), fmean(last), by / max(error, 1e-9))


def accuracy(line: Mapping[str, Any]) -> float | None:
    """Mean over tasks."""
    return fmean(line["accuracy"].values()) if line.get("accuracy") else None


def fall(values: Sequence[float]) -> Change | None:
    """From the best three values in a row to the last quarter, where a part of LOST of the level is gone for good."""
    if len(values) < 4:
        return None
    part = max(2, len(values) // 4)
    width = min(3, part)
    means = [fmean(values[i : i + width]) for i in range(len(values) - width + 1)]
    best, end = max(means), fmean(values[-part:])
    error = max(pstdev(values[-part:]) / math.sqrt(part), 0.02)
    if best - end < max(LOST * best, 0.1) or best - end < SURE * error:
        return None
    return Change(best, end, (end - best) / error)
