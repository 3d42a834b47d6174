"""A resumed run's recipe: the same, or changed where that is allowed, shown and noted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from strikes import trained

from slmgrpo.cli import app
from slmgrpo.curves import read
from slmgrpo.errors import RecipeError, RunError
from slmgrpo.eval.targets import merged_of
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.resume import begin, recipe_of
from slmgrpo.run import RunDir

RATE = "optimizer.learning_rate=1e-4"


@pytest.fixture
def started(tmp_path: Path) -> RunDir:
    """A run directory as `slmgrpo train quickstart` begins it."""
    run, recipe = RunDir(tmp_path), load("quickstart").recipe
    begin(run, recipe, plan(recipe), {"base": str(tmp_path)})
    return run


def test_an_unchanged_run_goes_on_with_its_own_recipe(started: RunDir) -> None:
    assert recipe_of(started) == (load("quickstart").recipe, started.path)
    assert recipe_of(started, ["optimizer.learning_rate=1e-3"])[0] == load("quickstart").recipe


def test_a_changed_recipe_is_refused_with_its_differences_unless_told(started: RunDir) -> None:
    with pytest.raises(RecipeError) as raised:
        recipe_of(started, [RATE, "guards.actions={unique: off}"])
    assert "optimizer.learning_rate: 0.001 -> 0.0001" in str(raised.value)
    assert "guards.actions.unique: absent -> " in str(raised.value)
    assert "--allow-changes" in str(raised.value)
    assert recipe_of(started, [RATE], allow_changes=True)[0].optimizer.learning_rate == 1e-4


def test_an_edit_of_the_runs_recipe_json_is_seen(started: RunDir) -> None:
    recipe = started.read_json("recipe.json")
    recipe["loss"]["beta"] = 0.1
    started.write_json("recipe.json", recipe)
    with pytest.raises(RecipeError, match=r"loss\.beta: 0\.0 -> 0\.1"):
        recipe_of(started)


@pytest.mark.parametrize("change", ["lora.rank=4", "model.dtype=bfloat16", "seed=1", "train.updates_per_rollout=2"])
def test_what_a_checkpoint_belongs_to_cannot_change(started: RunDir, change: str) -> None:
    with pytest.raises(RecipeError, match=f"{change.partition('=')[0]} cannot change within a run"):
        recipe_of(started, [change], allow_changes=True)


def test_a_run_made_longer_behind_a_short_rollout_takes_new_prompts(tmp_path: Path) -> None:
    short = ["train.updates_per_rollout=2", "train.steps=3"]
    run = trained(tmp_path / "run", *short)
    longer = [part for setting in (*short[:1], "train.steps=7") for part in ("--set", setting)]
    app(["train", "--resume", str(run.path), *longer, "--allow-changes"], standalone_mode=False)
    asked: dict[int, set[str]] = {}
    for line in run.lines(run.samples):
        asked.setdefault(line["step"], set()).add(line["id"])
    assert list(asked) == [2, 3, 5, 7]
    assert len(set().union(*asked.values())) == 4 * 6
    assert [line["step"] for line in read(run.path).rollouts] == [1, 3, 4, 6]
    assert [line["step"] for line in read(run.path).policy] == [2, 3, 5, 7]


def test_a_change_that_cannot_be_resumed_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "train.steps=2")
    files = ["recipe.json", "env.json", "plan.json"]
    before = [(run.path / name).read_bytes() for name in files]
    resume = ["train", "--resume", str(run.path)]
    with pytest.raises(RunError, match="are not those of the checkpoint"):
        app([*resume, "--set", "data.train.0.limit=100", "--allow-changes"], standalone_mode=False)
    assert [(run.path / name).read_bytes() for name in files] == before
    app(resume, standalone_mode=False)
    assert run.finished_at() == 2


def test_a_merged_adapter_that_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    weights = tmp_path / "from" / "adapter_model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"as it was")
    run, recipe = RunDir(tmp_path), load("quickstart", [f"adapter={weights.parent}", "merge_adapter=true"]).recipe
    begin(run, recipe, plan(recipe), {"base": str(tmp_path)})
    assert merged_of(run, recipe_of(run)[0]) == (weights.parent,)
    weights.write_bytes(b"trained further")
    for ask in (lambda: recipe_of(run), lambda: merged_of(run, recipe)):
        with pytest.raises(RecipeError, match=rf"{weights.parent} is not the adapter .* with sha256 [0-9a-f]{{64}}"):
            ask()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("recipe.json", "{", "recipe.json"),
        ("recipe.json", '{"model": "tiny"}', "problem"),
        ("env.json", "{}", "was it edited"),
        ("env.json", "[", "not readable as JSON"),
    ],
)
def test_a_run_whose_files_were_spoilt_is_refused_in_words(started: RunDir, name: str, text: str, says: str) -> None:
    (started.path / name).write_text(text)
    with pytest.raises(RecipeError, match=says):
        recipe_of(started)


def test_a_resumed_run_with_changes_learns_by_the_new_values_and_says_so(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "train.steps=2")
    arguments = ["train", "--resume", str(run.path), "--set", "train.steps=3", "--set", RATE]
    with pytest.raises(RecipeError, match=r"train\.steps: 2 -> 3"):
        app(arguments, standalone_mode=False)
    app([*arguments, "--allow-changes"], standalone_mode=False)
    rates = [json.loads(line)["learning_rate"] for line in run.metrics.read_text().splitlines()]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4])
    (note,) = run.read_json("env.json")["changes"]
    assert (note["step"], note["changed"]) == (
        2,
        {"train.steps": ["2", "3"], "optimizer.learning_rate": ["0.001", "0.0001"]},
    )
    assert recipe_of(run)[0].train.steps == 3  # told once, it needs no telling again
