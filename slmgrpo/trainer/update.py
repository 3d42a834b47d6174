"""One optimizer step on a rollout: rows with a gradient in micro-batches, their loss, one gradient over all ranks."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slmgrpo.rollout.groups import Group
from slmgrpo.run import Clock
from slmgrpo.trainer import losses, packing
from slmgrpo.trainer.context import Context
from slmgrpo.trainer.logprobs import TokenRow, decoder_of, log_probs

log = logging.getLogger("slmgrpo")


@dataclass
class Micro:
    """Rows of one forward pass, with what later updates compare against."""

    rows: list[TokenRow]
    advantages: list[float]
    truncated: list[bool]
    sampler: list[Sequence[float]] | None
    """Its log-probs; None where they are those of a filtered distribution."""
    old: Tensor | None = None
    reference: Tensor | None = None
    entropies: Tensor | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Work:
    """What is to be learned from a rollout: this rank's micro-batches, and counts over all ranks."""

    micros: list[Micro]
    rows: int
    dropped: int
    """Rows that have no gradient and are not run."""
    trunk_tokens: int
    padded_tokens: int
    """What one padded pass after the other would take in place of trunk_tokens."""


def work_of(ctx: Context, groups: Sequence[Group], weights: list[list[float]]) -> Work:
    """Rows that have a gradient, shared among the ranks and in micro-batches by tokens."""
    recipe = ctx.recipe
    drop = losses.why_silent_rows_run(recipe.loss, recipe.lora.dropout) is None
    masked = recipe.loss.mask_truncated_completions  # such rows have no gradient at all
    every = [
        (group.prompted.of(member.completion.member).prompt_ids, member.completion, weight)
        for group, group_weights in zip(groups, weights, strict=True)
        for member, weight in zip(group.members, group_weights, strict=True)
    ]
    kept = [
        (prompt, completion, weight)
        for prompt, completion, weight in every
        if (weight != 0 or not drop) and not (masked and completion.finish_reason == "length")
    ]
    rows = [TokenRow(prompt, completion.token_ids) for prompt, completion, _ in kept]
    if rows and ctx.packed is None:
        ctx.packed = _first_rows(ctx, rows, [completion.log_probs for _, completion, _ in kept])
    packed, limit = bool(ctx.packed), recipe.train.micro_batch_tokens
    batches_of_rank = [
        [[part[i] for i in batch] for batch in packing.micro_batches([rows[i] for i in part], limit, packed=packed)]
        for part in packing.shares(rows, ctx.ranks.world, packed=packed)
    ]
    micros = [
        Micro(
            rows=[rows[i] for i in batch],
            advantages=[kept[i][2] for i in batch],
            truncated=[kept[i][1].finish_reason == "length" for i in batch],
            sampler=[kept[i][1].log_probs for i in batch] if _comparable(ctx) else None,
        )
        for batch in batches_of_rank[ctx.ranks.rank]
    ]
    passes_now = [[rows[i] for i in batch] for batches in batches_of_rank for batch in batches]
    passes_padded = [[rows[i] for i in batch] for batch in packing.micro_batches(rows, limit, packed=False)]
    return Work(
        micros,
        rows=len(rows),
        dropped=len(every) - len(rows),
        trunk_tokens=sum(packing.pass_tokens(each, packed=packed) for each in passes_now),
        padded_tokens=sum(packing.pass_tokens(each, packed=False) for each in passes_padded),
    )


def _first_rows(ctx: Context, rows: Sequence[TokenRow], sampler: Sequence[Sequence[float]]) -> bool:
    """Whether log-probs take the packed path; by a group's first and last row, which the sampler must agree on too."""
    model, limits, temperature = ctx.policy.model, ctx.recipe.guards, ctx.recipe.sampling.temperature
    group = [i for i, row in enumerate(rows) if row.prompt_ids == rows[0].prompt_ids]
    ends = [rows[i] for i in (group[0], group[-1])]
    gap = None
    if _comparable(ctx):
        gap = packing.sampler_gap(model, ends, [sampler[group[0]], sampler[group[-1]]], temperature)
    allowed = limits.engine_parity or packing.precision_of(model)
    gap = next((found for found in ctx.ranks.gather(gap) if found is None or not found <= allowed), gap)
    if gap is not None and not gap <= allowed:
        what = f"sampler ({ctx.engine.name}) and trainer differ by {gap:.2g} nats a token, the limit is {allowed:g}"
        ctx.guards.breach("engine_parity", what, gap)
    reason = packing.can_pack(model, longest_row=ctx.plan.max_length)
    if reason is None and ctx.guards.action("log_prob_paths") != "off":
        reason = packing.differs_when_packed(model, ends, temperature, allowed=limits.log_prob_paths)
        reason = next(filter(None, ctx.ranks.gather(reason)), None)
        if reason:
            ctx.guards.breach("log_prob_paths", reason)
    log.info("log-prob path: %s", "packed" if reason is None else f"plain, since {reason}")
    return reason is None


def _comparable(ctx: Context) -> bool:
    """Whether the sampler's log-probs mean what the trainer's do: vLLM's are renormalised by its filters."""
    return ctx.engine.name == "hf" or not ctx.recipe.sampling.filters


def optimise(ctx: Context, groups: Sequence[Group], micros: list[Micro], clock: Clock) -> dict[str, Any]:
    """One optimizer step on the whole rollout; returns means per token, the gradient norm and the learning rate.

    Where loss or gradient is not finite the adapter stays as it is.
    """
    recipe, settings = ctx.recipe, ctx.recipe.loss
    model, parameters = ctx.policy.model, [p for _, p in ctx.policy.trainable()]
    members = [member for group in groups for member in group.members]
    threshold, acted_on = _prepare(ctx, micros)
    norms = losses.norms_of(
        [len(member.completion.token_ids) for member in members],
        [member.completion.finish_reason == "length" for member in members],
        settings,
        max_tokens=recipe.sampling.max_tokens,
        entropy_tokens=acted_on,
    )
    scale = losses.float16_scale(settings, norms) if decoder_of(model).dtype == torch.float16 else 1.0
    log_probs_of = packing.packed_log_probs if ctx.packed else log_probs
    model.train()
    sums: dict[str, Tensor] = {}
    loss = 0.0
    for done, micro in enumerate(micros):
        ctx.observer.progress("learning", done, len(micros))
        passed = log_probs_of(
            model,
            micro.rows,
            recipe.sampling.temperature,
            entropy=True,
            entropy_grad=settings.entropy_coef != 0,
        )
        batch = losses.LossBatch(
            mask=passed.mask,
            advantages=torch.tensor(micro.advantages, device=passed.mask.device),
            truncated=torch.tensor(micro.truncated, device=passed.mask.device),
            old=micro.old,
            sampler=None if micro.sampler is None else _pad(micro.sampler, passed.log_probs),
            reference=micro.reference,
            high_entropy=None
            if threshold is None or micro.entropies is None
            else losses.high_entropy_mask(micro.entropies, passed.mask, threshold),
        )
        result = losses.policy_loss(passed.log_probs, batch, settings, norms, entropies=passed.entropies)
        (result.loss * scale).backward()
        if micro.old is None:
            micro.old = passed.log_probs.detach()
        losses.add_stats(sums, result.stats)
        loss += float(result.loss.detach())
    clock.lap("forward_backward")
    if scale != 1:
        for gradient in [p.grad for p in parameters if p.grad is not None]:
            gradient /= scale
    loss, sums = _summed(ctx, loss, sums)
    ctx.ranks.sum_gradients(parameters)
    if ctx.ranks.world > 1:
        clock.lap("all_reduce")
    total = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
    norm = float(total)
    rate = ctx.scheduler.get_last_lr()[0]
    stats: dict[str, Any] = {"loss": loss, **losses.mean_stats(sums, norms), "grad_norm": norm, "learning_rate": rate}
    if math.isfinite(norm) and math.isfinite(loss):
        torch.nn.utils.clip_grads_with_norm_(parameters, recipe.optimizer.max_grad_norm, total)
        ctx.optimizer.step()
    else:
        _dump(ctx, micros, loss, norm)
        stats = {name: value if math.isfinite(value) else None for name, value in stats.items()} | {"nonfinite": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns where a first step was left out
        ctx.scheduler.step()
    ctx.optimizer.zero_grad(set_to_none=True)
    clock.lap("optimizer")
    return stats


def _dump(ctx: Context, micros: Sequence[Micro], loss: float, norm: float) -> None:
    """The batch of a step whose loss or gradient is not finite, for inspection: RUN/nonfinite/step_N.json."""
    decode = ctx.policy.tokenizer.decode
    rows = [
        {
            "prompt": decode(row.prompt_ids),
            "completion": decode(row.completion_ids),
            "prompt_ids": row.prompt_ids,
            "completion_ids": row.completion_ids,
            "advantage": advantage,
            "sampler_log_probs": list(map(str, known)),
            "log_probs": list(map(str, () if micro.old is None else micro.old[i, : len(row.completion_ids)].tolist())),
        }
        for micro in micros
        for i, (row, advantage, known) in enumerate(
            zip(micro.rows, micro.advantages, micro.sampler or [()] * len(micro.rows), strict=True)
        )
    ]
    bad = [name for name, p in ctx.policy.trainable() if p.grad is not None and not p.grad.isfinite().all()]
    weights = [name for name, p in ctx.policy.trainable() if not p.isfinite().all()]
    found = {"loss": str(loss), "grad_norm": str(norm), "gradients_not_finite": bad, "weights_not_finite": weights}
    rank = f"_rank_{ctx.ranks.rank}" if ctx.ranks.rank else ""
    ctx.run.write_json(f"nonfinite/step_{ctx.step + 1}{rank}.json", {**found, "rows": rows})


def _summed(ctx: Context, loss: float, sums: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Loss and statistics over the micro-batches of all ranks."""
    parts = ctx.ranks.gather((loss, {name: value.cpu() for name, value in sums.items()}))
    total: dict[str, Tensor] = {}
    for _, part in parts:
        losses.add_stats(total, part)
    return sum(loss for loss, _ in parts), total


def _prepare(ctx: Context, micros: list[Micro]) -> tuple[Tensor | None, int | None]:
    """Without gradient: the base's log-probs (beta > 0, once a rollout) and this update's entropy threshold."""
    settings, temperature = ctx.recipe.loss, ctx.recipe.sampling.temperature
    log_probs_of = packing.packed_log_probs if ctx.packed else log_probs
    quantile = settings.top_entropy_quantile < 1
    chosen: list[Tensor] = []
    with torch.no_grad():
        for micro in micros:
            if settings.beta > 0 and micro.reference is None:
                with ctx.policy.model.disable_adapter():
                    micro.reference = log_probs_of(ctx.policy.model, micro.rows, temperature).log_probs
            if quantile:
                passed = log_probs_of(ctx.policy.model, micro.rows, temperature, entropy=True)
                assert passed.entropies is not None
                micro.entropies = passed.entropies
                chosen.append(passed.entropies[passed.mask.bool()])
    if not quantile:
        return None, None
    own = torch.cat(chosen).cpu() if chosen else torch.empty(0)
    every = torch.cat(ctx.ranks.gather(own))
    threshold = losses.entropy_threshold(every, settings.top_entropy_quantile)
    return threshold.to(ctx.policy.device), int((every >= threshold).sum())


def _pad(values: Sequence[Sequence[float]], like: Tensor) -> Tensor:
    """Ragged log-probs as a right-padded tensor of the shape of `like`."""
    padded = [[*row, *[0.0] * (like.shape[1] - len(row))] for row in values]
    return torch.tensor(padded, dtype=like.dtype, device=like.device)
