"""The same recipe through TRL's GRPOTrainer (over plain transformers on CUDA): the baseline, and a way out.

Prompts and their order, graders, held-out accuracy, metrics and the run directory are slmgrpo's; generation, loss,
gradient and update are TRL's. Its own class does it: on CUDA over plain transformers, in a process that never imports
unsloth; on a CPU over Unsloth's CPU backend, which replaces a kernel that needs a GPU. A row that cannot be judged is
None for TRL too: out of its group's statistics, trained with advantage 0. Under `updates_per_rollout` TRL trains all
of a rollout's rows in each update, as slmgrpo does.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slmgrpo import prompts
from slmgrpo.callbacks import rollout_metrics, sample_lines, step_metrics
from slmgrpo.errors import PlanError
from slmgrpo.guards import GuardStop, message
from slmgrpo.model import quiet
from slmgrpo.rollout.engine import Completion, Request
from slmgrpo.rollout.groups import Group, generate_and_grade
from slmgrpo.run import Clock
from slmgrpo.trainer import trl_config
from slmgrpo.trainer.advantages import advantages
from slmgrpo.trainer.context import Context
from slmgrpo.trainer.loop import passes

log = logging.getLogger("slmgrpo")

METRICS = {
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/low_mean": "clip_low",
    "clip_ratio/high_mean": "clip_high",
    "cispo_clip_ratio": "clip_high",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
}
"""TRL's name -> the name in metrics.jsonl, for what both trainers have."""


def prepare(ctx: Context) -> Callable[[], None]:
    """Build TRL's trainer, write resolved.json, guard against a difference from the recipe; returns what trains on.

    Nothing is learned before the returned function is called.
    """
    recipe, device = ctx.recipe, ctx.policy.device.type
    asked = trl_config.config(recipe, ctx.plan, ctx.run, device="cuda" if device == "cuda" else "cpu")
    steps = Steps(ctx)
    with quiet():
        trainer = _build(ctx, asked, steps)
    kind = type(trainer)
    engine = f"{kind.__module__}.{kind.__qualname__}"
    found = trl_config.differences(recipe, ctx.plan, asked, trainer)
    ctx.run.write_json(
        "resolved.json",
        {
            "trainer": "trl",
            "class": engine,
            "path": _path(recipe.model.backend, device, kind.__name__),
            "device": str(ctx.policy.device),
            "dtype": str(ctx.policy.model.dtype),
            "engine": f"{type(ctx.policy.model.get_base_model()).__name__}.generate, called by {kind.__name__}",
            "log_prob_path": "padded, by TRL",
            "environment": {name: value for name, value in os.environ.items() if name.startswith("UNSLOTH_")},
            "asked": asked,
            "differences": trl_config.as_json(found),
            "held": {name: trl_config.plain(value) for name, value in trainer.args.to_dict().items()},
        },
    )
    if found:
        ctx.guards.breach("configuration", trl_config.as_text(found, engine), trl_config.as_json(found))
    log.info("trainer: %s (%s)", engine, _path(recipe.model.backend, device, kind.__name__))
    for note in trl_config.notes(recipe, asked):
        log.warning("%s", note)

    def learn() -> None:
        with _library_logs():
            steps.clock = Clock()
            trainer.train()
        ctx.engine.sync(ctx.step)

    return learn


def save(ctx: Context) -> Path:
    """The adapter alone: TRL's optimizer, schedule and buffered rollout cannot be continued exactly."""
    return ctx.run.save_checkpoint(
        ctx.step, lambda folder: ctx.policy.save_adapter(folder / "adapter"), ctx.recipe.train.keep_checkpoints
    )


def _build(ctx: Context, asked: Mapping[str, Any], steps: Steps) -> Any:
    from transformers import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    unsloth_cuda = ctx.policy.backend == "unsloth" and ctx.policy.device.type == "cuda"
    if unsloth_cuda and not GRPOTrainer.__name__.startswith("Unsloth"):
        raise PlanError(
            "trainer=trl: unsloth could not put its GRPOTrainer in the place of TRL's, and TRL's does not fit its CUDA "
            "model; check the versions with `slmgrpo doctor`, or set model.backend=transformers"
        )
    rows = _dataset(ctx)
    try:
        trainer = GRPOTrainer(
            model=ctx.policy.model,
            processing_class=ctx.policy.tokenizer,
            reward_funcs=[steps.total],
            args=GRPOConfig(**deepcopy(dict(asked))),  # a dict among them that the engine changed would hide it
            train_dataset=rows,
            callbacks=[steps.callback()],
        )
    except (ValueError, TypeError) as error:
        raise PlanError(f"trainer=trl: TRL refuses these settings: {error}") from error
    trainer.remove_callback(PrinterCallback)
    if "ref" in ctx.policy.model.peft_config:
        # TRL copies the adapter as its reference where beta > 0; slmgrpo's is the model with the adapter off. Both are
        # the same for a fresh adapter, and without the copy TRL takes the adapter off too.
        ctx.policy.model.delete_adapter("ref")
    return trainer


def _path(backend: str, device: str, name: str) -> str:
    if name.startswith("Unsloth"):
        return "the class that unsloth generates from TRL's"
    if backend == "unsloth":
        return f"TRL's own class on unsloth's {device} backend"
    return "TRL's own class without unsloth"


def _dataset(ctx: Context) -> Any:
    """Every rollout's prompts one behind the other, as slmgrpo's own trainer would take them."""
    from datasets import Dataset

    order = [row["id"] for rollout in range(ctx.plan.rollouts) for row in ctx.sampler.next(rollout)]
    place = {row_id: i for i, row_id in enumerate(dict.fromkeys(order))}
    texts = _texts(ctx, list(place))
    return Dataset.from_dict({"prompt": texts, "id": list(place)}).select([place[row_id] for row_id in order])


def _texts(ctx: Context, ids: Sequence[str]) -> list[str]:
    """Prompts as texts that TRL's call of the tokenizer turns into the very tokens of slmgrpo's prompts."""
    tokenizer = ctx.policy.tokenizer
    own = [ctx.prompted[row_id] for row_id in ids]
    texts = [rendered.text for rendered in prompts.render_all([p.row for p in own], ctx.recipe.prompt, tokenizer)]
    wanted = [list(p.prompt_ids) for p in own]
    if tokenizer(text=texts)["input_ids"] != wanted and tokenizer.bos_token:
        texts = [text.removeprefix(tokenizer.bos_token) for text in texts]  # the call writes one itself
    if tokenizer(text=texts)["input_ids"] != wanted:
        raise PlanError(
            "trainer=trl: TRL tokenises prompts itself and gets other tokens than the chat template writes, most often "
            "a begin-of-text token more; use trainer=slmgrpo, or a model.chat_template that begins with {{ bos_token }}"
        )
    return texts


@dataclass
class Written:
    """An engine that hands on the completions that TRL has written, so that both trainers grade and count alike."""

    completions: Sequence[Sequence[int]]
    end_ids: frozenset[int]
    name: str = "trl"

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        for request in requests:
            for member in request.members:
                ids = tuple(self.completions[request.index * len(request.members) + member])
                ended = bool(ids) and ids[-1] in self.end_ids
                yield Completion(request.index, member, ids, (), "stop" if ended else "length")


@dataclass
class Steps:
    """What happens around TRL's steps: grading, metrics, samples, checkpoints, held-out accuracy, signals."""

    ctx: Context
    clock: Clock = field(default_factory=Clock)
    groups: list[Group] = field(default_factory=list)
    weights: list[list[float]] = field(default_factory=list)
    rollout: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 0
    _held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def total(
        self, prompts: Sequence[str], completions: Any, completion_ids: Any, **columns: Any
    ) -> list[float | None]:
        """TRL's reward function: the recipe's whole sum, None where a row cannot be judged."""
        ctx, size = self.ctx, self.ctx.recipe.sampling.group_size
        self.groups = generate_and_grade(
            [ctx.prompted[row_id] for row_id in columns["id"][::size]],
            engine=Written(completion_ids, ctx.engine.end_ids),
            pool=ctx.pool,
            tokenizer=ctx.policy.tokenizer,
            recipe=ctx.recipe,
            step=ctx.step,
            group_size=size,
            clock=self.clock,
            progress=ctx.observer.progress,
        )
        ctx.guards.rewards(ctx.step + 1, self.groups, ctx.recipe.grading.max_error_rate)
        rewards = [[member.reward for member in group.members] for group in self.groups]
        self.weights = advantages(rewards, ctx.recipe.loss.scale_rewards)
        self.rollout = rollout_metrics(self.groups, self.weights)
        return [reward for group in rewards for reward in group]

    def callback(self) -> Any:
        """A transformers callback that calls the methods below."""
        from transformers import TrainerCallback

        steps = self

        class Follow(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step % args.num_iterations == 0:
                    steps.ctx.observer.progress("writing", 0, args.generation_batch_size)

            def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                steps.micro_batches += 1
                steps.ctx.observer.progress("learning", steps.micro_batches, args.gradient_accumulation_steps)

            def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                steps.before_update()

            def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                steps.clock.lap("optimizer")

            def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if "loss" in more["logs"]:  # the last one is a summary of the run
                    steps.after_update(state.global_step, more["logs"])

        return Follow()

    def before_update(self) -> None:
        """From here to the end of `after_update` a signal waits."""
        self.clock.lap("forward_backward")
        gradients = [p.grad for _, p in self.ctx.policy.trainable() if p.grad is not None]
        if not all(torch.isfinite(gradient).all() for gradient in gradients):
            what = f"step {self.ctx.step + 1}: the gradient is not finite, and TRL would take the step all the same"
            raise GuardStop("nonfinite", message("nonfinite", what))
        self._held.enter_context(self.ctx.interrupts.held())

    def after_update(self, step: int, logs: Mapping[str, Any]) -> None:
        ctx, train = self.ctx, self.ctx.recipe.train
        ctx.step = step
        policy = {ours: logs[theirs] for theirs, ours in METRICS.items() if logs.get(theirs) is not None}
        rows = sum(len(group.members) for group in self.groups)
        line = step_metrics(step, self.rollout, policy, self.clock, trained=rows, dropped=0)
        stop = ctx.guards.step(line, ctx.policy.trainable())
        self.clock, self.micro_batches = Clock(), 0
        ctx.run.append(ctx.run.metrics, [line])
        ctx.probe([line])
        last = step >= ctx.plan.steps
        rollout_ends = step % train.updates_per_rollout == 0 or last
        if rollout_ends and passes(train.samples_every, step, train.updates_per_rollout):
            ctx.run.append(ctx.run.samples, sample_lines(step, self.groups, self.weights))
        ctx.run.status("running", step, warnings=ctx.guards.warnings)
        ctx.observer.step(line)
        if stop:
            self._held.close()
            raise stop
        if last or (rollout_ends and passes(train.save_every, step, train.updates_per_rollout)):
            save(ctx)
        self._held.close()
        if rollout_ends and not last and passes(ctx.recipe.eval.every, step, train.updates_per_rollout):
            ctx.evaluate(step)
            self.clock = Clock()


@contextlib.contextmanager
def _library_logs() -> Iterator[None]:
    """What TRL and transformers have to say goes into the run's log, not over the live view."""
    libraries = [logging.getLogger(name) for name in ("trl", "transformers")]
    before = [(library, library.handlers, library.propagate) for library in libraries]
    for library in libraries:
        library.handlers, library.propagate = list(log.handlers), False
    try:
        yield
    finally:
        for library, handlers, propagate in before:
            library.handlers, library.propagate = handlers, propagate
