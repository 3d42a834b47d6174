"""Starting points: an adapter continued or merged first, a cold start, a model that the loop cannot train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slmgrpo import tiny
from slmgrpo.callbacks import Silent
from slmgrpo.errors import PlanError, RecipeError
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir
from slmgrpo.tiny import tasks
from slmgrpo.train import train

SETTINGS = ["train.prompts_per_step=4", "train.steps=1", "sampling.group_size=4", "optimizer.learning_rate=1e-9"]


def trained(out: Path, *overrides: str, beside: Path | None = None) -> RunDir:
    """One step at a learning rate that moves nothing, so that what comes out is what training started from."""
    sets = [*SETTINGS, *(f"data.heldout.{i}.limit=20" for i in range(3)), *overrides]
    loaded = load("quickstart", sets)
    base = beside or loaded.base
    outcome = train(loaded.recipe, plan(loaded), base=base, out=out, resume=None, observer=Silent())
    return outcome.run


def adapter_of(run: RunDir) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(run.checkpoints / "step_1" / "adapter" / "adapter_model.safetensors")


def accuracy(run: RunDir) -> float:
    scores = json.loads((run.eval_dir(0, "heldout") / "scores.json").read_text())
    return sum(task["hits"] for task in scores["tasks"].values()) / 60


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that began with a cold start on the worked style."""
    folder = tmp_path_factory.mktemp("cold")
    rows = [row | {"solution": tasks.worked(row)} for name in tasks.TASKS for row in tasks.rows(name, "train", 400)]
    (folder / "solutions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cold = "{data: [{source: 'file:solutions.jsonl'}], steps: 40, learning_rate: 2e-3, batch_size: 32}"
    return trained(folder / "run", f"cold_start={cold}", beside=folder)


def test_a_cold_start_teaches_before_the_first_rollout(taught: RunDir, tmp_path: Path) -> None:
    untaught = trained(tmp_path / "run")
    assert accuracy(taught) > accuracy(untaught) + 0.2
    assert (taught.path / "cold_start" / "adapter" / "adapter_model.safetensors").is_file()


def test_an_adapter_is_continued_where_it_stood(taught: RunDir, tmp_path: Path) -> None:
    again = trained(tmp_path / "run", f"adapter={taught.path}")
    before, after = adapter_of(taught), adapter_of(again)
    assert before.keys() == after.keys()
    for name in before:
        assert (before[name] - after[name]).abs().max() < 1e-6


def test_a_merged_adapter_becomes_the_base_under_a_fresh_one(taught: RunDir, tmp_path: Path) -> None:
    merged = trained(tmp_path / "run", f"adapter={taught.path}", "merge_adapter=true", "loss.beta=0.01")
    fresh = [tensor for name, tensor in adapter_of(merged).items() if "lora_B" in name]
    assert max(float(tensor.abs().max()) for tensor in fresh) < 1e-6
    assert accuracy(merged) == pytest.approx(accuracy(taught), abs=0.05)


def test_an_adapter_of_other_settings_is_refused(taught: RunDir, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="use the lora settings that it was trained with"):
        trained(tmp_path / "run", f"adapter={taught.path}", "lora.layers=first:1")
    assert not (tmp_path / "run").exists()


def test_a_model_whose_logits_the_loop_would_get_wrong_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    from random_models import random_model
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny.path())
    random_model("hyperclovax", vocab_size=len(tokenizer), logits_scaling=3.0).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(PlanError, match=r"HyperCLOVAXForCausalLM makes its logits .* set trainer=trl"):
        trained(tmp_path / "run", f"model.id={tmp_path / 'model'}")
    assert not (tmp_path / "run").exists()
