"""What a run logs of its rules, as pure functions: means, status counts, times, and where the signal comes from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from slmgrpo.rewards.base import Reward, Verdict, gated, total


@dataclass(frozen=True, slots=True)
class RuleSignal:
    """One rule over one step. mean leaves out the rows that it could not judge; None if there were no others."""

    mean: float | None
    statuses: Mapping[str, int]
    p50_s: float | None = None
    p95_s: float | None = None


def rule_signals(
    verdicts: Sequence[Mapping[str, Verdict]], times_s: Mapping[str, Sequence[float]] | None = None
) -> dict[str, RuleSignal]:
    """Per rule: mean value, how often each status occurred, and times where they were measured."""
    names = dict.fromkeys(name for row in verdicts for name in row)
    signals = {}
    for name in names:
        judged = [row[name] for row in verdicts if name in row]
        values = [verdict.value for verdict in judged if verdict.value is not None]
        times = (times_s or {}).get(name, ())
        signals[name] = RuleSignal(
            mean=math.fsum(values) / len(values) if values else None,
            statuses=dict(Counter(verdict.status for verdict in judged)),
            p50_s=quantile(times, 0.5),
            p95_s=quantile(times, 0.95),
        )
    return signals


def quantile(values: Sequence[float], q: float) -> float | None:
    """The smallest value with at least a share `q` at or below it; None of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)] if ordered else None


@dataclass(frozen=True)
class RuleErrors:
    """A rule that failed: how often, of how many completions that it had to judge, and why at first."""

    rule: str
    count: int
    of: int
    first: str

    @property
    def share(self) -> float:
        return self.count / self.of

    def __str__(self) -> str:
        return f"{self.rule} failed on {self.count} of {self.of} completions (first: {self.first})"


def rule_errors(graded: Iterable[Mapping[str, Verdict]]) -> list[RuleErrors]:
    """Rules with errors, over all that each was given to judge: in a mixture that is a part of the completions."""
    reasons: dict[str, list[str]] = {}
    judged: Counter[str] = Counter()
    for verdicts in graded:
        judged.update(verdicts.keys())
        for name, verdict in verdicts.items():
            if verdict.status == "error":
                reasons.setdefault(name, []).append(verdict.why)
    return [RuleErrors(name, len(why), judged[name], why[0]) for name, why in reasons.items()]


def correctness_share(groups: Sequence[Sequence[Mapping[str, Verdict]]], rewards: Sequence[Reward]) -> float | None:
    """The share of within-group reward variance that the correctness rules carry: their covariance with the total.

    1 where only correctness tells the members of a group apart, near 0 where form alone does; it can leave 0 to 1
    where rules work against each other. Rows without a total are left out; None where no group has any spread.
    """
    carried = whole = 0.0
    for group in groups:
        right, sums = [], []
        for row in group:
            if total(row, rewards) is None:
                continue
            settled = gated(row, rewards)
            parts = [(reward, settled[reward.name].value) for reward in rewards]
            right.append(math.fsum(r.weight * v for r, v in parts if v is not None and r.is_correctness))
            sums.append(math.fsum(r.weight * v for r, v in parts if v is not None))
        if not sums:
            continue
        middle, centre = math.fsum(right) / len(right), math.fsum(sums) / len(sums)
        carried += math.fsum((a - middle) * (b - centre) for a, b in zip(right, sums, strict=True))
        whole += math.fsum((b - centre) ** 2 for b in sums)
    return carried / whole if whole > 1e-12 else None


def form_without_substance(
    form: Sequence[float], correct: Sequence[float], *, window: int = 20, full: float = 0.95, gain: float = 0.02
) -> str:
    """A warning where a form rule is at its top over `window` steps and correctness has not moved; else nothing.

    form: a form rule's mean at each step, as a share of what it can pay; correct: the correctness rule's.
    """
    if min(len(form), len(correct)) < 2 * window:
        return ""
    recent = math.fsum(form[-window:]) / window
    now, before = math.fsum(correct[-window:]) / window, math.fsum(correct[-2 * window : -window]) / window
    if recent < full or now - before >= gain or now >= full:
        return ""
    return (
        f"form is learnt ({recent:.0%} over {window} steps) while correctness stays at {now:.0%} "
        f"({now - before:+.1%}): raise correctness' weight, or gate the form rule with `when:`"
    )
