"""Grades saved samples again by the present rules, without a model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from slmgrpo.errors import RecipeError
from slmgrpo.eval import store, suites
from slmgrpo.eval.complete import Problem
from slmgrpo.eval.evaluate import chooser, writing_to
from slmgrpo.eval.grading import Grader, label_answers
from slmgrpo.eval.rows import rows_of
from slmgrpo.eval.samples import lines_of, written_of
from slmgrpo.eval.store import Evaluated
from slmgrpo.recipe import Grading
from slmgrpo.rewards.pool import Pool
from slmgrpo.rewards.score import grader_version
from slmgrpo.rules import sandbox_in


@dataclass(frozen=True)
class Regraded:
    """An evaluation before and after. changed: ids of problems with a verdict on correctness that is another now."""

    before: Evaluated
    after: Evaluated
    changed: tuple[str, ...]


def regrade(before: Evaluated, grading: Grading, *, data: Path | None = None) -> Regraded:
    """Judge every saved completion anew and write samples and scores. data: where the plain files lie now."""
    if not all(line["token_ids"] for line in before.lines):
        raise RecipeError(
            f"{before.folder}: its samples hold no texts (the suite must not be republished); remove samples.jsonl and "
            "evaluate again"
        )
    origin = json.loads((before.folder / store.SUITE).read_text())
    suite = suites.Suite.model_validate(origin["suite"], by_alias=True)
    loaded = suites.Loaded(suite, Path(origin["base"]))
    place = data or (Path(origin["data"]) if origin["data"] else None)
    rows = {row["id"]: row for row in rows_of(loaded, data=place)[0]}
    ids = list(dict.fromkeys(line["id"] for line in before.lines))
    missing = [name for name in ids if name not in rows]
    if missing:
        raise RecipeError(f"{before.folder}: the data no longer has {missing[0]}; give the former data with --data")
    rules, also = loaded.rules()
    if before.settings["best_of"]:
        also = (*also, chooser(before.settings["best_of"], loaded.base))
    problems = [Problem(rows[name], (), before.settings["prefill"], rules, also) for name in ids]
    sandbox_in(grading.sandbox, [rules, also], "--sandbox ")
    workers = grading.workers or max(1, min(16, os.cpu_count() or 1))
    with Pool(workers, timeout_s=grading.timeout_s, sandbox=grading.sandbox) as pool:
        grader = Grader(problems, pool, max_error_rate=grading.max_error_rate)
        for one in written_of(before.lines):
            grader.submit(one)
        graded = label_answers(grader.results(), problems, pool)
    lines = lines_of(graded, problems, questions=True)
    old = {(line["id"], line["member"], line["greedy"]): line["correct"] for line in before.lines}
    changed = [line["id"] for line in lines if line["correct"] != old[line["id"], line["member"], line["greedy"]]]
    grader = grader_version((*rules, *also))
    with writing_to(before.folder, "copy the folder to where you may write, and regrade the copy"):
        after = store.save(before.label, before.folder, before.settings, lines, grader)
    return Regraded(before, after, tuple(dict.fromkeys(changed)))
