"""A recipe as TRL's GRPOConfig: every field that TRL or Unsloth would change, and what TRL cannot express."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from slmgrpo.errors import PlanError, RecipeError
from slmgrpo.plan import Plan
from slmgrpo.recipe import Recipe
from slmgrpo.run import RunDir

Device = Literal["cpu", "cuda"]

KEYS = {
    "num_generations": "sampling.group_size",
    "max_completion_length": "sampling.max_tokens",
    "max_steps": "train.steps",
    "num_iterations": "train.updates_per_rollout",
    "generation_batch_size": "train.prompts_per_step x sampling.group_size",
    "per_device_train_batch_size": "train.micro_batch_tokens",
    "gradient_accumulation_steps": "train.micro_batch_tokens",
    "steps_per_generation": "train.micro_batch_tokens",
    "warmup_steps": "optimizer.warmup_ratio",
    "optim": "optimizer.name",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "data_seed": "seed",
    "seed": "seed",
    "vllm_importance_sampling_correction": "loss.sampling_correction",
    "vllm_importance_sampling_mode": "loss.sampling_correction",
    "vllm_importance_sampling_clip_max": "loss.sampling_correction_cap",
}
"""TRL's field -> the recipe's, where the names differ."""
OTHERWISE = ("reward_weights", "generation_kwargs")
"""Attributes of the trainer that are named as arguments are but hold something else."""
OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_8bit", "paged_adamw_8bit": "paged_adamw_8bit"}


@dataclass(frozen=True)
class Difference:
    """A field that the engine holds otherwise than the recipe asks; key: what the recipe calls it, if anything."""

    field: str
    key: str | None
    asked: Any
    held: Any

    def __str__(self) -> str:
        recipe = f"the recipe asks {self.asked!r} ({self.key})" if self.key else f"slmgrpo asks {self.asked!r}"
        return f"{self.field}: {recipe}, the engine holds {self.held!r}"


def check(recipe: Recipe, resume: RunDir | None) -> None:
    """Refuse what cannot run, all of it at once, before data or model are read."""
    if resume is not None:
        raise RecipeError(
            f"{resume.path}: a run of trainer=trl cannot be resumed, TRL does not keep all of its state; start a new "
            f"run from its adapter: slmgrpo train RECIPE --set trainer=trl --set adapter={resume.path}"
        )
    import torch

    problems = [*inexpressible(recipe), *_wrong_process(recipe, torch.cuda.is_available())]
    if problems:
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise PlanError(f"plan: {count} with trainer=trl (trainer=slmgrpo has none of them)\n{lines}")


def inexpressible(recipe: Recipe) -> Iterator[str]:
    """Settings of the recipe that TRL's GRPOTrainer has no way to follow here; needs no torch."""
    if recipe.sampling.stop:
        yield "sampling.stop: TRL ends completions at end tokens only; take the texts out"
    if recipe.sampling.engine in ("vllm", "unsloth"):
        yield (
            f"sampling.engine={recipe.sampling.engine}: under trainer=trl completions are written by the model's own "
            "generate (TRL's vLLM mode merges the adapter into the base weights); set sampling.engine=auto"
        )
    if recipe.loss.sampling_correction == "bypass":
        yield "loss.sampling_correction=bypass: TRL's generate reports no log-probs to start from; set it to none"
    if recipe.guards.actions.get("nonfinite", "stop") != "stop":
        yield "guards.actions.nonfinite: TRL takes a step that is not finite, and the adapter is lost; set it to stop"
    if any(source.shuffle_options == "member" for source in recipe.data.train):
        yield "shuffle_options: member: TRL's groups share one prompt; use item"


def _wrong_process(recipe: Recipe, cuda: bool) -> Iterator[str]:
    """The three ways of TRL: Unsloth's class (CUDA), TRL's on Unsloth's CPU backend, TRL's alone (CUDA)."""
    plain = recipe.model.backend == "transformers"
    if plain and not cuda:
        yield (
            "model.backend=transformers: TRL 1.15's log-prob kernel is written in Triton and fails without a GPU "
            '("0 active drivers"); set model.backend=unsloth, whose CPU backend replaces that kernel'
        )
    if plain and "unsloth" in sys.modules:
        yield "model.backend=transformers: unsloth is imported in this process and has changed TRL; start a new one"
    if not plain and "trl" in sys.modules and "unsloth" not in sys.modules:
        yield "model.backend=unsloth: trl is imported in this process already; import unsloth before it"


def config(recipe: Recipe, plan: Plan, run: RunDir, *, device: Device) -> dict[str, Any]:
    """Arguments of GRPOConfig: nothing that matters is left to the defaults of TRL, transformers or Unsloth."""
    train, sampling, loss, optimizer = recipe.train, recipe.sampling, recipe.loss, recipe.optimizer
    groups = _groups_together(recipe, plan)
    accumulation = plan.prompts_per_rank // groups
    dtype = {"auto": "bfloat16" if device == "cuda" else "float32"}.get(recipe.model.dtype, recipe.model.dtype)
    unsloth_cuda = recipe.model.backend == "unsloth" and device == "cuda"
    correction = loss.sampling_correction
    scheduler = optimizer.lr_scheduler_type
    return {
        # how long, in which portions
        "output_dir": str(run.path),
        "max_steps": plan.steps,
        "per_device_train_batch_size": groups * sampling.group_size,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation,
        "num_iterations": train.updates_per_rollout,
        "num_generations": sampling.group_size,
        "shuffle_dataset": False,  # the rows come in the order of slmgrpo's own sampler
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        # numbers
        "use_cpu": device == "cpu",
        "bf16": dtype == "bfloat16",
        "fp16": dtype == "float16",
        "tf32": None,
        "gradient_checkpointing": train.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": unsloth_cuda} if train.gradient_checkpointing else None,
        "torch_empty_cache_steps": None,
        "dataloader_pin_memory": device == "cuda",
        "dataloader_num_workers": 0,
        "remove_unused_columns": False,
        # completions
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p or None,
        "repetition_penalty": 1.0,
        "max_completion_length": sampling.max_tokens,
        "generation_kwargs": None,
        "cache_implementation": None,
        "use_transformers_continuous_batching": False,
        "pad_to_multiple_of": None,
        "use_vllm": False,
        # objective
        "loss_type": loss.loss_type,
        "scale_rewards": loss.scale_rewards,
        "reward_weights": [1.0],
        "multi_objective_aggregation": "sum_then_normalize",
        "beta": loss.beta,
        "use_bias_correction_kl": False,
        "sync_ref_model": False,
        "router_aux_loss_coef": 0.0,
        "epsilon": loss.epsilon,
        "epsilon_high": loss.epsilon if loss.epsilon_high is None else loss.epsilon_high,
        "delta": loss.delta,
        "importance_sampling_level": loss.importance_sampling_level,
        "mask_truncated_completions": loss.mask_truncated_completions,
        "top_entropy_quantile": loss.top_entropy_quantile,
        "entropy_coef": loss.entropy_coef,
        "use_adaptive_entropy": False,
        "off_policy_mask_threshold": loss.off_policy_mask_threshold,
        "sapo_temperature_pos": loss.sapo_temperature_pos,
        "sapo_temperature_neg": loss.sapo_temperature_neg,
        "vespo_k_pos": loss.vespo_k_pos,
        "vespo_lambda_pos": loss.vespo_lambda_pos,
        "vespo_k_neg": loss.vespo_k_neg,
        "vespo_lambda_neg": loss.vespo_lambda_neg,
        "vllm_importance_sampling_correction": correction != "none",
        "vllm_importance_sampling_mode": "token_truncate" if correction == "none" else correction,
        "vllm_importance_sampling_clip_min": None,
        "vllm_importance_sampling_clip_max": loss.sampling_correction_cap,
        "disable_dropout": False,
        "cast_lm_head_to_fp32": False,
        "use_liger_kernel": False,
        # update
        "optim": OPTIMIZERS[optimizer.name],
        "learning_rate": optimizer.learning_rate,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_epsilon": 1e-8,
        "max_grad_norm": optimizer.max_grad_norm,
        "lr_scheduler_type": "constant_with_warmup" if scheduler == "constant" and plan.warmup_steps else scheduler,
        "lr_scheduler_kwargs": None,
        "warmup_steps": plan.warmup_steps,
        # what slmgrpo does itself: evaluation, checkpoints, logs
        "eval_strategy": "no",
        "save_strategy": "no",
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "log_completions": False,
        "disable_tqdm": True,
        "report_to": [],
    }


def _groups_together(recipe: Recipe, plan: Plan) -> int:
    """Groups of a micro-batch: as many as fit into micro_batch_tokens at full length and divide a rank's groups."""
    fit = recipe.train.micro_batch_tokens // (recipe.sampling.group_size * plan.max_length)
    return next(n for n in range(plan.prompts_per_rank, 0, -1) if plan.prompts_per_rank % n == 0 and n <= max(fit, 1))


def differences(recipe: Recipe, plan: Plan, asked: Mapping[str, Any], trainer: Any) -> list[Difference]:
    """Where the live trainer's arguments, or its own copies of them, are not what was asked."""
    expected = {**asked, "generation_batch_size": plan.completions_per_step}
    found = []
    for field, value in expected.items():
        holders = [trainer.args] + [trainer] * (field in vars(trainer) and field not in OTHERWISE)
        held = [plain(getattr(holder, field, "no such field")) for holder in holders]
        if wrong := [other for other in held if other != value]:
            found.append(Difference(field, _key(recipe, field), value, wrong[0]))
    return found


def as_text(found: list[Difference], engine: str) -> str:
    """What an engine would learn otherwise than the recipe says."""
    lines = "\n".join(f"  {difference}" for difference in found)
    return f"trainer=trl: {engine} changed {len(found)} setting{'s' * (len(found) > 1)}\n{lines}\n"


def plain(value: Any) -> Any:
    """An enum as its value; everything else as it is."""
    return getattr(value, "value", value)


def as_json(found: list[Difference]) -> list[dict[str, Any]]:
    return [asdict(difference) for difference in found]


def _key(recipe: Recipe, field: str) -> str | None:
    sections = ("loss", "sampling", "optimizer", "train")
    named = (f"{name}.{field}" for name in sections if field in type(getattr(recipe, name)).model_fields)
    return KEYS.get(field) or next(named, None)


def notes(recipe: Recipe, asked: Mapping[str, Any]) -> Iterator[str]:
    """What TRL does with this recipe otherwise than slmgrpo's own trainer, for the log."""
    loss, accumulation = recipe.loss, asked["gradient_accumulation_steps"]
    per_micro = {
        "the bnpo loss": loss.loss_type == "bnpo",
        "the entropy bonus": loss.entropy_coef != 0,
        "the entropy quantile": loss.top_entropy_quantile < 1,
    }
    if accumulation > 1 and (names := [name for name, on in per_micro.items() if on]):
        yield f"TRL normalises {' and '.join(names)} in each of {accumulation} micro-batches, slmgrpo over the step"
    if loss.sampling_correction != "none":
        yield (
            f"loss.sampling_correction={loss.sampling_correction} has nothing to correct: completions are written by "
            "the model that trains, without log-probs"
        )
