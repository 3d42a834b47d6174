"""The GPU comparison says plainly that it needs a GPU, and its code runs on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parent / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_ends_with_2() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stderr == "gpu.py: needs a CUDA device and this machine has none; --cpu-check runs its code on a CPU\n"
    assert done.stdout == ""


@pytest.mark.slow
def test_every_arm_runs_on_a_tiny_model_and_no_ratio_is_claimed() -> None:
    done = run("--cpu-check")
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert set(line) == {"arms", "cpu_check"}
    assert set(line["arms"]) == {"trl", "unsloth", "ours", "ours_plain"}
    assert all(arm["step_s"] > 0 and arm["device"] == "cpu" for arm in line["arms"].values())
    assert "packed" in line["arms"]["ours"]["path"]
