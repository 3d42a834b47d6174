"""Asks TRL's own GRPOTrainer for a loss and its gradient at hand-made log-probs; no model runs, under 1 ms a case."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slmgrpo.recipe import Loss

MAX_TOKENS = 6
"""T of every case, and dr_grpo's constant."""


@dataclass(frozen=True)
class Rows:
    """R rows of a step with everything that any loss may ask for; log-probs (R, T) in float64, right-padded."""

    log_probs: Tensor
    entropies: Tensor
    lengths: list[int]
    truncated: list[bool]
    advantages: Tensor
    old: Tensor | None
    sampler: Tensor
    reference: Tensor

    @property
    def mask(self) -> Tensor:
        columns = torch.arange(self.log_probs.shape[1])
        return (columns[None] < torch.tensor(self.lengths)[:, None]).double()


@dataclass(frozen=True)
class Answer:
    loss: float
    log_probs_grad: Tensor
    entropies_grad: Tensor


def make_trainer() -> Any:
    """TRL's trainer around a model that is never run; its log-prob pass returns what the case puts into it."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    class OracleTrainer(GRPOTrainer):
        leaves: tuple[Tensor, Tensor]

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, None]:
            return *self.leaves, None

    words = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1, "<pad>": 2}, unk_token="a"))
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    trainer = OracleTrainer(
        model=model,
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>"),
        reward_funcs=[lambda prompts, completions, **columns: [0.0] * len(prompts)],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=MAX_TOKENS,
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            use_bias_correction_kl=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 4),
    )
    model.train()
    return trainer


def ask_trl(trainer: Any, rows: Rows, settings: Loss, *, accumulation: int = 1) -> Answer:
    """TRL's loss of one optimizer step over `rows` in `accumulation` micro-batches, and its gradient."""
    _configure(trainer, settings, accumulation)
    mask = rows.mask
    if settings.mask_truncated_completions:
        mask = mask * ~torch.tensor(rows.truncated)[:, None]
    trainer.args.steps_per_generation = accumulation
    # bypass is TRL without correction, given the sampler's log-probs as the old policy's
    bypass = settings.sampling_correction == "bypass"
    old = torch.where(rows.sampler.isnan(), rows.log_probs, rows.sampler) if bypass else rows.old
    log_probs = rows.log_probs.clone().requires_grad_()
    entropies = rows.entropies.clone().requires_grad_()
    count = len(rows.lengths) // accumulation
    total = 0.0
    for start in range(0, len(rows.lengths), count):
        part = slice(start, start + count)
        inputs = {
            "prompt_ids": torch.ones(count, 1, dtype=torch.long),
            "prompt_mask": torch.ones(count, 1, dtype=torch.long),
            "completion_ids": torch.ones(count, mask.shape[1], dtype=torch.long),
            "completion_mask": mask[part],
            "advantages": rows.advantages[part],
            "num_items_in_batch": torch.tensor(float(mask.sum())),
            "sampling_per_token_logps": rows.sampler[part],
            "ref_per_token_logps": rows.reference[part],
        }
        if old is not None:
            inputs["old_per_token_logps"] = old[part]
        if trainer.use_vllm:
            now = rows.log_probs if old is None else old
            inputs["importance_sampling_ratio"] = _correction(now[part], rows.sampler[part], mask[part], settings)
        trainer.leaves = (log_probs[part], entropies[part])
        loss = trainer._compute_loss(trainer.model, inputs)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    trainer._metrics["train"].clear()
    zero = torch.zeros_like(rows.log_probs)
    return Answer(
        total,
        zero if log_probs.grad is None else log_probs.grad,
        zero if entropies.grad is None else entropies.grad,
    )


def _configure(trainer: Any, settings: Loss, accumulation: int) -> None:
    args = trainer.args
    trainer.loss_type = settings.loss_type
    trainer.beta = settings.beta
    trainer.epsilon_low = settings.epsilon
    trainer.epsilon_high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    args.delta = settings.delta
    trainer.importance_sampling_level = settings.importance_sampling_level
    trainer.top_entropy_quantile = settings.top_entropy_quantile
    trainer.entropy_coef = settings.entropy_coef
    trainer._entropy_bonus_enabled = settings.entropy_coef != 0
    trainer.off_policy_mask_threshold = settings.off_policy_mask_threshold
    trainer.use_vllm = settings.sampling_correction not in ("none", "bypass")
    trainer.vllm_importance_sampling_correction = True
    args.sapo_temperature_pos = settings.sapo_temperature_pos
    args.sapo_temperature_neg = settings.sapo_temperature_neg
    args.vespo_k_pos, args.vespo_lambda_pos = settings.vespo_k_pos, settings.vespo_lambda_pos
    args.vespo_k_neg, args.vespo_lambda_neg = settings.vespo_k_neg, settings.vespo_lambda_neg
    trainer.current_gradient_accumulation_steps = accumulation


def _correction(old: Tensor, sampler: Tensor, mask: Tensor, settings: Loss) -> Tensor:
    """What TRL's generation step puts into the batch as importance_sampling_ratio (it is not a function there)."""
    log_weight = torch.nan_to_num((old - sampler) * mask, nan=0.0)
    if settings.sampling_correction.startswith("sequence"):
        log_weight = log_weight.sum(dim=-1, keepdim=True)
    weight = log_weight.exp()
    if settings.sampling_correction.endswith("truncate"):
        return torch.minimum(weight, torch.tensor(settings.sampling_correction_cap))
    return torch.where(weight > settings.sampling_correction_cap, 0.0, weight)
