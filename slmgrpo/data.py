"""Rows of questions from a recipe's sources, under the names that rules read, and the sampler that mixes them.

A row is a plain dict: `id`, `task`, `source_index` (its place in the list of sources), `source_weight`, `question`, and
where the data has them `answer`, `choices` (option texts; the answer is then a letter), `tests` (a list), and every
other column.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any, overload

from slmgrpo.errors import RecipeError
from slmgrpo.gold import Unreadable, gold_letter, gold_text, kind, options
from slmgrpo.recipe import Source
from slmgrpo.sources import read

Row = dict[str, Any]

RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids", "source_index", "source_weight")
"""What rules call the run's own text: such columns of the data are left out."""
ALIASES = {
    "question": ("problem", "prompt", "instruction", "query", "input", "text"),
    "answer": ("answerKey", "solution", "target", "output", "label", "response", "final_answer"),
    "choices": ("options", "endings"),
    "tests": ("test_list", "test", "test_cases"),
}


@dataclass(frozen=True, slots=True)
class Rows(Sequence[Row]):
    """The rows of all sources, in order; `notes` says in a sentence each what was changed on the way in."""

    items: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.items[index]


def load_sources(
    sources: Sequence[Source],
    *,
    base: Path,
    need: Collection[str] | Callable[[Source], Collection[str]] = (),
) -> Rows:
    """Read all sources; every problem of every source is reported at once.

    base: the recipe's folder; paths start there, then at the working directory.
    need: columns that rules and prompt read, for all sources or as a function of the source.
    """
    rows: list[Row] = []
    problems: list[str] = []
    notes: list[str] = []
    for index, source in enumerate(sources):
        try:
            rows += _load(source, index, base, {"question", *(need(source) if callable(need) else need)}, notes)
        except RecipeError as error:
            problems += str(error).splitlines()
    problems = list(dict.fromkeys(problems))  # configurations of one data set are missing together
    if problems:
        raise RecipeError(f"data: {len(problems)} problem{'s' * (len(problems) > 1)}\n  " + "\n  ".join(problems))
    if renamed := _number_repeated_ids(rows):
        notes.append(f"{renamed} rows have an id that another row has: those got a number behind it, as in `ID#2`")
    return Rows(tuple(rows), tuple(notes))


def prompt_key(row_id: str) -> int:
    """A row's number for keyed sampling noise: the same on any machine, whatever else the data holds."""
    return int.from_bytes(blake2b(row_id.encode(), digest_size=7).digest())


class PromptSampler:
    """Chooses each step's prompts: sources by their weights, rows without repetition until a source is used up.

    What a step gets depends on (rows, seed, step) alone. Another choice of prompts is another class with these methods.
    """

    def __init__(self, rows: Sequence[Row], seed: int, prompts_per_step: int) -> None:
        self._seed = seed
        self._count = prompts_per_step
        grouped: dict[int, list[Row]] = {}
        for row in rows:
            grouped.setdefault(row["source_index"], []).append(row)
        self._by_source = [grouped[index] for index in sorted(grouped)]
        total = math.fsum(own[0]["source_weight"] for own in self._by_source)
        self._shares = [own[0]["source_weight"] / total for own in self._by_source]
        problems = []
        for own, share in zip(self._by_source, self._shares, strict=True):
            # The largest deficit is below (number of sources - 1) rows, so no step takes more than this of one source.
            most = min(prompts_per_step, math.ceil(share * prompts_per_step) + len(self._shares) - 1)
            if len(own) < most:
                problems.append(
                    f"data: {own[0]['task']} has {len(own)} rows, but a step of {prompts_per_step} prompts can need "
                    f"{most} different ones; lower train.prompts_per_step or the source's weight"
                )
        if problems or not grouped:
            raise RecipeError("\n".join(problems) or "data: no rows to choose prompts from")
        self._restart()

    def next(self, step: int) -> list[Row]:
        """The prompts of a step, counted from 0, each once; the same list whenever it is asked for."""
        if step < self._step:
            self._restart()
        while self._step < step:
            self._draw_step()
        return self._draw_step()

    def update(self, prompt_id: str, rewards: Sequence[float | None]) -> None:
        """Told after each step how a prompt's completions did; this sampler does not use it."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "rows": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["rows"] != self._fingerprint():
            raise RecipeError(
                "data: rows, weights, seed or prompts_per_step are not those of the checkpoint; "
                "restore them, or start a new run"
            )
        self._restart()
        while self._step < state["step"]:
            self._draw_step()

    def _fingerprint(self) -> str:
        what = [self._seed, self._count, self._shares, [sorted(row["id"] for row in own) for own in self._by_source]]
        return blake2b(json.dumps(what).encode(), digest_size=16).hexdigest()

    def _restart(self) -> None:
        self._step = 0
        self._taken = [0] * len(self._shares)
        self._epoch = [0] * len(self._shares)
        self._left: list[list[Row]] = [[] for _ in self._shares]

    def _draw_step(self) -> list[Row]:
        wanted = [0] * len(self._shares)
        for _ in range(self._count):
            drawn = sum(self._taken) + 1
            behind = [share * drawn - taken for share, taken in zip(self._shares, self._taken, strict=True)]
            chosen = behind.index(max(behind))
            self._taken[chosen] += 1
            wanted[chosen] += 1
        rows = [row for source, count in enumerate(wanted) for row in self._draw(source, count)]
        rows.sort(key=lambda row: _noise(self._seed, "step", self._step, row["id"]))
        self._step += 1
        return rows

    def _draw(self, source: int, count: int) -> list[Row]:
        drawn: list[Row] = []
        while len(drawn) < count:
            if not self._left[source]:
                # Twice in one step a prompt would get the same noise: this step's come last in the new epoch.
                recent = {row["id"] for row in drawn}
                key = (self._seed, source, self._epoch[source])
                self._left[source] = sorted(
                    self._by_source[source], key=lambda row: (row["id"] not in recent, _noise(*key, row["id"]))
                )
                self._epoch[source] += 1
            drawn.append(self._left[source].pop())
        return drawn


def _noise(*key: object) -> bytes:
    """Random order that does not change with the Python version."""
    return blake2b(repr(key).encode(), digest_size=8).digest()


def _load(source: Source, index: int, base: Path, need: set[str], notes: list[str]) -> list[Row]:
    records = read(source, base)
    rows: list[Row] = []
    complaints: dict[str, list[str]] = {}
    left_out: set[str] = set()
    for number, (where, record) in enumerate(islice(records.items, source.limit), start=1):
        left_out |= {name for name in RESERVED if name in record and name not in source.columns.values()}
        try:
            row = _row(record, source, need)
        except Unreadable as error:
            complaints.setdefault(str(error), []).append(where)
            continue
        row["id"] = str(row["id"]) if row.get("id") not in (None, "") else f"{records.task}:{number}"
        row["task"] = str(row["task"]) if row.get("task") not in (None, "") else records.task
        rows.append(row | {"source_index": index, "source_weight": source.weight})
    if complaints:
        shown = [f"{places[0]}: {what}{_and_more(len(places) - 1)}" for what, places in islice(complaints.items(), 8)]
        if len(complaints) > len(shown):
            shown.append(f"{source.source}: {len(complaints) - len(shown)} more kinds of unreadable row")
        raise RecipeError("\n".join(shown))
    if not rows:
        raise RecipeError(
            f"{source.source}: no rows in split `{source.split}`; a source must have at least one: is the data empty, "
            "or shorter than the slice?"
        )
    notes += [
        f"{source.source}: column `{name}` is left out, rules know the run's own by it" for name in sorted(left_out)
    ]
    return rows


def _and_more(count: int) -> str:
    return f" (and {count} more row{'s' * (count > 1)})" if count else ""


def _row(record: Mapping[str, Any], source: Source, need: set[str]) -> Row:
    """One record under the recipe's names, checked and in the types that rules expect."""
    taken = set(source.columns.values())
    row = {name: value for name, value in record.items() if name not in taken and name not in RESERVED}
    for ours, theirs in source.columns.items():
        if theirs not in record:
            raise Unreadable(f"no column `{theirs}` for columns.{ours}; the row has {_names(record)}")
        row[ours] = record[theirs]
    row = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
    for name in sorted(need):
        if name not in row:
            raise Unreadable(f"no column `{name}`; the row has {_names(record)}{_suggest(name, record)}")
        if row[name] is None or row[name] in ("", [], {}):
            raise Unreadable(f"`{name}` is empty")
    if not isinstance(row["question"], str) or not row["question"].strip():
        raise Unreadable(f"`question` must be text, not {kind(row['question'])}")
    answer, choices = row.get("answer"), row.get("choices")
    if choices is not None:
        row["choices"], labels = options(choices)
        if answer is not None:
            row["answer"] = gold_letter(answer, source.extract, labels)
    elif "answer" in need or source.extract or isinstance(answer, str) or type(answer) in (int, float):
        row["answer"] = gold_text(answer, source.extract)
    if row.get("tests") is not None:
        row["tests"] = _tests(row["tests"])
    return row


def _tests(value: Any) -> list[str | dict[str, Any]]:
    """Tests as a list: JSON text is read, one program is a list of one."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith("[") else [value]
        except (ValueError, RecursionError):
            value = [value]
    if not isinstance(value, list) or not all(isinstance(test, str | dict) for test in value):
        raise Unreadable(f"`tests` must be a list of texts or of mappings, not {kind(value)}")
    return value


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(str(name) for name in record) or "nothing"


def _suggest(name: str, record: Mapping[str, Any]) -> str:
    known = [alias for alias in ALIASES.get(name, ()) if alias in record]
    close = known or difflib.get_close_matches(name, [str(key) for key in record], 1)
    return f"; did you mean `columns: {{{name}: {close[0]}}}`?" if close else f"; name it by `columns: {{{name}: ...}}`"


def _number_repeated_ids(rows: list[Row]) -> int:
    """Give the second row of an id `ID#2` and so on, in place; returns how many were renamed."""
    taken = {row["id"] for row in rows}
    seen: dict[str, int] = {}
    renamed = 0
    for row in rows:
        own = row["id"]
        seen[own] = seen.get(own, 0) + 1
        if seen[own] == 1:
            continue
        while f"{own}#{seen[own]}" in taken:
            seen[own] += 1
        row["id"] = f"{own}#{seen[own]}"
        taken.add(row["id"])
        renamed += 1
    return renamed
