"""Engines that stop, fill the memory or return too little: one clear message, exit 1, and a run that goes on later."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from byte_tokenizer import tokenizer_with

from slmgrpo.callbacks import Silent
from slmgrpo.errors import RunError
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.pool import Pool
from slmgrpo.rollout.engine import Completion, Request
from slmgrpo.rollout.groups import Group, Prompted, generate_and_grade
from slmgrpo.rollout.hf import HfEngine
from slmgrpo.run import Clock, RunDir
from slmgrpo.train import train

GROUP, PROMPTS = 4, 3
SMALL = ["train.prompts_per_step=4", "sampling.group_size=4", "data.heldout=[]", "model.backend=transformers"]
TOKENIZER = tokenizer_with(None)
SEVEN = tuple(TOKENIZER(r"\boxed{7}")["input_ids"])


class Plays:
    """An engine that writes `7` for everybody and then does what it is told."""

    name = "playing"
    end_ids = frozenset[int]()

    def __init__(self, before_last: Callable[[], Any]) -> None:
        self.before_last = before_last

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        written = [Completion(r.index, m, SEVEN, (-0.1,) * len(SEVEN), "stop") for r in requests for m in r.members]
        yield from written[:-1]
        if self.before_last() != "stop":
            yield written[-1]

    def sync(self, step: int) -> None: ...

    def close(self) -> None: ...


def graded(engine: Plays, pool: Pool, clock: Clock | None = None) -> list[Group]:
    rows = [{"id": f"q{i}", "task": "t", "question": "3+4", "answer": "7"} for i in range(PROMPTS)]
    return generate_and_grade(
        [Prompted(row, (1, 2), "", (Reward("math.correct"),)) for row in rows],
        engine=engine,
        pool=pool,
        tokenizer=TOKENIZER,
        recipe=load("quickstart").recipe,
        step=5,
        group_size=GROUP,
        clock=clock or Clock(),
        progress=Silent().progress,
    )


def fail(error: Exception) -> Callable[[], None]:
    def raises() -> None:
        raise error

    return raises


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(1, sandbox="off") as opened:
        yield opened


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (fail(ValueError("no such token\nmore")), r"the playing engine failed \(ValueError: no such token\)$"),
        (fail(MemoryError()), r"failed \(MemoryError\); lower sampling.max_tokens or train.prompts_per_step"),
        (fail(torch.OutOfMemoryError("2 GiB")), r"failed \(OutOfMemoryError: 2 GiB\); lower sampling.max_tokens"),
        (fail(RunError("a message of its own")), "^a message of its own$"),
        (lambda: "stop", f"returned {GROUP * PROMPTS - 1} of {GROUP * PROMPTS} completions"),
    ],
)
def test_what_an_engine_dies_of_is_one_message(does: Callable[[], Any], said: str, pool: Pool) -> None:
    with pytest.raises(RunError, match=said) as error:
        graded(Plays(does), pool)
    assert "\n" not in str(error.value)
    list(pool.drain())


def test_completions_are_graded_while_the_last_one_is_still_being_written(pool: Pool) -> None:
    """The engine ends only when all others have their verdict, which it would otherwise wait for in vain."""
    already = sum(pool.stats()["math.correct"].statuses.values()) if pool.stats() else 0

    def wait() -> None:
        for _ in range(600):
            if sum(pool.stats()["math.correct"].statuses.values()) - already == GROUP * PROMPTS - 1:
                return
            time.sleep(0.05)
        pytest.fail("nothing was graded beside generation")

    clock = Clock()
    groups = graded(Plays(wait), pool, clock)
    assert all(member.reward == 1.0 for group in groups for member in group.members)
    assert list(clock.stages) == ["generation", "reward_wait"]


def test_a_run_whose_engine_dies_is_kept_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load("quickstart", ["train.steps=3", "train.save_every=2", *SMALL])
    arguments: dict[str, Any] = {"base": loaded.base, "observer": Silent()}
    real = HfEngine.generate

    def dies(self: HfEngine, requests: list[Request], *, step: int) -> Iterator[Completion]:
        written = real(self, requests, step=step)
        yield next(written)
        if step == 2:
            raise MemoryError
        yield from written

    with monkeypatch.context() as patch, pytest.raises(RunError) as error:
        patch.setattr(HfEngine, "generate", dies)
        train(loaded.recipe, plan(loaded), out=tmp_path / "run", resume=None, **arguments)
    run = RunDir(tmp_path / "run")
    assert error.value.exit_code == 1
    message, ways_on = str(error.value).splitlines()
    assert message.startswith("step 3: the hf engine failed (MemoryError); lower sampling.max_tokens")
    assert f"resume with `slmgrpo train --resume {run.path}`" in ways_on
    assert run.read_json("status.json")["state"] == "failed"
    assert "Traceback" in next(run.path.glob("logs/attempt_1/*.log")).read_text()
    again = RunDir(shutil.copytree(run.path, tmp_path / "again"))  # this process still holds the lock of the first
    train(loaded.recipe, plan(loaded), out=None, resume=again, **arguments)
    assert [json.loads(line)["step"] for line in again.metrics.read_text().splitlines()] == [1, 2, 3]
