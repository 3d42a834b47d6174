"""Evaluation while training: the same numbers as `slmgrpo eval`, the best checkpoint kept, nothing done twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from slmgrpo import recipe_load, train
from slmgrpo.callbacks import Silent
from slmgrpo.errors import RecipeError
from slmgrpo.eval import choose, evaluate, suites, targets
from slmgrpo.plan import plan
from slmgrpo.recipe import Grading
from slmgrpo.run import RunDir

SETS = [
    "train.steps=6",
    "train.prompts_per_step=6",
    "sampling.group_size=4",
    "train.save_every=2",
    "train.keep_checkpoints=3",
]
SETS += ["optimizer.lr_scheduler_type=constant", *(f"data.heldout.{i}.limit=6" for i in range(3))]
EVAL = ["eval.every=2", "eval.suites=[tiny_math]", "eval.limit=12", "eval.samples=2", "eval.best=tiny_math/pass@2"]


class Stages(Silent):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def stage(self, text: str) -> None:
        self.seen.append(text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, list[str]]:
    loaded = recipe_load.load("quickstart", [*SETS, *EVAL])
    out, stages = tmp_path_factory.mktemp("during") / "run", Stages()
    done = train.train(loaded.recipe, plan(loaded), base=loaded.base, out=out, resume=None, observer=stages)
    return done.run, stages.seen


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_suites_are_evaluated_before_between_and_after_with_their_cost(trained: tuple[RunDir, list[str]]) -> None:
    run, stages = trained
    found = lines(run.path / "evaluations.jsonl")
    assert [line["step"] for line in found] == [0, 2, 4, 6]
    for line in found:
        assert 0 < line["share"] < 1 and line["seconds"] > 0
        assert "heldout/accuracy" in line["metrics"]
        scores = json.loads((run.eval_dir(line["step"], "tiny_math") / "scores.json").read_text())
        assert scores["results"]["tiny_math"]["accuracy,96"] == line["metrics"]["tiny_math/accuracy"]
        assert len(lines(run.eval_dir(line["step"], "tiny_math") / "samples.jsonl")) == 24
        shown = f"step {line['step']}: heldout/accuracy"
        assert any(
            text.startswith(shown) and "evaluations take" in text and " % of the time" in text for text in stages
        )


def test_best_is_the_step_with_the_highest_metric(trained: tuple[RunDir, list[str]]) -> None:
    run, _ = trained
    values = {one["step"]: one["metrics"]["tiny_math/pass@2"] for one in lines(run.path / "evaluations.jsonl")[1:]}
    best = run.best()
    assert best is not None
    assert best["value"] == max(values.values()) == values[best["step"]]
    assert targets.parse(f"{run.path}:best").label == f"step_{best['step']}"


def test_the_best_checkpoint_is_kept_beside_the_newest_and_found(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step in (2, 4, 6, 8):
        run.save_checkpoint(step, lambda folder: None, keep=1)
        if step == 4:
            run.write_json("best.json", {"step": 4, "metric": "x/accuracy", "value": 0.5})
    assert run.steps() == [4, 8]


def test_what_training_measured_is_what_slmgrpo_eval_measures(
    trained: tuple[RunDir, list[str]], tmp_path: Path
) -> None:
    run, _ = trained
    options = evaluate.Options(samples=2, limit=12, grading=Grading(workers=1, sandbox="best"))

    class Writes(evaluate.Silent):
        count = 0

        def progress(self, what: str, done: int, total: int) -> None:
            self.count += what == "writing"

    watch = Writes()
    found = []
    for out in (None, tmp_path):
        chosen, _ = choose.targets_of([f"{run.path}:4"], None, alone=True, out=out)
        found += evaluate.evaluate(chosen, suites.find("tiny_math"), options, watch)
        assert watch.count == (0 if out is None else 24)  # what the run has is read, elsewhere it is written again
    assert found[0].lines == found[1].lines


def test_a_resumed_run_evaluates_what_is_missing_and_nothing_twice(
    trained: tuple[RunDir, list[str]], tmp_path: Path
) -> None:
    run = RunDir(shutil.copytree(trained[0].path, tmp_path / "run"))
    shutil.rmtree(run.checkpoints / "step_6")
    shutil.rmtree(run.path / "eval/step_6")
    shutil.rmtree(run.eval_dir(4, "tiny_math"))  # as if it had ended in the middle of this evaluation
    stream = run.path / "evaluations.jsonl"
    stream.write_text("".join(stream.read_text().splitlines(keepends=True)[:2]))
    before = {file: file.stat().st_mtime_ns for file in run.path.glob("eval/step_[024]/*/samples.jsonl")}
    loaded = recipe_load.load("quickstart", [*SETS, *EVAL])
    train.train(loaded.recipe, plan(loaded), base=loaded.base, out=None, resume=run, observer=Silent())
    assert [line["step"] for line in lines(stream)] == [0, 2, 4, 6]
    assert {file: file.stat().st_mtime_ns for file in before} == before
    again = [lines(run.eval_dir(4, "tiny_math") / "samples.jsonl")]
    assert again == [lines(trained[0].eval_dir(4, "tiny_math") / "samples.jsonl")]


BAD = {
    "unknown suite": (["eval.suites=[gsm8]"], "eval.suites: gsm8: no such suite; did you mean `gsm8k`"),
    "suite twice": (["eval.suites=[tiny, tiny_mcq]"], "eval.suites: tiny_mcq is there twice"),
    "nothing to evaluate": (
        ["eval.every=5", "data.heldout=[]"],
        "eval.every=5: there is nothing to evaluate; name eval.suites",
    ),
    "best of nothing": (
        ["eval.best=heldout/accuracy", "data.heldout=[]"],
        "eval.best=heldout/accuracy: there is nothing to evaluate",
    ),
    "limit without suites": (["eval.limit=5"], "eval.limit=5: is for suites, and eval.suites names none"),
    "best of another suite": (["eval.best=gsm8k/accuracy"], "gsm8k is not evaluated; there are heldout"),
    "best by an unknown metric": (
        ["eval.suites=[tiny_math]", "eval.samples=4", "eval.best=tiny_math/pass@8"],
        "write tiny_math/METRIC, one of accuracy, pass@2, pass@4",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_one_message_of_the_plan(name: str) -> None:
    sets, expected = BAD[name]
    with pytest.raises(RecipeError) as caught:
        plan(recipe_load.load("quickstart", sets))
    assert expected in str(caught.value)


def test_a_budget_beyond_the_context_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    text = suites.packaged_suites()["tiny_math"].read_text().replace("[32, 96]", "[32, 5000]")
    (tmp_path / "long.yaml").write_text(text)
    loaded = recipe_load.load("quickstart", [*SETS, f"eval.suites=[{tmp_path}/long.yaml]"])
    with pytest.raises(RecipeError, match=r"goes beyond the model's context of 1024; use eval\.budgets=\[10\d\d\]"):
        train.train(loaded.recipe, plan(loaded), base=loaded.base, out=tmp_path / "run", resume=None, observer=Silent())
    assert not (tmp_path / "run").exists()
