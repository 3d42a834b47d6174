"""A short real run on the embedded model, trained once for all tests that look at runs."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SLMGRPO = [sys.executable, "-m", "slmgrpo"]
SHORT = ["--set", "train.steps=12", "--set", "optimizer.lr_scheduler_type=constant"]


def slmgrpo(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [*SLMGRPO, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@functools.cache
def trained_run() -> Path:
    """The run directory; copy it before changing anything in it."""
    folder = Path(tempfile.mkdtemp(prefix="slmgrpo-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    limits = [f"--set=data.heldout.{i}.limit=40" for i in range(3)]
    done = slmgrpo("train", "quickstart", *SHORT, *limits, "--out", "run", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"
