"""What a step leaves behind: one metrics object, one line a completion, and calls to whoever watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol

from slmgrpo import guards, signals
from slmgrpo.rewards import signals as rule_signals
from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.code import not_trivial
from slmgrpo.rewards.pool import RuleStats
from slmgrpo.rewards.programs import HOLDS_ANSWERS
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

    def warn(self, text: str) -> None:
        """Something that a person should know now; it is in the log too."""
        ...

    def step(self, metrics: Mapping[str, Any]) -> None: ...


class Silent:
    """Watches nothing: for tests and scripts."""

    def stage(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def warn(self, text: str) -> None: ...

    def step(self, metrics: Mapping[str, Any]) -> None: ...


def rollout_metrics(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float]],
    token_class: Callable[[int], signals.TokenClass] | None = None,
) -> dict[str, Any]:
    """What a rollout says by itself: the part of its steps' lines that no update changes, counted once.

    token_class: by token id (signals.token_classes); None where the sampler's log-probs are not known.
    """
    members = [member for group in groups for member in group.members]
    rewards = [member.reward for member in members if member.reward is not None]
    ids = [member.completion.token_ids for member in members]
    log_probs = [member.completion.log_probs for member in members]
    rules = rule_signals.rule_signals([member.verdicts for member in members])
    tokens = sum(map(len, ids))
    return {
        "reward": fmean(rewards) if rewards else None,
        "reward_std": signals.mean_spread([m.reward for m in g.members if m.reward is not None] for g in groups),
        "reward_cv": signals.reward_cv(rewards),
        "accuracy": _by_task(groups),
        "pass_histogram": signals.pass_histogram([member.correct for member in group.members] for group in groups),
        "rules": {name: rule.mean for name, rule in sorted(rules.items()) if rule.mean is not None},
        "statuses": {name: dict(sorted(rule.statuses.items())) for name, rule in sorted(rules.items())},
        "correctness_share": _correctness_shares(groups),
        "hard_coded": _hard_coded(groups),
        "length": tokens / len(members),
        "truncated": fmean(member.completion.finish_reason == "length" for member in members),
        "silent": fmean(not any(group) for group in advantages),
        "unjudged": fmean(member.reward is None for member in members),
        "unique": fmean(len({m.completion.token_ids for m in group.members}) / len(group.members) for group in groups),
        "entropy": signals.sampled_entropy(log_probs),
        "entropy_by_class": signals.entropy_by_class(log_probs, ids, token_class) if token_class else {},
        "unsolved": guards.figures(groups, advantages),
        "tokens": tokens,
    }


def step_metrics(
    step: int,
    rollout: Mapping[str, Any],
    policy: Mapping[str, float],
    clock: Clock,
    *,
    trained: int,
    dropped: int,
    trunk_tokens: int | None = None,
    padded_tokens: int | None = None,
    rule_times: Mapping[str, RuleStats] | None = None,
) -> dict[str, Any]:
    """One line of metrics.jsonl; `seconds`, `rule_seconds` and `tokens_per_s` alone differ in a repeated run.

    rollout: `rollout_metrics`, the same for all updates on it; policy: what this update saw, by losses.mean_stats.
    trunk_tokens, padded_tokens: of one forward pass over the rows that are trained, and what padded rows would take in
    micro-batches of the same limit; None where the trainer cannot say.
    """
    seconds = dict(clock.stages)
    total = clock.total()
    seconds["other"] = seconds.get("other", 0.0) + max(total - sum(seconds.values()), 0.0)
    return {
        "step": step,
        **rollout,
        **policy,
        "rows_trained": trained,
        "rows_dropped": dropped,
        "trunk_tokens": trunk_tokens,
        "packing_efficiency": trunk_tokens / padded_tokens if trunk_tokens and padded_tokens else None,
        "tokens_per_s": rollout["tokens"] / total if total and "generation" in seconds else None,
        "rule_seconds": {name: [round(t.p50_s, 6), round(t.p95_s, 6)] for name, t in (rule_times or {}).items()},
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
                **_columns_read(group, member),
                **({"option_order": order} if (order := _option_order(group, member)) else {}),
            }


def _columns_read(group: Group, member: Member) -> dict[str, Any]:
    """The columns that the rules read, so that `slmgrpo reward score` can judge the sample again."""
    seen = group.prompted.of(member.completion.member)
    names = {name for reward in seen.rewards for name in reward.reads or reward.columns}
    return {name: seen.row[name] for name in sorted(names & seen.row.keys())}


def _option_order(group: Group, member: Member) -> Any:
    """How the options were shuffled for this member (shuffle.shuffle_options), where they were."""
    return group.prompted.of(member.completion.member).row.get("option_order")


def _by_task(groups: Sequence[Group]) -> dict[str, float]:
    tasks: dict[str, list[bool]] = {}
    for group in groups:
        tasks.setdefault(group.prompted.row["task"], []).extend(member.correct for member in group.members)
    return {task: fmean(hits) for task, hits in sorted(tasks.items())}


def _correctness_shares(groups: Sequence[Group]) -> dict[str, float | None]:
    """By task: how much of the reward's spread within groups is about being right (see rewards/signals.py)."""
    tasks: dict[str, list[Group]] = {}
    for group in groups:
        tasks.setdefault(group.prompted.row["task"], []).append(group)
    return {
        task: rule_signals.correctness_share(
            [[member.verdicts for member in group.members] for group in own], own[0].prompted.rewards
        )
        for task, own in sorted(tasks.items())
    }


def _hard_coded(groups: Sequence[Group]) -> float | None:
    """Of the programs that pass their tests, the share that holds the expected values: no sandbox can stop those."""
    found = [
        not_trivial(member.text, group.prompted.row.get("entry_point") or "", group.prompted.row["tests"]).why
        for group in groups
        if group.prompted.row.get("tests")
        for member in group.members
        if member.correct
    ]
    return fmean(why == HOLDS_ANSWERS for why in found) if found else None


class FormWatch:
    """Warns once a rule where form saturates while correctness stays flat (rewards.signals.form_without_substance)."""

    def __init__(self) -> None:
        self._means: dict[str, list[float]] = {}
        self._warned: set[str] = set()

    def see(self, groups: Sequence[Group]) -> list[str]:
        """Take in a rollout; returns new warnings."""
        rewards: dict[str, Reward] = {}
        values: dict[str, list[float]] = {}
        for group in groups:
            for reward in group.prompted.rewards:
                rewards[reward.name] = reward
                scores = [member.verdicts[reward.name].value for member in group.members]
                values.setdefault(reward.name, []).extend(score for score in scores if score is not None)
        right, form = [], []
        for name, scores in values.items():
            if scores:
                self._means.setdefault(name, []).append(fmean(scores) / (rewards[name].bounds.high or 1.0))
                (right if rewards[name].is_correctness else form).append(name)
        warnings = []
        for name in form:
            for judge in right:
                text = rule_signals.form_without_substance(self._means[name], self._means[judge])
                if text and name not in self._warned:
                    self._warned.add(name)
                    warnings.append(f"{name}: {text}")
        return warnings
