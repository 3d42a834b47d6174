"""Readers of data: tiny tasks, files (jsonl, csv, parquet), hub data sets and reasoning-gym, as records with places."""

from __future__ import annotations

import csv
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.gold import kind
from slmgrpo.recipe import Source, is_path

GENERATED_ROWS = 1000
"""Rows that reasoning-gym writes where neither `limit` nor `options.size` says."""
PROBE_S = 5.0
"""Seconds that the hub has for its first answer."""


Items = Iterator[tuple[str, Mapping[str, Any]]]
"""(where, record), as in (`data/a.jsonl:3`, {...})."""


@dataclass(frozen=True, slots=True)
class Records:
    """What a source holds before the recipe's names are put on it; `task` is its name for per-task accuracy."""

    task: str
    items: Items


class Unreachable(RecipeError):
    """The hub does not answer and the data set is not in the cache."""


def read(source: Source, base: Path) -> Records:
    """Open one source. Problems of the whole source raise here or at the first record."""
    name, _, rest = source.source.partition(":")
    readers = {"tiny": _tiny, "file": _file, "hub": _hub, "reasoning_gym": _reasoning_gym}
    if name not in readers or not rest:
        close = difflib.get_close_matches(name, readers, 1)
        hint = f"did you mean `{close[0]}:{rest or '...'}`?" if close else "write tiny:, file:, hub: or reasoning_gym:"
        raise RecipeError(f"{source.source}: no such kind of source; {hint}")
    if source.options and name != "reasoning_gym":
        raise RecipeError(f"{source.source}: options are for reasoning_gym; take them out")
    if source.config and name != "hub":
        raise RecipeError(f"{source.source}: config is for hub data sets; take it out")
    return readers[name](rest, source, base)


def out_of_reach(source: Source, base: Path) -> str | None:
    """What to do where a hub data set cannot be had now; None for all else, whatever else is wrong with it."""
    if not source.source.startswith("hub:") or is_path(source.source.removeprefix("hub:")) or not hub_silence():
        return None
    try:
        read(source, base)
    except Unreachable as error:
        return str(error)
    except RecipeError:
        return None  # at hand, but not right: said where its rows are read
    return None


@cache
def hub_silence() -> str | None:
    """Why the hub cannot be reached, asked once; None where it answers.

    Where it does not, the hub's libraries go on as under HF_HUB_OFFLINE=1: each would ask six times in half a minute.
    """
    import httpx
    from datasets import config
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_S)
    except httpx.TransportError as error:
        constants.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT}: {error or type(error).__name__}"
    return None


def _tiny(task: str, source: Source, base: Path) -> Records:
    from slmgrpo.tiny import tasks

    rows = tasks.rows(task, source.split, source.limit)
    return Records(source.source, _numbered(source.source, rows))


def _reasoning_gym(task: str, source: Source, base: Path) -> Records:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise RecipeError(
            f"{source.source}: reasoning-gym is not installed; run `pip install 'slmgrpo[reasoning]'`"
        ) from None
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, 1)
        hint = f"did you mean `{close[0]}`?" if close else f"it has {len(DATASETS)}, such as leg_counting"
        raise RecipeError(f"{source.source}: no such task in reasoning-gym; {hint}")
    if source.split not in ("train", "test"):
        raise RecipeError(f"{source.source}: no split `{source.split}`; there are train and test")
    size = source.limit or source.options.get("size", GENERATED_ROWS)
    # Row i is drawn with seed + i: the splits lie further apart than any data set is long.
    seed = source.options.get("seed", 0) + (0 if source.split == "train" else 1_000_000_000)
    try:
        generator = reasoning_gym.create_dataset(task, **source.options | {"size": size, "seed": seed})
        rows = [generator[i] for i in range(size)]
    except (TypeError, ValueError, AssertionError) as error:
        raise RecipeError(f"{source.source}: options: {error}") from None
    return Records(source.source, _numbered(source.source, rows))


def _hub(name: str, source: Source, base: Path) -> Records:
    import datasets
    from datasets.exceptions import DatasetsError

    folder = _find(name, base) if is_path(name) else None
    silence = None if folder else hub_silence()
    try:
        with _quietly():
            table = datasets.load_dataset(str(folder or name), source.config, split=source.split)
    except ConnectionError:
        leaf = name.rsplit("/", 1)[-1]
        raise Unreachable(
            f"{source.source}: the hub cannot be reached ({silence or 'it broke off'}) and the data set is not in the "
            f"cache; where it can be reached run `hf download {name} --repo-type dataset --local-dir data/{leaf}`, "
            f"copy the folder here and write `source: hub:./data/{leaf}`, or use file: with a jsonl, csv or parquet "
            "file"
        ) from None
    except (ValueError, OSError, DatasetsError) as error:
        cause = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise RecipeError(f"{source.source}: {cause[0]} (config {source.config}, split {source.split})") from None
    where = f"{source.source}[{source.split}]"
    return Records(folder.name if folder else name, _numbered(where, (dict(row) for row in table)))


@contextmanager
def _quietly() -> Iterator[None]:
    """No bars and no warnings of the hub's libraries: what goes wrong is in the error."""
    import datasets
    from huggingface_hub.utils import logging as hub_logging

    bars = datasets.is_progress_bar_enabled()
    levels = [(module, module.get_verbosity()) for module in (datasets.logging, hub_logging)]
    datasets.disable_progress_bars()
    for module, _ in levels:
        module.set_verbosity_error()
    try:
        yield
    finally:
        for module, level in levels:
            module.set_verbosity(level)
        if bars:
            datasets.enable_progress_bars()


def _numbered(where: str, rows: Iterable[Mapping[str, Any]]) -> Items:
    return ((f"{where} row {number}", row) for number, row in enumerate(rows, start=1))


def _file(name: str, source: Source, base: Path) -> Records:
    path = _find(name, base)
    if path.is_dir():
        raise RecipeError(
            f"{source.source}: a folder; name the file in it, or use `hub:./{name}` for a data-set folder"
        )
    readers = {".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    if path.suffix not in readers:
        raise RecipeError(f"{source.source}: cannot read `{path.suffix or path.name}`; use .jsonl, .csv or .parquet")
    return Records(path.stem, _cut(readers[path.suffix](_shown(path)), source))


def _shown(path: Path) -> Path:
    """The path as messages name it: from the working directory where it lies below."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _find(name: str, base: Path) -> Path:
    wanted = Path(name).expanduser()
    tried = [base / wanted, Path.cwd() / wanted]
    for path in tried:
        if path.exists():
            return path
    siblings = [p.name for path in tried if path.parent.is_dir() for p in path.parent.iterdir()]
    close = difflib.get_close_matches(wanted.name, siblings, 1)
    hint = f"did you mean `{close[0]}`?" if close else "paths start at the recipe's folder, then the working directory"
    raise RecipeError(f"{name}: no such file; {hint}")


def _cut(records: Items, source: Source) -> Items:
    """A file is one split, `train`; `train[:-200]` and `train[-200:]`, or `train[:80%]`, hold rows out."""
    if source.split == "train":
        return records
    cut = re.fullmatch(r"train\[(-?\d+%?)?:(-?\d+%?)?\]", source.split)
    if not cut:
        raise RecipeError(
            f"{source.source}: a file has no split `{source.split}`; take `split` out, or cut as in `train[:-200]`"
        )
    every = list(records)

    def place(end: str | None) -> int | None:
        if end is None:
            return None
        return int(end[:-1]) * len(every) // 100 if end.endswith("%") else int(end)

    return iter(every[place(cut[1]) : place(cut[2])])


def _jsonl(path: Path) -> Items:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                raise RecipeError(f"{where}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
            except json.JSONDecodeError as error:
                hint = "; a .jsonl file has one {...} a line" if number == 1 else ""
                raise RecipeError(f"{where}: not JSON: {error.msg} at column {error.colno}{hint}") from None
            except (ValueError, RecursionError) as error:  # a number of over 4,300 digits, or brackets without end
                raise RecipeError(f"{where}: not JSON that can be read: {error}") from None
            if not isinstance(record, dict):
                raise RecipeError(
                    f"{where}: {kind(record)} in place of a {{...}}; a .jsonl file has one {{...}} a line"
                )
            yield where, record


def _csv(path: Path) -> Items:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.reader(lines, strict=True)
        try:
            header = next(reader, [])
            for name in header:
                if header.count(name) > 1:
                    raise RecipeError(f"{path}:1: two columns are called `{name}`; give each its own name")
            for fields in reader:
                where = f"{path}:{reader.line_num}"
                if fields and len(fields) != len(header):
                    raise RecipeError(f"{where}: {len(fields)} fields, the header has {len(header)}; quote commas")
                if fields:
                    yield where, dict(zip(header, fields, strict=True))
        except UnicodeDecodeError:
            raise RecipeError(f"{path}: behind line {reader.line_num}: not UTF-8; save the file as UTF-8") from None
        except csv.Error as error:
            raise RecipeError(f"{path}:{reader.line_num}: not CSV: {error}") from None


def _parquet(path: Path) -> Items:
    import pyarrow as pa
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", record
    # The last two come of values that Python cannot hold, such as text that is not UTF-8.
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        what = (str(error).splitlines() or [type(error).__name__])[0]
        raise RecipeError(f"{path} row {number + 1} or a later one: not readable parquet: {what}") from None
