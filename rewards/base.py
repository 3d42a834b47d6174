"""The reward contract: verdicts, rules found by import path, and `Reward`, a rule with settings, gate and weight.

A rule scores one completion. Its positional parameters are data (`prompt`, `completion`, `completion_ids`
or a column of the data set; one with a default may be absent); its keyword-only parameters are settings
from the recipe. It returns a number, a bool, None ("cannot judge") or a `Verdict`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from slmgrpo.errors import RecipeError
from slmgrpo.rewards.find import Rule, closest, load, signature, wrong_value

Status = Literal["correct", "wrong", "no_answer", "ungradeable", "timeout", "error", "gated", "scored"]
F = TypeVar("F", bound=Rule)

GIVEN = ("prompt", "completion", "completion_ids")
"""What every row has without being a column of the data."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says of one completion.

    value: 1.0 right, 0.0 wrong, anything between for partial credit, None "cannot judge".
    status: why the value is what it is; `scored` for rules that are no right-or-wrong question.
    read: the answer as the rule read it; why: one short sentence for people.
    """

    value: float | None
    status: Status = "scored"
    read: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a rule can pay: in general, at most to a wrong answer, at least to a right one."""

    low: float = 0.0
    high: float = 1.0
    best_wrong: float | None = None
    worst_right: float | None = None

    @property
    def wrong(self) -> float:
        return self.high if self.best_wrong is None else self.best_wrong

    @property
    def right(self) -> float:
        return self.low if self.worst_right is None else self.worst_right


def correctness(rule: F) -> F:
    """Mark a rule whose value is the verdict on the answer: required by default, 1.0 only when right."""
    vars(rule).update(correctness=True, bounds=lambda settings: Bounds(0.0, 1.0, 0.0, 1.0))
    return rule


def bounded(bounds: Callable[[Mapping[str, Any]], Bounds]) -> Callable[[F], F]:
    """State what a rule can pay, as a function of its settings; without it `reward lint` takes 0 to 1."""

    def mark(rule: F) -> F:
        vars(rule).update(bounds=bounds)
        return rule

    return mark


def quick(rule: F) -> F:
    """Mark a rule that takes microseconds on any text: it is run where the text is, not in a worker."""
    vars(rule).update(quick=rule)
    return rule


class Use(Protocol):
    """The part of a recipe's reward entry that this package reads (recipe.RewardUse has this shape)."""

    @property
    def use(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def when(self) -> str | None: ...
    @property
    def required(self) -> bool | None: ...


def text_of(value: Any) -> str:
    """The text of a prompt or completion that may be chat messages."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return text_of(value.get("content") or "")
    if isinstance(value, Sequence):
        return "".join(text_of(part) if isinstance(part, str | Mapping) else str(part) for part in value)
    return "" if value is None else str(value)


def completion_text(value: Any) -> str:
    """The text of a completion: of its assistant's turns where it is chat messages."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        turns = [part for part in value if isinstance(part, Mapping) and part.get("role", "assistant") == "assistant"]
        return text_of(turns) if turns else text_of(value)
    return text_of(value)


@dataclass(frozen=True)
class Reward:
    """A rule as a recipe uses it. Answers to TRL's reward signature; pickles by its import path."""

    use: str
    weight: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    when: str | None = None
    required: bool = False
    name: str = ""
    base: Path | None = None
    """The folder that `./file.py:name` is relative to."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or self.use)

    @classmethod
    def from_use(cls, use: Use, *, base: Path | None = None, known: Mapping[str, Any] | None = None) -> Reward:
        """Check a recipe's entry. `known`: settings of the run itself (`max_tokens`), for rules that ask."""
        rule = load(use.use, base=base)
        takes = signature(rule)
        settings = {key: value for key, value in (known or {}).items() if key in takes.settings} | dict(use.settings)
        problems = [
            f"rewards: {use.use} has no setting `{key}`{closest(key, takes.settings)}"
            + (f"; write `*,` before `{key}` to make it one" if key in takes.data else "")
            for key in settings
            if key not in takes.settings and not takes.open_ended
        ]
        problems += [
            f"rewards: {use.use} needs `with: {{{key}: ...}}`" for key in sorted(takes.needed_settings - set(settings))
        ]
        wrong = [wrong_value(rule, key, value) for key, value in settings.items()]
        problems += [f"rewards: {use.use}: {text}" for text in wrong if text]
        if not math.isfinite(use.weight):
            problems.append(f"rewards: {use.use} has weight {use.weight}; use a number")
        if problems:
            raise RecipeError("\n".join(problems))
        required = bool(getattr(rule, "correctness", False)) if use.required is None else use.required
        return cls(use.use, use.weight, settings, use.when, required, base=base)

    @property
    def rule(self) -> Rule:
        return load(self.use, base=self.base)

    @property
    def is_correctness(self) -> bool:
        return bool(getattr(self.rule, "correctness", False))

    @property
    def bounds(self) -> Bounds:
        stated = getattr(self.rule, "bounds", None)
        return Bounds() if stated is None else stated(self.settings)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the data without which the rule cannot be called."""
        takes = signature(self.rule)
        given = (*GIVEN, "prompts", "completions")
        return tuple(name for name in takes.data if name not in given and name not in takes.optional)

    @property
    def reads(self) -> tuple[str, ...] | None:
        """Every name of data that the rule can read; None where that cannot be told (TRL functions, `**columns`)."""
        takes = signature(self.rule)
        return None if takes.batched or takes.open_ended else takes.data

    @property
    def __name__(self) -> str:
        return self.name

    def judge(
        self, prompt: str, completion: str, completion_ids: Sequence[int] = (), columns: Mapping[str, Any] | None = None
    ) -> Verdict:
        """Score one completion. What the rule raises becomes a verdict of status `error`, never a zero."""
        try:
            return _verdict(_call(self.rule, self.settings, prompt, completion, completion_ids, columns or {}))
        except (
            Exception,
            SystemExit,
        ) as error:  # a rule's bug is data here: counted, masked, and it stops the run above a rate
            return Verdict(None, "error", why=f"{type(error).__name__}: {error}"[:300])

    def quick(
        self, prompt: str, completion: str, completion_ids: Sequence[int] = (), columns: Mapping[str, Any] | None = None
    ) -> Verdict | None:
        """What `judge` says where that takes microseconds, else None: ask here before a worker is asked.

        A rule offers it by its attribute `quick`, a function of the same parameters that may return NotImplemented.
        """
        rule = getattr(self.rule, "quick", None)
        if rule is None:
            return None
        try:
            result = _call(rule, self.settings, prompt, completion, completion_ids, columns or {})
        except (Exception, SystemExit) as error:
            return Verdict(None, "error", why=f"{type(error).__name__}: {error}"[:300])
        return None if result is NotImplemented else _verdict(result)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        """TRL's signature; unweighted and ungated (see `Total` for the whole sum)."""
        rows = list(_rows(prompts, completions, completion_ids, columns))
        return [self.judge(prompt, completion, ids, row).value for prompt, completion, ids, row in rows]


def _call(
    rule: Rule,
    settings: Mapping[str, Any],
    prompt: str,
    completion: str,
    completion_ids: Sequence[int],
    columns: Mapping[str, Any],
) -> Any:
    """Call a rule on one row by the names of its parameters; a TRL reward function gets lists of one, as chats."""
    takes = signature(rule)
    have = {**columns, "prompt": prompt, "completion": completion, "completion_ids": completion_ids}
    if takes.batched:
        chats = {
            "prompts": {"role": "user", "content": prompt},
            "completions": {"role": "assistant", "content": completion},
        }
        lists = {key: [value] for key, value in have.items()} | {key: [[chat]] for key, chat in chats.items()}
        names = lists if takes.open_ended else takes.data
        return rule(**{name: lists[name] for name in names if name in lists}, **settings)[0]
    missing = [name for name in takes.data if name not in have and name not in takes.optional]
    if missing:
        return Verdict(None, "error", why=f"the data has no column `{missing[0]}`")
    return rule(**{name: have[name] for name in takes.data if name in have}, **settings)


def _verdict(result: Any) -> Verdict:
    if isinstance(result, Verdict):
        value = result.value
        return result if value is None or math.isfinite(value) else replace(result, value=None, status="error")
    if result is None:
        return Verdict(None, "ungradeable", why="the rule cannot judge this row")
    if isinstance(result, bool | int | float) or hasattr(result, "__float__"):
        value = float(result)
        if math.isfinite(value):
            return Verdict(value)
        return Verdict(None, "error", why=f"the rule returned {value}")
    return Verdict(None, "error", why=f"the rule returned a {type(result).__name__}, not a number, None or Verdict")


def _rows(
    prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Any] | None, columns: Mapping[str, Any]
) -> Iterable[tuple[str, str, Sequence[int], dict[str, Any]]]:
    count = len(completions)
    lists = {key: value for key, value in columns.items() if isinstance(value, list) and len(value) == count}
    for i in range(count):
        ids = completion_ids[i] if completion_ids is not None else ()
        yield text_of(prompts[i]), completion_text(completions[i]), ids, {key: value[i] for key, value in lists.items()}


def load_rewards(
    uses: Iterable[Use], *, base: Path | None = None, known: Mapping[str, Any] | None = None
) -> tuple[Reward, ...]:
    """All rules of a recipe, checked together: settings, gates and repeated rules, every problem at once."""
    rewards, problems = [], []
    for use in uses:
        try:
            rewards.append(Reward.from_use(use, base=base, known=known))
        except RecipeError as error:
            problems.append(str(error))
    names = [reward.name for reward in rewards]
    problems += [
        f"rewards: {name} is used twice; keep one of them" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    gates = {reward.name: reward.when for reward in rewards}
    for reward in rewards:
        if reward.when is not None and reward.when not in gates and not problems:
            hint = closest(reward.when, gates)
            problems.append(f"rewards: {reward.name}: `when: {reward.when}` names no rule of this recipe{hint}")
        elif _circular(reward.name, gates):
            problems.append(f"rewards: {reward.name}: its `when` comes back to itself")
    if problems:
        raise RecipeError("\n".join(problems))
    return tuple(rewards)


def _circular(name: str, gates: Mapping[str, str | None]) -> bool:
    seen, at = set(), gates.get(name)
    while at is not None and at not in seen:
        if at == name:
            return True
        seen.add(at)
        at = gates.get(at)
    return False


def missing_columns(rewards: Iterable[Reward], columns: Iterable[str]) -> list[str]:
    """One problem for each column that a rule reads and the data does not have."""
    have = sorted(columns)
    return [
        f"rewards: {reward.name} reads the column `{name}`, the data has {', '.join(have)}{closest(name, have)}"
        for reward in rewards
        for name in reward.columns
        if name not in have
    ]


def gated(verdicts: Mapping[str, Verdict], rewards: Sequence[Reward]) -> dict[str, Verdict]:
    """Verdicts after the gates: 0 behind a gate of 0 or less, None behind a gate of None."""
    by_name = {reward.name: reward for reward in rewards}
    done: dict[str, Verdict] = {}

    def settle(name: str) -> Verdict:
        if name not in done:
            reward, verdict = by_name[name], verdicts[name]
            gate = None if reward.when is None else settle(reward.when)
            if gate is not None and gate.value is None:
                verdict = Verdict(None, "gated", why=f"{reward.when} cannot be judged")
            elif gate is not None and gate.value is not None and gate.value <= 0:
                verdict = Verdict(0.0, "gated", why=f"{reward.when} is {gate.value:g}")
            done[name] = verdict
        return done[name]

    return {reward.name: settle(reward.name) for reward in rewards}


def total(verdicts: Mapping[str, Verdict], rewards: Sequence[Reward]) -> float | None:
    """The weighted sum after gates, None where the row cannot be judged.

    So it is where a required rule or every rule gives None, and where one that counts failed or ran out of time, or its
    gate did: left out, it would be a 0 among the row's siblings. Other Nones are absent.
    """
    settled, by_name = gated(verdicts, rewards), {reward.name: reward for reward in rewards}

    def failed(name: str) -> bool:
        gate = by_name[name].when
        here = settled[name].status in ("error", "timeout") or (gate is not None and failed(gate))
        return settled[name].value is None and here

    values = [(reward, settled[reward.name].value) for reward in rewards]
    if any(value is None and (reward.required or (reward.weight and failed(reward.name))) for reward, value in values):
        return None
    present = [reward.weight * value for reward, value in values if value is not None]
    return math.fsum(present) if present else None


def judge_all(
    rewards: Sequence[Reward],
    prompt: str,
    completion: str,
    completion_ids: Sequence[int] = (),
    columns: Mapping[str, Any] | None = None,
) -> dict[str, Verdict]:
    """Every rule on one completion, in this process and without a deadline (the pool has one), gates applied."""
    verdicts = {reward.name: reward.judge(prompt, completion, completion_ids, columns) for reward in rewards}
    return gated(verdicts, rewards)


@dataclass(frozen=True)
class Total:
    """All rules of a recipe as one TRL reward function: gated, and None for a row that cannot be judged."""

    rewards: tuple[Reward, ...]

    @property
    def __name__(self) -> str:
        return "total"

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        rows = _rows(prompts, completions, completion_ids, columns)
        return [total(judge_all(self.rewards, *row), self.rewards) for row in rows]
