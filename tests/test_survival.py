"""What ends a run, and what is left: kill -9, signals, full disks, damaged and hostile checkpoints, two at once."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from strikes import STAGES, struck, trained
from test_guards import Seen

from slmgrpo.errors import RecipeError, RunError
from slmgrpo.run import RunDir, damage, sha256

CLOCK = ("seconds", "rule_seconds", "tokens_per_s")


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def distance(a: Path, b: Path) -> float:
    """Relative Frobenius distance of the adapters of two checkpoints."""
    from safetensors.torch import load_file

    left, right = (load_file(str(folder / "adapter" / "adapter_model.safetensors")) for folder in (a, b))
    apart = math.hypot(*(float((left[name] - right[name]).norm()) for name in left))
    return apart / math.hypot(*(float(value.norm()) for value in left.values()))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return trained(tmp_path_factory.mktemp("unbroken") / "run")


def same(run: RunDir, unbroken: RunDir) -> None:
    """The run has learned and left what the unbroken one has, and nothing else."""
    assert run.read_json("status.json")["state"] == "finished"
    assert [m["step"] for m in lines(run.metrics)] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(lines(run.metrics), lines(unbroken.metrics), strict=True):
        assert numbers(a) == pytest.approx(numbers(b), rel=1e-4, abs=1e-5)
    texts = [[(s["step"], s["id"], s["member"], s["text"]) for s in lines(r.samples)] for r in (run, unbroken)]
    assert texts[0] == texts[1]
    assert [f.name for f in run.checkpoints.iterdir() if damage(f)] == []
    assert run.steps() == unbroken.steps() == [4, 6]
    assert distance(run.checkpoints / "step_6", unbroken.checkpoints / "step_6") < 1e-4
    assert not [f.name for f in run.path.iterdir() if f.name.startswith(".")]


def numbers(value: Any, name: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        parts = [numbers(part, f"{name}.{key}") for key, part in value.items() if key not in (*CLOCK, "adapter_change")]
        return {k: v for part in parts for k, v in part.items()}
    if isinstance(value, list):
        return numbers(dict(enumerate(value)), name)
    return {name: float(value)} if value is not None else {}


# kill -9


def points(count: int, seed: int) -> list[tuple[str, int]]:
    """Random points, every stage in turn."""
    draw = random.Random(seed)
    stages = list(STAGES)
    return [(stage, draw.randint(1, STAGES[stage])) for stage in (stages * count)[:count]]


POINTS = [("backward", 9), ("checkpoint", 7), ("metrics", 8)]


@pytest.mark.parametrize(
    ("stage", "count"), [*POINTS, *(pytest.param(*point, marks=pytest.mark.slow) for point in points(20, 2026))]
)
def test_a_killed_run_resumes_as_if_nothing_had_been(tmp_path: Path, unbroken: RunDir, stage: str, count: int) -> None:
    ended = struck(tmp_path / "run", stage, count)
    assert os.WIFSIGNALED(ended) and os.WTERMSIG(ended) == signal.SIGKILL
    run = RunDir(tmp_path / "run")
    assert not [step for step in run.steps() if damage(run.checkpoints / f"step_{step}")]
    same(trained(run.path, resume=True), unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_command_killed_at_any_time_resumes(tmp_path: Path, seed: int) -> None:
    run, small = tmp_path / "run", ["--set", "train.steps=12", "--set", "train.save_every=2"]
    command = [sys.executable, "-m", "slmgrpo", "train", "quickstart", *small, "--out", str(run)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (run / "metrics.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(random.Random(seed).uniform(0, 6))
    process.kill()
    process.wait()
    command = [sys.executable, "-m", "slmgrpo", "train", "--resume", str(run)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in lines(run / "metrics.jsonl")] == list(range(1, 13))
    assert len(lines(run / "samples.jsonl")) == 12 * 24 * 8


# signals


RARE = [pytest.param("generation", 80, marks=pytest.mark.slow), pytest.param("rewards", 80, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("stage", "count"), [("backward", 9), ("checkpoint", 7), *RARE])
def test_a_signal_in_any_stage_saves_first(tmp_path: Path, unbroken: RunDir, stage: str, count: int) -> None:
    ended = struck(tmp_path / "run", stage, count, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(ended) == 143
    run = RunDir(tmp_path / "run")
    status = run.read_json("status.json")
    assert status["state"] == "interrupted"
    assert run.steps()[-1] == status["step"] == lines(run.metrics)[-1]["step"] > 0
    same(trained(run.path, resume=True), unbroken)


def test_two_signals_in_an_update_save_nothing_half_done(tmp_path: Path, unbroken: RunDir) -> None:
    ended = struck(tmp_path / "run", "metrics", 7, signal.SIGINT, times=2)  # updated, but not yet in the metrics
    assert os.waitstatus_to_exitcode(ended) == 130
    same(trained(tmp_path / "run", resume=True), unbroken)


@pytest.mark.slow
def test_a_signal_in_the_cold_start_leaves_a_run_that_begins_with_it_again(tmp_path: Path) -> None:
    pytest.importorskip("unsloth")  # before trl
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1), "solution": f"{i + 1}"} for i in range(8)]
    (tmp_path / "cold.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cold = f"cold_start={{data: [{{source: 'file:{tmp_path}/cold.jsonl'}}], steps: 4, batch_size: 4}}"
    ended = struck(tmp_path / "run", "cold start", 3, signal.SIGTERM, cold)
    assert os.waitstatus_to_exitcode(ended) == 143
    run = RunDir(tmp_path / "run")
    assert run.read_json("status.json")["state"] == "interrupted"
    assert not (run.path / "cold_start" / "adapter").exists()
    assert [m["step"] for m in lines(trained(run.path, cold, resume=True).metrics)] == [1, 2, 3, 4, 5, 6]


# disks


def test_a_full_disk_keeps_the_last_good_checkpoint_and_the_run_goes_on_with_more_room(
    tmp_path: Path, unbroken: RunDir, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(f.stat().st_size for f in (unbroken.checkpoints / "step_6").rglob("*") if f.is_file())
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.7 * size)}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs root, to mount a small disk")
    try:
        with pytest.raises(RunError) as raised:
            trained(disk / "run")
        run = RunDir(disk / "run")
        assert "checkpoints/step_4: could not be written" in str(raised.value)
        assert f"the last good checkpoint is {run.checkpoints / 'step_2'}" in str(raised.value)
        assert "slmgrpo train --resume" in str(raised.value) and "\n\n" not in str(raised.value)
        assert run.steps() == [2] and damage(run.checkpoints / "step_2") is None
        assert "Traceback" not in capfd.readouterr().err
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        same(trained(run.path, resume=True), unbroken)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def copied(run: RunDir, to: Path) -> RunDir:
    shutil.copytree(run.path, to)
    return RunDir(to)


def test_a_damaged_newest_checkpoint_is_said_and_replaced(tmp_path: Path, unbroken: RunDir) -> None:
    run = copied(unbroken, tmp_path / "run")
    file = run.checkpoints / "step_6" / "trainer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    seen = Seen()
    trained(run.path, resume=True, observer=seen)
    (warning,) = seen.warnings
    assert "step_6: damaged (trainer.pt does not match its checksum); using the one before" in warning
    same(run, unbroken)


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tmp_path: Path, unbroken: RunDir) -> None:
    run = copied(unbroken, tmp_path / "run")
    for step in run.steps():
        (run.checkpoints / f"step_{step}" / "trainer.pt").unlink()
    with pytest.raises(RunError, match=r"no other is left\nremove .*checkpoints to begin this run again"):
        trained(run.path, resume=True)
    assert len(lines(run.metrics)) == 6


def test_a_line_of_the_metrics_that_is_lost_is_said(tmp_path: Path, unbroken: RunDir) -> None:
    run = copied(unbroken, tmp_path / "run")
    rows = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join([*rows[:2], rows[2][:50] + "\0\0\n", *rows[3:]]))
    seen = Seen()
    trained(run.path, resume=True, observer=seen)
    assert [text for text in seen.warnings if "no readable line of step 3" in text]
    assert [m["step"] for m in lines(run.metrics)] == [1, 2, 4, 5, 6]


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize("name", ["trainer.pt", "sampler.pt"])
def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path, unbroken: RunDir, name: str) -> None:
    import torch

    run, mark = copied(unbroken, tmp_path / "run"), tmp_path / "it ran"
    file = run.checkpoints / "step_6" / name
    torch.save({"optimizer": Hostile(mark)}, file, pickle_module=pickle)
    manifest = json.loads((file.parent / "manifest.json").read_text())
    manifest["sha256"][name] = sha256(file)
    (file.parent / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="holds more than tensors and plain values") as raised:
        trained(run.path, resume=True)
    assert not mark.exists()
    assert "weights_only" not in str(raised.value)


# two at once


def test_a_second_process_in_a_live_run_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            trained(run, "train.steps=200")
            code = 0
        finally:
            os._exit(code)
    try:
        while not (run / "metrics.jsonl").exists():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
            time.sleep(0.05)
        with pytest.raises(RecipeError, match="another process is training"):
            trained(run, resume=True)
        with pytest.raises(RecipeError, match="another process is training"):
            trained(run)
        before = len(lines(run / "metrics.jsonl"))
        while len(lines(run / "metrics.jsonl")) < before + 2:
            time.sleep(0.05)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    RunDir(run).lock()
