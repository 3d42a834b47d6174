"""Checks how a recipe uses the packaged rules (names, settings) by reading their source; nothing is imported."""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from slmgrpo.recipe import RewardUse

MODULES = ("math", "mcq", "code", "format", "length")
"""Under slmgrpo.rewards; every public function there is a rule."""
FROM_THE_RUN = {"max_tokens"}
"""Settings that the run fills in."""


@dataclass(frozen=True, slots=True)
class Rule:
    """settings: name -> whether a recipe must give it."""

    settings: dict[str, bool]
    open_ended: bool


def wrong_use(use: RewardUse) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key inside the entry, what is wrong) for a packaged rule; a rule of one's own (`file.py:name`) passes."""
    if ":" in use.use:
        return
    place, _, name = use.use.rpartition(".")
    if place not in MODULES:
        every = [f"{module}.{rule}" for module in MODULES for rule in rules(module)]
        hint = _closest(use.use, every) or "; a rule of your own is `./file.py:name` or `pkg.mod:name`"
        yield ("use",), f"there is no rule `{use.use}`{hint}"
        return
    rule = rules(place).get(name)
    if rule is None:
        yield ("use",), f"slmgrpo.rewards.{place} has no `{name}`{_closest(name, list(rules(place)))}"
        return
    for key in use.settings:
        if key not in rule.settings and not rule.open_ended:
            known = ", ".join(rule.settings)
            hint = _closest(key, list(rule.settings)) or (f"; it has {known}" if known else "; it has none")
            yield ("with", key), f"{use.use} has no such setting{hint}"
    for key, needed in rule.settings.items():
        if needed and key not in use.settings and key not in FROM_THE_RUN:
            yield ("with",), f"{use.use} needs `with: {{{key}: ...}}`"


@functools.cache
def rules(module: str) -> dict[str, Rule]:
    """The rules of a module of slmgrpo.rewards."""
    source = (Path(__file__).parent / "rewards" / f"{module}.py").read_text(encoding="utf-8")
    return {
        node.name: _rule(node.args)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def _rule(arguments: ast.arguments) -> Rule:
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return Rule({argument.arg: default is None for argument, default in pairs}, arguments.kwarg is not None)


def _closest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""
