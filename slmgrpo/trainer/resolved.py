"""What slmgrpo's own trainer really holds, for resolved.json (the trl trainer writes its own)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slmgrpo.trainer.loop import Context


def of_loop(ctx: Context) -> dict[str, Any]:
    """Values after every default; log_prob_path is null until the first rows with a signal have decided it."""
    from slmgrpo.trainer import losses

    recipe, group = ctx.recipe, ctx.optimizer.param_groups[0]
    high = recipe.loss.epsilon if recipe.loss.epsilon_high is None else recipe.loss.epsilon_high
    return {
        "trainer": "slmgrpo",
        "device": str(ctx.policy.device),
        "dtype": str(ctx.policy.model.dtype),
        "engine": ctx.engine.name,
        "log_prob_path": None if ctx.packed is None else "packed" if ctx.packed else "plain",
        "silent_rows_run_because": losses.why_silent_rows_run(recipe.loss, recipe.lora.dropout),
        "loss": recipe.loss.model_dump() | {"epsilon_high": high},
        "optimizer": {"class": f"{type(ctx.optimizer).__module__}.{type(ctx.optimizer).__qualname__}"}
        | {name: value for name, value in group.items() if name not in ("params", "lr")}
        | {"learning_rate": group["initial_lr"], "max_grad_norm": recipe.optimizer.max_grad_norm},
        "scheduler": {"type": recipe.optimizer.lr_scheduler_type, "warmup_steps": ctx.plan.warmup_steps},
        "sampling": recipe.sampling.model_dump(),
        "trained_parameters": sum(p.numel() for _, p in ctx.policy.trainable()),
    }
