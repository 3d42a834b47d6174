"""An evaluation's folder: settings that never mix, completions to go on from, samples, scores."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from slmgrpo.errors import RecipeError
from slmgrpo.eval import scores
from slmgrpo.eval.complete import Written
from slmgrpo.eval.samples import at_budget, read_lines
from slmgrpo.eval.stats import Estimate
from slmgrpo.run import write_text

SETTINGS, SUITE = "settings.json", "suite.json"
PARTIAL, SAMPLES, SCORES = "completions.jsonl", "samples.jsonl", "scores.json"


@dataclass(frozen=True)
class Evaluated:
    """One target on one suite. by_budget: metrics at each token budget, the longest last."""

    label: str
    suite: str
    folder: Path
    settings: Mapping[str, Any]
    lines: list[dict[str, Any]]
    by_budget: dict[int, dict[str, Estimate]]
    grader: str

    @property
    def problems(self) -> int:
        return self.settings["rows"]


def finished(folder: Path) -> bool:
    return (folder / SAMPLES).is_file()


def open_folder(folder: Path, settings: Mapping[str, Any], suite: Mapping[str, Any], *, fresh: bool) -> None:
    """Make the folder, or make sure that what is in it was asked for in the same way. suite: kept for `regrade`.

    fresh: what was asked for in another way is removed.
    """
    path, now = folder / SETTINGS, json.loads(json.dumps(settings))
    before = json.loads(path.read_text()) if path.is_file() else {}
    changed = [name for name in now if now[name] != before.get(name)]
    if before and changed and not fresh:
        shown = ", ".join(f"{name} was {_short(before.get(name))} and is {_short(now[name])}" for name in changed)
        raise RecipeError(
            f"{folder}: evaluated with other settings ({shown}); use --out for another folder, or --fresh to remove "
            "what is there"
        )
    if before and changed:
        for name in (SAMPLES, PARTIAL, SCORES, SETTINGS):
            (folder / name).unlink(missing_ok=True)
    if changed:
        write_text(folder / SUITE, json.dumps(suite, indent=2, ensure_ascii=False) + "\n")
        write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def partial(folder: Path) -> Iterator[tuple[TextIO, list[Written]]]:
    """The file that takes completions as they come, and those of an interrupted evaluation; one process at a time."""
    path = folder / PARTIAL
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RecipeError(
                f"{folder}: another process is evaluating into this folder; wait for it, or use --out"
            ) from None
        raw = path.read_bytes()
        file.truncate(raw.rfind(b"\n") + 1)  # a half line at the end
        yield file, [_written(line) for line in read_lines(path)]


def _written(line: Mapping[str, Any]) -> Written:
    ids = tuple(line["token_ids"])
    return Written(line["id"], line["member"], line["greedy"], ids, line["text"], line["finish_reason"])


def completion_line(one: Written) -> str:
    names = ("id", "member", "greedy", "finish_reason", "text", "token_ids")
    return json.dumps({name: getattr(one, name) for name in names}, ensure_ascii=False) + "\n"


def save(
    label: str, folder: Path, settings: Mapping[str, Any], lines: list[dict[str, Any]], grader: str, **extra: Any
) -> Evaluated:
    """Write scores, then samples: where the samples are, the evaluation is whole. grader: see `grader_version`."""
    found = _summary(label, folder, settings, lines, grader)
    _write_scores(found, extra)
    write_text(folder / SAMPLES, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    (folder / PARTIAL).unlink(missing_ok=True)
    return found


def find(path: Path) -> list[Evaluated]:
    """The whole evaluations at a path: a suite's folder, a target's, a run's or one of several targets."""
    for pattern in ("", "*/", "*/*/", "eval/*/*/"):
        folders = [file.parent for file in sorted(path.glob(f"{pattern}{SETTINGS}")) if finished(file.parent)]
        if folders:
            return [load(folder) for folder in folders]
    raise RecipeError(
        f"{path}: no finished evaluation there; `slmgrpo eval RUN` makes one (what a run measured of its held-out rows "
        "while it trained stands in RUN/eval/step_N/heldout/scores.json)"
    )


def load(folder: Path, label: str | None = None) -> Evaluated:
    """A whole evaluation; its metrics are computed anew from the samples."""
    for name in (SETTINGS, SAMPLES, SCORES):
        if not (folder / name).is_file():
            raise RecipeError(f"{folder}: no {name}; the evaluation is not finished: run the same command again")
    before = json.loads((folder / SCORES).read_text())["slmgrpo"]
    settings = json.loads((folder / SETTINGS).read_text())
    return _summary(label or before["label"], folder, settings, read_lines(folder / SAMPLES), before["grader"])


def _summary(
    label: str, folder: Path, settings: Mapping[str, Any], lines: list[dict[str, Any]], grader: str
) -> Evaluated:
    by_budget = {budget: scores.scores(at_budget(lines, budget)) for budget in settings["budgets"]}
    return Evaluated(label, settings["suite"], folder, settings, lines, by_budget, grader)


def _write_scores(found: Evaluated, extra: Mapping[str, Any]) -> None:
    settings = found.settings
    adapter = f"+adapter:{settings['adapter'][:8]}" if settings["adapter"] else ""
    scale = f"@{settings['scale']:g}" if adapter and settings["scale"] != 1 else ""
    result = scores.as_json(
        found.suite,
        found.by_budget,
        settings,
        problems=found.problems,
        model_name=f"{settings['model']}{adapter}{scale}",
        extra={"label": found.label, "grader": found.grader, **extra},
    )
    write_text(found.folder / SCORES, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 24 else f"{text[:21]}..."
