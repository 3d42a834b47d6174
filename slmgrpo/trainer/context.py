"""What a step works on, and how it is saved and restored: policy, engine, optimizer, schedule, prompt order, step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from slmgrpo.callbacks import Observer
from slmgrpo.data import PromptSampler
from slmgrpo.errors import PlanError, RunError
from slmgrpo.guards import Watch
from slmgrpo.interrupt import Interrupts
from slmgrpo.model import Policy, fingerprint
from slmgrpo.plan import Plan
from slmgrpo.ranks import Ranks
from slmgrpo.recipe import Optimizer, Recipe
from slmgrpo.rewards.pool import Pool
from slmgrpo.rollout.engine import Engine
from slmgrpo.rollout.groups import Prompted
from slmgrpo.run import RunDir


@dataclass
class Context:
    """Everything a step needs; `step` counts finished optimizer steps."""

    recipe: Recipe
    plan: Plan
    run: RunDir
    policy: Policy
    engine: Engine
    pool: Pool
    sampler: PromptSampler
    prompted: dict[str, Prompted]
    optimizer: Any
    scheduler: Any
    observer: Observer
    interrupts: Interrupts
    ranks: Ranks
    guards: Watch
    evaluate: Callable[[int], Any]
    probe: Callable[[Sequence[dict[str, Any]]], None] = lambda lines: None
    """Gets each rollout's metrics: dynamics.probe."""
    step: int = 0
    packed: bool | None = None
    """Which log-prob path runs; decided at the first rows with a signal."""
    whole: bool = True
    """Whether this is a state to go on from: all updates of a rollout made, its metrics and samples written."""


def optimizer_of(settings: Optimizer, policy: Policy) -> Any:
    """AdamW by torch, or its 8-bit forms by bitsandbytes (CUDA only)."""
    parameters = [p for _, p in policy.trainable()]
    values: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, **values)
    if policy.device.type != "cuda":
        raise PlanError(
            f"optimizer.name={settings.name}: bitsandbytes' 8-bit optimizers need CUDA, the model is on "
            f"{policy.device.type}; set optimizer.name=adamw"
        )
    import bitsandbytes

    kind = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}[settings.name]
    return getattr(bitsandbytes.optim, kind)(parameters, **values)


def scheduler_of(settings: Optimizer, optimizer: Any, plan: Plan) -> Any:
    """transformers' schedule over the plan's steps with its warmup."""
    from transformers import get_scheduler

    name = settings.lr_scheduler_type
    if name == "constant" and plan.warmup_steps:
        name = "constant_with_warmup"
    return get_scheduler(name, optimizer, num_warmup_steps=plan.warmup_steps, num_training_steps=plan.steps)


def save(ctx: Context) -> None:
    """Adapter, optimizer, schedule and prompt-choice state; what is random is keyed by the step."""

    def write(folder: Path) -> None:
        ctx.policy.save_adapter(folder / "adapter")
        state = {"optimizer": ctx.optimizer.state_dict(), "scheduler": ctx.scheduler.state_dict()}
        torch.save(state, folder / "trainer.pt")
        torch.save(ctx.sampler.state_dict(), folder / "sampler.pt")

    ranks_agree(ctx)
    with ctx.ranks.together():
        if ctx.ranks.first:
            ctx.run.save_checkpoint(ctx.step, write, ctx.recipe.train.keep_checkpoints)


def restore(ctx: Context, folder: Path) -> None:
    """Continue from a checkpoint folder; nothing in it is executed."""
    ctx.policy.load_adapter(folder / "adapter")
    state = _read(folder / "trainer.pt", ctx.policy.device)
    settings, rates = ctx.recipe.optimizer, ctx.scheduler
    ctx.optimizer.load_state_dict(state["optimizer"])
    rates.load_state_dict(state["scheduler"])
    rates.base_lrs = [settings.learning_rate] * len(rates.base_lrs)
    for group, factor in zip(ctx.optimizer.param_groups, rates.lr_lambdas, strict=True):
        group["initial_lr"] = settings.learning_rate  # the state has those of before, the recipe may be changed
        group["lr"] = settings.learning_rate * factor(rates.last_epoch)
        group["weight_decay"] = settings.weight_decay
        group["betas"] = (settings.adam_beta1, settings.adam_beta2)
    rates._last_lr = [group["lr"] for group in ctx.optimizer.param_groups]
    ctx.sampler.load_state_dict(_read(folder / "sampler.pt", ctx.policy.device))
    ctx.step = int(folder.name.removeprefix("step_"))
    ctx.engine.sync(ctx.step)


def _read(file: Path, device: Any) -> Any:
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except UnpicklingError:
        raise RunError(
            f"{file}: holds more than tensors and plain values, so nothing of it was run and it cannot be used; "
            f"slmgrpo did not write it like this: remove {file.parent} to go on from the checkpoint before"
        ) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise RunError(f"{file}: cannot be read ({str(error).splitlines()[0]}); remove {file.parent}") from None


def ranks_agree(ctx: Context) -> None:
    """Ranks with the same adapter, bit for bit, train one model."""
    if ctx.ranks.world > 1:
        other = ctx.ranks.others(fingerprint(ctx.policy.trainable()))
        if other:
            what = f"step {ctx.step}: the adapter of rank {', '.join(map(str, other))} is not that of rank 0"
            ctx.guards.breach("rank_equality", what, other)
