"""`slmgrpo eval` on a trained run of the embedded model: comparisons, scales, resume, refusals, saved samples."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from random_models import random_model
from trained_run import SLMGRPO, slmgrpo, trained_run

from slmgrpo.errors import PlanError, RecipeError
from slmgrpo.eval import choose, evaluate, harness, store, suites, table, targets
from slmgrpo.eval.compare import compare
from slmgrpo.eval.regrade import regrade
from slmgrpo.recipe import Grading
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir

GRADING = Grading(workers=1, sandbox="best")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run was trained and `slmgrpo eval` was typed."""
    folder = tmp_path_factory.mktemp("eval")
    shutil.copytree(trained_run(), folder / "runs/first")
    done = slmgrpo("eval", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "shown.txt").write_text(done.stdout)
    return folder


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def tokens(found: list[store.Evaluated], label: str) -> list[list[int]]:
    return [line["token_ids"] for one in found if one.label == label for line in one.lines]


# What is shown and written


def test_eval_alone_compares_the_newest_run_with_its_base_on_its_held_out_rows(place: Path) -> None:
    shown = (place / "shown.txt").read_text()
    for part in ("heldout_math: 40 problems, greedy", "base", "step_12", "change", "won:lost", "exact McNemar", "Holm"):
        assert part in shown
    assert max(map(len, shown.splitlines())) <= 80
    saved = json.loads((place / "runs/first/eval/step_12/comparison.json").read_text())["comparisons"]
    assert [(one["suite"], one["budget"]) for one in saved] == [
        (f"heldout_{task}", budget) for task in ("math", "mcq", "code") for budget in (32, 128)
    ]
    for one in saved:
        assert one["p"] < 0.05
        assert 0 < one["difference"]["low"] <= one["difference"]["value"]
        assert len(one["won"]) == one["difference"]["wins"] > one["difference"]["losses"]


def test_what_is_saved_is_whole(place: Path) -> None:
    folder = place / "runs/first/eval/base/heldout_math"
    assert sorted(file.name for file in folder.iterdir()) == [
        "samples.jsonl",
        "scores.json",
        "settings.json",
        "suite.json",
    ]
    line = lines(folder / "samples.jsonl")[0]
    assert {
        "id",
        "question",
        "gold",
        "text",
        "tokens",
        "finish_reason",
        "correct",
        "status",
        "read",
        "verdicts",
    } <= set(line)
    scores = json.loads((folder / "scores.json").read_text())
    for metric in scores["slmgrpo"]["budgets"]["32"].values():
        assert metric["low"] <= metric["value"] <= metric["high"]
    assert json.loads((folder / "settings.json").read_text())["first_prompt"].endswith("<|assistant|>")


def shown_by_eval(place: Path) -> str:
    return (place / "shown.txt").read_text()


# In one process


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    return place


def evaluated(
    *texts: str, out: Path, suite: str = "tiny_math", watcher: evaluate.Watcher | None = None, **options: Any
) -> list[store.Evaluated]:
    chosen, _ = choose.targets_of(texts, None, alone=True, out=out)
    settings = evaluate.Options(**{"limit": 12, "grading": GRADING, **options})
    return evaluate.evaluate(chosen, suites.find(suite), settings, watcher or evaluate.Silent())


class Noting(evaluate.Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Counting(evaluate.Silent):
    def __init__(self) -> None:
        self.written: list[int] = []

    def progress(self, what: str, done: int, total: int) -> None:
        if what == "writing":
            self.written.append(done)


def test_the_same_evaluation_again_writes_nothing_anew(here: Path, tmp_path: Path) -> None:
    once = evaluated("tiny", out=tmp_path)[0]
    before = (once.folder / "samples.jsonl").stat().st_mtime_ns
    counting = Counting()
    assert evaluated("tiny", out=tmp_path, watcher=counting)[0] == once
    assert counting.written == []
    assert (once.folder / "samples.jsonl").stat().st_mtime_ns == before


def test_other_settings_never_mix(here: Path, tmp_path: Path) -> None:
    evaluated("tiny", out=tmp_path)
    with pytest.raises(RecipeError, match=r"samples was 0 and is 2.*--out.*--fresh"):
        evaluated("tiny", out=tmp_path, samples=2)
    assert evaluated("tiny", out=tmp_path, samples=2, fresh=True)[0].settings["samples"] == 2


def test_fresh_removes_only_what_other_settings_left(tmp_path: Path) -> None:
    for settings, kept in (({"samples": 2}, False), ({"samples": 2}, True), ({"samples": 3}, False)):
        store.open_folder(tmp_path, settings, {}, fresh=True)
        assert (tmp_path / store.PARTIAL).is_file() == kept
        assert json.loads((tmp_path / store.SETTINGS).read_text()) == settings
        (tmp_path / store.PARTIAL).write_text("")


def test_scale_0_writes_what_the_base_writes_and_scale_1_what_the_run_writes(here: Path, tmp_path: Path) -> None:
    found = evaluated("runs/first", "runs/first@0", "runs/first@0.5", "tiny", out=tmp_path, samples=3)
    assert [one.label for one in found] == ["step_12", "step_12@0", "step_12@0.5", "tiny"]
    alone = evaluated("tiny", out=tmp_path / "alone", samples=3)  # without an adapter on the model at all
    assert tokens(found, "step_12@0") == tokens(found, "tiny") == tokens(alone, "tiny")
    assert tokens(found, "step_12@0.5") not in (tokens(found, "tiny"), tokens(found, "step_12"))
    adapter = here / "runs/first/checkpoints/step_12/adapter"
    copied = shutil.copytree(adapter, tmp_path / "adapter")
    assert tokens(found, "step_12") == tokens(evaluated(str(copied), out=tmp_path / "copy", samples=3), "adapter")


def test_a_shorter_budget_is_what_an_evaluation_with_that_budget_gives(here: Path, tmp_path: Path) -> None:
    both = evaluated("runs/first", out=tmp_path / "both", samples=2, budgets=(9, 40))[0]
    short = evaluated("runs/first", out=tmp_path / "short", samples=2, budgets=(9,))[0]
    assert both.by_budget[9] == short.by_budget[9]
    assert both.by_budget[9]["truncated"].value > both.by_budget[40]["truncated"].value


def test_two_seeds_of_the_base_are_not_different(here: Path, tmp_path: Path) -> None:
    pairs = []
    for suite in ("tiny_math", "tiny_mcq", "tiny_code"):
        a, b = (evaluated("tiny", out=tmp_path / str(s), suite=suite, samples=4, limit=30, seed=s)[0] for s in (0, 1))
        assert [line["token_ids"] for line in a.lines] != [line["token_ids"] for line in b.lines]
        pairs.append((a, b))
    assert not any(one.significant for one in compare(pairs))


def test_an_interrupted_evaluation_goes_on_where_it_was(here: Path, tmp_path: Path) -> None:
    whole = evaluated("tiny", out=tmp_path / "whole", samples=4)[0]
    cut = tmp_path / "cut/tiny/tiny_math"
    shutil.copytree(whole.folder, cut)
    (cut / "samples.jsonl").unlink()
    names = ("id", "member", "greedy", "finish_reason", "text", "token_ids")
    kept = [json.dumps({name: line[name] for name in names}) + "\n" for line in whole.lines[5:25]]
    (cut / "completions.jsonl").write_text("".join(kept) + '{"id": "half a li')
    counting = Counting()
    again = evaluated("tiny", out=tmp_path / "cut", samples=4, watcher=counting)[0]
    assert counting.written == list(range(21, 49))
    assert again.lines == whole.lines
    assert not (cut / "completions.jsonl").exists()


def test_two_processes_do_not_evaluate_into_one_folder(here: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny/tiny_math"
    folder.mkdir(parents=True)
    with store.partial(folder), pytest.raises(RecipeError, match="another process is evaluating"):
        evaluated("tiny", out=tmp_path)


def test_a_signal_keeps_what_is_written(place: Path, tmp_path: Path) -> None:
    command = [*SLMGRPO, "eval", str(place / "runs/first"), "--suite", "tiny_math", "--samples", "16", "--alone"]
    command += ["--limit", "400", "--out", "out", "--batch-tokens", "2000"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    partial = tmp_path / "out/step_12/tiny_math/completions.jsonl"
    try:
        for _ in range(1200):
            if partial.is_file() and partial.stat().st_size > 5000:
                break
            assert process.poll() is None, "it ended before the signal"
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
    assert len(partial.read_text().splitlines()) > 10


def test_best_of_n_by_a_rule_is_scored_beside(here: Path, tmp_path: Path) -> None:
    found = evaluated("tiny", out=tmp_path, samples=4, best_of="math.steps_checked")[0]
    assert found.by_budget[96]["best@4"].value > found.by_budget[96]["accuracy"].value
    with pytest.raises(RecipeError, match="knows the answer"):
        evaluated("tiny", out=tmp_path, samples=4, best_of="math.correct")


OWN_RULE = """
from slmgrpo.rewards.base import correctness

@correctness
def right(completion: str) -> float:
    return {}
"""


def test_verdicts_of_different_versions_of_an_own_rule_do_not_mix(here: Path, tmp_path: Path) -> None:
    text = suites.packaged_suites()["tiny_math"].read_text().replace("math.correct", "./mine.py:right")
    found = []
    for version in ("0.0", "1.0"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "mine.py").write_text(OWN_RULE.format(version))
        (tmp_path / version / "mine.yaml").write_text(text)
        suite = str(tmp_path / version / "mine.yaml")
        found += evaluated("tiny", out=tmp_path / version, suite=suite, limit=2)
    with pytest.raises(RecipeError, match="graded by different versions of the rules"):
        compare([(found[0], found[1])])
    saved, noting = found[1].folder / store.SCORES, Noting()
    saved.write_text(saved.read_text().replace(found[1].grader, found[0].grader))
    evaluated("tiny", out=tmp_path / "1.0", suite=str(tmp_path / "1.0/mine.yaml"), limit=2, watcher=noting)
    assert f"slmgrpo eval regrade {found[1].folder}" in noting.notes[-1]


def test_headroom_is_looked_for_on_training_rows(here: Path, tmp_path: Path) -> None:
    chosen, _ = choose.targets_of(["tiny"], None, headroom=True)
    loaded, grading = choose.suites_of([], "quickstart", chosen, headroom=True)
    options = evaluate.Options(samples=4, greedy=True, limit=10, grading=grading)
    shown = table.text("headroom", table.headroom_table(evaluate.evaluate(chosen, loaded, options, evaluate.Silent())))
    assert (here / "evals/tiny/headroom/model/train_math/samples.jsonl").is_file()
    assert re.search(r"train_math +tiny +\d+\.\d \[.*\+\d+\.\d \[", shown)
    assert "train_code" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_scales_are_compared_with_the_scale_0(here: Path) -> None:
    chosen, opponent = choose.targets_of(["runs/first"], None, scales="0,0.5,1")
    assert [target.label for target in chosen] == ["step_12@0", "step_12@0.5", "step_12"]
    assert opponent == "step_12@0"
    with pytest.raises(RecipeError, match="each lies between 0"):
        choose.targets_of(["runs/first"], None, scales="0,2")


def test_rows_are_those_of_the_evaluated_run_and_not_of_its_opponent(here: Path, tmp_path: Path) -> None:
    other = shutil.copytree(here / "runs/first", tmp_path / "other")
    recipe = json.loads((other / "recipe.json").read_text())
    del recipe["data"]["heldout"][1:]
    (other / "recipe.json").write_text(json.dumps(recipe))
    for evaluating, against, count in (
        ("runs/first", str(other), 3),
        (str(other), "runs/first", 1),
        ("tiny", str(other), 1),
    ):
        chosen, opponent = choose.targets_of([evaluating], against)
        assert len(choose.suites_of([], None, chosen, opponent=opponent, headroom=False)[0]) == count


# Saved samples


def test_show_prints_wrong_samples_with_what_was_read(place: Path) -> None:
    done = slmgrpo("eval", "show", "runs/first", "--wrong", "--count", "2", "--suite", "heldout_math", cwd=place)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--- base heldout_math") == 2
    assert "What is" in done.stdout and "gold" in done.stdout


def test_compare_needs_no_model_and_gives_what_eval_gave(place: Path) -> None:
    base, tuned = place / "runs/first/eval/base", place / "runs/first/eval/step_12"
    done = slmgrpo("eval", "compare", base, tuned, cwd=place)
    assert done.returncode == 0, done.stderr
    found = [re.findall(r"(?:32|128) +(?:first/)?step_12 +(.*)", text) for text in (done.stdout, shown_by_eval(place))]
    assert sorted(found[0]) == sorted(found[1])
    assert len(found[0]) == 6
    twice = slmgrpo("eval", "compare", base, tuned, shutil.copytree(tuned, place / "other"), cwd=place)
    assert re.search(r"heldout_math at 32 tokens: (\+\d+\.\d) \[\1, \1\] points over 2 runs", twice.stdout)
    alone = slmgrpo("eval", "compare", place / "runs/first", tuned, cwd=place)
    assert alone.returncode == 2
    assert "holds several targets; give one of" in alone.stderr
    written = slmgrpo("eval", "compare", base, tuned, "--markdown", cwd=place).stdout
    assert "| tokens | target | accuracy % | change | p | won:lost |" in written


def test_what_was_not_evaluated_alike_is_not_compared(here: Path, tmp_path: Path) -> None:
    a = evaluated("tiny", out=tmp_path / "a", limit=5)[0]
    b = evaluated("tiny", out=tmp_path / "b", limit=6)[0]
    with pytest.raises(RecipeError, match="not evaluated alike"):
        compare([(a, b)])


def test_regrade_finds_verdicts_that_were_changed(place: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(place / "runs/first/eval/base/heldout_math", tmp_path / "saved")
    tampered = lines(folder / "samples.jsonl")
    tampered[0]["correct"] = not tampered[0]["correct"]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tampered))
    done = slmgrpo("eval", "regrade", folder, "--sandbox", "best", cwd=place)
    assert done.returncode == 0, done.stderr
    assert f"1 problems changed: {tampered[0]['id']}" in done.stdout
    assert lines(folder / "samples.jsonl") == lines(place / "runs/first/eval/base/heldout_math/samples.jsonl")


# Refusals


BAD_INPUT = {
    "no run": (["eval"], "there is no run with a checkpoint under runs/"),
    "no such target": (["eval", "runs/none"], "runs/none: no such run, adapter or model"),
    "no suite for a model": (["eval", "tiny"], "on what? Give --suite"),
    "unknown suite": (["eval", "tiny", "--suite", "gsm8"], "did you mean `gsm8k`"),
    "missing data": (["eval", "tiny", "--suite", "gsm8k", "--data", "."], "gsm8k_test.jsonl is not there"),
    "scale of a model": (["eval", "tiny@0.5", "--suite", "tiny"], "@0.5 scales an adapter"),
    "scale beyond 1": (["eval", "tiny@2", "--suite", "tiny"], "between 0 (the base) and 1"),
    "budgets that are no numbers": (["eval", "tiny", "--suite", "tiny", "--budgets", "many"], "numbers with commas"),
    "samples of the harness": (
        ["eval", "tiny", "--lm-eval", "gsm8k", "--samples", "4", "--seed", "1"],
        "leave --samples, --seed out",
    ),
    "temperature 0": (
        ["eval", "tiny", "--suite", "tiny", "--temperature", "0"],
        "for greedy completions use --samples 1",
    ),
    "headroom of one sample": (
        ["eval", "tiny", "--recipe", "quickstart", "--headroom", "--samples", "1"],
        "the best of one sample is that sample; use --samples 2 or more",
    ),
    "twice the same": (["eval", "tiny", "tiny", "--suite", "tiny_math"], "is given twice"),
    "suite twice": (["eval", "tiny", "--suite", "tiny", "--suite", "tiny_mcq"], "tiny_mcq is named twice"),
    "nothing saved": (["eval", "show", "."], "no finished evaluation there"),
    "unknown sandbox": (["eval", "tiny", "--suite", "tiny", "--sandbox", "none"], "one of strict, best and off"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_message(tmp_path: Path, name: str) -> None:
    arguments, expected = BAD_INPUT[name]
    done = slmgrpo(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_a_budget_beyond_the_context_is_refused_with_the_longest_that_fits(here: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"beyond the model's context of 1024; use --budgets 10\d\d"):
        evaluated("tiny", out=tmp_path, budgets=(32, 2000))


def test_checkpoints_are_chosen_by_name(here: Path, tmp_path: Path) -> None:
    run = shutil.copytree(here / "runs/first", tmp_path / "run")
    assert targets.parse(str(run)).label == targets.parse(f"{run}:12").label == "step_12"
    assert targets.parse(f"{run}:best").label == "step_12"
    assert targets.parse(f"{run}/checkpoints/step_12").home == run / "eval/step_12"
    with pytest.raises(RecipeError, match="no such checkpoint; there are last, best, 12"):
        targets.parse(f"{run}:99")
    with pytest.raises(RecipeError, match="a number from 0 to 1"):
        targets.parse(f"{run}@half")
    shutil.rmtree(run / "eval")
    with pytest.raises(RecipeError, match="no checkpoint has held-out scores"):
        targets.parse(f"{run}:best")


@pytest.mark.parametrize("changed", [{"hidden_size": 64}, {"num_hidden_layers": 3}])
def test_a_base_that_the_adapter_does_not_fit_is_refused(here: Path, tmp_path: Path, changed: dict[str, int]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from slmgrpo import tiny

    config = AutoConfig.from_pretrained(tiny.path(), **changed)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny.path()).save_pretrained(tmp_path / "other")
    adapter = shutil.copytree(here / "runs/first/checkpoints/step_12/adapter", tmp_path / "adapter")
    chosen = [targets.parse(str(adapter), base=str(tmp_path / "other"))]
    with pytest.raises(RecipeError, match=r"does not fit its base.*--base"):
        evaluate.evaluate(
            chosen, suites.find("tiny_math"), evaluate.Options(limit=2, grading=GRADING), evaluate.Silent()
        )


def test_a_family_that_our_engine_does_not_know_is_referred_to_the_harness(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from slmgrpo import tiny

    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    random_model("mistral", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(PlanError, match=r"llama, qwen2, qwen3, not mistral; use --lm-eval TASKS"):
        evaluated(str(tmp_path / "other"), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("when", ["open", "go on", "compare"])
def test_a_folder_that_cannot_be_written_is_one_message(here: Path, tmp_path: Path, when: str) -> None:
    out, arguments = (
        tmp_path / "out",
        ["eval", "runs/first", "--suite", "tiny_math", "--limit", "4", "--sandbox", "best"],
    )
    if when == "open":
        out.touch()
    else:
        assert slmgrpo(*arguments, "--out", out, cwd=here).returncode == 0
        for file in out.glob("step_12/*.json" if when == "compare" else "step_12/*/samples.jsonl"):
            file.unlink()
        (out / "step_12" / ("comparison.json" if when == "compare" else "tiny_math/completions.jsonl")).mkdir()
    done = slmgrpo(*arguments, "--out", out, cwd=here)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(rf"^{out}\S*: cannot be written \(.+\); use --out for another folder$", done.stderr, re.MULTILINE)
    assert "Traceback" not in done.stderr


def test_code_without_a_jail_is_refused_before_a_model_is_loaded(
    tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slmgrpo.rewards import sandbox

    monkeypatch.setattr(sandbox, "_shared", lambda mode: sandbox.Sandbox(mode, python="/no/such/python"))
    with pytest.raises(PlanError, match=r"^--sandbox strict: (.|\n)*use .*`--sandbox best`"):
        evaluated("tiny", out=tmp_path / "out", suite="tiny_code", grading=Grading(workers=1))
    assert not (tmp_path / "out").exists()
    saved = shutil.copytree(place / "runs/first/eval/base/heldout_code", tmp_path / "saved")
    with pytest.raises(PlanError, match=r"^--sandbox strict: "):
        regrade(store.load(saved), Grading(workers=1))


def test_questions_that_must_not_be_published_are_not_saved(here: Path, tmp_path: Path) -> None:
    text = suites.packaged_suites()["tiny_math"].read_text() + "republish: false\n"
    (tmp_path / "secret.yaml").write_text(text)
    noting = Noting()
    found = evaluated("tiny", out=tmp_path, suite=str(tmp_path / "secret.yaml"), watcher=noting)[0]
    assert "ask not to publish" in noting.notes[0]
    saved = (found.folder / "samples.jsonl").read_text() + (found.folder / "settings.json").read_text()
    assert "What is" not in saved


def test_a_run_of_another_version_is_one_message(tmp_path: Path) -> None:
    recipe = load("quickstart").recipe.model_dump(mode="json", by_alias=True)
    (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"eval_every": 5}))
    with pytest.raises(RecipeError, match=r"recipe.json: not a recipe of this version \(eval_every: Extra inputs"):
        targets.recipe_of(RunDir(tmp_path))


# lm-evaluation-harness


def test_the_harness_gets_the_base_the_adapter_and_the_chat_template(here: Path) -> None:
    line = " ".join(harness.command(targets.parse("runs/first"), ["gsm8k", "arc_challenge"], limit=5))
    assert "--tasks gsm8k arc_challenge --apply_chat_template" in line
    assert "peft=runs/first/checkpoints/step_12/adapter" in line
    assert "dtype=float32" in line and "slmgrpo/tiny/model" in line and line.endswith("--limit 5")
    with pytest.raises(RecipeError, match=r"slmgrpo export runs/first:12@0\.5 --to merged"):
        harness.command(targets.parse("runs/first@0.5"), ["gsm8k"], limit=None)


def test_a_missing_harness_is_one_message(here: Path) -> None:
    if importlib.util.find_spec("lm_eval") is not None:
        pytest.skip("lm-evaluation-harness is installed")
    with pytest.raises(RecipeError, match=r"pip install 'slmgrpo\[eval\]'"):
        harness.hand_over([targets.parse("tiny")], "gsm8k", limit=None, stage=lambda text: None)


# A new domain


def test_the_new_domain_of_the_documentation_gets_its_suite_and_its_eval(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    blocks = {
        found[2].splitlines()[0].strip("# \n"): found[2]
        for file in ("recipes/README.md", "eval/README.md")
        for found in re.finditer(r"```(python|yaml)\n(.*?)```", (root / file).read_text(), re.DOTALL)
    }
    for name in ("make_data.py", "last_digit.py", "last_digit_suite.yaml"):
        (tmp_path / name).write_text(blocks[name])
        assert len(blocks["last_digit_suite.yaml"].splitlines()) <= 10
    subprocess.run([sys.executable, "make_data.py"], cwd=tmp_path, check=True)
    done = slmgrpo("eval", "tiny", "--suite", "last_digit_suite.yaml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "last_digit: 40 problems, greedy" in done.stdout


@pytest.mark.slow
def test_the_quickstart_is_better_than_its_base_on_all_three_suites(tmp_path: Path) -> None:
    assert slmgrpo("train", "quickstart", "--out", "runs/q", cwd=tmp_path).returncode == 0
    assert slmgrpo("eval", "--suite", "tiny", "--samples", "4", "--limit", "200", cwd=tmp_path).returncode == 0
    folder = next((tmp_path / "runs/q/eval").glob("step_*/comparison.json"))
    saved = json.loads(folder.read_text())["comparisons"]
    assert len(saved) == 6
    assert all(one["p"] < 0.001 and one["difference"]["low"] > 0.3 for one in saved)
