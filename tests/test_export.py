"""Exports of a trained run: what is written says what the run says, token for token, and its card has the numbers."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from random_models import random_model
from trained_run import slmgrpo, trained_run

from slmgrpo import export as exporting
from slmgrpo.card import model_card
from slmgrpo.errors import RecipeError, RunError
from slmgrpo.eval import evaluate, suites
from slmgrpo.eval.targets import Base, parse, recipe_of
from slmgrpo.export import export
from slmgrpo.recipe import Grading


def silent(text: str) -> None: ...


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained_run(), tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_adapter_and_merged_model_agree_token_for_token(here: Path) -> None:
    adapter = export(parse("run"), "adapter", here / "adapter", stage=silent)
    merged = export(parse("run"), "merged", here / "merged", stage=silent)
    assert (adapter.equal, adapter.checked) == (merged.equal, merged.checked) == (20, 20)
    options = evaluate.Options(samples=3, greedy=True, limit=10, grading=Grading(workers=1))
    targets = [parse("run"), parse("adapter"), parse("merged"), parse("tiny")]
    found = evaluate.evaluate(targets, suites.find("tiny_math"), options, evaluate.Silent())
    run, own, whole, base = ([line["token_ids"] for line in one.lines] for one in found)
    assert run == own == whole != base


def test_a_scaled_update_can_be_merged(here: Path) -> None:
    export(parse("run@0"), "merged", here / "none", stage=silent)
    options = evaluate.Options(limit=10, grading=Grading(workers=1))
    targets = [parse("none"), parse("tiny")]
    a, b = evaluate.evaluate(targets, suites.find("tiny_math"), options, evaluate.Silent())
    assert [line["token_ids"] for line in a.lines] == [line["token_ids"] for line in b.lines]


def test_the_card_has_evaluations_data_recipe_and_licences(here: Path) -> None:
    assert slmgrpo("eval", "run", cwd=here).returncode == 0
    done = slmgrpo("export", "run", "--to", "adapter", "--out", "mine", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "20 of 20 greedy outputs equal" in done.stdout
    card = (here / "mine/README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["base_model"] == "tiny"
    assert head["library_name"] == "peft"
    for part in (
        "| 32 | step_12 |",
        "exact McNemar",
        "tiny:mcq",
        "Licences",
        "lr_scheduler_type: constant",
        "PeftModel",
    ):
        assert part in card


def test_a_card_without_evaluations_says_how_to_get_them(here: Path) -> None:
    export(parse("run"), "adapter", here / "mine", stage=silent)
    assert "run `slmgrpo eval run` before the export" in (here / "mine/README.md").read_text()


def test_a_family_that_our_engine_does_not_know_is_checked_by_transformers(here: Path) -> None:
    from transformers import AutoTokenizer

    from slmgrpo import model, tiny
    from slmgrpo.recipe import Data, Model, Recipe, Source

    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    random_model("mistral", vocab_size=len(tokenizer)).float().save_pretrained("other")
    tokenizer.save_pretrained("other")
    other = Model(id=str(here / "other"), backend="transformers")
    model.load(Recipe(model=other, data=Data(train=[Source(source="tiny:math")])), max_length=64).save_adapter(
        here / "a"
    )
    target = replace(parse("run"), base=Base(other), adapter=here / "a")
    for form in ("adapter", "merged"):
        assert export(target, form, here / form, stage=silent).equal == 20


def test_a_place_that_cannot_be_written_is_one_message(here: Path) -> None:
    (here / "file").touch()
    done = slmgrpo("export", "run", "--to", "adapter", "--out", "file/mine", cwd=here)
    assert done.returncode == 2
    assert (
        done.stderr.splitlines()[-1] == "file/mine: cannot be written (Not a directory); use --out for another folder"
    )


def test_the_card_compares_only_what_was_evaluated_alike(here: Path) -> None:
    for target, limit in ((parse("run"), 10), (parse("run").bare(), 6)):
        options = evaluate.Options(limit=limit, grading=Grading(workers=1))
        evaluate.evaluate([target], suites.find("tiny_math"), options, evaluate.Silent())
    target = parse("run")
    assert target.run is not None
    text = model_card(target, recipe_of(target.run)[0], "adapter")
    assert "tiny_math: 10 problems" in text
    assert "base |" not in text and "won:lost" not in text


def test_a_card_that_cannot_be_written_stops_before_the_weights(here: Path) -> None:
    folder = here / "run/eval/step_12/mine"
    folder.mkdir(parents=True)
    for name in ("settings.json", "samples.jsonl"):
        (folder / name).write_text("{}")
    with pytest.raises(RecipeError, match=r"mine: no scores\.json"):
        export(parse("run"), "adapter", here / "mine", stage=silent)
    assert sorted(path.name for path in here.iterdir()) == ["run"]


def test_files_that_say_something_else_are_not_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "_outputs_of", lambda folder, form, target, asked: [(1,)] * len(asked))
    with pytest.raises(RunError, match="20 of 20 greedy outputs differ"):
        export(parse("run"), "merged", here / "mine", stage=silent)
    assert sorted(path.name for path in here.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("target", "form", "out", "expected"),
    [
        ("tiny", "merged", "mine", "export takes a run"),
        ("run", "merged", "run", "exists; choose another --out"),
        ("run@0.5", "adapter", "mine", "an adapter is exported whole"),
    ],
)
def test_what_cannot_be_exported_is_refused(here: Path, target: str, form, out: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        export(parse(target), form, here / out, stage=silent)
