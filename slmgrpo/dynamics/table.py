"""Rows of a run's probe as tables of at most 80 columns: groups of tensors with their null, coherence over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from slmgrpo.eval import stats

if TYPE_CHECKING:
    from slmgrpo.dynamics.update import Principal

By = Literal["layer", "module", "role"]
FEW = 5
"""Below so many tensors an interval over tensors says nothing."""


@dataclass(frozen=True)
class Group:
    """Tensors together. relative, null: ||dW|| and its null over ||W||, of all of them as one vector (the paper's
    WDisp); mass: share of the whole ||dW||^2; effective_rank: mean; coherence with its 95 % interval over tensors
    (bootstrap), nan where there are few.
    """

    name: str
    tensors: int
    relative: float
    null: float
    mass: float
    effective_rank: float
    coherence: float
    low: float
    high: float


def group(name: str, rows: Sequence[Mapping[str, Any]], whole: float) -> Group:
    """One line of a table. whole: ||dW||^2 of all tensors."""
    moved, base, expected = (math.fsum(row[key] ** 2 for row in rows) for key in ("norm", "base_norm", "null"))
    found = stats.ratio([row["norm"] ** 2 for row in rows], [row["null"] ** 2 for row in rows], share=False)
    low, high = (found.low, found.high) if len(rows) >= FEW else (math.nan, math.nan)
    return Group(
        name=name,
        tensors=len(rows),
        relative=math.sqrt(moved / base),
        null=math.sqrt(expected / base),
        mass=moved / whole if whole else math.nan,
        effective_rank=math.fsum(row["effective_rank"] for row in rows) / len(rows),
        coherence=math.sqrt(found.value) if expected else math.nan,
        low=math.sqrt(low),
        high=math.sqrt(high),
    )


def grouped(rows: Sequence[Mapping[str, Any]], by: By) -> list[Group]:
    """Groups in the order of the model, then all tensors together."""
    parts: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        parts.setdefault(row[by], []).append(row)
    whole = math.fsum(row["norm"] ** 2 for row in rows)
    keys = sorted(parts) if by == "layer" else list(parts)
    return [*(group(str(key), parts[key], whole) for key in keys), group("all", rows, whole)]


def update_table(groups: Sequence[Group], by: By) -> list[list[str]]:
    """Cells, the heading first."""
    table = [[by, "tensors", "moved %", "noise %", "mass %", "eff. rank", "coherence"]]
    for one in groups:
        shares = (f"{100 * one.relative:.3g}", f"{100 * one.null:.3g}", f"{100 * one.mass:.1f}")
        table.append([one.name, str(one.tensors), *shares, f"{one.effective_rank:.1f}", coherence(one)])
    return table


def principal_table(shares: Mapping[str, Sequence[tuple[Principal, tuple[int, int]]]], top: int) -> list[list[str]]:
    """A line a module, means over its tensors in %. shares: by module, each tensor's with the shape (d_out, d_in)."""
    table = [["module", "tensors", "output %", "chance", "input %", "chance"]]
    every = [one for own in shares.values() for one in own]
    for name, own in [*shares.items(), ("all", every)]:
        found = [
            fmean(100 * value for value in values)
            for values in (
                [share.left for share, _ in own],
                [min(top / d_out, 1.0) for _, (d_out, _) in own],
                [share.right for share, _ in own],
                [min(top / d_in, 1.0) for _, (_, d_in) in own],
            )
        ]
        table.append([name, str(len(own)), *(f"{value:.1f}" for value in found)])
    return table


def coherence(one: Group) -> str:
    """`2.31 [2.20, 2.43]`."""
    if math.isnan(one.coherence):
        return "-"
    interval = "" if math.isnan(one.low) else f" [{one.low:.2f}, {one.high:.2f}]"
    return f"{one.coherence:.2f}{interval}"


def coherence_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Coherence of all tensors together."""
    moved, expected = (math.fsum(row[key] ** 2 for row in rows) for key in ("norm", "null"))
    return math.sqrt(moved / expected) if expected else math.nan


NOTES = (
    "moved: ||dW|| / ||W||; noise: the same if every gradient had been noise; mass: share of ||dW||^2",
    "coherence: moved / noise, 1 for pure noise; [ ]: 95 % by the bootstrap over tensors",
)
