"""Fixed completions through the real loop, without an engine or an optimizer: its gradient is what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slmgrpo.callbacks import Silent
from slmgrpo.guards import Watch
from slmgrpo.model import Policy
from slmgrpo.plan import Plan
from slmgrpo.ranks import ALONE
from slmgrpo.recipe import Action, GuardName, Recipe
from slmgrpo.rollout.engine import Completion
from slmgrpo.rollout.groups import Group, Member, Prompted
from slmgrpo.run import Clock
from slmgrpo.trainer import context, update
from slmgrpo.trainer.advantages import advantages


@dataclass(frozen=True)
class Row:
    """A completion with its reward; None: cannot be judged."""

    ids: tuple[int, ...]
    cut: bool
    """Whether it reached max_tokens without an end token."""
    reward: float | None
    log_probs: tuple[float, ...] = ()
    """As the sampler reported them."""


def groups_of(prompts: Sequence[tuple[int, ...]], rows: Sequence[Sequence[Row]]) -> list[Group]:
    def member(g: int, m: int, row: Row) -> Member:
        completion = Completion(g, m, row.ids, row.log_probs, "length" if row.cut else "stop")
        return Member(completion, "", {}, row.reward)

    return [
        Group(Prompted({"id": str(g)}, prompt, "", ()), tuple(member(g, m, row) for m, row in enumerate(group)))
        for g, (prompt, group) in enumerate(zip(prompts, rows, strict=True))
    ]


def flat_gradient(policy: Policy) -> Tensor:
    """(N,), of the adapter; takes it away."""
    parts = [(p.grad if p.grad is not None else torch.zeros_like(p)).flatten() for _, p in policy.trainable()]
    for _, p in policy.trainable():
        p.grad = None
    return torch.cat(parts)


def context_of(
    policy: Policy, recipe: Recipe, plan: Plan, *, optimizer: Any, scheduler: Any, packed: bool | None = None
) -> context.Context:
    """What an optimizer step needs, and nothing that writes, grades, saves or evaluates."""
    absent: Any = None
    engine: Any = SimpleNamespace(name="replayed")
    no_sampler: dict[GuardName, Action] = {"engine_parity": "off", "sampler_gap": "off"}
    return context.Context(
        recipe=recipe,
        plan=plan,
        run=absent,
        policy=policy,
        engine=engine,
        pool=absent,
        sampler=absent,
        prompted={},
        optimizer=optimizer,
        scheduler=scheduler,
        observer=Silent(),
        interrupts=absent,
        ranks=ALONE,
        guards=Watch(recipe.guards.model_copy(update={"actions": no_sampler}), print),
        evaluate=absent,
        packed=packed,
    )


def loop_gradient(
    policy: Policy,
    recipe: Recipe,
    plan: Plan,
    groups: list[Group],
    before_second_update: Callable[[], None] | None = None,
    *,
    packed: bool | None = None,
) -> Tensor:
    """(N,), the loop's gradient of this rollout's first update, or of its second one where a function is given.

    packed: the log-prob path; None: decided at the first rows, as in a run.
    """
    found: list[Tensor] = []

    class Look:
        """In the place of optimizer and scheduler: sees the gradient and changes nothing."""

        def step(self) -> None: ...

        def zero_grad(self, **_: Any) -> None:
            found.append(flat_gradient(policy))

        def get_last_lr(self) -> list[float]:
            return [0.0]

    look = Look()
    recipe = recipe.model_copy(update={"optimizer": recipe.optimizer.model_copy(update={"max_grad_norm": 1e30})})
    ctx = context_of(policy, recipe, plan, optimizer=look, scheduler=look, packed=packed)
    rewards = [[member.reward for member in group.members] for group in groups]
    micros = update.work_of(ctx, groups, advantages(rewards, recipe.loss.scale_rewards)).micros
    update.optimise(ctx, groups, micros, Clock())
    if before_second_update is not None:
        before_second_update()
        update.optimise(ctx, groups, micros, Clock())
    return found[-1]
