"""Every packaged rule with its data, settings and range, from signatures and docstrings: the table of README.md."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slmgrpo.rewards.base import GIVEN, Reward
from slmgrpo.rewards.find import RULE_MODULES, load, rules_of, signature

START, END = "<!-- rules: python -m slmgrpo.rewards.catalogue -->", "<!-- /rules -->"


@dataclass(frozen=True, slots=True)
class Entry:
    use: str
    says: str
    columns: tuple[str, ...]
    settings: tuple[str, ...]
    low: float
    high: float
    correctness: bool


def entries() -> Iterator[Entry]:
    """All rules in the order of their modules."""
    for place in RULE_MODULES:
        for name in rules_of(importlib.import_module(f"slmgrpo.rewards.{place}")):
            reward = Reward(f"{place}.{name}")
            rule = load(reward.use)
            takes = signature(rule)
            first = (inspect.getdoc(rule) or "").partition("\n\n")[0].replace("\n", " ")
            columns = tuple(f"{c}?" if c in takes.optional else c for c in takes.data if c not in GIVEN)
            settings = tuple(
                p.name if p.default is p.empty else f"{p.name}={p.default}"
                for p in inspect.signature(rule).parameters.values()
                if p.kind is p.KEYWORD_ONLY
            )
            bounds = reward.bounds
            yield Entry(reward.use, first, columns, settings, bounds.low, bounds.high, reward.is_correctness)


def table() -> str:
    """The table as Markdown."""
    rows = ["| `use:` | pays | reads | settings | |", "|---|---|---|---|---|"]
    for entry in entries():
        pays = f"{entry.low:g} to {entry.high:g}" + (", judges the answer" if entry.correctness else "")
        reads, settings = ("<br>".join(f"`{word}`" for word in words) for words in (entry.columns, entry.settings))
        rows.append(f"| `{entry.use}` | {pays} | {reads} | {settings} | {entry.says.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def write(readme: Path) -> None:
    """Put the table between the marks in the README."""
    before, _, rest = readme.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    readme.write_text(f"{before}{START}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).with_name("README.md"))
