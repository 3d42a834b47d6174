"""Checks that stop a run that only looks alive: each has a name, a limit, an action, and says what it usually means."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from slmgrpo.errors import RunError
from slmgrpo.recipe import Action, Grading, GuardName, Guards
from slmgrpo.rewards.signals import rule_errors
from slmgrpo.rollout.groups import Group, Member
from slmgrpo.signals import begins_rollout, sampled_entropy

log = logging.getLogger("slmgrpo")

ENOUGH = 0.25
"""Share of unsolved groups below which their figures are chance: late in a healthy run one or two are left."""
FIRST = 3
"""Updates with a gradient and a learning rate above 0 after which the adapter must have moved."""


@dataclass(frozen=True)
class Guard:
    """What a guard does by default and what it says. limit: the key of its limit in a recipe; None: it has none.

    steps: acts when the limit is passed in so many steps in a row that say anything about it.
    """

    action: Action
    limit: str | None
    watches: str
    means: str
    advice: str
    steps: int = 1


GUARDS: dict[GuardName, Guard] = {
    "log_prob_paths": Guard(
        "warn",
        "guards.log_prob_paths",
        "mean difference in log-prob a token between the packed and the plain pass, first rows with a signal",
        "this model's attention is not what the packed pass takes it for",
        "nothing needs to be done, the plain pass is used: right, and slower",
    ),
    "configuration": Guard(
        "stop",
        None,
        "whether optimizer, adapter, precision and the live trainer's class are what the recipe asks for",
        "a library put its own default in the place of the recipe's value",
        "set the recipe to what is really used (resolved.json has it), or take another model.backend or trainer",
    ),
    "engine_parity": Guard(
        "stop",
        "guards.engine_parity",
        "mean difference in log-prob a token between sampler and trainer, first rows with a signal",
        "the engine writes with other weights, another temperature or another prompt than the trainer reads",
        "sampling.engine=hf as a comparison; a higher limit where the engine computes in fewer bits on purpose",
    ),
    "rank_equality": Guard(
        "stop",
        None,
        "whether the adapter is the same on all ranks",
        "since the last checkpoint the ranks trained different models: a faulty GPU or link, or code that changes the "
        "adapter on one rank",
        "resume; where the same rank differs again leave its GPU out",
    ),
    "reward_errors": Guard(
        "stop",
        "grading.max_error_rate",
        "share of the step's completions that a rule had to judge and failed on with an error",
        "the rule or the data has a fault; such completions are no zeros, they are left out",
        "mend the rule or the data (`slmgrpo check RECIPE`; on the steps before `slmgrpo reward score "
        "RUN/samples.jsonl --use RULE --map completion=text`)",
    ),
    "unique": Guard(
        "stop",
        "guards.unique",
        "how different completions of an unsolved group are: 0 all alike, 1 all different",
        "the sampler repeats itself (a temperature near 0, equal seeds), or the policy has settled on one answer",
        "sampling.temperature=1.0, a smaller optimizer.learning_rate, loss.epsilon_high=0.28, loss.entropy_coef",
        steps=3,
    ),
    "truncated": Guard(
        "warn",
        "guards.truncated",
        "share of completions that reach sampling.max_tokens",
        "answers are cut off before they are given and count as wrong: the reward is about length",
        "a larger sampling.max_tokens, an end token in the chat template (`slmgrpo check` shows prompts), "
        "loss.mask_truncated_completions=true",
        steps=3,
    ),
    "silent": Guard(
        "stop",
        "guards.silent",
        "share of groups that are unsolved and give no signal, all members being paid alike",
        "questions far too hard, answers in a form that the rules do not read (look at `read` in samples.jsonl), or a "
        "rule that pays everything alike",
        "`slmgrpo check`, easier data, a rule on form, cold_start, a larger sampling.group_size",
    ),
    "entropy": Guard(
        "warn",
        "guards.entropy",
        "entropy a token of unsolved groups, in nats",
        "the policy has become certain of wrong answers and no longer explores",
        "an earlier checkpoint, a smaller optimizer.learning_rate, loss.epsilon_high=0.28, loss.entropy_coef",
        steps=5,
    ),
    "nonfinite": Guard(
        "stop",
        "guards.nonfinite",
        "steps in a row whose loss or gradient is not finite; such a step is skipped, its batch put into RUN/nonfinite",
        "an update made the weights too large, or the precision cannot hold the numbers",
        "a smaller optimizer.learning_rate, optimizer.max_grad_norm, model.dtype=float32",
    ),
    "adapter_moved": Guard(
        "stop",
        "guards.adapter_moved",
        f"relative change of the adapter over its first {FIRST} updates",
        "the learning rate is next to nothing, gradients do not reach the adapter, or its precision rounds them away",
        "a larger optimizer.learning_rate, model.dtype=float32, lora.targets=all-linear",
        steps=FIRST,
    ),
    "sampler_gap": Guard(
        "warn",
        "guards.sampler_gap",
        "mean difference in log-prob a token between sampler and trainer, every step",
        "the engine does not get the adapter after each step, or its precision drifts from the trainer's",
        "sampling.engine=hf as a comparison, loss.sampling_correction=sequence_mask",
        steps=3,
    ),
}
"""In the order of the README's table."""


class GuardStop(RunError):
    """A guard ends the run. save: whether the present state is worth a checkpoint."""

    def __init__(self, name: GuardName, text: str) -> None:
        super().__init__(text)
        self.name: GuardName = name
        self.save = name not in ("nonfinite", "configuration", "rank_equality")


# pure: figures and decisions


def figures(groups: Sequence[Group], advantages: Sequence[Sequence[float]]) -> dict[str, Any]:
    """What guards look at and other metrics do not have, of groups in which not every member is right.

    Groups that the policy has solved are alike and silent for a good reason, so they count for no guard. share: of all
    groups; silent: share of all groups that are unsolved without a signal; variety: mean of (distinct completions - 1)
    / (members - 1); entropy: -mean log-prob of sampled tokens, None where the engine does not say.
    """
    open_groups = [group for group in groups if not all(map(_solved_by(group), group.members))]
    silent = {id(group) for group, weights in zip(groups, advantages, strict=True) if not any(weights)}
    return {
        "share": len(open_groups) / len(groups),
        "silent": sum(id(group) in silent for group in open_groups) / len(groups),
        "variety": fmean(map(_variety, open_groups)) if open_groups else None,
        "entropy": sampled_entropy(m.completion.log_probs for group in open_groups for m in group.members),
    }


def _solved_by(group: Group) -> Callable[[Member], bool]:
    rules = group.prompted.rewards
    top = math.fsum(max(rule.weight * rule.bounds.low, rule.weight * rule.bounds.high) for rule in rules)
    return lambda member: member.correct or (member.reward is not None and member.reward >= top - 1e-9)


def _variety(group: Group) -> float:
    distinct = len({member.completion.token_ids for member in group.members})
    return (distinct - 1) / max(len(group.members) - 1, 1)


Figure = Callable[[Mapping[str, Any]], float | None]
"""A guard's figure in a metrics line; None: this step says nothing about it."""


def _metric(key: str) -> Figure:
    return lambda line: line.get(key)


def _unsolved(key: str, *, share: float = 0.0) -> Figure:
    """A figure of the unsolved groups, where they are at least this share of all."""

    def figure(line: Mapping[str, Any]) -> float | None:
        unsolved = line.get("unsolved") or {}
        return unsolved.get(key) if (unsolved.get("share") or 0.0) >= share else None

    return figure


OVER_STEPS: dict[GuardName, tuple[Figure, Callable[[float, Guards], bool]]] = {
    "unique": (_unsolved("variety", share=ENOUGH), lambda value, limits: value < limits.unique),
    "truncated": (_metric("truncated"), lambda value, limits: value > limits.truncated),
    "silent": (_unsolved("silent"), lambda value, limits: value > limits.silent),
    "entropy": (_unsolved("entropy", share=ENOUGH), lambda value, limits: value < limits.entropy),
    "nonfinite": (lambda line: float(bool(line.get("nonfinite"))), lambda value, limits: value > 0),
    "adapter_moved": (_metric("adapter_change"), lambda value, limits: not value > limits.adapter_moved),
    "sampler_gap": (_metric("sampler_gap"), lambda value, limits: value > limits.sampler_gap),
}
"""Guards that are judged by metrics lines: the figure, and whether it is beyond its limit (a NaN is no movement). The
others are judged where their figure arises."""

EVERY_UPDATE: tuple[GuardName, ...] = ("nonfinite", "adapter_moved")
"""Of these the guards that look at each update; the others look at completions, once a rollout."""


def passed(name: GuardName, line: Mapping[str, Any], limits: Guards) -> tuple[float | None, bool]:
    """A guard's figure in a metrics line and whether it is beyond its limit."""
    figure, beyond = OVER_STEPS[name]
    value = figure(line)
    return value, value is not None and beyond(value, limits)


def limit_of(name: GuardName, limits: Guards) -> Any:
    return getattr(limits, name, None)


def steps_of(name: GuardName, limits: Guards) -> int:
    """In how many steps in a row the limit must be passed."""
    return {"silent": limits.silent_steps, "nonfinite": limits.nonfinite}.get(name, GUARDS[name].steps)


def message(name: GuardName, what: str) -> str:
    """What was seen, what it usually means, what to try."""
    guard, end = GUARDS[name], "" if what.endswith("\n") else ". "
    return f"guard {name}: {what}{end}This usually means: {guard.means}. Try: {guard.advice}"


def relative_change(before: Sequence[Any], after: Sequence[Any]) -> float:
    """Norm of the difference of two lists of tensors over the norm of the first."""
    import torch

    with torch.no_grad():
        moved = math.hypot(*(float((new - old).float().norm()) for old, new in zip(before, after, strict=True)))
        return moved / max(math.hypot(*(float(old.float().norm()) for old in before)), 1e-30)


# the run's watch


class Watch:
    """The guards of one run: warns by `tell` and the log, stops by GuardStop.

    Its state are the steps in a row beyond each limit, which a resumed run finds again in its metrics.
    """

    def __init__(self, limits: Guards, tell: Callable[[str], None], *, resumable: bool = True) -> None:
        self._limits = limits
        self._resumable = resumable
        self._tell = tell
        self._start: list[Any] = []
        self._learned = 0
        self._row: dict[GuardName, int] = dict.fromkeys(OVER_STEPS, 0)
        self._now: dict[str, Any] = {}
        self.warnings: dict[GuardName, str] = {}
        """The last warning of each guard, for status.json."""

    def begin(self, adapter: Sequence[tuple[str, Any]], history: Iterable[Mapping[str, Any]] = ()) -> None:
        """Called before the first step. adapter: (name, parameter); history: metrics of the steps before a resume."""
        self._start = [p.detach().clone() for _, p in adapter]
        for line in history:
            for name in OVER_STEPS:
                self._count(name, line)

    def action(self, name: GuardName) -> Action:
        return self._limits.actions.get(name, GUARDS[name].action)

    def breach(self, name: GuardName, what: str, value: Any = True) -> None:
        """A limit is passed: raise GuardStop, warn, or nothing, as the recipe says."""
        action = self.action(name)
        if action == "off":
            return
        self._now[name] = value
        if action == "warn":
            self.warn(name, message(name, what))
            return
        way = "To resume all the same add" if self._resumable else "A new run goes on in spite of it with"
        change = f". {way} --set guards.actions.{name}=warn" + (" --allow-changes" if self._resumable else "")
        raise GuardStop(name, message(name, what) + ("" if name == "rank_equality" else change))

    def warn(self, name: GuardName, text: str) -> None:
        log.warning("%s", text)
        self._tell(text)
        self.warnings[name] = text

    def error_limit(self, grading: Grading) -> float:
        """Share of errors that ends an evaluation within a run: none where errors do not stop the run (they are told in
        its scores)."""
        return grading.max_error_rate if self.action("reward_errors") == "stop" else 1.0

    def rewards(self, step: int, groups: Sequence[Group], max_error_rate: float) -> None:
        """A rule that breaks is a fault to mend: called before anything is learned from its rewards."""
        for broken in rule_errors(member.verdicts for group in groups for member in group.members):
            if broken.share > max_error_rate:
                self.breach("reward_errors", f"step {step}: {broken}", broken.share)

    def step(self, line: dict[str, Any], adapter: Sequence[tuple[str, Any]]) -> GuardStop | None:
        """Judge a finished step by its metrics line, which gets `guards`: the figures beyond their limits."""
        stop = None
        if self._start and line["rows_trained"] and line.get("learning_rate") and not line.get("nonfinite"):
            line["adapter_change"] = relative_change(self._start, [p for _, p in adapter])
            self._learned += 1
            if self._learned == FIRST:
                self._start = []
        for name in OVER_STEPS:
            value = self._count(name, line)
            if value is None or self._row[name] == 0:
                continue
            needed = steps_of(name, self._limits)
            if name == "nonfinite" and self._row[name] < needed and self.action(name) != "off":
                self._now[name] = value
                self.warn(name, f"step {line['step']}: loss or gradient is not finite; the step was skipped")
            if self._row[name] < needed or (self._row[name] > needed and self.action(name) == "warn"):
                continue
            try:
                self.breach(name, self._what(name, value, line), value)
            except GuardStop as error:
                stop = stop or error
        if self._now:
            line["guards"] = dict(self._now)
            self._now.clear()
        return stop

    def _count(self, name: GuardName, line: Mapping[str, Any]) -> float | None:
        if name not in EVERY_UPDATE and not begins_rollout(line):
            return None  # the same completions as the line before
        value, beyond = passed(name, line, self._limits)
        if value is not None:
            self._row[name] = self._row[name] + 1 if beyond else 0
        return value

    def _what(self, name: GuardName, value: float, line: Mapping[str, Any]) -> str:
        row = self._row[name]
        often = f", {row} steps in a row" if row > 1 else ""
        if name == "nonfinite":
            return f"step {line['step']}: loss or gradient is not finite{often}"
        limit = limit_of(name, self._limits)
        return f"step {line['step']}: {GUARDS[name].watches} is {value:.3g}, the limit is {limit:g}{often}"
