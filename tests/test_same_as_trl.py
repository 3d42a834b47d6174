"""End to end through the model against TRL's own pass: same completions, same gradient, same weights in the end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from trl_replay import ASIDE, AXES, LOSS_TYPES

CHILD = Path(__file__).with_name("trl_replay.py")
FLOAT64, FLOAT32 = 1e-12, 1e-4
"""Distance of the gradients over the norm of TRL's."""


def child(*arguments: str | Path) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process for all tests here: importing TRL takes 12 s."""
    return child("share", tmp_path_factory.mktemp("replay"))


def assert_same(results: Iterable[dict[str, Any]]) -> None:
    """The same mathematics, and in float32 no more apart than by rounding.

    That is above 1e-5 where the gradient is a small rest of large parts: batches with nothing but KL and entropy in
    them, or advantages that cancel.
    """
    wrong = [result for result in results if result["exact"] > FLOAT64 or result["gap"] > FLOAT32]
    assert not wrong, wrong[0]


def test_gradients_through_the_model_are_trls(share: dict[str, Any]) -> None:
    assert_same(share["grid"])


def test_the_share_of_the_grid_spans_every_axis_for_every_loss_type(share: dict[str, Any]) -> None:
    for loss_type in LOSS_TYPES:
        seen = [result["case"] for result in share["grid"] if result["case"]["loss_type"] == loss_type]
        for axis, values in AXES.items():
            wanted = {1} if axis == "accumulation" and loss_type == "bnpo" else set(values)
            assert {case[axis] for case in seen} == wanted, (loss_type, axis)
    seen = [result["case"] for result in share["grid"]]
    for axis, values in ASIDE.items():
        assert {json.dumps(case[axis]) for case in seen} == {json.dumps(value) for value in values}
    assert sum(result["size"] > 0 for result in share["grid"]) > 0.8 * len(seen)


def test_a_silent_batch_has_a_gradient_from_kl_and_entropy_alone(share: dict[str, Any]) -> None:
    for result in share["grid"]:
        case = result["case"]
        if case["batch"] == "silent":
            assert (result["size"] > 0) == (case["beta"] > 0 or case["entropy"][0] > 0), case


def test_twenty_steps_on_the_same_completions_end_in_the_same_weights(share: dict[str, Any]) -> None:
    for name, apart in share["steps"].items():
        assert apart["rollouts"] in (10, 20) and apart["left"] == 0, name
        assert apart["weights"] < 1e-4, (name, apart)
        assert apart["lora_B"] < 1e-3, (name, apart)  # starts at 0, so this is a share of all that was learned


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_through_the_model_are_trls_on_the_full_grid(loss_type: str) -> None:
    results = child("full", loss_type)["grid"]
    assert len(results) == 192
    close = sum(result["gap"] <= 1e-5 for result in results)
    print(f"{loss_type}: {close} of {len(results)} within 1e-5 in float32", end=", ")
    print(f"at most {max(r['gap'] for r in results):.1e}, in float64 {max(r['exact'] for r in results):.1e}")
    assert_same(results)
