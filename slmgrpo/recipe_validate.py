"""A tree of values becomes a Recipe, or the list of everything that is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from slmgrpo.recipe import Recipe
from slmgrpo.recipe_checks import clashes
from slmgrpo.recipe_words import explain, members, within
from slmgrpo.recipe_yaml import Problem, Spot

Key = tuple[str | int, ...]

_STAND_INS: dict[Key, Any] = {
    ("model",): {"id": "tiny"},
    ("model", "id"): "tiny",
    ("data",): {"train": [{"source": "tiny:math"}]},
    ("data", "train"): [{"source": "tiny:math"}],
}
_YES_NO = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def validate(tree: Spot) -> tuple[Recipe | None, list[Problem]]:
    """The recipe (None where a field is wrong), and every problem: of fields, of open settings, between fields."""
    data = plain(tree)
    problems = list(_ambiguous(tree, ()))
    recipe, bad = _fields(data)
    problems += [_at(tree, key, text) for key, text in bad.items()]
    whole = recipe
    for _ in range(3):  # what depends on wrong fields cannot be judged; the rest can, with stand-ins for the wrong ones
        if whole is not None:
            break
        bad |= {_stand_in(data, key): "" for key in list(bad)}
        whole, more = _fields(data)
        bad |= more
    for clash in clashes(whole) if whole is not None else ():
        if not any(_overlap(key, wrong) for key in clash.keys for wrong in bad):
            written = [key for key in clash.keys if lookup(tree, key)[1]]
            problems.append(_at(tree, (written or clash.keys)[0], clash.text, name=clash.keys[0]))
    return recipe, problems


def _fields(data: Any) -> tuple[Recipe | None, dict[Key, str]]:
    try:
        return Recipe.model_validate(data, strict=True, by_alias=True, by_name=False), {}
    except ValidationError as error:
        return None, explain(error, data)


def _stand_in(data: Any, key: Key) -> Key:
    """Put something valid in place of a wrong value (its whole list, or section where it is optional)."""
    index = next((i for i, part in enumerate(key) if isinstance(part, int)), len(key))
    cut = key[:1] if key[0] == "cold_start" else key[:index]
    for part in cut[:-1]:
        data = data[part]
    if cut in _STAND_INS:
        data[cut[-1]] = _STAND_INS[cut]
    else:
        data.pop(cut[-1], None)
    return cut


def _ambiguous(tree: Spot, key: Key) -> Iterator[Problem]:
    """Unquoted words that people read as a bool, number or null and YAML 1.2 reads as text."""
    if isinstance(tree.value, dict):
        for name, spot in tree.value.items():
            yield from _ambiguous(spot, (*key, name))
    elif isinstance(tree.value, list):
        for i, spot in enumerate(tree.value):
            yield from _ambiguous(spot, (*key, i))
    elif tree.plain and (advice := _advice(tree.value, members(key))):
        yield _at(tree, key, advice, spot=tree)


def _advice(value: Any, allowed: set[Any]) -> str:
    if value == "None" and allowed & {type(None), Any}:
        return "`None` is text here; write null, or 'None' in quotes"
    if Any not in allowed:
        return ""
    if isinstance(value, str) and (truth := _YES_NO.get(value.lower())):
        return f"`{value}` is text here; write {truth}, or '{value}' in quotes"
    if isinstance(value, str) and value[:1].isdigit() and not value.strip("0123456789_:"):
        return f"`{value}` is text here; write a plain number, or '{value}' in quotes"
    return "must be a finite number" if isinstance(value, float) and not math.isfinite(value) else ""


def plain(tree: Spot) -> Any:
    if isinstance(tree.value, dict):
        return {key: plain(spot) for key, spot in tree.value.items()}
    if isinstance(tree.value, list):
        return [plain(spot) for spot in tree.value]
    return tree.value


def lookup(tree: Spot, key: Key) -> tuple[Spot, bool]:
    """The spot at a key, or the nearest one around it; whether it is the key's own."""
    for part in key:
        try:
            tree = within(tree.value, part)
        except LookupError:
            return tree, False
    return tree, True


def _at(tree: Spot, key: Key, text: str, *, name: Key | None = None, spot: Spot | None = None) -> Problem:
    return Problem((spot or lookup(tree, key)[0]).where, ".".join(map(str, name or key)), text)


def _overlap(a: Key, b: Key) -> bool:
    return all(x == y for x, y in zip(a, b, strict=False))
