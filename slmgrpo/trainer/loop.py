"""The GRPO algorithm on one page: prompts, completions, rewards, advantages, loss by micro-batches, optimizer step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from slmgrpo.callbacks import FormWatch, rollout_metrics, sample_lines, step_metrics
from slmgrpo.rollout.groups import Group, Prompted, generate_and_grade
from slmgrpo.run import Clock
from slmgrpo.signals import token_classes
from slmgrpo.trainer.advantages import advantages
from slmgrpo.trainer.context import Context, ranks_agree, save
from slmgrpo.trainer.update import optimise, work_of

log = logging.getLogger("slmgrpo")


def train(ctx: Context) -> None:
    """Run to plan.steps from wherever ctx stands; every rollout ends in metrics, samples and perhaps a checkpoint."""
    recipe, updates = ctx.recipe, ctx.recipe.train.updates_per_rollout
    form_watch, token_class = FormWatch(), token_classes(ctx.policy.tokenizer)
    while ctx.step < ctx.plan.steps:
        clock = Clock()
        ctx.ranks.pulse.step(ctx.step)
        torch.manual_seed(_seed_of(recipe.seed, ctx.step))  # dropout; so that a resume needs no saved RNG state
        rows = ctx.sampler.next(-(-ctx.step // updates))  # the last rollout of a run that is made longer may be short
        groups = _rollout(ctx, [ctx.prompted[row["id"]] for row in rows], clock)
        rewards = [[member.reward for member in group.members] for group in groups]
        ctx.guards.rewards(ctx.step + 1, groups, recipe.grading.max_error_rate)
        weights = advantages(rewards, recipe.loss.scale_rewards)
        rollout = rollout_metrics(groups, weights, token_class)
        work = work_of(ctx, groups, weights)
        clock.lap("other")
        lines, policy_stats, stop = [], {}, None
        with ctx.interrupts.held():  # a second signal does not wait, so `whole` says whether the state can be saved
            ctx.whole = False
            for update in range(min(updates, ctx.plan.steps - ctx.step)):
                policy_stats = optimise(ctx, groups, work.micros, clock)
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
                ranks_agree(ctx)
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


def passes(every: int, step: int, updates: int) -> bool:
    """Whether a multiple of `every` was reached in the rollout that ended at `step`."""
    return every > 0 and step // every > (step - updates) // every


def _seed_of(seed: int, step: int) -> int:
    return (seed * 1_000_003 + step) % 2**63
