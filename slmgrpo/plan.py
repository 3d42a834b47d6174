"""Recipe x GPUs becomes a Plan: every derived number of a run, computed here and nowhere else, without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from slmgrpo.errors import PlanError
from slmgrpo.recipe import Evaluation, Recipe, Source
from slmgrpo.recipe_load import Loaded
from slmgrpo.sources import GENERATED_ROWS, read

COUNTED_BYTES = 20_000_000
"""Files up to this size are counted even where only the epochs shown depend on it."""


@dataclass(frozen=True)
class Plan:
    """A run in numbers. A `_max` is a bound, reached when every prompt and completion is as long as it may be."""

    recipe: str
    gpus: int
    """Ranks, on all machines together."""
    steps: int
    """Optimizer steps."""
    rollouts: int
    """Times that completions are written; each serves updates_per_rollout steps."""
    updates_per_rollout: int
    prompts_per_step: int
    group_size: int
    completions_per_step: int
    prompts_per_rank: int
    completions_per_rank: int
    prompts: int
    """Over the whole run, repetitions counted."""
    completions: int
    rows: int | None
    """Training rows; None: not known without a download."""
    epochs: float | None
    """Passes over those rows; None where they are not known."""
    max_length: int
    """Tokens of the longest prompt with the longest completion."""
    prompt_tokens_per_step_max: int
    """Each prompt of a group counted once."""
    completion_tokens_per_step_max: int
    completion_tokens_max: int
    """Over the whole run: what the engine writes."""
    micro_batches_max: int
    """Forward passes of a rank in an update, when no row is silent and all are as long as they may be."""
    learning_rate: float
    lr_scheduler_type: str
    warmup_steps: int
    lr_sum: float
    """Sum of the learning rates of all steps."""
    lr_norm: float
    """Root of the sum of their squares: what a random walk of that many steps scales with."""
    checkpoints: int
    """Written; the newest `keep_checkpoints` stay."""
    keep_checkpoints: int
    evaluations: int
    """Of held-out rows and suites, before and after included; 0 without either."""
    reward_workers: int
    """Grading processes of a rank."""
    notes: tuple[str, ...]
    """What is allowed but worth knowing."""


def plan(
    recipe: Loaded | Recipe, gpus: int = 1, rows: int | None = None, *, nodes: int = 1, base: Path | None = None
) -> Plan:
    """Derive the numbers, or raise PlanError with the nearest settings that work.

    gpus: ranks on all nodes together. rows: number of training rows where the caller knows it better than
    the recipe. base: the recipe's folder (a Loaded knows its own).
    """
    if isinstance(recipe, Loaded):
        recipe, base = recipe.recipe, base or recipe.base
    base = base or Path.cwd()
    train, sampling, optimizer = recipe.train, recipe.sampling, recipe.optimizer
    _check_ranks(recipe, gpus, nodes)
    if recipe.eval != Evaluation():
        from slmgrpo.eval.during import suites_of

        suites_of(recipe, base)  # refuses what it does not find
    if rows is None:
        rows = _count_rows(recipe, base)
    steps = train.steps if train.steps is not None else _steps_of_epochs(recipe, rows)
    rollouts = -(-steps // train.updates_per_rollout)
    prompts = rollouts * train.prompts_per_step
    groups_of_rank = train.prompts_per_step // gpus
    max_length = recipe.prompt.max_tokens + sampling.max_tokens
    group_tokens = sampling.group_size * max_length
    groups_together = train.micro_batch_tokens // group_tokens
    rows_together = max(1, train.micro_batch_tokens // max_length)
    split = groups_of_rank * -(-sampling.group_size // rows_together)
    warmup = math.ceil(optimizer.warmup_ratio * steps - 1e-9)
    first, second = lr_sums(optimizer.lr_scheduler_type, steps, warmup)
    completions_per_step = train.prompts_per_step * sampling.group_size
    return Plan(
        recipe=recipe.name,
        gpus=gpus,
        steps=steps,
        rollouts=rollouts,
        updates_per_rollout=train.updates_per_rollout,
        prompts_per_step=train.prompts_per_step,
        group_size=sampling.group_size,
        completions_per_step=completions_per_step,
        prompts_per_rank=groups_of_rank,
        completions_per_rank=groups_of_rank * sampling.group_size,
        prompts=prompts,
        completions=prompts * sampling.group_size,
        rows=rows,
        epochs=None if rows is None else prompts / rows,
        max_length=max_length,
        prompt_tokens_per_step_max=train.prompts_per_step * recipe.prompt.max_tokens,
        completion_tokens_per_step_max=completions_per_step * sampling.max_tokens,
        completion_tokens_max=rollouts * completions_per_step * sampling.max_tokens,
        micro_batches_max=-(-groups_of_rank // groups_together) if groups_together else split,
        learning_rate=optimizer.learning_rate,
        lr_scheduler_type=optimizer.lr_scheduler_type,
        warmup_steps=warmup,
        lr_sum=optimizer.learning_rate * first,
        lr_norm=optimizer.learning_rate * math.sqrt(second),
        checkpoints=1 + _before_the_last(train.save_every, rollouts, train.updates_per_rollout),
        keep_checkpoints=train.keep_checkpoints,
        evaluations=_evaluations(recipe, rollouts),
        reward_workers=recipe.grading.workers or max(1, min(16, _cores() * nodes // gpus)),
        notes=tuple(_notes(recipe, steps, group_tokens)),
    )


def _check_ranks(recipe: Recipe, gpus: int, nodes: int) -> None:
    prompts = recipe.train.prompts_per_step
    if gpus < 1:
        raise PlanError(f"plan: {gpus} GPUs; write --gpus 1 or more")
    if gpus > 1 and recipe.trainer == "trl":
        raise PlanError(
            f"plan: trainer=trl on {gpus} GPUs: this baseline runs in one process; use --gpus 1, or trainer=slmgrpo"
        )
    if gpus > 1 and recipe.cold_start is not None:
        raise PlanError(
            f"plan: cold_start on {gpus} GPUs: its SFT runs in one process; make the adapter first (--gpus 1 "
            "--set train.steps=1 --set train.epochs=null), then train with --set cold_start=null --set "
            "adapter=RUN/cold_start/adapter"
        )
    if prompts % gpus == 0:
        return
    lower = prompts // gpus * gpus
    sizes = [str(size) for size in (lower, lower + gpus) if size]
    each = gpus // nodes  # --gpus counts those of one machine
    below = next((count for count in range(min(each, prompts), 0, -1) if prompts % (count * nodes) == 0), None)
    above = next((count for count in range(each, min(prompts, 64 * each) + 1) if prompts % (count * nodes) == 0), None)
    counts = [str(count) for count in (below, above) if count]
    raise PlanError(
        f"plan: train.prompts_per_step={prompts} on {gpus} GPUs is not the same number of whole groups for each; "
        f"use --set train.prompts_per_step={' or '.join(sizes)}"
        + (f", or --gpus {' or '.join(counts)}" if counts else "")
    )


def _steps_of_epochs(recipe: Recipe, rows: int | None) -> int:
    train = recipe.train
    if train.epochs is None:
        raise PlanError("plan: the recipe says neither how many steps nor epochs; use --set train.steps=100")
    if rows is None:
        unknown = [i for i, source in enumerate(recipe.data.train) if _declared(source) is None]
        sources = ", ".join(recipe.data.train[i].source for i in unknown)
        sets = " ".join(f"--set data.train.{i}.rows=N" for i in unknown)
        raise PlanError(
            f"plan: train.epochs={train.epochs:g} needs the number of rows of {sources}; use {sets} "
            "(its page says how many), or --set train.epochs=null --set train.steps=300"
        )
    rollouts = max(1, math.ceil(train.epochs * rows / train.prompts_per_step - 1e-9))
    return rollouts * train.updates_per_rollout


def _count_rows(recipe: Recipe, base: Path) -> int | None:
    """Training rows; None where a source cannot be counted here, or is a large file whose count decides nothing."""
    counts = [_declared(source) or _counted(source, base, recipe.train.epochs is None) for source in recipe.data.train]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _declared(source: Source) -> int | None:
    """What the recipe itself says of a source's rows."""
    kind = source.source.partition(":")[0]
    if kind == "reasoning_gym":
        return source.limit or source.options.get("size", GENERATED_ROWS)
    if kind == "hub" and source.rows is not None:
        return min(source.rows, source.limit or source.rows)
    return None


def _counted(source: Source, base: Path, only_small: bool) -> int | None:
    kind, _, name = source.source.partition(":")
    if kind == "hub":
        return None
    if kind == "file" and only_small:
        file = base / Path(name).expanduser()
        if file.is_file() and file.stat().st_size > COUNTED_BYTES:
            return None
    return sum(1 for _ in islice(read(source, base).items, source.limit))


def lr_sums(scheduler: str, steps: int, warmup: int) -> tuple[float, float]:
    """Sums over all steps of the schedule's factor and of its square, as transformers schedules it.

    The factor of step i (from 0) is i / warmup while rising; then 1, or a line or half a cosine towards 0.
    """
    rising = (warmup - 1) / 2, (warmup - 1) * (2 * warmup - 1) / (6 * warmup) if warmup else 0.0
    rest = steps - warmup
    if rest <= 0:
        falling = 0.0, 0.0
    elif scheduler == "constant":
        falling = float(rest), float(rest)
    elif scheduler == "linear":
        falling = (rest + 1) / 2, (rest + 1) * (2 * rest + 1) / (6 * rest)
    else:
        falling = (rest + 1) / 2, (3 * rest + 4) / 8 if rest > 1 else 1.0
    return (rising[0] if warmup else 0.0) + falling[0], rising[1] + falling[1]


def _before_the_last(every: int, rollouts: int, updates: int) -> int:
    """At how many rollout ends before the last one a multiple of `every` has just been passed."""
    return min((rollouts - 1) * updates // every, rollouts - 1)


def _evaluations(recipe: Recipe, rollouts: int) -> int:
    every, updates = recipe.eval.every, recipe.train.updates_per_rollout
    between = _before_the_last(every, rollouts, updates) if every else 0
    return 2 + between if recipe.data.heldout or recipe.eval.suites else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _notes(recipe: Recipe, steps: int, group_tokens: int) -> Iterator[str]:
    loss, train, sampling = recipe.loss, recipe.train, recipe.sampling
    if group_tokens > train.micro_batch_tokens:
        yield (
            f"a full group has {sampling.group_size} x {group_tokens // sampling.group_size} = {group_tokens:,} "
            f"tokens, more than train.micro_batch_tokens={train.micro_batch_tokens:,}: such a group is split"
        )
    reasons = [
        name
        for name, on in (
            ("loss.beta > 0", loss.beta > 0),
            ("lora.dropout > 0", recipe.lora.dropout > 0),
            ("an entropy bonus", loss.entropy_coef != 0),
            ("an entropy quantile", loss.top_entropy_quantile < 1),
        )
        if on
    ]
    if recipe.eval.best is not None:
        yield f"the checkpoint with the highest {recipe.eval.best} is kept beside the newest ones"
    if reasons:
        yield f"rows without signal are run too, because of {' and '.join(reasons)}"
    if loss.loss_type == "dr_grpo" and loss.scale_rewards != "none":
        yield f"dr_grpo's paper does not divide by a deviation; here loss.scale_rewards is {loss.scale_rewards}"
    if loss.loss_type == "luspo" and loss.importance_sampling_level == "token":
        yield "luspo's paper takes ratios by sequence; here loss.importance_sampling_level is token"
    if loss.importance_sampling_level == "sequence" and loss.loss_type in ("bnpo", "dr_grpo", "dapo", "cispo"):
        yield f"{loss.loss_type} sums over tokens, so sequence ratios count by length; GSPO's paper uses grpo"
    if train.steps is not None and steps % train.updates_per_rollout:
        yield f"the last rollout serves {steps % train.updates_per_rollout} of {train.updates_per_rollout} updates"
    if sampling.engine == "hf" and recipe.model.backend == "unsloth":
        yield "engine hf with backend unsloth runs on a CPU only; on CUDA set model.backend: transformers"
    if sampling.engine == "vllm":
        yield (
            "engine vllm holds the base model a second time, in main memory while it sleeps; "
            f"sampling.vllm_memory={sampling.vllm_memory:g} of each GPU must have room for it and its cache"
        )


def describe(plan: Plan) -> list[tuple[str, str]]:
    """The plan as (what, how much) pairs for a table."""
    rollouts = (
        ""
        if plan.updates_per_rollout == 1
        else f" ({plan.rollouts:,} rollouts of {plan.updates_per_rollout} updates each)"
    )
    if plan.rows is None or plan.epochs is None:
        data = "number of training rows not known here"
    else:
        data = f"{plan.rows:,} rows, {plan.epochs:.3g} {'epoch' if plan.epochs == 1 else 'epochs'}"
    schedule = {"constant": "constant", "linear": "linear to 0", "cosine": "cosine to 0"}[plan.lr_scheduler_type]
    warmup = f", {plan.warmup_steps:,} steps of warmup" if plan.warmup_steps else ""
    pairs = [
        ("recipe", plan.recipe),
        ("steps", f"{plan.steps:,}{rollouts}"),
        ("a step", f"{plan.prompts_per_step} prompts x {plan.group_size} = {plan.completions_per_step:,} completions"),
        *(
            [("ranks", f"{plan.gpus}"), ("a rank", f"{_of(plan.prompts_per_rank, 'prompt')} of a step")]
            if plan.gpus > 1
            else []
        ),
        ("in all", f"{plan.prompts:,} prompts, {plan.completions:,} completions"),
        ("data", data),
        (
            "tokens, at most",
            f"{plan.max_length:,} in a row, {plan.completion_tokens_per_step_max:,} written a step, "
            f"{plan.completion_tokens_max:,} in all",
        ),
        ("micro-batches", f"at most {plan.micro_batches_max} a rank and update"),
        ("learning rate", f"{plan.learning_rate:g}, {schedule}{warmup}"),
        ("checkpoints", f"{plan.checkpoints:,} written, {plan.keep_checkpoints} kept"),
        ("evaluations", f"{plan.evaluations:,}" if plan.evaluations else "none: no held-out rows and no suites"),
        ("grading", f"{_of(plan.reward_workers, 'process')} a rank on this machine"),
    ]
    return pairs + [("note", note) for note in plan.notes]


def _of(count: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{count:,} {what if count == 1 else plural}"
