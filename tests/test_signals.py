"""Signals of a step: on known numbers, against exact values of a small distribution, and in a real run."""

from __future__ import annotations

import atexit
import functools
import json
import math
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slmgrpo import signals
from slmgrpo.callbacks import Silent
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir
from slmgrpo.train import train


def test_reward_cv_is_deviation_over_mean() -> None:
    assert signals.reward_cv([1.0, 3.0]) == 0.5
    assert signals.reward_cv([-1.0, -3.0]) == 0.5
    assert signals.reward_cv([0.0, 0.0]) is None and signals.reward_cv([]) is None


@pytest.mark.parametrize(
    ("right", "bin"),
    [([0, 0], 0), ([1, 0, 0, 0, 0], 1), ([1, 0, 0, 0], 2), ([1, 0], 3), ([1, 1, 1, 0], 4), ([1, 1], 5), ([1], 5)],
)
def test_a_group_counts_in_the_bin_of_its_pass_rate(right: list[int], bin: int) -> None:
    counts = signals.pass_histogram([[bool(hit) for hit in right]])
    assert counts == [int(place == bin) for place in range(6)]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=16), max_size=20))
def test_the_pass_histogram_counts_every_group_once(right: list[list[bool]]) -> None:
    assert sum(signals.pass_histogram(right)) == len(right)


def test_sampled_entropy_is_unbiased_also_for_rows_that_are_kept_because_of_what_was_drawn() -> None:
    probabilities = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    drawn = torch.multinomial(probabilities, 20_000, replacement=True, generator=torch.Generator().manual_seed(1))
    log_probs = probabilities.log()[drawn].tolist()
    exact = float(-(probabilities * probabilities.log()).sum())
    assert signals.sampled_entropy([log_probs]) == pytest.approx(exact, abs=0.02)
    half = [exact if token else -p for token, p in zip(drawn.tolist(), log_probs, strict=True)]
    assert sum(half) / len(half) < exact - 0.1  # exact where trained, sampled elsewhere: what signals.py does not do


def test_what_an_engine_could_not_say_is_left_out() -> None:
    assert signals.sampled_entropy([(-1.0, math.nan), ()]) == 1.0
    assert signals.sampled_entropy([(), (math.nan,)]) is None
    assert signals.entropy_by_class([(-1.0, math.nan)], [(1, 2)], lambda token: "digit") == {"digit": 1.0}


@pytest.mark.parametrize(
    ("text", "kind"),
    [("7", "digit"), (" 12", "digit"), (" the", "letter"), ("x", "letter"), ("<think>", "mark"), ("\\boxed{", "mark"),
     ("\n", "mark"), ("<|end|>", "mark"), ("don't", "mark"), ("", "mark")],
)  # fmt: skip
def test_a_token_is_a_digit_a_word_or_a_mark(text: str, kind: str) -> None:
    assert signals.token_class(text) == kind


def test_classes_split_the_entropy_exactly() -> None:
    by_class = signals.entropy_by_class(
        [(-1.0, -2.0), (-3.0,)], [(1, 5), (5,)], lambda token: "digit" if token == 5 else "mark"
    )
    assert by_class == {"digit": 2.5, "mark": 1.0}


def test_kl_estimates_agree_with_the_exact_divergence_where_they_are_unbiased() -> None:
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    k1, k2, k3 = ((p * k).sum() for k in signals.kl_estimates(p.log(), q.log()))  # expectations under p
    assert float(k1) == pytest.approx(exact) and float(k3) == pytest.approx(exact)
    assert 0 < float(k2) != pytest.approx(exact)


@functools.cache
def two_updates() -> tuple[RunDir, list[dict[str, Any]]]:
    """A run of two updates on one rollout, and its metrics."""
    folder = Path(tempfile.mkdtemp(prefix="slmgrpo-signals-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    small = ["train.prompts_per_step=6", "sampling.group_size=4", "train.steps=2", "train.updates_per_rollout=2"]
    heldout = [f"data.heldout.{i}.limit=6" for i in range(3)]
    loaded = load("quickstart", [*small, *heldout, "optimizer.lr_scheduler_type=constant"])
    run = train(loaded.recipe, plan(loaded), base=loaded.base, out=folder / "run", resume=None, observer=Silent()).run
    return run, [json.loads(line) for line in run.metrics.read_text().splitlines()]


def test_a_run_writes_every_signal_and_counts_silent_rows_in() -> None:
    run, (first, second) = two_updates()
    assert sum(first["pass_histogram"]) == 6
    assert first["rows_dropped"] > 0 and first["rows_trained"] + first["rows_dropped"] == 24
    assert set(first["entropy_by_class"]) == {"digit", "letter", "mark"}
    assert first["entropy"] == second["entropy"] != first["entropy_trained"]
    assert abs(first["sampler_kl_k1"]) < 1e-4 and second["sampler_kl_k3"] > 1e-5
    lines = [json.loads(line) for line in run.samples.read_text().splitlines()]
    right = {line["id"]: [] for line in lines}
    for line in lines:
        right[line["id"]].append(set(line["statuses"].values()) == {"correct"})
    assert signals.pass_histogram(right.values()) == first["pass_histogram"]
    scores = json.loads((run.eval_dir(2, "heldout") / "scores.json").read_text())
    assert 0 <= scores["reward"] <= 1 and 0 < scores["entropy"] < 3


def test_the_readme_explains_exactly_the_metrics_that_a_run_writes() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    table = readme.split("## Metrics")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    explained = {name: about for names, about in rows for name in re.findall(r"`(\w+)`", names)}
    _, lines = two_updates()
    written = set().union(*lines)
    assert written <= explained.keys()
    assert {
        name for name, about in explained.items() if " where " not in f" {about}" and "under" not in about
    } <= written
