"""The rows of a suite, from the hub or a plain file, under the names that prompts and rules read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from slmgrpo.data import Row, load_sources
from slmgrpo.errors import RecipeError
from slmgrpo.eval.suites import Loaded, Suite
from slmgrpo.prompts import columns
from slmgrpo.questions import ordered
from slmgrpo.recipe import Source

PAIR = ("input", "output")
"""What a test of standard input holds."""


def rows_of(loaded: Loaded, *, data: Path | None = None, limit: int | None = None) -> tuple[list[Row], list[str]]:
    """The suite's rows and notes on them. data: folder with plain files. limit: a random subset, always the same."""
    suite = loaded.suite
    source, base, wanted = suite.data, loaded.base, suite.keep
    if data is not None and source.source.startswith("hub:"):
        if suite.file is None:
            raise RecipeError(
                f"{suite.name}: the suite names no file for --data; leave --data out to load it from the hub"
            )
        if not (data / suite.file.path).is_file():
            raise RecipeError(f"{suite.name}: {data / suite.file.path} is not there; give the folder that holds it")
        source, base = Source(source=f"file:{suite.file.path}", columns=suite.file.columns), data.resolve()
        wanted = {}
    rules, also = loaded.rules()
    made = {
        "choices": suite.choices_in,
        "tests": suite.stdio_tests_in,
        "answer": suite.choices_in or suite.answer_in_list,
    }
    need = columns(suite.prompt).union(*(rule.columns for rule in (*rules, *also)))
    need -= {name for name, way in made.items() if way} | set(suite.constants)
    configs = suite.configs if source.source.startswith("hub:") else []
    sources = [source.model_copy(update={"config": config}) for config in configs] or [source]
    read = load_sources(sources, base=base, need=need | set(wanted))
    kept = [row for row in read if all(row[name] in values for name, values in wanted.items())]
    kept = [row for row in kept if not any(row.get(name) for name in suite.empty)]
    rows = [_completed(row, suite) for row in kept]
    notes = list(read.notes)
    if suite.stdio_tests_in and (untested := [row for row in rows if not row["tests"]]):
        notes.append(f"{suite.name}: {len(untested)} rows without tests of standard input are left out")
        rows = [row for row in rows if row["tests"]]
    if not rows:
        raise RecipeError(f"{suite.name}: no row is left; correct `keep` and `empty`")
    expected = source.rows
    if expected and limit is None and len(rows) != expected:
        notes.append(f"{suite.name}: {len(rows)} rows where {expected} were expected; the data set has changed")
    return (rows if limit is None or limit >= len(rows) else _subset(rows, limit)), notes


def _completed(row: Row, suite: Suite) -> Row:
    row = {**suite.constants, **row, "task": suite.name}
    if suite.answer_in_list and "answer" not in row:
        row["answer"] = str(_column(row, suite.answer_in_list, suite)[0])
    if suite.stdio_tests_in and not row.get("tests"):
        pairs = [pair for name in suite.stdio_tests_in for pair in _stdio(row, name, suite)]
        row["tests"] = pairs[: suite.most_tests]
    if suite.choices_in and "choices" not in row:
        options = [str(_column(row, name, suite)).strip() for name in suite.choices_in]
        order = sorted(range(len(options)), key=lambda i: _key(row["question"], i))
        row["choices"] = [options[i] for i in order]
        row["answer"] = ascii_uppercase[order.index(0)]
    return ordered(row, suite.data.shuffle_options, suite.seed)


def _stdio(row: Mapping[str, Any], name: str, suite: Suite) -> list[dict[str, str]]:
    """{input, output} of each test, from lists in a mapping (or its JSON) or a list of mappings.

    None at all where they call a function by its name or cannot be read.
    """
    if name not in row:
        _column(row, name, suite)  # says what there is
    value = row[name] or {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):  # integers beyond what Python converts, too
            return []
    if isinstance(value, dict) and not value.get("fn_name"):
        inputs, outputs = (value.get(f"{part}s", value.get(part)) for part in ("input", "output"))
        if not (isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)):
            return []
        value = [{"input": given, "output": wanted} for given, wanted in zip(inputs, outputs, strict=True)]
    tests = value if isinstance(value, list) else []
    if not all(isinstance(test, dict) and isinstance(test.get(part), str) for test in tests for part in PAIR):
        return []
    return [{part: test[part] for part in PAIR} for test in tests]


def _column(row: Mapping[str, Any], name: str, suite: Suite) -> Any:
    if row.get(name) in (None, "", []):
        raise RecipeError(f"{suite.name}: {row['id']} has no column `{name}`; it has {', '.join(map(str, row))}")
    return row[name]


def _subset(rows: Sequence[Row], limit: int) -> list[Row]:
    chosen = {id(row) for row in sorted(rows, key=lambda row: _key(row["question"]))[:limit]}
    return [row for row in rows if id(row) in chosen]


def _key(*parts: object) -> bytes:
    return blake2b(json.dumps(parts).encode(), digest_size=8).digest()
