"""The statistics behind every number that is shown: intervals, pass@k, votes, paired tests; pure functions."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeVar

Label = TypeVar("Label", bound=Hashable)

RESAMPLES = 4000
CHUNK = 2_000_000
"""Numbers drawn at a time while resampling."""


@dataclass(frozen=True)
class Rate:
    """`hits` of `n`, with a 95 % interval."""

    hits: int
    n: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.hits / self.n if self.n else float("nan")


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval and standard error, over `problems`."""

    value: float
    low: float
    high: float
    stderr: float
    problems: int


@dataclass(frozen=True)
class Difference:
    """b - a over the same problems: mean with its 95 % interval, two-sided p, problems won, lost and tied by b."""

    value: float
    low: float
    high: float
    p: float
    wins: int
    losses: int
    ties: int


def rate(hits: int, n: int, method: Literal["wilson", "exact"] = "wilson") -> Rate:
    """One rate of independent rows: Wilson's interval (1927), or the exact one of Clopper and Pearson (1934).

    Both stay inside [0, 1] and are sensible at 0 of n and n of n; no data gives [0, 1].
    """
    if n == 0:
        return Rate(0, 0, 0.0, 1.0)
    from scipy.stats import binomtest

    interval = binomtest(hits, n).proportion_ci(method=method)
    return Rate(hits, n, float(interval.low), float(interval.high))


def mean(values: Sequence[float], *, share: bool = True) -> Estimate:
    """Mean over problems, one value each: Wilson's interval where all are 0 or 1, else as `ratio`."""
    if share and values and all(value in (0, 1) for value in values):
        found, n = rate(round(sum(values)), len(values)), len(values)
        return Estimate(found.value, found.low, found.high, math.sqrt(found.value * (1 - found.value) / n), n)
    return ratio(values, [1.0] * len(values), share=share)


def ratio(tops: Sequence[float], bottoms: Sequence[float], *, share: bool = True) -> Estimate:
    """sum(tops) / sum(bottoms), one pair a problem; 95 % by the bootstrap over problems (BCa, Efron 1987).

    share: each top lies between 0 and its bottom. Then no spread at all (nothing right, or everything) gets Wilson's
    interval over problems, where a bootstrap would claim certainty. With 100 problems and rates of 5 to 95 % about
    95 % of the intervals cover the truth; with 30 problems and a rate of 5 % it is nearer to 90 %.
    The standard error is that of clustered samples (Miller 2024, eq. 4): problems are the clusters.
    """
    import numpy as np
    from scipy.stats import norm

    top, bottom = np.asarray(tops, float), np.asarray(bottoms, float)
    count, total = len(top), bottom.sum()
    if not total:
        return Estimate(float("nan"), 0.0, 1.0 if share else float("inf"), float("nan"), 0)
    value = float(top.sum() / total)
    if np.ptp(top - value * bottom) < 1e-12:
        low, high = value, value
        if share:
            bounds = rate(round(value * count), count)
            low, high = min(bounds.low, value), max(bounds.high, value)
        return Estimate(value, low, high, 0.0, count)
    drawn = _resampled(top, bottom)
    below = float(np.mean(drawn < value) + np.mean(drawn == value) / 2)
    bias = norm.ppf(min(max(below, 1 / RESAMPLES), 1 - 1 / RESAMPLES))
    kept = total - bottom
    left_out = (top.sum() - top)[kept > 0] / kept[kept > 0]
    off = left_out.mean() - left_out
    spread = float((off**2).sum())
    skew = float((off**3).sum()) / (6 * spread**1.5) if spread else 0.0
    ends = []
    for z in norm.ppf([0.025, 0.975]):
        ends.append(norm.cdf(bias + (bias + z) / (1 - skew * (bias + z))))
    low, high = np.quantile(drawn, ends)
    stderr = clustered_stderr(tops, bottoms)
    return Estimate(value, min(float(low), value), max(float(high), value), stderr, count)


def clustered_stderr(tops: Sequence[float], bottoms: Sequence[float]) -> float:
    """Standard error of sum(tops) / sum(bottoms) where all samples of a problem are one cluster."""
    import numpy as np

    top, bottom = np.asarray(tops, float), np.asarray(bottoms, float)
    residuals = top - top.sum() / bottom.sum() * bottom
    return float(np.sqrt((residuals**2).sum()) / bottom.sum())


def over_seeds(values: Sequence[float]) -> Estimate:
    """Mean of whole runs that differ by their seed, with Student's interval: the seed is the cluster above problems."""
    from statistics import fmean, stdev

    from scipy.stats import t

    value = fmean(values)
    if len(values) < 2:
        return Estimate(value, -math.inf, math.inf, math.nan, len(values))
    stderr = stdev(values) / math.sqrt(len(values))
    half = float(t.ppf(0.975, len(values) - 1)) * stderr
    return Estimate(value, value - half, value + half, stderr, len(values))


def pass_at_k(correct: int, n: int, k: int) -> float:
    """Chance that k of the n samples, drawn without replacement, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased (Chen et al. 2021, eq. 1); asks for n >= k.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} of {n} samples with {correct} right: k must lie between 1 and n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def vote(classes: Sequence[Label | None], right: Mapping[Label, bool]) -> float:
    """maj@n: whether the answer given most often is right; among equally frequent ones the share of right ones.

    classes: one label a sample, equal labels for equal answers, None for no answer (which is no vote).
    """
    counts = Counter(label for label in classes if label is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    first = [label for label, count in counts.items() if count == most]
    return sum(right[label] for label in first) / len(first)


def best_of(scores: Sequence[float | None], right: Sequence[bool]) -> float:
    """Whether the sample with the highest score is right; among equal ones the share. None is below every score."""
    ranked = [-math.inf if score is None else score for score in scores]
    most = max(ranked)
    first = [hit for score, hit in zip(ranked, right, strict=True) if score == most]
    return sum(first) / len(first)


def mcnemar(wins: int, losses: int) -> float:
    """Exact two-sided p that wins and losses are equally likely (McNemar 1947 by the binomial)."""
    if wins + losses == 0:
        return 1.0
    from scipy.stats import binomtest

    return float(binomtest(wins, wins + losses).pvalue)


def paired(a: Sequence[float], b: Sequence[float]) -> Difference:
    """Compare two models on the same problems, one value between 0 and 1 a problem and model.

    The interval is the bootstrap's over problems; p is the exact McNemar test for single samples and the sign-flip test
    for means of samples, which is the same test where all values are 0 or 1.
    """
    change = [y - x for x, y in zip(a, b, strict=True)]
    wins, losses = sum(c > 0 for c in change), sum(c < 0 for c in change)
    single = all(v in (0, 1) for v in itertools.chain(a, b))
    p = mcnemar(wins, losses) if single else sign_flips(change)
    shifted = mean([(c + 1) / 2 for c in change])  # as a share, so that no change at all gets an honest interval too
    low, high = 2 * shifted.low - 1, 2 * shifted.high - 1
    if wins + losses == 0:
        # Nothing differs: the share of problems that could is bounded by Wilson's interval for 0 of n.
        low, high = -rate(0, len(change)).high, rate(0, len(change)).high
    value = sum(change) / len(change) if change else math.nan
    return Difference(value, low, high, p, wins, losses, len(change) - wins - losses)


def sign_flips(changes: Sequence[float]) -> float:
    """Exact two-sided p that each change is as likely as its opposite; changes are multiples of 1 / samples."""
    import numpy as np

    parts = [Fraction(c).limit_denominator(10_000) for c in changes if c]
    unit = math.lcm(*(part.denominator for part in parts))
    steps = [abs(int(part * unit)) for part in parts]
    seen = abs(int(sum(parts) * unit))
    # The chance of every sum from -reach to reach, one change after the other.
    reach = sum(steps)
    chances = np.zeros(2 * reach + 1)
    chances[reach] = 1.0
    for step in steps:
        up, down = np.zeros_like(chances), np.zeros_like(chances)
        up[step:], down[:-step] = chances[:-step], chances[step:]
        chances = (up + down) / 2
    return min(1.0, float(chances[: reach - seen + 1].sum() + chances[reach + seen :].sum())) if seen else 1.0


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for looking at all of them (Holm 1979): below .05, the family's chance of one slip is 5 %."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = largest
    return adjusted


def _resampled(top, bottom):
    """RESAMPLES ratios of problems drawn with replacement; always the same ones for the same data."""
    import numpy as np

    pairs, counts = np.unique(np.stack([top, bottom], 1), axis=0, return_counts=True)
    rng, parts, left = np.random.default_rng(0), [], RESAMPLES
    while left:
        rows = min(left, max(1, CHUNK // len(pairs)))
        # How often each distinct pair is drawn; far fewer numbers than drawing the problems themselves.
        times = rng.multinomial(len(top), counts / len(top), rows)
        sums = np.einsum("dp,pc->dc", times, pairs)  # not by BLAS, whose threads cost more than this product
        parts.append(sums[sums[:, 1] > 0, 0] / sums[sums[:, 1] > 0, 1])
        left -= rows
    return np.concatenate(parts)
