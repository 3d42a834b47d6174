"""What `slmgrpo diagnose` says of curves made by hand, of unfinished and broken runs, and of a few real ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slmgrpo.callbacks import Silent
from slmgrpo.curves import fall
from slmgrpo.diagnose import ENOUGH, diagnose
from slmgrpo.errors import RecipeError
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir
from slmgrpo.train import train

RULES = [
    {"use": "math.correct", "weight": 1.0},
    {"use": "format.tagged", "weight": 0.5},
    {"use": "length.cosine", "weight": 2.0},
    {"use": "./mine.py:kind", "weight": 1.0},
]


def wave(step: int) -> float:
    """Noise that is the same in every run of the test."""
    return 0.02 * math.sin(37.0 * step * step)


def written(
    path: Path,
    lines: list[dict[str, Any]],
    *,
    updates: int = 1,
    heldout: tuple[float, ...] = (),
    state: str | None = None,
) -> Path:
    """A run directory with these metrics. heldout: shares of 100 rows, the first at step 0, the last at the end."""
    path.mkdir()
    for line in lines:
        first = (line["step"] - 1) % updates == 0
        line.setdefault("seconds", {"generation": 1.0} if first else {"forward_backward": 1.0})
    recipe = {"train": {"updates_per_rollout": updates}, "rewards": RULES, "data": {"train": [{"source": "x"}]}}
    (path / "recipe.json").write_text(json.dumps(recipe))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if state:
        (path / "status.json").write_text(json.dumps({"state": state, "step": len(lines)}))
    for i, share in enumerate(heldout):
        folder = path / "eval" / f"step_{i * len(lines) // max(len(heldout) - 1, 1)}" / "heldout"
        folder.mkdir(parents=True)
        scores = {"tasks": {"math": {"accuracy": share, "n": 100}}}
        (folder / "scores.json").write_text(json.dumps(scores))
    return path


def line(step: int, accuracy: float, reward: float | None = None, **more: Any) -> dict[str, Any]:
    right = min(max(accuracy + wave(step), 0.0), 1.0)
    rules = {"math.correct": right} | more.pop("rules", {})
    statuses = {name: {"scored": 8} for name in rules} | {"math.correct": {"correct": 4, "wrong": 4}}
    usual = {
        "step": step, "reward": right if reward is None else reward + wave(step), "reward_std": 0.3,
        "accuracy": {"math": right}, "rules": rules, "statuses": statuses, "length": 100.0 + 100 * wave(step),
        "truncated": 0.0, "silent": 0.2, "unique": 0.9, "entropy": 0.5 + wave(step), "grad_norm": 0.1,
        "learning_rate": 1e-5, "sampler_kl_k3": 1e-6, "pass_histogram": [1, 2, 2, 2, 2, 1],
    }  # fmt: skip
    return usual | more


def chief(path: Path) -> str:
    findings = diagnose(path).findings
    return findings[0].name if findings else "nothing"


def risen(step: int, start: float = 0.2, end: float = 0.8, middle: int = 14) -> float:
    return start + (end - start) / (1 + math.exp(-(step - middle) / 2))


STEPS = range(1, 41)
MADE: dict[str, tuple[str, list[dict[str, Any]], tuple[float, ...]]] = {
    "rising in a line": ("learning", [line(i, 0.2 + 0.012 * i) for i in STEPS], (0.2, 0.66)),
    "at its end": ("saturated", [line(i, risen(i)) for i in STEPS], (0.2, 0.79)),
    "solved from the start": ("saturated", [line(i, 1.0, silent=1.0) for i in STEPS], (1.0, 1.0)),
    "solved, hence certain and silent": (
        "saturated",
        [line(i, risen(i, end=1.0), silent=risen(i, 0.1, 1.0), entropy=risen(i, 0.5, 0.001)) for i in STEPS],
        (0.2, 0.99),
    ),
    "right answers given up": (
        "reward hacking",
        [line(i, risen(i, 0.5, 0.1), risen(i, 1.0, 1.8), rules={"length.cosine": risen(i, 0.2, 0.8)}) for i in STEPS],
        (0.5, 0.1),
    ),
    "a grader that is fooled": ("reward hacking", [line(i, risen(i)) for i in STEPS], (0.2, 0.21)),
    "a rule of one's own pays": (
        "reward hacking",
        [line(i, 0.2, risen(i, 0.4, 1.0), rules={"./mine.py:kind": risen(i, 0.2, 0.8)}) for i in STEPS],
        (0.2, 0.2),
    ),
    "tags learnt alone": (
        "format-only learning",
        [line(i, 0.1, risen(i, 0.2, 0.5), rules={"format.tagged": risen(i, 0.2, 0.9)}) for i in STEPS],
        (0.1, 0.12),
    ),
    "longer for the reward's sake": (
        "length drift",
        [
            line(i, 0.1, risen(i, 0.2, 1.2), rules={"length.cosine": risen(i, 0.1, 0.6)}, length=risen(i, 100, 400))
            for i in STEPS
        ],
        (0.1, 0.1),
    ),
    "longer for nothing": ("length drift", [line(i, 0.3, length=risen(i, 100, 200)) for i in STEPS], (0.3, 0.3)),
    "cut off for nothing": ("length drift", [line(i, 0.3, truncated=risen(i, 0.1, 0.7)) for i in STEPS], ()),
    "certain while wrong": (
        "entropy collapse",
        [line(i, 0.3, entropy=risen(i, 0.5, 0.01), unique=risen(i, 0.9, 0.15)) for i in STEPS],
        (0.3, 0.3),
    ),
    "fallen and not back": ("instability", [line(i, risen(i, 0.6, 0.05, 20)) for i in STEPS], (0.6, 0.05)),
    "no group gives a signal": (
        "degenerate advantages",
        [line(i, 0.0, 0.0, silent=1.0, pass_histogram=[10, 0, 0, 0, 0, 0]) for i in STEPS],
        (0.0, 0.0),
    ),
    "a level": ("nothing", [line(i, 0.4) for i in STEPS], (0.4, 0.42)),
}


@pytest.mark.parametrize("made", MADE)
def test_curves_made_by_hand_get_their_name(made: str, tmp_path: Path) -> None:
    name, lines, heldout = MADE[made]
    found = diagnose(written(tmp_path / "run", lines, heldout=heldout, state="finished"))
    assert (found.findings[0].name if found.findings else "nothing") == name, found.as_text()


def test_stale_updates_are_told_by_the_last_one_on_each_rollout(tmp_path: Path) -> None:
    def run(name: str, drift: float) -> Path:
        lines = [line(i, 0.4, sampler_kl_k3=drift * ((i - 1) % 4), clip_low=0.1, clip_high=0.05) for i in range(1, 49)]
        return written(tmp_path / name, lines, updates=4, state="finished")

    stale = diagnose(run("stale", 0.1))
    assert stale.findings[0].name == "staleness" and stale.rollouts == 12
    assert "12 of 12 rollouts" in stale.findings[0].evidence[0]
    assert chief(run("fresh", 0.001)) == "nothing"


def test_every_finding_has_numbers_and_a_remedy_and_fits_80_columns(tmp_path: Path) -> None:
    for made, (_, lines, heldout) in MADE.items():
        found = diagnose(written(tmp_path / made.replace(" ", "_"), lines, heldout=heldout, state="finished"))
        text = found.as_text().replace(found.run, "runs/x")
        assert max(map(len, text.splitlines())) <= 80
        for finding in found.findings:
            assert finding.remedy and any(any(c.isdigit() for c in sentence) for sentence in finding.evidence)
        assert json.loads(json.dumps(found.as_json()))["findings"] is not None


def test_an_unfinished_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [line(i, 0.2 + 0.03 * i) for i in range(1, 21)], state="running")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "rew')
    assert diagnose(run).state == "killed"
    directory = RunDir(run)
    directory.lock()
    found = diagnose(run)
    assert (found.state, found.steps, found.findings[0].name) == ("running", 20, "learning")


@pytest.mark.parametrize(("norm", "said"), [(1.1, "hardly more than"), (3.0, "3.0 times as far as")])
def test_how_far_the_adapter_moved_is_told_beside_noise(tmp_path: Path, norm: float, said: str) -> None:
    run = written(tmp_path / "run", [line(i, 0.4) for i in range(1, 11)])
    (run / "dynamics").mkdir()
    pq.write_table(pa.table({"norm": [norm, norm], "null": [1.0, 1.0]}), run / "dynamics" / "step_10.parquet")
    assert any(said in note and f"(coherence {norm:.2f})" in note for note in diagnose(run).notes)


def test_too_few_steps_are_said_and_give_no_trend(tmp_path: Path) -> None:
    run = written(tmp_path / "run", [line(i, 0.1 * i) for i in range(1, ENOUGH)])
    found = diagnose(run)
    assert found.findings == ()
    assert any(note == f"too few steps for trends: {ENOUGH - 1} rollouts, {ENOUGH} are needed" for note in found.notes)
    silent = written(tmp_path / "silent", [line(i, 0.0, 0.0, silent=1.0) for i in range(1, 5)])
    assert chief(silent) == "degenerate advantages"  # needs no trend


def test_what_is_no_run_or_has_no_steps_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no steps yet"):
        diagnose(written(tmp_path / "empty", []))
    with pytest.raises(RecipeError, match="no such run directory"):
        diagnose(tmp_path / "nowhere")
    broken = written(tmp_path / "broken", [line(1, 0.1)])
    (broken / "metrics.jsonl").write_text("{\n")
    with pytest.raises(RecipeError, match=r"metrics.jsonl:1: not readable"):
        diagnose(broken)
    done = subprocess.run(
        [sys.executable, "-m", "slmgrpo", "diagnose", str(tmp_path / "nowhere")], capture_output=True, text=True
    )
    assert done.returncode == 2 and "no such run directory" in done.stderr and "Traceback" not in done.stderr


def test_a_dip_that_comes_back_is_no_fall() -> None:
    assert fall([0.2, 0.5, 0.8, 0.8, 0.3, 0.6, 0.8, 0.8, 0.8, 0.8]) is None
    gone = fall([0.2, 0.5, 0.8, 0.8, 0.8, 0.5, 0.3, 0.1, 0.1, 0.1])
    assert gone is not None and gone.start == pytest.approx(0.8) and gone.end == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [("nothing_to_learn", "degenerate advantages"), ("wrong_answer_wins", "reward hacking")],
)
def test_real_runs_that_fail_are_named(recipe: str, name: str, tmp_path: Path) -> None:
    loaded = load(f"studies/failures/{recipe}", ["seed=21", "train.steps=16", "data.heldout.0.limit=20"])
    train(loaded.recipe, plan(loaded), base=loaded.base, out=tmp_path / "run", resume=None, observer=Silent())
    assert chief(tmp_path / "run") == name


@pytest.mark.slow
def test_most_runs_of_unseen_seeds_are_named(tmp_path: Path) -> None:
    script = Path(__file__).parent / "benchmarks" / "diagnose.py"
    done = subprocess.run(
        [sys.executable, script, "--seeds", "31", "--runs", tmp_path], capture_output=True, text=True, check=True
    )
    scores = json.loads(done.stdout.splitlines()[-1])
    assert scores["named"] >= 0.75 and scores["healthy_or_not"] >= 0.9, done.stdout
