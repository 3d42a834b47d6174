"""The GRPO algorithm on one page: prompts, completions, rewards, advantages, loss by micro-batches, optimizer step."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from slmgrpo.callbacks import FormWatch, Observer, rollout_metrics, sample_lines, step_metrics
from slmgrpo.data import PromptSampler
from slmgrpo.errors import PlanError, RunError
from slmgrpo.guards import Watch
from slmgrpo.interrupt import Interrupts
from slmgrpo.model import Policy, fingerprint
from slmgrpo.plan import Plan
from slmgrpo.ranks import Ranks
from slmgrpo.recipe import Optimizer, Recipe
from slmgrpo.rewards.pool import Pool
from slmgrpo.rollout.engine import Engine
from slmgrpo.rollout.groups import Group, Prompted, generate_and_grade
from slmgrpo.run import Clock, RunDir
from slmgrpo.signals import token_classes
from slmgrpo.trainer import losses, packing
from slmgrpo.trainer.advantages import advantages
from slmgrpo.trainer.logprobs import TokenRow, log_probs

log = logging.getLogger("slmgrpo")


@dataclass
class Context:
    """Everything a step needs; `step` counts finished optimizer steps."""

    recipe: Recipe
    plan: Plan
    run: RunDir
    policy: Policy
    engine: Engine
    pool: Pool
    sampler: PromptSampler
    prompted: dict[str, Prompted]
    optimizer: Any
    scheduler: Any
    observer: Observer
    interrupts: Interrupts
    ranks: Ranks
    guards: Watch
    evaluate: Callable[[int], Any]
    probe: Callable[[Sequence[dict[str, Any]]], None] = lambda lines: None
    """Gets each rollout's metrics: dynamics.probe."""
    step: int = 0
    packed: bool | None = None
    """Which log-prob path runs; decided at the first rows with a signal."""
    whole: bool = True
    """Whether this is a state to go on from: all updates of a rollout made, its metrics and samples written."""


@dataclass
class Micro:
    """Rows of one forward pass, with what later updates compare against."""

    rows: list[TokenRow]
    advantages: list[float]
    truncated: list[bool]
    sampler: list[Sequence[float]]
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


def train(ctx: Context) -> None:
    """Run to plan.steps from wherever ctx stands; every rollout ends in metrics, samples and perhaps a checkpoint."""
    recipe, updates = ctx.recipe, ctx.recipe.train.updates_per_rollout
    form_watch, token_class = FormWatch(), token_classes(ctx.policy.tokenizer)
    while ctx.step < ctx.plan.steps:
        clock = Clock()
        ctx.ranks.pulse.step(ctx.step)
        torch.manual_seed(_seed_of(recipe.seed, ctx.step))  # dropout; so that a resume needs no saved RNG state
        rows = ctx.sampler.next(ctx.step // updates)
        groups = _rollout(ctx, [ctx.prompted[row["id"]] for row in rows], clock)
        rewards = [[member.reward for member in group.members] for group in groups]
        ctx.guards.rewards(ctx.step + 1, groups, recipe.grading.max_error_rate)
        weights = advantages(rewards, recipe.loss.scale_rewards)
        rollout = rollout_metrics(groups, weights, token_class)
        work = _work(ctx, groups, weights)
        clock.lap("other")
        lines, policy_stats, stop = [], {}, None
        with ctx.interrupts.held():  # a second signal does not wait, so `whole` says whether the state can be saved
            ctx.whole = False
            for update in range(min(updates, ctx.plan.steps - ctx.step)):
                policy_stats = _optimise(ctx, groups, work.micros, clock)
                ctx.step += 1
                if update + 1 == updates or ctx.step >= ctx.plan.steps:
                    ctx.engine.sync(ctx.step)
                    clock.lap("sync")
                lines.append(
                    step_metrics(
                        ctx.step,
                        rollout,
                        policy_stats,
                        clock,
                        trained=work.rows,
                        dropped=work.dropped,
                        trunk_tokens=work.trunk_tokens,
                        padded_tokens=work.padded_tokens,
                        rule_times=ctx.pool.stats(),
                    )
                )
                stop = ctx.guards.step(lines[-1], ctx.policy.trainable()) or stop
                if update + 1 < updates:
                    clock = Clock()
            for row, group in zip(rows, rewards, strict=True):
                ctx.sampler.update(row["id"], group)
            with ctx.ranks.together():
                if ctx.ranks.first:
                    _record(ctx, lines, groups, weights)
            ctx.whole = True
            for line in lines:
                ctx.observer.step(line)
            for warning in form_watch.see(groups):
                log.warning("%s", warning)
                ctx.observer.warn(warning)
            if stop:
                raise stop
            if any(ctx.step - updates < step <= ctx.step for step in (1, 2, 10)):
                _ranks_agree(ctx)
            due = passes(recipe.train.save_every, ctx.step, updates) and not lines[-1].get("nonfinite")
            if due or ctx.step >= ctx.plan.steps:
                save(ctx)
        if passes(recipe.eval.every, ctx.step, updates) and ctx.step < ctx.plan.steps:
            ctx.evaluate(ctx.step)


def _rollout(ctx: Context, prompted: Sequence[Prompted], clock: Clock) -> list[Group]:
    """Groups of these prompts: each rank writes and grades its own, then every rank has all of them."""
    own: list[Group] = []
    with ctx.ranks.together(ctx.interrupts):
        own = generate_and_grade(
            ctx.ranks.own(prompted),
            engine=ctx.engine,
            pool=ctx.pool,
            tokenizer=ctx.policy.tokenizer,
            recipe=ctx.recipe,
            step=ctx.step,
            group_size=ctx.recipe.sampling.group_size,
            clock=clock,
            progress=ctx.observer.progress,
        )
    if ctx.ranks.world == 1:
        return own
    members = ctx.ranks.gather_shares([group.members for group in own])
    clock.lap("rank_wait")
    return [Group(prompt, part) for prompt, part in zip(prompted, members, strict=True)]


def _record(ctx: Context, lines: Sequence[dict[str, Any]], groups: Sequence[Group], weights: list[list[float]]) -> None:
    """What a rollout leaves in the run directory."""
    train = ctx.recipe.train
    ctx.run.append(ctx.run.metrics, lines)
    ctx.probe(lines)
    if passes(train.samples_every, ctx.step, train.updates_per_rollout):
        ctx.run.append(ctx.run.samples, sample_lines(ctx.step, groups, weights))
    ctx.run.status("running", ctx.step, warnings=ctx.guards.warnings)


def _ranks_agree(ctx: Context) -> None:
    """Ranks with the same adapter, bit for bit, train one model."""
    if ctx.ranks.world > 1:
        other = ctx.ranks.others(fingerprint(ctx.policy.trainable()))
        if other:
            what = f"step {ctx.step}: the adapter of rank {', '.join(map(str, other))} is not that of rank 0"
            ctx.guards.breach("rank_equality", what, other)


def _work(ctx: Context, groups: Sequence[Group], weights: list[list[float]]) -> Work:
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
            sampler=[kept[i][1].log_probs for i in batch],
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


def _optimise(ctx: Context, groups: Sequence[Group], micros: list[Micro], clock: Clock) -> dict[str, Any]:
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
            sampler=_pad(micro.sampler, passed.log_probs),
            reference=micro.reference,
            high_entropy=None
            if threshold is None or micro.entropies is None
            else losses.high_entropy_mask(micro.entropies, passed.mask, threshold),
        )
        result = losses.policy_loss(passed.log_probs, batch, settings, norms, entropies=passed.entropies)
        result.loss.backward()
        if micro.old is None:
            micro.old = passed.log_probs.detach()
        losses.add_stats(sums, result.stats)
        loss += float(result.loss.detach())
    clock.lap("forward_backward")
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
        for i, (row, advantage, known) in enumerate(zip(micro.rows, micro.advantages, micro.sampler, strict=True))
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


def passes(every: int, step: int, updates: int) -> bool:
    """Whether a multiple of `every` was reached in the rollout that ended at `step`."""
    return every > 0 and step // every > (step - updates) // every


def _seed_of(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) % 2**63


def optimizer_of(settings: Optimizer, policy: Policy) -> Any:
    """AdamW by torch, or its 8-bit forms by bitsandbytes (CUDA only)."""
    parameters = [p for _, p in policy.trainable()]
    values: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.adam_beta1, settings.adam_beta2),
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, **values)
    if policy.device.type != "cuda":
        raise PlanError(
            f"optimizer.name={settings.name}: bitsandbytes' 8-bit optimizers need CUDA, the model is on "
            f"{policy.device.type}; set optimizer.name=adamw"
        )
    import bitsandbytes

    kind = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}[settings.name]
    return getattr(bitsandbytes.optim, kind)(parameters, **values)


def scheduler_of(settings: Optimizer, optimizer: Any, plan: Plan) -> Any:
    """transformers' schedule over the plan's steps with its warmup."""
    from transformers import get_scheduler

    name = settings.lr_scheduler_type
    if name == "constant" and plan.warmup_steps:
        name = "constant_with_warmup"
    return get_scheduler(name, optimizer, num_warmup_steps=plan.warmup_steps, num_training_steps=plan.steps)


def save(ctx: Context) -> None:
    """Adapter, optimizer, schedule and prompt-choice state; what is random is keyed by the step."""

    def write(folder: Path) -> None:
        ctx.policy.save_adapter(folder / "adapter")
        state = {"optimizer": ctx.optimizer.state_dict(), "scheduler": ctx.scheduler.state_dict()}
        torch.save(state, folder / "trainer.pt")
        torch.save(ctx.sampler.state_dict(), folder / "sampler.pt")

    _ranks_agree(ctx)
    with ctx.ranks.together():
        if ctx.ranks.first:
            ctx.run.save_checkpoint(ctx.step, write, ctx.recipe.train.keep_checkpoints)


def restore(ctx: Context, folder: Path) -> None:
    """Continue from a checkpoint folder; nothing in it is executed."""
    ctx.policy.load_adapter(folder / "adapter")
    state = _read(folder / "trainer.pt", ctx.policy.device)
    settings, rates = ctx.recipe.optimizer, ctx.scheduler
    ctx.optimizer.load_state_dict(state["optimizer"])
    rates.load_state_dict(state["scheduler"])
    rates.base_lrs = [settings.learning_rate] * len(rates.base_lrs)
    for group, factor in zip(ctx.optimizer.param_groups, rates.lr_lambdas, strict=True):
        group["initial_lr"] = (
            settings.learning_rate
        )  # the state holds the settings of before, the recipe may be changed
        group["lr"] = settings.learning_rate * factor(rates.last_epoch)
        group["weight_decay"] = settings.weight_decay
        group["betas"] = (settings.adam_beta1, settings.adam_beta2)
    rates._last_lr = [group["lr"] for group in ctx.optimizer.param_groups]
    ctx.sampler.load_state_dict(_read(folder / "sampler.pt", ctx.policy.device))
    ctx.step = int(folder.name.removeprefix("step_"))
    ctx.engine.sync(ctx.step)


def _read(file: Path, device: Any) -> Any:
    try:
        return torch.load(file, map_location=device, weights_only=True)
    except UnpicklingError:
        raise RunError(
            f"{file}: holds more than tensors and plain values, so nothing of it was run and it cannot be used; "
            f"slmgrpo did not write it like this: remove {file.parent} to go on from the checkpoint before"
        ) from None
    except (OSError, RuntimeError, EOFError) as error:
        raise RunError(f"{file}: cannot be read ({str(error).splitlines()[0]}); remove {file.parent}") from None
