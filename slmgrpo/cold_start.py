"""A short SFT on worked solutions before GRPO, by TRL's SFTTrainer; it leaves an adapter to start from."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from slmgrpo import prompts
from slmgrpo.data import Row
from slmgrpo.errors import RecipeError
from slmgrpo.model import Policy
from slmgrpo.recipe import Recipe

log = logging.getLogger("slmgrpo")

SOLUTION = "solution"
"""The column with a worked solution, written as the model should write it."""


def cold_start(policy: Policy, rows: Sequence[Row], recipe: Recipe, folder: Path) -> None:
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
