"""Rewards of a group to advantages: TRL's three scalings, except that a group without spread is exactly silent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal

from slmgrpo.errors import RunError

SPREAD_TOLERANCE = 1e-9
"""Rewards closer than this (relative to the largest, or to 1) are one reward: 0.1 + 0.2 and 0.3 differ by 6e-17."""


def advantages(
    rewards: Sequence[Sequence[float | None]], scale_rewards: Literal["group", "batch", "none"]
) -> list[list[float]]:
    """Advantages of P groups of G completions, in the shape of `rewards` (group-major).

    group: (r - group mean) / (group std + 1e-4), GRPO (2402.03300, sec. 4.1.2); batch: the std of all rewards in its
    place; none: r - group mean (Dr. GRPO, 2503.20783). Standard deviations have ddof 1, as in TRL. A None reward (a
    required rule could not judge) is left out of means and deviations and gets 0. So does, exactly, every row of a
    group without spread: TRL's float32 mean leaves -6e-4 for eight rewards of 0.7.
    """
    judged = [[reward for reward in group if reward is not None] for group in rewards]
    for prompt, group in enumerate(judged):
        if not all(math.isfinite(reward) for reward in group):
            raise RunError(f"prompt {prompt} has rewards {list(rewards[prompt])}: a rule must return a finite number")
    batch_std = _std([reward for group in judged for reward in group])
    result: list[list[float]] = []
    for group, known in zip(rewards, judged, strict=True):
        if not has_spread(group):
            result.append([0.0] * len(group))
            continue
        mean = fmean(known)
        scale = {"group": _std(known) + 1e-4, "batch": batch_std + 1e-4, "none": 1.0}[scale_rewards]
        result.append([0.0 if reward is None else (reward - mean) / scale for reward in group])
    return result


def has_spread(group: Sequence[float | None]) -> bool:
    """Whether a group's judged rewards differ, so that it carries a signal."""
    known = [reward for reward in group if reward is not None]
    if len(known) < 2:
        return False
    return max(known) - min(known) > SPREAD_TOLERANCE * max(1.0, *(abs(reward) for reward in known))


def _std(values: list[float]) -> float:
    return stdev(values) if len(values) > 1 else 0.0
