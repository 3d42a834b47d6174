"""The loop under the settings that change its course: updates, reference, entropy, masks, micro-batches."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from slmgrpo import model
from slmgrpo.callbacks import Silent
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.train import train

SMALL = ["train.prompts_per_step=6", "sampling.group_size=4", "data.heldout=[]", "train.steps=4"]


def metrics(out: Path, *overrides: str) -> list[dict[str, Any]]:
    loaded = load("quickstart", [*SMALL, *overrides])
    run = train(loaded.recipe, plan(loaded), base=loaded.base, out=out, resume=None, observer=Silent()).run
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def numbers(line: dict[str, Any]) -> list[float]:
    return [line[name] for name in ("loss", "grad_norm", "ratio", "learning_rate", "entropy")]


@pytest.mark.parametrize(
    "settings",
    [
        ("loss.loss_type=grpo", "loss.beta=0.02"),
        ("loss.loss_type=dr_grpo", "loss.scale_rewards=none"),
        ("loss.loss_type=cispo", "loss.epsilon_high=5"),
        ("loss.loss_type=grpo", "loss.importance_sampling_level=sequence"),
        ("loss.entropy_coef=0.01", "loss.top_entropy_quantile=0.5"),
        ("loss.mask_truncated_completions=true", "sampling.max_tokens=14"),
        ("loss.sampling_correction=bypass",),
    ],
    ids=" ".join,
)
def test_every_course_of_the_loop_gives_finite_steps(tmp_path: Path, settings: tuple[str, ...]) -> None:
    lines = metrics(tmp_path / "run", *settings)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    learned = [line for line in lines if line["rows_trained"]]
    assert all(math.isfinite(value) for line in learned for value in numbers(line))
    assert any(line["grad_norm"] > 0 for line in lines)


def test_a_second_update_on_a_rollout_is_off_policy_and_the_next_rollout_is_not(tmp_path: Path) -> None:
    lines = metrics(tmp_path / "run", "train.updates_per_rollout=2", "optimizer.lr_scheduler_type=constant")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    first, again, fresh, _ = lines
    assert first["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert again["ratio_max"] > 1.001
    assert fresh["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert first["reward"] == again["reward"]
    assert first["tokens_per_s"] > 0 and again["tokens_per_s"] is None  # its time has no writing in it


def test_micro_batches_do_not_change_what_is_learned(tmp_path: Path) -> None:
    whole = metrics(tmp_path / "whole", "train.micro_batch_tokens=100000")
    parts = metrics(tmp_path / "parts", "train.micro_batch_tokens=1")
    for a, b in zip(whole, parts, strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=1e-4, abs=1e-5)


def test_training_moves_the_adapter_and_never_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[model.Policy, str, list[Any]]] = []
    load_policy = model.load

    def remembered(*arguments: Any, **named: Any) -> model.Policy:
        policy = load_policy(*arguments, **named)
        loaded.append((policy, model.base_fingerprint(policy), [p.detach().clone() for _, p in policy.trainable()]))
        return policy

    monkeypatch.setattr(model, "load", remembered)
    metrics(tmp_path / "run")
    ((policy, before, adapter),) = loaded
    assert model.base_fingerprint(policy) == before
    assert any(not p.equal(old) for (_, p), old in zip(policy.trainable(), adapter, strict=True))
