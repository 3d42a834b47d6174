"""What a step's numbers say, as pure functions: reward spread, pass rates, entropy by token class, KL estimates.

All are cheap enough for every step (no forward pass of their own). Signals of completions use every completion of the
rollout, also those whose rows are never trained: their log-probs are the sampler's, so that curves stay unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

PASS_BINS = ("none", "below 1/4", "below 1/2", "below 3/4", "below all", "all")
"""The bins of `pass_histogram`: which share of a group is right."""

TokenClass = Literal["digit", "letter", "mark"]


def begins_rollout(line: Mapping[str, Any]) -> bool:
    """Whether a metrics line is of the first update on its completions: writing them is part of its time alone."""
    return "generation" in line["seconds"]


def reward_cv(rewards: Sequence[float]) -> float | None:
    """Coefficient of variation, standard deviation / |mean| over a step's completions (2609.39321, "reward CV").

    The paper reads a low one as little left to learn from. None where the mean is 0 or nothing was judged.
    """
    mean = fmean(rewards) if rewards else 0.0
    return pstdev(rewards) / abs(mean) if abs(mean) > 1e-12 else None


def mean_spread(rewards: Iterable[Sequence[float]]) -> float:
    """Mean within-group standard deviation of the reward: no spread, nothing to learn from."""
    spreads = [pstdev(group) for group in rewards if len(group) > 1]
    return fmean(spreads) if spreads else 0.0


def pass_histogram(right: Iterable[Sequence[bool]]) -> list[int]:
    """How many groups fall into each of PASS_BINS by their share of right members; the outer two give no signal."""
    counts = [0] * len(PASS_BINS)
    for group in right:
        hits = sum(group)
        if hits in (0, len(group)):
            counts[-1 if hits else 0] += 1
        else:
            counts[1 + int(4 * hits / len(group))] += 1
    return counts


def sampled_entropy(log_probs: Iterable[Sequence[float]]) -> float | None:
    """Mean -log p of the sampled tokens, in nats: unbiased for the policy's mean entropy per token, H = -E[log p].

    From the sampler's log-probs under logits / temperature, so it costs nothing and covers the rows that are never
    run; exact entropies of the others alone would be biased, since which rows run depends on what was sampled. Under
    top_p, top_k or min_p it is the cross entropy of the filtered to the unfiltered distribution. NaN where an engine
    could not say is left out; None of nothing.
    """
    known = [p for row in log_probs for p in row if not math.isnan(p)]
    return -math.fsum(known) / len(known) if known else None


def entropy_by_class(
    log_probs: Sequence[Sequence[float]],
    token_ids: Sequence[Sequence[int]],
    class_of: Callable[[int], TokenClass],
) -> dict[str, float]:
    """`sampled_entropy` of the tokens of each class (by the token that was drawn); a class that never came is absent.

    That entropy sits in few tokens and falls unevenly: 2506.01939; here the classes are by what a token spells.
    """
    sums: dict[str, list[float]] = {}
    for ids, row in zip(token_ids, log_probs, strict=False):
        for token, p in zip(ids, row, strict=False):
            if not math.isnan(p):
                sums.setdefault(class_of(token), []).append(p)
    return {name: -math.fsum(values) / len(values) for name, values in sorted(sums.items())}


def token_class(text: str) -> TokenClass:
    """digit: holds a digit; letter: letters only; mark: all else, such as punctuation, tags, blanks, special tokens."""
    bare = text.strip()
    if any(character.isdigit() for character in bare):
        return "digit"
    return "letter" if bare.isalpha() else "mark"


def token_classes(tokenizer: Any) -> Callable[[int], TokenClass]:
    """`token_class` of a token id; each id is decoded once."""
    known: dict[int, TokenClass] = {}

    def class_of(token: int) -> TokenClass:
        if token not in known:
            known[token] = token_class(tokenizer.decode([token], skip_special_tokens=False))
        return known[token]

    return class_of


def kl_estimates(drawn: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k1, k2, k3 of KL(drawn || other), elementwise, from log-probs of tokens that `drawn` wrote (Schulman, 2020).

    With d = log other - log drawn: k1 = -d (unbiased, of any sign), k2 = d^2 / 2 (biased, small variance),
    k3 = e^d - 1 - d (unbiased, never negative; GRPO's penalty, 2402.03300, eq. 4). Far apart they disagree.
    """
    d = other - drawn
    return -d, d.square() / 2, d.exp() - 1 - d
