"""What slmgrpo's own trainer really holds: for resolved.json, and where it is not what the recipe asks for.

The trl trainer has its own of both (trl_config.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slmgrpo.trainer.context import Context


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


def differences(ctx: Context) -> list[str]:
    """Where the live adapter, precision or optimizer are not the recipe's; empty where all is as asked."""
    from slmgrpo.model import dtype_of, layers, target_modules

    recipe, lora, base = ctx.recipe, ctx.recipe.lora, ctx.policy.model.get_base_model()
    adapter = ctx.policy.model.peft_config["default"]
    chosen = layers(lora.layers, base.config.num_hidden_layers)
    pairs: dict[str, tuple[Any, Any]] = {
        "lora.rank": (lora.rank, adapter.r),
        "lora.alpha": (lora.alpha, adapter.lora_alpha),
        "lora.dropout": (lora.dropout, adapter.lora_dropout),
        "lora.targets": (sorted(target_modules(lora, base)), sorted(adapter.target_modules)),
        "lora.layers": (chosen, None if chosen is None else sorted(adapter.layers_to_transform)),
        "model.dtype": (str(dtype_of(recipe.model)), str(ctx.policy.model.dtype)),
        "model.load_in_4bit": (
            recipe.model.load_in_4bit,
            any(type(m).__name__ == "Linear4bit" for m in base.modules()),
        ),
    }
    for group in ctx.optimizer.param_groups:
        pairs |= {
            "optimizer.learning_rate": (recipe.optimizer.learning_rate, group["initial_lr"]),
            "optimizer.weight_decay": (recipe.optimizer.weight_decay, group["weight_decay"]),
            "optimizer.adam_beta1": (recipe.optimizer.adam_beta1, group["betas"][0]),
            "optimizer.adam_beta2": (recipe.optimizer.adam_beta2, group["betas"][1]),
        }
    found = [f"{key} is {held!r}, the recipe says {asked!r}" for key, (asked, held) in pairs.items() if asked != held]
    foreign = [name for name, _ in ctx.policy.trainable() if "lora_" not in name]
    return found + [f"{name} is trained and no part of the adapter" for name in foreign[:3]]
