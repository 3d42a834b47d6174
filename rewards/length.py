"""Rules for length and repetition, in tokens. Penalties are negative, so weights stay positive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from slmgrpo.rewards.base import Bounds, bounded, quick


@quick
@bounded(lambda settings: Bounds(-1.0, 0.0))
def overlong(completion_ids: Sequence[int], *, max_tokens: int, margin: int) -> float:
    """0 up to `max_tokens - margin` tokens, then down to -1 at `max_tokens` (DAPO, arXiv 2503.14476, eq. 13)."""
    over = len(completion_ids) - (max_tokens - margin)
    return -min(1.0, max(0.0, over / max(margin, 1)))


def _cosine_bounds(settings: Mapping[str, Any]) -> Bounds:
    ends = (float(settings.get("shortest", 1.0)), float(settings.get("longest", 0.5)))
    return Bounds(min(ends), max(ends))


@quick
@bounded(_cosine_bounds)
def cosine(completion_ids: Sequence[int], *, max_tokens: int, shortest: float = 1.0, longest: float = 0.5) -> float:
    """From `shortest` at no tokens to `longest` at `max_tokens` along half a cosine (arXiv 2502.03373, appendix C.1).

    It is that paper's branch for right answers: use it with `when:` a correctness rule.
    """
    progress = min(1.0, len(completion_ids) / max_tokens)
    return longest + (shortest - longest) * 0.5 * (1.0 + math.cos(math.pi * progress))


@quick
@bounded(lambda settings: Bounds(-1.0, 0.0))
def repetition(completion_ids: Sequence[int], *, n: int = 8) -> float:
    """Minus the share of token n-grams that occurred before: 0 without repeats, towards -1 in a loop."""
    ids = list(completion_ids)
    count = len(ids) - n + 1
    if count < 1:
        return 0.0
    return len({tuple(ids[i : i + n]) for i in range(count)}) / count - 1.0
