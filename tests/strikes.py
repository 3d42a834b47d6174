"""Training in a forked process that strikes itself with a signal in the midst of a stage: for the tests of survival."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from slmgrpo import run as runs
from slmgrpo import train as training
from slmgrpo.callbacks import Silent
from slmgrpo.errors import RunError
from slmgrpo.interrupt import Interrupted
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.rewards.pool import Pool
from slmgrpo.rollout.hf import HfEngine
from slmgrpo.run import RunDir, open_run
from slmgrpo.tiny import tasks

SMALL = [
    "model.backend=transformers",
    "grading.workers=1",
    "train.steps=6",
    "train.save_every=2",
    "train.prompts_per_step=6",
    "train.micro_batch_tokens=1",  # a micro-batch a group
    "sampling.group_size=4",
    "optimizer.lr_scheduler_type=constant",
    "data.heldout=[{source: tiny:mcq, split: test, limit: 6, rewards: [{use: mcq.correct}]}]",
]


@functools.cache
def rows_file() -> Path:
    """Two hundred questions in a file, which is read faster than all are made."""
    folder = Path(tempfile.mkdtemp(prefix="slmgrpo-rows-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tasks.rows("mcq", "train", 200)))
    return folder / "rows.jsonl"


def few_rows(rule: str = "mcq.correct") -> str:
    """A `--set` that trains on them by this rule."""
    return f"data.train=[{{source: 'file:{rows_file()}', rewards: [{{use: '{rule}'}}]}}]"


STAGES = {
    "generation": 24 * 5,  # completions written in five steps
    "rewards": 24 * 5,  # completions graded
    "backward": 12,  # micro-batches at least
    "checkpoint": 3 * 4,  # files hashed, before the folder gets its name
    "metrics": 2 * 5,  # appends, half of whose text is written
    "pruning": 1,  # old checkpoints removed, half of whose files are gone
    "status": 6,
}
"""Where to strike, and how often a run passes there at least."""


def trained(out: Path, *overrides: str, resume: bool = False, observer: Silent | None = None) -> RunDir:
    """Train here, from the start or on from the run's last checkpoint."""
    loaded = load("quickstart", [*SMALL, few_rows(), *overrides])
    place: dict[str, Any] = {"out": None, "resume": open_run(out)} if resume else {"out": out, "resume": None}
    return training.train(loaded.recipe, plan(loaded), base=loaded.base, observer=observer or Silent(), **place).run


def struck(out: Path, stage: str, count: int, number: int = signal.SIGKILL, *overrides: str, times: int = 1) -> int:
    """Train in a new process until its `count`-th passage of `stage`; returns how the process ended (os.waitpid)."""
    rows_file()  # the same for both
    pid = os.fork()
    if pid == 0:
        code = 70
        with suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            _arm(stage, count, lambda: [os.kill(os.getpid(), number) for _ in range(times)])
            try:
                trained(out, *overrides)
                code = 0
            except Interrupted as stop:
                code = stop.exit_code
            except RunError:
                code = 1
        os._exit(code)
    return os.waitpid(pid, 0)[1]


def _arm(stage: str, count: int, strike: Callable[[], Any]) -> None:
    passages = 0

    def passing() -> bool:
        nonlocal passages
        passages += 1
        return passages == count

    with pytest.MonkeyPatch.context() as patch:
        patch.undo = lambda: None  # this process ends with the strike
        if stage == "generation":
            generate = HfEngine.generate

            def generating(self: HfEngine, *given: Any, **named: Any) -> Iterator[Any]:
                for completion in generate(self, *given, **named):
                    if passing():
                        strike()
                    yield completion

            patch.setattr(HfEngine, "generate", generating)
        elif stage == "rewards":
            drain = Pool.drain

            def draining(self: Pool) -> Iterator[Any]:
                for item in drain(self):
                    if passing():
                        strike()
                    yield item

            patch.setattr(Pool, "drain", draining)
        elif stage == "backward":
            backward = torch.Tensor.backward

            def going_back(self: torch.Tensor, *given: Any, **named: Any) -> None:
                backward(self, *given, **named)
                if passing():
                    strike()

            patch.setattr(torch.Tensor, "backward", going_back)
        elif stage == "checkpoint":
            hashed = runs.sha256

            def hashing(path: Path) -> str:
                if passing():
                    strike()
                return hashed(path)

            patch.setattr(runs, "sha256", hashing)
        elif stage == "metrics":
            append = RunDir.append

            def appending(self: RunDir, stream: Path, values: Any) -> None:
                if not passing():
                    append(self, stream, values)
                    return
                with stream.open("a") as file:
                    file.write('{"step": 1, "rew')
                strike()

            patch.setattr(RunDir, "append", appending)
        elif stage == "pruning":
            rmtree = shutil.rmtree

            def removing(path: Any, *given: Any, **named: Any) -> None:
                if (Path(path) / "trainer.pt").exists() and passing():
                    (Path(path) / "trainer.pt").unlink()
                    strike()
                rmtree(path, *given, **named)

            patch.setattr(shutil, "rmtree", removing)
        elif stage == "status":
            write = runs.write_text

            def writing(path: Path, text: str) -> None:
                if path.name == "status.json" and passing():
                    path.with_name(f".{path.name}.{os.getpid()}").write_text(text[:20])
                    strike()
                write(path, text)

            patch.setattr(runs, "write_text", writing)
        elif stage == "cold start":
            from transformers import Trainer

            training_step = Trainer.training_step

            def stepping(self: Trainer, *given: Any, **named: Any) -> Any:
                if passing():
                    strike()
                return training_step(self, *given, **named)

            patch.setattr(Trainer, "training_step", stepping)
        else:
            raise AssertionError(stage)
