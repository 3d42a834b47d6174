"""A short SFT on worked solutions before GRPO, by TRL's SFTTrainer; it leaves an adapter to start from."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from slmgrpo import data, model, prompts
from slmgrpo.callbacks import Observer
from slmgrpo.errors import RecipeError, RunError, SlmgrpoError
from slmgrpo.interrupt import Interrupted
from slmgrpo.plan import Plan
from slmgrpo.recipe import Recipe
from slmgrpo.run import RunDir

log = logging.getLogger("slmgrpo")

SOLUTION = "solution"
"""The column with a worked solution, written as the model should write it."""


def cold_start(policy: model.Policy, rows: Sequence[data.Row], recipe: Recipe, folder: Path) -> None:
    """Teach the policy's adapter the rows' solutions (loss on the solution alone) and save it to `folder`."""
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    settings = recipe.cold_start
    assert settings is not None
    tokenizer = policy.tokenizer
    examples = []
    limit = recipe.prompt.max_tokens + recipe.sampling.max_tokens
    for row, rendered in zip(rows, prompts.render_all(rows, recipe.prompt, tokenizer), strict=True):
        solution = tokenizer(row[SOLUTION] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        ids = [*rendered.ids, *solution]
        if len(ids) <= limit:
            examples.append({"input_ids": ids, "labels": [-100] * len(rendered.ids) + solution})
    if not examples:
        raise RecipeError(f"cold_start.data: no solution fits into {limit} tokens; raise sampling.max_tokens")
    log.info("cold start: %d steps on %d of %d worked solutions", settings.steps, len(examples), len(rows))
    on_cpu = policy.device.type == "cpu"
    arguments = SFTConfig(
        output_dir=str(folder / "trainer"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.batch_size,
        gradient_accumulation_steps=1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_length=limit,
        packing=False,
        gradient_checkpointing=recipe.train.gradient_checkpointing,
        optim="adamw_torch",
        bf16=not on_cpu,
        use_cpu=on_cpu,
        seed=recipe.seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=max(1, settings.steps // 10),
    )
    SFTTrainer(
        model=policy.model, processing_class=tokenizer, args=arguments, train_dataset=Dataset.from_list(examples)
    ).train()
    partial = folder / f".partial_{os.getpid()}"
    policy.save_adapter(partial)
    partial.rename(folder / "adapter")  # a folder of this name is a whole one


def rows_of(recipe: Recipe, base: Path) -> data.Rows | None:
    """The rows of `cold_start.data`; None where the recipe has no cold start."""
    if recipe.cold_start is None:
        return None
    return data.load_sources(recipe.cold_start.data, base=base, need={SOLUTION} | prompts.columns(recipe.prompt))


def started(
    recipe: Recipe, plan: Plan, policy: model.Policy, rows: data.Rows, run: RunDir, base: Path, observer: Observer
) -> model.Policy:
    """The policy after the cold start, which a resumed run finds done; merged into a new base where the recipe asks."""
    folder = run.path / "cold_start"
    adapter = folder / "adapter"
    if not (adapter / "adapter_model.safetensors").exists():
        observer.stage(f"cold start: {recipe.cold_start.steps if recipe.cold_start else 0} steps on worked solutions")
        with _kept(run):
            cold_start(policy, rows, recipe, folder)
    if recipe.merge_adapter:
        log.info("the cold start's adapter is merged: the reference is the model after it")
        policy = model.load(recipe.model_copy(update={"adapter": str(adapter)}), max_length=plan.max_length)
        prompts.set_chat_template(policy.tokenizer, recipe.model, base)
    else:
        log.info("the cold start's adapter is continued: the reference (adapter off) is the model before it")
        policy.load_adapter(adapter)
    return policy


@contextmanager
def _kept(run: RunDir) -> Iterator[None]:
    """What ends the cold start leaves a run that begins with it again."""
    way = f"{run.path} is kept (before step 1); resume with `slmgrpo train --resume {run.path}`"
    try:
        yield
    except Interrupted as stop:
        run.status("interrupted", 0, signal=str(stop))
        stop.saved = way
        raise
    except Exception as error:
        log.error("%s", traceback.format_exc())
        reason = str(error) if isinstance(error, SlmgrpoError) else f"{type(error).__name__}: {error}".splitlines()[0]
        with suppress(OSError):
            run.status("failed", 0, error=reason)
        raise RunError(f"cold start: {reason}\n{way}") from error
