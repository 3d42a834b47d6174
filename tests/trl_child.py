"""Runs in a process of its own, since unsloth changes TRL for good; prints what it saw as one line of JSON."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slmgrpo.errors import RunError
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir

SMALL = [
    "train.steps=2",
    "train.prompts_per_step=6",
    "optimizer.learning_rate=1e-3",
    "optimizer.lr_scheduler_type=cosine",
    "loss.sampling_correction=none",
]


def sets(*settings: str) -> list[str]:
    return [part for setting in (*SMALL, *settings) for part in ("--set", setting)]


def train(folder: Path) -> dict[str, Any]:
    """Two steps by TRL, each gradient beside that of slmgrpo's loss; two by slmgrpo; a run that is refused."""
    from slmgrpo.cli import app
    from slmgrpo.trainer import trl

    gaps: list[float] = []
    before_update = trl.Steps.before_update

    def compare(self: trl.Steps) -> None:
        gaps.append(_gap(self))
        before_update(self)

    trl.Steps.before_update = compare
    heldout = [f"data.heldout.{i}.limit=4" for i in range(3)]
    for trainer, out in (("trl", "run"), ("slmgrpo", "own")):
        arguments = [*sets(f"trainer={trainer}", *heldout), "--out", str(folder / out)]
        app(["train", "quickstart", *arguments], standalone_mode=False)
    refused = ["train", "quickstart", *sets("trainer=trl", "model.dtype=float16"), "--out", str(folder / "refused")]
    try:
        app(refused, standalone_mode=False)
        message = "not refused"
    except RunError as error:
        message = str(error)
    return {"gaps": gaps, "refusal": message}


def _gap(steps: Any) -> float:
    """Relative distance of TRL's gradient from that of slmgrpo's plain path."""
    import torch

    from slmgrpo.trainer import losses
    from slmgrpo.trainer.logprobs import TokenRow, log_probs

    ctx, settings = steps.ctx, steps.ctx.recipe.loss
    parameters = [p for _, p in ctx.policy.trainable()]
    theirs = [p.grad for p in parameters]
    members = [(group.prompted.prompt_ids, member) for group in steps.groups for member in group.members]
    lengths = [len(member.completion.token_ids) for _, member in members]
    truncated = [member.completion.finish_reason == "length" for _, member in members]
    rows = [TokenRow(prompt, member.completion.token_ids) for prompt, member in members]
    passed = log_probs(ctx.policy.model, rows, ctx.recipe.sampling.temperature)
    batch = losses.LossBatch(
        mask=passed.mask,
        advantages=torch.tensor([weight for group in steps.weights for weight in group]),
        truncated=torch.tensor(truncated),
    )
    norms = losses.norms_of(lengths, truncated, settings, max_tokens=ctx.recipe.sampling.max_tokens)
    loss = losses.policy_loss(passed.log_probs, batch, settings, norms).loss
    ours = torch.autograd.grad(loss, parameters)
    apart = torch.cat([(a - b).flatten() for a, b in zip(theirs, ours, strict=True)]).norm()
    return float(apart / torch.cat([b.flatten() for b in ours]).norm())


def unsloth(folder: Path, cases: list[list[str]]) -> dict[str, Any]:
    """What Unsloth's config for CUDA makes of recipes; it can be built without a GPU by the parent's switches."""
    import unsloth  # noqa: F401
    from unsloth.models import rl

    if not hasattr(rl, "_patch_trl_rl_trainers_impl"):
        return {"skip": "unsloth's patcher has another name now"}
    from trl.trainer.grpo_config import GRPOConfig as Stock

    rl._patch_trl_rl_trainers_impl("grpo_trainer")
    import trl

    from slmgrpo.trainer import trl_config

    module = sys.modules[trl.GRPOTrainer.__module__]  # pyright: ignore[reportPrivateImportUsage]
    kind = getattr(module, "UnslothGRPOConfig", None)
    if kind is None:
        return {"skip": "unsloth did not make a GRPOConfig of its own"}
    changed, every = [], set()
    for settings in cases:
        recipe = load("quickstart", settings).recipe
        planned = plan(recipe)
        asked = trl_config.config(recipe, planned, RunDir(folder), device="cpu")
        every = set(asked)
        live = SimpleNamespace(args=kind(**deepcopy(asked)))
        changed.append([found.field for found in trl_config.differences(recipe, planned, asked, live)])
    own = {name: p.default for name, p in inspect.signature(kind.__init__).parameters.items()}
    stock = {f.name: f.default for f in dataclasses.fields(Stock) if f.default is not dataclasses.MISSING}
    unset = [n for n in own if n in stock and trl_config.plain(own[n]) != trl_config.plain(stock[n]) and n not in every]
    return {"changed": changed, "defaults_not_set": unset}


if __name__ == "__main__":
    what, place, *rest = sys.argv[1:]
    result = train(Path(place)) if what == "train" else unsloth(Path(place), json.loads(rest[0]))
    print(json.dumps(result))
