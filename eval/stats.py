"""Intervals for rates: every number that is shown carries one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rate:
    """`hits` of `n`, with a 95 % Wilson interval (Wilson 1927)."""

    hits: int
    n: int
    low: float
    high: float

    @property
    def value(self) -> float:
        return self.hits / self.n if self.n else float("nan")


def rate(hits: int, n: int) -> Rate:
    """Wilson's interval stays inside [0, 1] and is sensible at 0 of n and n of n; no data gives [0, 1]."""
    if n == 0:
        return Rate(0, 0, 0.0, 1.0)
    from scipy.stats import binomtest

    interval = binomtest(hits, n).proportion_ci(method="wilson")
    return Rate(hits, n, float(interval.low), float(interval.high))
