"""What one of several gloo ranks does in test_ranks.py: python rank_child.py WHAT FOLDER, in torchrun's environment."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slmgrpo import pulse, ranks, train
from slmgrpo.callbacks import Silent
from slmgrpo.errors import RunError
from slmgrpo.interrupt import Interrupted
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.rollout.engine import Completion, Request

SMALL = ["train.prompts_per_step=6", "data.heldout=[]", "model.backend=transformers", "grading.workers=1"]
SETTINGS = {
    # micro_batch_tokens=1: every group is a pass of its own, so one rank accumulates twice as often as two
    "plain": ["train.steps=10", "train.micro_batch_tokens=1"],
    "everything gathered": [
        "train.steps=4",
        "loss.loss_type=bnpo",
        "loss.beta=0.02",
        "loss.entropy_coef=0.01",
        "loss.top_entropy_quantile=0.5",
        "train.updates_per_rollout=2",
        "loss.mask_truncated_completions=true",
        "sampling.max_tokens=14",
    ],
}

Key = tuple[int, int, int]
"""Step, prompt, member."""


@dataclass
class Recorded:
    """The engine itself, or what it wrote in an earlier run; either way `written` has it."""

    engine: Any
    written: dict[Key, Completion] = field(default_factory=dict)
    replayed: dict[Key, Completion] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        key_of = {request.index: request.prompt_key for request in requests}
        if self.replayed is None:
            for one in self.engine.generate(requests, step=step):
                self.written[step, key_of[one.index], one.member] = one
                yield one
            return
        for request in requests:
            for member in request.members:
                yield replace(self.replayed[step, request.prompt_key, member], index=request.index)


def run(out: Path, here: ranks.Ranks, settings: list[str], replayed: dict[Key, Completion] | None) -> dict[Key, Any]:
    """Train with a recording engine; returns what it wrote on this rank."""
    engines: list[Recorded] = []
    make = train._engine

    def recorded(*arguments: Any) -> Recorded:
        engines.append(Recorded(make(*arguments), replayed=replayed))
        return engines[-1]

    train._engine = recorded
    try:
        loaded = load("quickstart", [*SMALL, *settings])
        planned = plan(loaded, gpus=here.world)
        train.train(loaded.recipe, planned, base=loaded.base, out=out, resume=None, observer=Silent(), ranks=here)
    finally:
        train._engine = make
    return engines[-1].written


def adapter(out: Path, step: int) -> Any:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(out / "checkpoints" / f"step_{step}" / "adapter" / "adapter_model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def same_as_one_rank(folder: Path, here: ranks.Ranks) -> dict[str, Any]:
    """One rank alone, then all ranks on its completions; the first settings also live, for one step."""
    found: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        alone, many = folder / f"{name}, alone", folder / f"{name}, many"
        written = here.gather(run(alone, ranks.ALONE, settings, None) if here.first else {})[0]
        run(many, here, settings, written)
        found[name] = {"metrics": [lines(out / "metrics.jsonl") for out in (alone, many)]}
        steps = len(found[name]["metrics"][0])
        one, two = adapter(alone, steps), adapter(many, steps)
        found[name]["difference"] = float((one - two).norm() / one.norm())
        if name == "plain":
            mine = run(folder / "live", here, [*settings, "train.steps=1"], None)
            found[name]["moved"] = float((one - adapter(folder / "live", 1)).norm() / one.norm())
            found[name]["live"] = _equal_tokens(here.gather(mine), written)
    return found


def _equal_tokens(parts: list[dict[Key, Completion]], written: dict[Key, Completion]) -> dict[str, float]:
    """Completions of the live first step, and the share of their tokens that one rank alone wrote too."""
    pairs = [(one, written[key]) for part in parts for key, one in part.items()]
    equal = sum(a == b for one, other in pairs for a, b in zip(one.token_ids, other.token_ids, strict=False))
    longest = sum(max(len(one.token_ids), len(other.token_ids)) for one, other in pairs)
    return {"completions": len(pairs), "equal": equal / longest}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Once(Recorded):
    """An engine that calls `act` when it first writes at step 1."""

    act: Callable[[Any], None]

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        if step == 1:
            self.act(self.engine)
        return super().generate(requests, step=step)


def at_step_1(
    out: Path, here: ranks.Ranks, act: Callable[[Any], None], *settings: str, base: Path | None = None
) -> str:
    """Train while rank 1 does something before its second rollout; how the run ended on this rank, and its warnings."""
    watcher = Told()
    make = train._engine

    def engine(*arguments: Any) -> Any:
        once = Once(make(*arguments))
        once.act = act if here.rank == 1 else lambda engine: None
        return once

    train._engine = engine
    try:
        loaded = load("quickstart", [*SMALL, "train.steps=4", *settings])
        planned = plan(loaded, gpus=here.world)
        place = base or loaded.base
        train.train(loaded.recipe, planned, base=place, out=out, resume=None, observer=watcher, ranks=here)
    except (RunError, Interrupted) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        train._engine = make
    return "finished: " + "; ".join(watcher.warnings)


class Told(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


SLOW = """
import os, time

def slow(completion: str) -> float:
    time.sleep(3 if os.environ["RANK"] == "1" else 0)
    return float(len(completion) % 2)
"""


def _move_adapter(engine: Any) -> None:
    next(p for p in engine._model.parameters() if p.requires_grad).data.add_(1e-3)


def trouble(folder: Path, here: ranks.Ranks) -> dict[str, Any]:
    """A signal to one rank, an adapter changed on one, an error on one, a reward that takes its time on one."""
    found: dict[str, Any] = {}

    def fail(engine: Any) -> None:
        raise ValueError("broken on one rank")

    acts: dict[str, Callable[[Any], None]] = {
        "signal": lambda engine: os.kill(os.getpid(), signal.SIGTERM),
        "other adapter": _move_adapter,
        "error": fail,
    }
    for name, act in acts.items():
        ends = here.gather(at_step_1(folder / name, here, act))
        status = json.loads((folder / name / "status.json").read_text())
        found[name] = {"ends": ends, "state": status["state"], "step": status["step"]}
        found[name]["checkpoints"] = sorted(f.name for f in (folder / name / "checkpoints").glob("step_*"))
    if here.first:
        (folder / "slow.py").write_text(SLOW)
    here.gather(None)
    pulse.PATIENCE_S = 0.5
    use = "rewards=[{use: './slow.py:slow'}]"
    sources = "data={train: [{source: 'tiny:math'}]}"
    settings = [use, sources, "train.steps=1", "train.prompts_per_step=2", "sampling.group_size=2"]
    found["late"] = here.gather(at_step_1(folder / "late", here, lambda engine: None, *settings, base=folder))
    return found


WHAT = {"same": same_as_one_rank, "trouble": trouble}

if __name__ == "__main__":
    what, place = sys.argv[1:]
    with ranks.joined() as joined:
        result = {name: WHAT[name](Path(place), joined) for name in what.split(",")}
        if joined.first:
            print(json.dumps(result))
