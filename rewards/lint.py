"""Bounds of a recipe's weighted sum: whether the best wrong answer can out-earn a bare right one, and what mends it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from slmgrpo.rewards.base import Bounds, Reward


@dataclass(frozen=True, slots=True)
class Line:
    """One rule's weighted part: of any answer, at most of a wrong one, at least of a right one."""

    name: str
    weight: float
    low: float
    high: float
    best_wrong: float
    worst_right: float


@dataclass(frozen=True, slots=True)
class Report:
    """ok: no wrong answer earns as much as a right one without any form. fix: the smallest change where it is not."""

    lines: tuple[Line, ...]
    best_wrong: float
    bare_right: float
    ok: bool
    fix: str

    @property
    def low(self) -> float:
        return math.fsum(line.low for line in self.lines)

    @property
    def high(self) -> float:
        return math.fsum(line.high for line in self.lines)


def lint(rewards: Sequence[Reward]) -> Report:
    """A bare right answer is right and earns the least of every other rule; the best wrong one earns the most."""
    lines = tuple(_line(reward, rewards) for reward in rewards)
    wrong = math.fsum(line.best_wrong for line in lines)
    right = math.fsum(line.worst_right for line in lines)
    ok = right > wrong + 1e-9 and any(reward.is_correctness for reward in rewards)
    return Report(lines, wrong, right, ok, "" if ok else _fix(rewards, wrong, right))


def _line(reward: Reward, rewards: Sequence[Reward]) -> Line:
    bounds = reward.bounds
    low, high = sorted((reward.weight * bounds.low, reward.weight * bounds.high))
    wrong = max(reward.weight * bounds.low, reward.weight * bounds.wrong)
    right = min(reward.weight * bounds.right, reward.weight * bounds.high)
    if reward.when is not None:
        low, high = min(0.0, low), max(0.0, high)
        shut_for_wrong = _gate_bounds(reward, rewards).wrong <= 0
        open_for_right = _gate_bounds(reward, rewards).right > 0
        wrong = 0.0 if shut_for_wrong else max(0.0, wrong)
        right = right if open_for_right else min(0.0, right)
    return Line(reward.name, reward.weight, low, high, wrong, right)


def _gate_bounds(reward: Reward, rewards: Sequence[Reward]) -> Bounds:
    """What the gate of a rule can be worth, through gates of its own."""
    gate = next(other for other in rewards if other.name == reward.when)
    own = gate.bounds
    if gate.when is None:
        return own
    behind = _gate_bounds(gate, rewards)
    return Bounds(
        min(0.0, own.low),
        max(0.0, own.high),
        own.wrong if behind.wrong > 0 else 0.0,
        own.right if behind.right > 0 else min(0.0, own.right),
    )


def _fix(rewards: Sequence[Reward], wrong: float, right: float) -> str:
    judges = [reward for reward in rewards if reward.is_correctness]
    if not judges:
        return "add a correctness rule such as math.correct: nothing here tells right from wrong"
    judge = max(judges, key=lambda reward: reward.weight)
    bounds = judge.bounds
    step = bounds.right - bounds.wrong
    if judge.weight <= 0 or step <= 0:
        return f"give {judge.name} a positive weight"
    needed = math.floor((judge.weight + (wrong - right) / step) * 100 + 1) / 100
    gates = _gates(rewards, judge)
    return f"set the weight of {judge.name} to {needed:g}" + (
        f", or put `when: {judge.name}` on {gates}" if gates else ""
    )


def _gates(rewards: Sequence[Reward], judge: Reward) -> str:
    """The fewest rules which, gated by correctness, make the sum sound; nothing where gates do not help."""
    if judge.bounds.wrong > 0:
        return ""
    others = [r for r in rewards if r.when is None and not r.is_correctness]
    others.sort(key=lambda r: _line(r, rewards).best_wrong, reverse=True)
    changed = list(rewards)
    for count, reward in enumerate(others, 1):
        changed = [replace(r, when=judge.name) if r.name == reward.name else r for r in changed]
        lines = [_line(r, changed) for r in changed]
        if math.fsum(line.worst_right for line in lines) > math.fsum(line.best_wrong for line in lines) + 1e-9:
            return " and ".join(r.name for r in others[:count])
    return ""


def as_text(report: Report, title: str = "rewards") -> str:
    """The report for people, in 80 columns: the title, a row a rule, the verdict and what mends it."""
    width = min(30, max([len(line.name) for line in report.lines], default=4))
    rows = [*_wrapped(title), f"  {'rule':{width}}  weight    low   high  best wrong  worst right"]
    for line in report.lines:
        if len(line.name) > width:
            rows.append(f"  {line.name}")
        rows.append(
            f"  {line.name if len(line.name) <= width else '':{width}}  {line.weight:6g} {line.low:6.2f}"
            f" {line.high:6.2f} {line.best_wrong:11.2f} {line.worst_right:12.2f}"
        )
    verdict = "no wrong answer out-earns a right one" if report.ok else "a wrong answer can out-earn a right one"
    rows.append(f"  the sum lies in {report.low:g} to {report.high:g}")
    rows.append(f"  {verdict}: {report.best_wrong:.4g} against {report.bare_right:.4g}")
    return "\n".join([*rows, *_wrapped(report.fix, "  ")])


def _wrapped(text: str, indent: str = "") -> list[str]:
    """Lines of at most 80 columns; a name longer than that stays whole."""
    return textwrap.wrap(
        text,
        80,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
