"""Whole runs by both trainers: seconds of training until held-out accuracy is the same (a part of trainer.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from statistics import fmean, geometric_mean

EVERY = 4
"""Steps between measures of accuracy; their own time is not counted."""


def compare_runs(recipe: str, seeds: list[int], target: float, threads: int, settings: list[str]) -> None:
    """Print each run's course and, last, JSON with the ratio of seconds (TRL's / ours) a seed."""
    ratios: dict[int, float | None] = {}
    for seed in seeds:
        seconds: dict[str, float | None] = {}
        for trainer in ("slmgrpo", "trl"):
            with tempfile.TemporaryDirectory() as folder:
                run = Path(folder) / "run"
                train(recipe, trainer, seed, run, threads, settings)
                seconds[trainer] = time_to(target, trainer, seed, run)
        ours, theirs = seconds["slmgrpo"], seconds["trl"]
        ratios[seed] = theirs / ours if ours and theirs else None
        print(f"seed {seed}: {ratios[seed] or 'not reached by both'}", flush=True)
    reached = [ratio for ratio in ratios.values() if ratio]
    mean = round(geometric_mean(reached), 3) if reached else None
    print(json.dumps({"target": target, "time_ratio": ratios, "time_ratio_mean": mean}))


def train(recipe: str, trainer: str, seed: int, out: Path, threads: int, settings: list[str]) -> None:
    # TRL's generate reports no log-probs, so neither side corrects for the sampler
    given = [f"trainer={trainer}", f"seed={seed}", f"eval.every={EVERY}", "loss.sampling_correction=none"]
    sets = [f"--set={setting}" for setting in (*given, *settings)]
    command = [sys.executable, "-m", "slmgrpo", "train", recipe, *sets, "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def time_to(target: float, trainer: str, seed: int, run: Path) -> float | None:
    """Seconds of the steps before the first measure that reaches the target; None: never reached."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    passed = [0.0, *accumulate(line["seconds"]["total"] for line in lines)]
    learning = fmean(line["seconds"]["forward_backward"] for line in lines)
    files = run.glob("eval/step_*/heldout/scores.json")
    course = {int(file.parts[-3].removeprefix("step_")): accuracy_of(file) for file in files}
    shown = " ".join(f"{step}:{course[step]:.0%}" for step in sorted(course))
    reached = next((step for step in sorted(course) if course[step] >= target), None)
    seconds = None if reached is None else passed[reached]
    until = "never" if seconds is None else f"{seconds:.1f} s, step {reached}"
    print(f"seed {seed} {trainer}: {target:.0%} after {until}; {passed[-1]:.1f} s in all, of them forward and backward")
    print(f"  {learning:.2f} s a step; held-out accuracy {shown}", flush=True)
    return seconds


def accuracy_of(scores: Path) -> float:
    """Mean over the tasks."""
    return fmean(task["accuracy"] for task in json.loads(scores.read_text())["tasks"].values())
