"""What a step leaves behind: one metrics object, one line a completion, and calls to whoever watches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, Protocol

from slmgrpo.rollout.groups import Group, Member
from slmgrpo.run import Clock


class Observer(Protocol):
    """The live view, or anything else that follows a run."""

    def stage(self, text: str) -> None:
        """Something without a bar began: loading, evaluating."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """Within a step: completions written, graded, micro-batches learned."""
        ...

    def step(self, metrics: Mapping[str, Any]) -> None: ...


class Silent:
    """Watches nothing: for tests and scripts."""

    def stage(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def step(self, metrics: Mapping[str, Any]) -> None: ...


def step_metrics(
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    policy: Mapping[str, float],
    clock: Clock,
    *,
    trained: int,
    dropped: int,
) -> dict[str, Any]:
    """One line of metrics.jsonl. Everything but `seconds` and `tokens_per_s` is the same in a repeated run."""
    members = [member for group in groups for member in group.members]
    rewards = [member.reward for member in members if member.reward is not None]
    tokens = sum(len(member.completion.token_ids) for member in members)
    seconds = dict(clock.stages)
    total = clock.total()
    seconds["other"] = max(total - sum(seconds.values()), 0.0)
    return {
        "step": step,
        "reward": fmean(rewards) if rewards else None,
        "reward_std": _mean_spread(groups),
        "accuracy": _by_task(groups),
        "rules": _rules(members),
        "statuses": _statuses(members),
        "length": tokens / len(members),
        "truncated": fmean(member.completion.finish_reason == "length" for member in members),
        "silent": fmean(not any(group) for group in advantages),
        "unjudged": fmean(member.reward is None for member in members),
        "unique": fmean(len({m.completion.token_ids for m in group.members}) / len(group.members) for group in groups),
        **policy,
        "rows_trained": trained,
        "rows_dropped": dropped,
        "tokens": tokens,
        "tokens_per_s": tokens / total if total else None,
        "seconds": {stage: round(value, 4) for stage, value in seconds.items()} | {"total": round(total, 4)},
    }


def sample_lines(step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> Iterator[dict[str, Any]]:
    """Lines of samples.jsonl, one a completion."""
    for group, weights in zip(groups, advantages, strict=True):
        for member, advantage in zip(group.members, weights, strict=True):
            yield {
                "step": step,
                "id": group.prompted.row["id"],
                "task": group.prompted.row["task"],
                "member": member.completion.member,
                "question": group.prompted.row.get("question"),
                "text": member.text,
                "reward": member.reward,
                "values": {name: verdict.value for name, verdict in member.verdicts.items()},
                "read": {name: verdict.read for name, verdict in member.verdicts.items() if verdict.read is not None},
                "statuses": {name: verdict.status for name, verdict in member.verdicts.items()},
                "advantage": advantage,
                "tokens": len(member.completion.token_ids),
                "finish_reason": member.completion.finish_reason,
            }


def _by_task(groups: Sequence[Group]) -> dict[str, float]:
    tasks: dict[str, list[bool]] = {}
    for group in groups:
        tasks.setdefault(group.prompted.row["task"], []).extend(member.correct for member in group.members)
    return {task: fmean(hits) for task, hits in sorted(tasks.items())}


def _rules(members: Sequence[Member]) -> dict[str, float]:
    """Mean value per rule over the completions it could judge."""
    values: dict[str, list[float]] = {}
    for member in members:
        for name, verdict in member.verdicts.items():
            if verdict.value is not None:
                values.setdefault(name, []).append(verdict.value)
    return {name: fmean(column) for name, column in sorted(values.items())}


def _statuses(members: Sequence[Member]) -> dict[str, dict[str, int]]:
    counts: dict[str, Counter[str]] = {}
    for member in members:
        for name, verdict in member.verdicts.items():
            counts.setdefault(name, Counter())[verdict.status] += 1
    return {name: dict(sorted(counter.items())) for name, counter in sorted(counts.items())}


def _mean_spread(groups: Sequence[Group]) -> float:
    """Mean within-group standard deviation of the reward: no spread, nothing to learn from."""
    known = [[m.reward for m in group.members if m.reward is not None] for group in groups]
    spreads = [pstdev(rewards) for rewards in known if len(rewards) > 1]
    return fmean(spreads) if spreads else 0.0
