"""What a worker does: data, rewards, model, engine, loop, save; readable top to bottom."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slmgrpo import __version__, cold_start, data, model, prompts, pulse, trackers
from slmgrpo import run as runs
from slmgrpo.callbacks import Observer
from slmgrpo.errors import PlanError, RunError, SlmgrpoError
from slmgrpo.eval import during
from slmgrpo.guards import GuardStop, Watch
from slmgrpo.interrupt import Interrupted, Interrupts
from slmgrpo.plan import Plan
from slmgrpo.questions import check_context, check_lengths, lengths_of, log_data, prompted_of
from slmgrpo.ranks import ALONE, Ranks
from slmgrpo.recipe import Recipe
from slmgrpo.resume import accept, begin
from slmgrpo.rewards.pool import Pool
from slmgrpo.rollout.engine import Engine
from slmgrpo.rollout.groups import Prompted
from slmgrpo.rules import rows_of, rules_of, sandbox_of
from slmgrpo.run import RunDir
from slmgrpo.trainer import resolved, trl_config

if TYPE_CHECKING:
    from slmgrpo.trainer import context

log = logging.getLogger("slmgrpo")


@dataclass(frozen=True)
class Outcome:
    """A finished run: held-out scores (as scores.json has them) before and after, where the recipe asks for them."""

    run: RunDir
    before: dict[str, Any] | None
    after: dict[str, Any] | None


def train(
    recipe: Recipe,
    plan: Plan,
    *,
    base: Path,
    out: Path | None,
    resume: RunDir | None,
    observer: Observer,
    ranks: Ranks = ALONE,
) -> Outcome:
    """Run the recipe from the start, or go on from a run's newest whole checkpoint.

    base: the folder that the recipe's relative paths start from. ranks: this process among those that train together;
    the first of them writes. A user's mistake raises before anything is written; a fault later raises RunError and
    leaves the run resumable; Interrupted saves first.
    """
    with Interrupts() as interrupts, ExitStack() as stack:
        if ranks.world > 1:
            stack.enter_context(interrupts.held())  # ranks stop together, where `ranks.together` lets signals in
        with ranks.together(interrupts):
            if recipe.trainer == "trl":
                trl_config.check(recipe, resume)
            if ranks.first and resume is not None:
                resume.lock()
            elif ranks.first and out is not None:
                runs.refuse_used(out)
            trackers.check(recipe)
            observer.stage("reading data")
            train_rules = [rules_of(recipe, source, base) for source in recipe.data.train]
            heldout_rules = [rules_of(recipe, source, base) for source in recipe.data.heldout]
            suites = during.Suites.of(recipe, base, ranks)
            rung = sandbox_of(recipe, train_rules + heldout_rules + suites.rules())
            train_rows = rows_of(recipe.data.train, train_rules, recipe, base)
            heldout_rows = rows_of(recipe.data.heldout, heldout_rules, recipe, base)
        import torch

        from slmgrpo.rollout.unsloth import for_this_machine
        from slmgrpo.trainer import context, logprobs

        with ranks.together(interrupts):
            pool = stack.enter_context(
                Pool(
                    recipe.grading.workers or plan.reward_workers,
                    timeout_s=recipe.grading.timeout_s,
                    sandbox=recipe.grading.sandbox,
                )
            )
            observer.stage(f"loading {recipe.model.id}")
            asked = recipe
            recipe, changed = for_this_machine(recipe, cuda=torch.cuda.is_available())
            policy = model.load(recipe, max_length=plan.max_length, sequences=plan.completions_per_rank)
            if recipe.trainer == "slmgrpo":
                logprobs.check_head(policy.model)
            prompts.set_chat_template(policy.tokenizer, recipe.model, base)
            prompted = prompted_of(train_rows, recipe.data.train, train_rules, recipe, policy.tokenizer)
            heldout = prompted_of(heldout_rows, recipe.data.heldout, heldout_rules, recipe, policy.tokenizer)
            check_lengths(train_rows, prompted, recipe)
            cold_rows = cold_start.rows_of(recipe, base)
            engine, optimizer = _engine(recipe, plan, policy), context.optimizer_of(recipe.optimizer, policy)
            check_context(lengths_of(prompted), lengths_of(heldout), recipe, engine.context)
            suites.check(policy, engine)
            sampler = data.PromptSampler([p.row for p in prompted.values()], recipe.seed, recipe.train.prompts_per_step)
        run = resume or _new_run(asked, plan, base, out, ranks)
        watched = stack.enter_context(_followed(observer, recipe, run, ranks))
        if changed:
            _warn(watched, changed)
        if rung:
            log.info("sandbox: rung %d, %s; it does not stop: %s", rung.number, rung.name, rung.does_not)
        for note in suites.notes:
            _warn(watched, note)
        log_data(recipe, (train_rows, prompted), (heldout_rows, heldout))
        if cold_rows:
            policy = cold_start.started(recipe, plan, policy, cold_rows, run, base, watched)
            engine, optimizer = _engine(recipe, plan, policy), context.optimizer_of(recipe.optimizer, policy)
        ctx = context.Context(
            recipe=recipe,
            plan=plan,
            run=run,
            policy=policy,
            engine=engine,
            pool=pool,
            sampler=sampler,
            prompted=prompted,
            optimizer=optimizer,
            scheduler=context.scheduler_of(recipe.optimizer, optimizer, plan),
            observer=watched,
            interrupts=interrupts,
            ranks=ranks,
            guards=Watch(recipe.guards, watched.warn, resumable=recipe.trainer != "trl"),
            evaluate=lambda step: _evaluate(ctx, heldout, suites, step),
        )
        return _run(ctx, asked)


@contextmanager
def _followed(observer: Observer, recipe: Recipe, run: RunDir, ranks: Ranks) -> Iterator[Observer]:
    """The observer with whatever else follows the run: logs, trackers (first rank), signs of life (several ranks)."""
    with ExitStack() as stack:
        if ranks.first:
            shutil.rmtree(run.path / "ranks", ignore_errors=True)  # an earlier attempt may have had more of them
        stack.enter_context(_logging_to(run, ranks))
        if ranks.first:
            observer = stack.enter_context(trackers.tracked(observer, recipe, run))
        if ranks.world > 1:
            beats = run.path / "ranks"
            ranks.pulse.start(beats, ranks.rank)
            if ranks.first:
                stack.enter_context(pulse.watched(beats, lambda text: _warn(observer, text)))
            observer = pulse.Pulsing(observer, ranks.pulse)
        yield observer


def _warn(observer: Observer, text: str) -> None:
    log.warning("%s", text)
    observer.warn(text)


def _run(ctx: context.Context, asked: Recipe) -> Outcome:
    """Restore, evaluate, train, evaluate; whatever ends it early leaves a directory that can be resumed.

    asked: the recipe as it was given; the context's is the one for this machine.
    """
    from slmgrpo.dynamics.probe import Probe
    from slmgrpo.trainer import context, loop, trl

    run, by_trl = ctx.run, ctx.recipe.trainer == "trl"
    try:
        learn = trl.prepare(ctx) if by_trl else partial(loop.train, ctx)
        with ctx.ranks.together():
            checkpoint, damaged = run.latest_checkpoint()
            if damaged and not checkpoint:
                raise RunError(
                    "\n".join(damaged)
                    + f"\nremove {run.checkpoints} to begin this run again at step 0, or start a new one"
                )
            if checkpoint:
                context.restore(ctx, checkpoint)
        with ctx.ranks.together():
            messages = damaged
            if ctx.ranks.first:  # only now: a change that the checkpoint does not fit must leave the run's own recipe
                messages = [*damaged, *run.rewind(ctx.step), *accept(run, asked, ctx.plan)]
            for message in messages:
                _warn(ctx.observer, message)
        ctx.ranks.broadcast([p for _, p in ctx.policy.trainable()])
        if ctx.recipe.dynamics.every and ctx.ranks.first:
            ctx.probe = Probe(ctx.policy, run, ctx.recipe, step=ctx.step, steps=ctx.plan.steps).see
        _record(ctx, "running")
        ctx.guards.begin(ctx.policy.trainable(), run.lines(run.metrics))
        if not by_trl and (found := resolved.differences(ctx)):
            ctx.guards.breach("configuration", "; ".join(found), found)
        before = ctx.evaluate(0) if ctx.step == 0 else _saved_scores(run, 0)
        if ctx.step and loop.passes(ctx.recipe.eval.every, ctx.step, ctx.recipe.train.updates_per_rollout):
            ctx.evaluate(ctx.step)  # where the run ended in the middle of it
        ctx.observer.stage("training")
        learn()
        after = ctx.evaluate(ctx.step)
        _record(ctx, "finished")
        return Outcome(run, before, after)
    except Interrupted as stop:
        with ctx.interrupts.held():
            lost = _save_what_is_whole(ctx)
            _end(ctx, "interrupted", signal=str(stop), **({"error": lost} if lost else {}))
        stop.saved = "\n".join(filter(None, [lost, _ways_on(ctx)]))
        raise
    except PlanError as error:
        _end(ctx, "failed", error=str(error))
        raise
    except SlmgrpoError as error:
        lost = _save_what_is_whole(ctx) if isinstance(error, GuardStop) and error.save else None
        what = "\n".join(filter(None, [str(error), lost]))
        _end(ctx, "failed", error=what, warnings=ctx.guards.warnings)
        raise RunError(f"{what}\n{_ways_on(ctx)}") from error
    except Exception as error:
        log.error("%s", traceback.format_exc())
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": ")
        _end(ctx, "failed", error=reason)
        raise RunError(f"stopped after step {ctx.step}: {reason}\n{_ways_on(ctx)}") from error
    finally:
        ctx.engine.close()
        run.unlock()


def _save_what_is_whole(ctx: context.Context) -> str | None:
    """A checkpoint of a run that ends early; why there is none, where it cannot be written (a full disk)."""
    from slmgrpo.trainer import context, trl

    try:
        if ctx.step and ctx.whole:
            (trl if ctx.recipe.trainer == "trl" else context).save(ctx)
    except RunError as error:
        return str(error)
    return None


def _record(ctx: context.Context, state: str) -> None:
    with ctx.ranks.together():
        if not ctx.ranks.first:
            return
        ctx.run.status(state, ctx.step, warnings=ctx.guards.warnings)
        if ctx.recipe.trainer == "slmgrpo":
            ctx.run.write_json("resolved.json", resolved.of_loop(ctx))


def _end(ctx: context.Context, state: str, **more: Any) -> None:
    """Write the state of a run that ends early; a full disk must not hide why it ends."""
    if ctx.ranks.first:
        with suppress(OSError):
            ctx.run.status(state, ctx.step, **more)


def _evaluate(
    ctx: context.Context, heldout: dict[str, Prompted], suites: during.Suites, step: int
) -> dict[str, Any] | None:
    """Held-out rows and suites at this step, recorded with their cost; returns the held-out scores."""
    from slmgrpo.trainer import context, trl

    if not heldout and not suites.read:
        return None
    started = time.perf_counter()
    scores = _heldout(ctx, heldout, step)
    metrics = during.heldout_metrics(scores) | suites.evaluate(
        ctx.run,
        step,
        policy=ctx.policy,
        engine=ctx.engine,
        pool=ctx.pool,
        max_error_rate=ctx.guards.error_limit(ctx.recipe.grading),
        observer=ctx.observer,
        interrupts=ctx.interrupts,
    )
    seconds = time.perf_counter() - started
    save = partial((trl if ctx.recipe.trainer == "trl" else context).save, ctx)
    with ctx.interrupts.held():
        ctx.observer.stage(suites.record(ctx.run, step, metrics, seconds=seconds, save=save))
    return scores


def _heldout(ctx: context.Context, heldout: dict[str, Prompted], step: int) -> dict[str, Any] | None:
    """Held-out scores at this step; taken from the run directory where they are there already."""
    from slmgrpo.eval import runner

    if not heldout:
        return None
    if saved := ctx.ranks.gather(_saved_scores(ctx.run, step))[0]:
        return saved
    ctx.observer.stage(f"held-out accuracy, step {step}")
    rows = list(heldout.values())
    graded = []
    with ctx.ranks.together(ctx.interrupts):
        graded = runner.grade(
            ctx.ranks.own(rows),
            engine=ctx.engine,
            pool=ctx.pool,
            tokenizer=ctx.policy.tokenizer,
            recipe=ctx.recipe,
            max_error_rate=ctx.guards.error_limit(ctx.recipe.grading),
            progress=ctx.observer.progress,
        )
    graded = ctx.ranks.gather_shares(graded)
    scores = runner.scores_of(graded, rows)
    with ctx.ranks.together():
        if ctx.ranks.first:
            runner.write(ctx.run, step, scores, graded, rows)
    return scores.as_json()


def _engine(recipe: Recipe, plan: Plan, policy: model.Policy) -> Engine:
    """The engine that `sampling.engine` names, auto resolved. The vllm engine's vLLM starts when it first writes."""
    name = recipe.sampling.engine
    if name == "unsloth":
        from slmgrpo.rollout.unsloth import unsloth_engine

        return unsloth_engine(policy, recipe, plan)
    if name == "vllm":
        from slmgrpo.rollout.vllm import VllmEngine

        return VllmEngine(policy, recipe, plan)
    from slmgrpo.rollout.hf import HfEngine

    return HfEngine(policy.model, policy.tokenizer, recipe.sampling, recipe.seed)


def _new_run(recipe: Recipe, plan: Plan, base: Path, out: Path | None, ranks: Ranks) -> RunDir:
    """Made by the first rank, seen by all."""
    run = None
    with ranks.together():
        if ranks.first:
            run = runs.create(recipe.name, out)
            run.lock()
            begin(run, recipe, plan, runs.environment() | {"base": str(base.resolve())})
    path = ranks.gather(run.path if run else Path())[0]
    with ranks.together():
        if not (path / "recipe.json").is_file():
            raise PlanError(
                f"{path}: not to be seen from {socket.gethostname()}; with --nodes give an --out on a file system that "
                "all machines share"
            )
    return run or RunDir(path)


def _saved_scores(run: RunDir, step: int) -> dict[str, Any] | None:
    path = run.eval_dir(step, "heldout") / "scores.json"
    return run.read_json(str(path.relative_to(run.path))) if path.exists() else None


def _ways_on(ctx: context.Context) -> str:
    path = ctx.run.path
    logs = path.glob("logs/attempt_*/rank_0.log")
    log_file = max(logs, key=lambda file: int(file.parent.name.removeprefix("attempt_")), default=None)
    state = f"resume with `slmgrpo train --resume {shlex.quote(str(path))}`"
    if ctx.recipe.trainer == "trl":
        state = f"a new run can start from its adapter with --set adapter={path}"
        state = state if ctx.run.steps() else "nothing was saved"
    saved = max(ctx.run.steps(), default=0)
    step = f"step {ctx.step}" + (f", saved up to step {saved}" if saved != ctx.step else "")
    return f"{path} is kept ({step}); {state}" + (f"; details in {log_file}" if log_file else "")


@contextmanager
def _logging_to(run: RunDir, ranks: Ranks) -> Iterator[None]:
    """logs/attempt_K/rank_R.log, one folder for every start of this run."""
    attempt = ranks.gather(len(list(run.path.glob("logs/attempt_*"))) + 1)[0]
    folder = run.path / "logs" / f"attempt_{attempt}"
    folder.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(folder / f"rank_{ranks.rank}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    log.info("process %d, slmgrpo %s", os.getpid(), __version__)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()
