"""Every policy loss of TRL as a pure function of log-probs, normalised over the whole step.

A call returns this micro-batch's share of the step's loss: the shares of all micro-batches and ranks add up to the
loss, because every normaliser is in `Norms`, computed once a step over all rows, also those that are never run.

Shapes: R rows of one micro-batch, T tokens of its longest completion, right-padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slmgrpo.recipe import Loss
from slmgrpo.signals import kl_estimates

CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
"""Loss types that clip the ratio as PPO does; they differ in the normaliser."""


@dataclass(frozen=True)
class LossBatch:
    """What a loss needs besides the policy's log-probs. All log-probs are of unfiltered logits / temperature."""

    mask: Tensor
    """(R, T), 1 for tokens that the model wrote and that are trained."""
    advantages: Tensor
    """(R,)"""
    truncated: Tensor
    """(R,), true where a completion ended by length: left out under mask_truncated_completions."""
    old: Tensor | None = None
    """(R, T), the policy that the ratio is taken against; None: the policy as it is now (first update)."""
    sampler: Tensor | None = None
    """(R, T), as the engine reported them; NaN where it could not say."""
    reference: Tensor | None = None
    """(R, T), the base's; needed when beta > 0."""
    high_entropy: Tensor | None = None
    """(R, T), `high_entropy_mask`; needed when top_entropy_quantile < 1."""


@dataclass(frozen=True)
class Norms:
    """Counts over all rows of all ranks in this optimizer step, dropped rows included."""

    rows: int
    tokens: int
    """Trained tokens of this update."""
    max_tokens: int
    entropy_tokens: int
    """Tokens that the entropy bonus acts on."""


@dataclass(frozen=True)
class LossResult:
    loss: Tensor
    """Scalar, this micro-batch's share of the step's loss."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Sums over trained tokens (a name that ends in `_max`: a maximum); `add_stats` and `mean_stats` take them."""


def norms_of(
    lengths: Sequence[int],
    truncated: Sequence[bool],
    settings: Loss,
    *,
    max_tokens: int,
    entropy_tokens: int | None = None,
) -> Norms:
    """Normalisers of one update from the trained tokens per row, over all rows of all ranks.

    Truncated rows that are masked stay in the row count and leave the token counts. entropy_tokens: the tokens in
    `high_entropy_mask` (None: all trained tokens).
    """
    dropped = settings.mask_truncated_completions
    tokens = sum(n for n, cut in zip(lengths, truncated, strict=True) if not (cut and dropped))
    return Norms(
        rows=len(lengths),
        tokens=tokens,
        max_tokens=max_tokens,
        entropy_tokens=tokens if entropy_tokens is None else entropy_tokens,
    )


def why_silent_rows_run(settings: Loss, lora_dropout: float) -> str | None:
    """Why rows of zero advantage change the gradient and cannot be dropped, or None where dropping them is exact."""
    reasons = {
        "beta > 0": settings.beta > 0,
        "entropy_coef != 0": settings.entropy_coef != 0,
        "top_entropy_quantile < 1": settings.top_entropy_quantile < 1,
        "lora.dropout > 0": lora_dropout > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def policy_loss(
    log_probs: Tensor, batch: LossBatch, settings: Loss, norms: Norms, *, entropies: Tensor | None = None
) -> LossResult:
    """This micro-batch's share of the step's loss; its gradient flows into log_probs and entropies, both (R, T)."""
    mask = loss_mask(batch, settings).to(log_probs.dtype)
    advantages = batch.advantages.to(log_probs.dtype)[:, None]
    old = _old_policy(log_probs, batch, settings)
    log_ratio = (log_probs - old).masked_fill(mask == 0, 0.0)
    ratio = _ratio(log_ratio, mask, settings)
    weight = sampling_weight(old, batch.sampler, mask, settings)
    phi = kl = None

    if settings.loss_type in CLIPPED:
        per_token = _clipped(ratio, advantages, settings)
    elif settings.loss_type == "cispo":
        per_token = _cispo(ratio, advantages, log_probs, settings)
    elif settings.loss_type == "sapo":
        per_token = _sapo(ratio, advantages, settings)
    else:
        phi = _vespo_weight(log_ratio, weight, advantages, mask, settings)
        per_token = -phi * advantages * log_probs

    if settings.off_policy_mask_threshold is not None:
        drift = _drift(log_probs, old if batch.sampler is None else batch.sampler, mask)
        per_token = per_token * ((advantages >= 0) | (drift <= settings.off_policy_mask_threshold))
    if settings.top_entropy_quantile < 1:
        assert batch.high_entropy is not None
        per_token = per_token * batch.high_entropy
    if weight is not None and settings.loss_type != "vespo":
        per_token = per_token * weight
    if settings.beta > 0:
        assert batch.reference is not None
        *_, kl = kl_estimates(log_probs, batch.reference)
        per_token = per_token + settings.beta * kl

    loss = _normalise(per_token, mask, settings, norms)
    if settings.entropy_coef != 0:
        assert entropies is not None
        acted_on = mask if batch.high_entropy is None else mask * batch.high_entropy
        loss = loss - settings.entropy_coef * (entropies * acted_on).sum() / max(norms.entropy_tokens, 1)

    with torch.no_grad():
        means = {"ratio": ratio, "sampling_weight": weight, "phi": phi, "kl": kl, "entropy_trained": entropies}
        if kl is not None and batch.reference is not None:
            means["kl_k1"], means["kl_k2"], _ = kl_estimates(log_probs, batch.reference)
        stats = {name: (value * mask).sum() for name, value in means.items() if value is not None}
        stats |= {"tokens": mask.sum(), "ratio_max": (ratio * mask).amax()}
        stats |= _clip_counts(ratio, advantages, mask, settings)
        if batch.sampler is not None:
            at_rollout = log_probs if batch.old is None else batch.old
            gap = (at_rollout - batch.sampler).nan_to_num(nan=0.0).abs() * mask
            stats |= {"sampler_gap": gap.sum(), "sampler_gap_max": gap.amax()}
            drift = kl_estimates(batch.sampler, log_probs)
            stats |= {f"sampler_kl_k{i}": (k.nan_to_num(nan=0.0) * mask).sum() for i, k in enumerate(drift, start=1)}
    return LossResult(loss, stats)


def float16_scale(settings: Loss, norms: Norms) -> float:
    """What a float16 model's loss is multiplied by before the backward pass, and its gradient divided by after it.

    About what the loss type divides by, so that the derivative in a log-prob is about the advantage: far from 65,504,
    where float16 ends, and from 6e-5, where it loses digits (unscaled, the gradient is wrong by 0.33 of its norm at
    32,768 tokens). A power of two rounds nothing, and counts of the whole step make it one number on all micro-batches
    and ranks.
    """
    divisor = norms.tokens
    if settings.loss_type == "luspo":
        divisor = norms.rows
    elif settings.loss_type == "dr_grpo":
        divisor = norms.rows * norms.max_tokens
    elif settings.loss_type in ("grpo", "sapo"):
        divisor = norms.rows * 256  # a row's own length, 1 to 65,536: the middle, so no derivative is far from 1
    return 2.0 ** round(math.log2(max(divisor, 1)))


def loss_mask(batch: LossBatch, settings: Loss) -> Tensor:
    """(R, T), the tokens that are trained: none of a truncated completion where those are masked (DAPO, sec. 3.4)."""
    if not settings.mask_truncated_completions:
        return batch.mask
    return batch.mask * ~batch.truncated.bool()[:, None]


def sampling_weight(old: Tensor, sampler: Tensor | None, mask: Tensor, settings: Loss) -> Tensor | None:
    """Weight for the gap between trainer and sampler, exp(old - sampler): (R, T), or (R, 1) at sequence level.

    truncate: min(weight, cap); mask: 0 above the cap. A token without a sampler's log-prob counts as equal.
    """
    if settings.sampling_correction in ("none", "bypass"):
        return None
    assert sampler is not None
    gap = ((old - sampler) * mask).nan_to_num(nan=0.0)
    level, action = settings.sampling_correction.split("_")
    weight = (gap.sum(-1, keepdim=True) if level == "sequence" else gap).exp()
    cap = settings.sampling_correction_cap
    return weight.clamp(max=cap) if action == "truncate" else weight.masked_fill(weight > cap, 0.0)


def entropy_threshold(entropies: Tensor, top_entropy_quantile: float) -> Tensor:
    """The entropy that only this share of the step's trained tokens, (N,) over all ranks, reaches (2506.01939)."""
    if entropies.numel() == 0:
        return entropies.new_tensor(math.inf)
    return torch.quantile(entropies.detach().float(), 1 - top_entropy_quantile)


def high_entropy_mask(entropies: Tensor, mask: Tensor, threshold: Tensor) -> Tensor:
    """(R, T), the trained tokens that decide: only they get a policy gradient when top_entropy_quantile < 1."""
    return (entropies.detach() >= threshold) & mask.bool()


def add_stats(total: dict[str, Tensor], part: Mapping[str, Tensor]) -> None:
    """Fold one micro-batch's (or rank's) sums into the step's."""
    for name, value in part.items():
        if name not in total:
            total[name] = value
        else:
            total[name] = torch.maximum(total[name], value) if name.endswith("_max") else total[name] + value


def mean_stats(total: Mapping[str, Tensor], norms: Norms) -> dict[str, float]:
    """Means per trained token: of clip shares over all rows (dropped ones never clip), of the rest over rows run."""
    if not total:
        return {}
    run = max(float(total["tokens"]), 1.0)
    means: dict[str, float] = {}
    for name, value in total.items():
        if name == "tokens":
            continue
        divisor = max(norms.tokens, 1) if name.startswith("clip_") else run
        means[name] = float(value) if name.endswith("_max") else float(value) / divisor
    return means


def _old_policy(log_probs: Tensor, batch: LossBatch, settings: Loss) -> Tensor:
    """(R, T). bypass takes the sampler for the old policy, so that ratio and clip carry the whole correction."""
    if settings.sampling_correction == "bypass":
        assert batch.sampler is not None
        return torch.where(batch.sampler.isnan(), log_probs.detach(), batch.sampler)
    return log_probs.detach() if batch.old is None else batch.old


def _ratio(log_ratio: Tensor, mask: Tensor, settings: Loss) -> Tensor:
    """pi / pi_old per token (R, T), or its geometric mean over the completion (R, 1) (GSPO, 2507.18071, eq. 7)."""
    if settings.importance_sampling_level == "token":
        return log_ratio.exp()
    return ((log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()


def _clipped(ratio: Tensor, advantages: Tensor, settings: Loss) -> Tensor:
    """-min(r A, clip(r, 1 - eps, 1 + eps_high) A): GRPO (2402.03300, eq. 3), clip-higher (DAPO, 2503.14476, eq. 10).

    delta also bounds r itself, which matters for negative advantages (two-sided clip, INTELLECT-2, 2505.07291).
    """
    bounded = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    clipped = ratio.clamp(1 - settings.epsilon, 1 + _epsilon_high(settings))
    return -torch.min(bounded * advantages, clipped * advantages)


def _cispo(ratio: Tensor, advantages: Tensor, log_probs: Tensor, settings: Loss) -> Tensor:
    """-sg(min(r, eps_max)) A log pi (MiniMax-M1, 2506.13585).

    epsilon_high is the cap itself, not a distance from 1: 5 is usual, and TRL's default (epsilon) caps at 0.2.
    """
    return -ratio.clamp(max=_epsilon_high(settings)).detach() * advantages * log_probs


def _sapo(ratio: Tensor, advantages: Tensor, settings: Loss) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the advantage's sign (SAPO, 2511.20347)."""
    tau = torch.where(advantages > 0, settings.sapo_temperature_pos, settings.sapo_temperature_neg).to(ratio.dtype)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantages


@torch.no_grad()
def _vespo_weight(log_ratio: Tensor, weight: Tensor | None, advantages: Tensor, mask: Tensor, settings: Loss) -> Tensor:
    """phi(w) = e^lambda w^k e^(-lambda w) for w the whole completion's ratio, (R, 1) (VESPO, 2602.10693).

    The sampling weight is a part of w. Clamps as in the authors' code: 20 on log-ratios, 1e-8 on w.
    """
    smallest = math.log(1e-8)
    log_w = (log_ratio.clamp(-20, 20) * mask).sum(-1, keepdim=True)
    if weight is not None:
        log_w = log_w + weight.log().clamp(smallest, 20).sum(-1, keepdim=True)
    log_w = log_w.clamp(smallest, 20)
    positive = advantages >= 0
    k = torch.where(positive, settings.vespo_k_pos, settings.vespo_k_neg).to(log_w.dtype)
    rate = torch.where(positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg).to(log_w.dtype).clamp(min=1e-4)
    return (rate + k * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


@torch.no_grad()
def _drift(log_probs: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """Mean log(pi_start / pi) of a completion, (R, 1); negative ones that drifted too far are left out.

    DeepSeek-V3.2 (2512.02556, eq. 9), from the sampler's log-probs where there are any.
    """
    gap = (start - log_probs).nan_to_num(nan=0.0) * mask
    return gap.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _normalise(per_token: Tensor, mask: Tensor, settings: Loss, norms: Norms) -> Tensor:
    """Sum of (R, T) or (R, 1) losses over the loss type's normaliser.

    grpo, sapo: mean over a row's tokens, then over rows. luspo: sum over tokens, mean over rows (2602.05261).
    dr_grpo: sum / (rows x max_tokens) (2503.20783). dapo, bnpo, cispo, vespo: sum / trained tokens (2503.14476,
    eq. 12); for bnpo TRL counts them per micro-batch, which is the same at accumulation 1.
    """
    per_row = (per_token * mask).sum(-1)
    if settings.loss_type in ("grpo", "sapo"):
        return (per_row / mask.sum(-1).clamp(min=1)).sum() / norms.rows
    if settings.loss_type == "luspo":
        return per_row.sum() / norms.rows
    if settings.loss_type == "dr_grpo":
        return per_row.sum() / (norms.rows * norms.max_tokens)
    return per_row.sum() / max(norms.tokens, 1)


def _epsilon_high(settings: Loss) -> float:
    return settings.epsilon if settings.epsilon_high is None else settings.epsilon_high


def _clip_counts(ratio: Tensor, advantages: Tensor, mask: Tensor, settings: Loss) -> dict[str, Tensor]:
    """Tokens whose gradient the clip cuts; none for sapo and vespo, which do not clip."""
    high = _epsilon_high(settings)
    if settings.loss_type == "cispo":
        return {"clip_high": ((ratio > high) & (advantages > 0)).mul(mask).sum()}
    if settings.loss_type not in CLIPPED:
        return {}
    return {
        "clip_low": ((ratio < 1 - settings.epsilon) & (advantages < 0)).mul(mask).sum(),
        "clip_high": ((ratio > 1 + high) & (advantages > 0)).mul(mask).sum(),
    }
