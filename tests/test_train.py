"""The whole path on the embedded model: recipe, plan, run directory, checkpoints, resume, signals, bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SLMGRPO = [sys.executable, "-m", "slmgrpo"]
SMALL = ["--set", "train.steps=4", "--set", "train.prompts_per_step=6", "--set", "train.save_every=2"]
HELDOUT = [f"--set=data.heldout.{i}.limit=8" for i in range(3)]


def slmgrpo(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*SLMGRPO, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def learning(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock, or on where this process began (a guard's `adapter_change`)."""
    beside = ("seconds", "rule_seconds", "tokens_per_s", "adapter_change")
    return [{k: v for k, v in m.items() if k not in beside} for m in metrics]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("train")
    done = slmgrpo("train", "quickstart", *SMALL, *HELDOUT, "--out", folder / "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run", done.stdout


def test_a_run_leaves_everything_that_the_design_names(finished: tuple[Path, str]) -> None:
    run, _ = finished
    for name in ("recipe.json", "plan.json", "env.json", "status.json", "metrics.jsonl", "samples.jsonl"):
        assert (run / name).is_file(), name
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert [m["step"] for m in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]
    assert len(lines(run / "samples.jsonl")) == 4 * 6 * 8
    assert sorted(f.name for f in (run / "checkpoints").iterdir()) == ["step_2", "step_4"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        f.name for f in (run / "checkpoints" / "step_4" / "adapter").iterdir()
    }
    assert set(json.loads((run / "eval/step_4/heldout/scores.json").read_text())["tasks"]) == {
        "tiny:math",
        "tiny:mcq",
        "tiny:code",
    }


def test_every_step_has_a_timeline_that_adds_up_and_counts_its_tokens(finished: tuple[Path, str]) -> None:
    run, _ = finished
    for line in lines(run / "metrics.jsonl"):
        seconds = line["seconds"]
        total = seconds.pop("total")
        assert set(seconds) == {"generation", "reward_wait", "forward_backward", "optimizer", "sync", "other"}
        assert sum(seconds.values()) == pytest.approx(total, abs=1e-3)
        assert line["rows_trained"] + line["rows_dropped"] == 6 * 8
        if line["rows_trained"]:
            assert 0 < line["packing_efficiency"] < 0.8
            assert line["trunk_tokens"] > line["rows_trained"]


def test_engine_and_trainer_agree_at_every_step(finished: tuple[Path, str]) -> None:
    run, _ = finished
    gaps = [line["sampler_gap_max"] for line in lines(run / "metrics.jsonl") if line["rows_trained"]]
    assert gaps and max(gaps) <= 5e-5


def test_the_summary_shows_before_and_after_with_intervals_and_what_to_do_next(finished: tuple[Path, str]) -> None:
    run, shown = finished
    for part in ("tiny:math", "before", "after", "%", "reward", str(run.name), "next: slmgrpo", "--set train.steps=8"):
        assert part in shown
    widths = [len(line) for line in shown.splitlines() if "run:" not in line and "slmgrpo " not in line]
    assert max(widths) <= 80  # paths and commands may be long


def test_a_finished_run_says_so_when_it_is_resumed(finished: tuple[Path, str]) -> None:
    run, _ = finished
    done = slmgrpo("train", "--resume", run, cwd=run)
    assert done.returncode == 0 and f"{run}: finished at step 4; to go further: slmgrpo train" in done.stdout
    assert "train.steps=8 --allow-changes" in done.stdout and "training" not in done.stdout


def test_a_resumed_run_learns_what_the_uninterrupted_one_does(finished: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = finished
    cut = tmp_path / "run"
    subprocess.run(["cp", "-r", run, cut], check=True)
    subprocess.run(["rm", "-r", cut / "checkpoints" / "step_4", cut / "eval" / "step_4"], check=True)
    done = slmgrpo("train", "--resume", cut, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    once, again = learning(lines(run / "metrics.jsonl")), learning(lines(cut / "metrics.jsonl"))
    for a, b in zip(once, again, strict=True):
        assert _numbers(a) == pytest.approx(_numbers(b), rel=1e-5, abs=1e-5)
    assert [m["step"] for m in lines(cut / "samples.jsonl")] == [m["step"] for m in lines(run / "samples.jsonl")]


def _numbers(value: Any, name: str = "") -> dict[str, float]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in _numbers(part, f"{name}.{key}").items()}
    return {name: float(value)} if value is not None else {}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_can_be_resumed(tmp_path: Path, number: int, code: int) -> None:
    run = tmp_path / "run"
    command = [*SLMGRPO, "train", "quickstart", "--set", "train.steps=500", *HELDOUT, "--out", str(run)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: (run / "metrics.jsonl").is_file() and len(lines(run / "metrics.jsonl")) >= 2, process)
        os.kill(process.pid, number)
        assert process.wait(timeout=60) == code
    finally:
        process.kill()
        process.wait()
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "interrupted"
    assert (run / "checkpoints" / f"step_{status['step']}").is_dir()
    assert lines(run / "metrics.jsonl")[-1]["step"] == status["step"]


def _wait_for(condition: Any, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        if condition():
            return
        assert process.poll() is None, "the run ended before the signal"
        time.sleep(0.1)
    pytest.fail("waited two minutes in vain")


BAD_INPUT = {
    "no recipe": (["train"], "give a recipe, or --resume RUN"),
    "unknown recipe": (["train", "quickstrat"], "quickstart"),
    "unknown key": (["train", "quickstart", "--set", "sampling.group_sise=4"], "did you mean `group_size`?"),
    "no such run": (["train", "--resume", "runs/none"], "no such run directory"),
    "resume with --out": (["train", "--resume", "x", "--out", "y"], "keeps its folder and name"),
    "engine that is not there": (["train", "quickstart", "--set", "sampling.engine=unsloth"], "sampling.engine"),
    "vllm that is not installed": (
        ["train", "quickstart", "--set", "sampling.engine=vllm"],
        "sampling.engine=vllm: vLLM is not installed; pip install 'slmgrpo[vllm]'",
    ),
    "engine without CUDA": (
        ["train", "quickstart", "--set", "sampling.engine=unsloth"],
        "there is no CUDA device here, which Unsloth's fast_inference needs; set sampling.engine=auto",
    ),
    "rule that is not there": (
        ["train", "quickstart", "--set", "data.train.0.rewards=[{use: math.corect}]"],
        "correct",
    ),
    "model folder that is not there": (
        ["train", "quickstart", "--set", "model.id=./nowhere"],
        "./nowhere is no folder",
    ),
    "4 bit without CUDA": (["train", "quickstart", "--set", "model.load_in_4bit=true"], "needs CUDA"),
    "8-bit optimizer without CUDA": (["train", "quickstart", "--set", "optimizer.name=adamw_8bit"], "need CUDA"),
    "prompts beyond the model's positions": (
        ["train", "quickstart", "--set", "sampling.max_tokens=1010"],
        "make 1034 tokens, tiny has 1024 positions\nset sampling.max_tokens=1000 or prompt.max_tokens=14",
    ),
    "layers beyond the model": (["train", "quickstart", "--set", "lora.layers=first:99"], "does not fit a model of"),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_message_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    arguments, expected = BAD_INPUT[name]
    done = slmgrpo(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_used_directory_is_refused(finished: tuple[Path, str], tmp_path: Path) -> None:
    run, _ = finished
    done = slmgrpo("train", "quickstart", "--out", run, cwd=tmp_path)
    assert done.returncode == 2
    assert f"slmgrpo train --resume {run}" in done.stderr


def test_a_full_disk_ends_the_run_with_exit_1_and_a_later_resume_works(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*SLMGRPO, "train", "quickstart", *SMALL, *HELDOUT, "--out", str(run)]
    limit = "import resource, sys, os; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, -1)); "
    full = [sys.executable, "-c", limit + "os.execv(sys.argv[1], sys.argv[1:])", *command]
    done = subprocess.run(full, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "checkpoints/step_2: could not be written" in done.stderr
    assert f"slmgrpo train --resume {run}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((run / "checkpoints").iterdir())
    assert slmgrpo("train", "--resume", run, cwd=tmp_path).returncode == 0
    assert [m["step"] for m in lines(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_help_is_quick_and_imports_nothing_heavy(tmp_path: Path) -> None:
    heavy = ("torch", "transformers", "trl", "datasets", "pandas", "unsloth", "peft")
    code = (
        "import sys\nfrom slmgrpo.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "LOADED []"
