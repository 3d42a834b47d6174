"""The run directory: names, files, checkpoints with checksums, resume, environment snapshot."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from slmgrpo.errors import RecipeError, RunError

PACKAGES = ("slmgrpo", "torch", "transformers", "peft", "trl", "unsloth", "vllm", "bitsandbytes", "math-verify")
MANIFEST = "manifest.json"
HALF_WRITTEN = re.compile(r"\..+\.(json|jsonl|parquet)\.\d+")
"""`.NAME.PID`: a file of ours before it gets its name; other files that begin with a dot are none of our business."""


@dataclass(frozen=True)
class RunDir:
    """Paths and files of one run. Whole files appear by rename, streams grow by whole lines."""

    path: Path
    _lock: list[TextIO] = field(default_factory=list, repr=False, compare=False)

    # names
    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def dynamics(self) -> Path:
        return self.path / "dynamics"

    def eval_dir(self, step: int, suite: str) -> Path:
        return self.path / "eval" / f"step_{step}" / suite

    # files
    def write_json(self, name: str, value: Any) -> None:
        write_text(self.path / name, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")

    def read_json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            raise RecipeError(f"{self.path}: no {name}, so this is not a run directory of slmgrpo") from None
        except json.JSONDecodeError as error:
            raise RecipeError(f"{self.path / name}: not readable as JSON ({error}); was it edited?") from None

    def append(self, stream: Path, values: Iterable[dict[str, Any]]) -> None:
        text = "".join(json.dumps(value, ensure_ascii=False, default=str) + "\n" for value in values)
        with stream.open("a", encoding="utf-8") as file:
            file.write(text)

    def lines(self, stream: Path) -> list[dict[str, Any]]:
        """A stream's whole lines; none where it is not there yet."""
        if not stream.exists():
            return []
        with stream.open(encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]

    def best(self) -> dict[str, Any] | None:
        """step, metric and value of the best evaluation so far, where the recipe names an `eval.best`."""
        return self.read_json("best.json") if (self.path / "best.json").exists() else None

    def status(self, state: str, step: int, **more: Any) -> None:
        """state: running, finished, interrupted or failed."""
        now = datetime.now().isoformat(timespec="seconds")
        self.write_json("status.json", {"state": state, "step": step, "pid": os.getpid(), "time": now, **more})

    def state(self) -> str:
        """What status.json says, or killed: it says running, and no process holds the lock any more."""
        said = self.read_json("status.json")["state"]
        return "killed" if said == "running" and not self._locked() else said

    def finished_at(self) -> int | None:
        """The last step of a run that has come to its end and is whole; None where there is something left to do."""
        if not (self.path / "status.json").is_file() or self.state() != "finished":
            return None
        step = self.read_json("status.json")["step"]
        return step if step == max(self.steps(), default=0) else None

    def _locked(self) -> bool:
        try:
            with (self.path / "lock").open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def lock(self) -> None:
        """Refuse a second process in this directory; the lock goes with the process."""
        try:
            file = (self.path / "lock").open("w")
        except OSError as error:
            raise RecipeError(
                f"{self.path}: cannot be written ({error.strerror}); copy it, or choose another --out"
            ) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RecipeError(
                f"{self.path}: another process is training in this directory; wait for it, or choose another --out"
            ) from None
        self._lock.append(file)

    def unlock(self) -> None:
        while self._lock:
            self._lock.pop().close()

    # checkpoints
    def save_checkpoint(self, step: int, write: Callable[[Path], None], keep: int) -> Path:
        """`write(folder)` fills a new folder; it gets its name only when whole, with a checksum of every file.

        keep: how many of the newest stay, beside the best.
        """
        final = self.checkpoints / f"step_{step}"
        if final.exists() and damage(final) is None:
            return final
        partial = self.checkpoints / f".partial_{step}_{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            write(partial)
            files = sorted(f for f in partial.rglob("*") if f.is_file())
            sums = {f.relative_to(partial).as_posix(): sha256(f) for f in files}
            write_text(partial / MANIFEST, json.dumps({"step": step, "sha256": sums}, indent=2) + "\n")
            for file in (*files, *(stream for stream in self._streams if stream.exists())):
                _to_disk(file)  # so that no checkpoint outlives its metrics when the power fails
            self._remove(final)
            partial.rename(final)
            _to_disk(self.checkpoints)
        except Exception as error:  # a full disk is an OSError here, but not in safetensors and torch.save
            shutil.rmtree(partial, ignore_errors=True)
            kept = self.latest_checkpoint()[0]
            state = f"the last good checkpoint is {kept}" if kept else "no checkpoint was saved yet"
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RunError(f"{final}: could not be written ({reason}); {state}; is the disk full?") from error
        best = self.best()
        for old in self.steps()[:-keep]:
            if best is not None and old == best["step"]:
                continue
            self._remove(self.checkpoints / f"step_{old}")
        return final

    def _remove(self, folder: Path) -> None:
        """A checkpoint that is half gone has no name of its own any more; `rewind` clears what a kill leaves of it."""
        if folder.exists():
            doomed = self.checkpoints / f".partial_{folder.name}_{os.getpid()}"
            folder.rename(doomed)
            shutil.rmtree(doomed)

    def steps(self) -> list[int]:
        if not self.checkpoints.is_dir():
            return []
        return sorted(_number(f) for f in self.checkpoints.glob("step_*") if _number(f))

    def latest_checkpoint(self) -> tuple[Path | None, list[str]]:
        """The newest whole checkpoint, and a message for each newer one that is damaged."""
        messages = []
        steps = self.steps()
        for step in reversed(steps):
            folder = self.checkpoints / f"step_{step}"
            fault = damage(folder)
            if fault is None:
                return folder, messages
            messages.append(
                f"{folder}: damaged ({fault}); " + ("using the one before" if step != steps[0] else "no other is left")
            )
        return None, messages

    @property
    def _streams(self) -> tuple[Path, ...]:
        return self.metrics, self.samples, self.evaluations

    def rewind(self, step: int) -> list[str]:
        """Leave what a run at `step` would have: no line and nothing of a later step, no half-written file.

        Returns what was lost before: steps that metrics.jsonl has no readable line of.
        """
        for stream in (stream for stream in self._streams if stream.exists()):
            with stream.open(encoding="utf-8", errors="replace") as file:
                lines = file.readlines()
            kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
            if len(kept) < len(lines):
                write_text(stream, "".join(kept))
        for late in (path for path in self.path.glob("*/step_*") if _number(path) > step):
            shutil.rmtree(late) if late.is_dir() else late.unlink()
        if (best := self.best()) and best["step"] > step:
            (self.path / "best.json").unlink()
        for left in self.checkpoints.glob(".partial_*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in (file for file in self.path.rglob(".*") if HALF_WRITTEN.fullmatch(file.name) and file.is_file()):
            left.unlink()
        have = {line["step"] for line in self.lines(self.metrics)}
        lost = [number for number in range(1, step + 1) if number not in have]
        return [f"{self.metrics}: no readable line of step {', '.join(map(str, lost[:10]))}"] if lost else []


def create(name: str, out: Path | None, root: Path = Path("runs")) -> RunDir:
    """A new directory `root/NAME-DATE-TIME`, or exactly `out`; a used one is refused with its ways out."""
    if out is None:
        path = fresh(name, root)
    else:
        path = out
        refuse_used(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be made ({error.strerror}); choose another place with --out") from None
    return RunDir(path)


def fresh(name: str, root: Path = Path("runs")) -> Path:
    """`root/NAME-DATE-TIME`, with a number where that is taken."""
    stem = f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    count, path = 1, root / stem
    while path.exists():
        count += 1
        path = root / f"{stem}-{count}"
    return path


def refuse_used(path: Path) -> None:
    """Refuse a directory that a new run cannot have, with its ways out; asked before anything is loaded."""
    if path.is_dir() and any(path.iterdir()):
        if not (path / "recipe.json").exists():
            raise RecipeError(f"{path}: is not empty and not a run; choose another --out, or empty it")
        RunDir(path).lock()
        raise RecipeError(
            f"{path}: already in use; continue that run with `slmgrpo train --resume {shlex.quote(str(path))}`, "
            "choose another --out, or remove it"
        )
    if path.exists() and not path.is_dir():
        raise RecipeError(f"{path}: is a file; choose another --out")
    missing = [parent for parent in (path, *path.parents) if not parent.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for made in missing:
            made.rmdir()
    except OSError as error:
        raise RecipeError(f"{path}: cannot be made ({error.strerror}); choose another place with --out") from None
    if path.is_dir() and not os.access(path, os.W_OK):
        raise RecipeError(f"{path}: cannot be written; choose another place with --out")


def open_run(path: Path) -> RunDir:
    if not path.is_dir():
        raise RecipeError(f"{path}: no such run directory; `ls runs` shows those that are there")
    run = RunDir(path)
    run.read_json("recipe.json")
    return run


def environment() -> dict[str, Any]:
    """Versions, machine and command line, for env.json."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "time": datetime.now().isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": versions,
    }


def write_text(path: Path, text: str) -> None:
    """Write by rename, so that a reader sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _to_disk(path: Path) -> None:
    """Wait until a file or a folder's names are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _number(path: Path) -> int:
    """N of `step_N`, `step_N.ext` and `step_N_rank_R.ext`; 0 of another name."""
    found = re.fullmatch(r"step_(\d+)(_rank_\d+)?(\..*)?", path.name)
    return int(found[1]) if found else 0


def _step_of(line: str) -> float:
    """The step of a stream's line; a line that is none ends what can be kept."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        sums = dict(json.loads((folder / MANIFEST).read_text())["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        return f"{MANIFEST} missing or unreadable"
    if not sums:
        return f"{MANIFEST} names no file"
    for name, expected in sums.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if sha256(folder / name) != expected:
            return f"{name} does not match its checksum"
    return None


class Clock:
    """Seconds per named stage of a step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.stages: dict[str, float] = {}
        self._mark = self.start

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._mark
        self._mark = now

    def total(self) -> float:
        return time.perf_counter() - self.start
