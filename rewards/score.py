"""Scores any jsonl of completions with any rules: the value of each rule, the answer read and why."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.recipe import RewardUse
from slmgrpo.rewards.base import Reward, Verdict, completion_text, gated, load_rewards, missing_columns, text_of
from slmgrpo.rewards.find import closest, own_version

CHUNK = 512
MAX_DEPTH = 100


@dataclass(frozen=True, slots=True)
class Scored:
    """One line of the file. id: its `id` column, else its line number."""

    id: str
    verdicts: Mapping[str, Verdict]
    grader: str = ""

    def as_json(self) -> str:
        """One object: id, values, read, why, grader. read is the first answer that a rule read."""
        reads = (verdict.read for verdict in self.verdicts.values())
        reasons = [(name, verdict) for name, verdict in self.verdicts.items() if verdict.why]
        if len(self.verdicts) == 1:
            why = "".join(verdict.why for _, verdict in reasons)
        else:
            why = "; ".join(f"{name}: {verdict.why}" for name, verdict in reasons)
        text = json.dumps(
            {
                "id": self.id,
                "values": {name: verdict.value for name, verdict in self.verdicts.items()},
                "read": next((read for read in reads if read is not None), None),
                "why": why,
                "grader": self.grader,
            },
            ensure_ascii=False,
        )
        return text.encode("utf-8", "backslashreplace").decode("utf-8")  # half a surrogate pair as JSON's \\uD800


def grader_version(rewards: Iterable[Reward] = ()) -> str:
    """Digests of the packaged rules' sources and of own rules' files, math-verify's version.

    Saved scores are comparable where it is equal.
    """
    own = {own_version(reward.use, base=reward.base) for reward in rewards}
    return "+".join([_packaged_version(), *sorted(own - {""})])


@functools.cache
def _packaged_version() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return f"{digest.hexdigest()[:12]}+math-verify-{importlib.metadata.version('math-verify')}"


def parse_settings(pairs: Iterable[str], uses: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`math.correct:extract=tag` -> {"math.correct": {"extract": "tag"}}; values are JSON where they can be.

    `extract=tag` will do where there is one use.
    """
    settings: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        head, equals, value = pair.partition("=")
        use, _, key = head.rpartition(":")
        if not use and len(uses) == 1:
            use = uses[0]
        if not (equals and use and key) or head in uses:
            examples = " or ".join(f"{name}:KEY=VALUE" for name in uses)
            raise RecipeError(f"reward score: --with {pair}: write it as {examples}")
        try:
            settings.setdefault(use, {})[key] = json.loads(value)
        except (ValueError, RecursionError):  # no JSON, a number of over 4,300 digits, brackets without end
            settings.setdefault(use, {})[key] = value
    return settings


def parse_mapping(text: str) -> dict[str, str]:
    """`completion=pred,answer=gold` -> what rules call it: what the file calls it (dots go into nested objects)."""
    mapping: dict[str, str] = {}
    for pair in text.split(",") if text else ():
        name, equals, source = pair.strip().partition("=")
        if not (equals and name and source):
            raise RecipeError(f"reward score: --map {pair}: write it as completion=pred,answer=gold")
        mapping[name] = source
    return mapping


def rewards_of(
    uses: Sequence[str], settings: Mapping[str, Mapping[str, Any]], base: Path | None = None
) -> tuple[Reward, ...]:
    """The rules of a command line, checked like those of a recipe."""
    if not uses:
        raise RecipeError("reward score: name a rule, as in --use math.correct")
    unused = [name for name in settings if name not in uses]
    if unused:
        raise RecipeError(f"reward score: --with {unused[0]}: no such --use{closest(unused[0], uses)}")
    return load_rewards([RewardUse(use=use, settings=settings.get(use, {})) for use in uses], base=base)


def rows(file: Path, mapping: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """The rows of a jsonl file under the names that rules use; tests nested under `prompt_tests` are lifted."""
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines also splits at U+2028, inside texts
    except (OSError, ValueError) as error:  # no UTF-8, no file name
        raise RecipeError(f"{file}: cannot be read ({error}); give a jsonl file of completions") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise RecipeError(f"{file}: line {number}: not JSON ({error.msg} at column {error.colno})") from error
        except (ValueError, RecursionError) as error:  # a number of over 4,300 digits, or brackets without end
            raise RecipeError(f"{file}: line {number}: not JSON that can be read: {error}") from None
        if not isinstance(row, dict):
            raise RecipeError(f"{file}: line {number}: not an object; write one JSON object a line")
        if _deep(row):
            raise RecipeError(f"{file}: line {number}: nested over {MAX_DEPTH} levels deep; flatten the data")
        nested = row.get("prompt_tests")
        row = {**(nested if isinstance(nested, dict) else {}), **row}
        if "tests" not in row and "stdin_tests" in row:
            row |= {"tests": row["stdin_tests"], "test_kind": "stdio"}
        row |= {name: _at(row, source, file, number) for name, source in mapping.items()}
        if "completion" not in row:
            have = ", ".join(sorted(row))
            raise RecipeError(
                f"{file}: line {number}: no column `completion` among {have}; use --map completion=COLUMN"
            )
        ids = row.get("completion_ids") or []
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise RecipeError(f"{file}: line {number}: `completion_ids` is no list of token numbers; mend or drop it")
        yield {"id": str(number), **row}


def _deep(value: Any) -> bool:
    """Whether lists and objects lie in one another over MAX_DEPTH levels: code that recurses could not follow."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [part for parts in inside for part in parts]
    return bool(level)


def _at(row: Mapping[str, Any], path: str, file: Path, number: int) -> Any:
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            hint = closest(path, row)
            raise RecipeError(f"{file}: line {number}: --map: no column `{path}`{hint}")
        value = value[key]
    return value


def score(
    file: Path,
    rewards: Sequence[Reward],
    *,
    mapping: Mapping[str, str] | None = None,
    workers: int = 2,
    timeout_s: float = 10.0,
    sandbox: str = "strict",
) -> Iterator[Scored]:
    """Every row's verdicts, in the order of the file, gates applied."""
    from slmgrpo.rewards.pool import Pool, Task

    every = list(rows(file, mapping or {}))
    for number, row in enumerate(every, 1):
        problems = missing_columns(rewards, row)
        if problems:
            raise RecipeError(f"{file}: row {number}\n  " + "\n  ".join(problems) + "\n  use --map NAME=COLUMN")
    grader = grader_version(rewards)
    with Pool(workers, timeout_s=timeout_s, sandbox=sandbox) as pool:
        for start in range(0, len(every), CHUNK):
            chunk = every[start : start + CHUNK]
            tasks = [
                Task(
                    key=start + i,
                    rewards=tuple(rewards),
                    prompt=text_of(row.get("prompt")),
                    completion=completion_text(row["completion"]),
                    completion_ids=tuple(row.get("completion_ids") or ()),
                    columns={key: value for key, value in row.items() if key not in ("prompt", "completion")},
                )
                for i, row in enumerate(chunk)
            ]
            for row, verdicts in zip(chunk, pool.grade(tasks), strict=True):
                yield Scored(str(row["id"]), gated(verdicts, rewards), grader)


def as_text(scored: Sequence[Scored], *, shown: int = 20) -> str:
    """The scores for people: the first rows, then each rule's mean and status counts."""
    lines = []
    for item in scored[:shown]:
        for name, verdict in item.verdicts.items():
            value = "none" if verdict.value is None else f"{verdict.value:g}"
            read = "" if verdict.read is None else f"  read {verdict.read[:60]!r}"
            lines.append(f"{item.id:>12}  {name:22} {value:>6}  {verdict.status:11}{read}  {verdict.why}")
    if len(scored) > shown:
        lines.append(f"{'':>12}  ... {len(scored) - shown} more rows")
    for name in scored[0].verdicts if scored else ():
        verdicts = [item.verdicts[name] for item in scored]
        values = [verdict.value for verdict in verdicts if verdict.value is not None]
        counts = ", ".join(f"{status} {count}" for status, count in Counter(v.status for v in verdicts).most_common())
        mean = f"mean {sum(values) / len(values):.4f} of {len(values)}" if values else "nothing judged"
        lines.append(f"{name}: {mean}; {counts}")
    lines.append(f"grader {scored[0].grader if scored else grader_version()}")
    return "\n".join(lines)
