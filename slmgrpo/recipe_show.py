"""Packaged recipes listed, one recipe shown with each value's origin, copied to be edited, compared with another."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.recipe import resolved
from slmgrpo.recipe_load import Loaded, find, load, packaged_recipes
from slmgrpo.recipe_yaml import Unreadable, parse

ORIGIN_COLUMN = 52
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Listed:
    name: str
    model: str
    description: str


@dataclass(frozen=True, slots=True)
class Difference:
    """One value that two recipes do not share; None in place of a text: that recipe has no such entry."""

    key: str
    a: str | None
    b: str | None


def list_recipes() -> list[Listed]:
    """The packaged recipes that can be trained (parents start with `_` and are left out)."""
    names = [name for name in packaged_recipes() if not name.rpartition("/")[2].startswith("_")]
    recipes = [(name, load(packaged_recipes()[name]).recipe) for name in names]
    return [Listed(name, recipe.model.id, recipe.description) for name, recipe in recipes]


def show(loaded: Loaded) -> str:
    """The whole recipe as YAML that loads again, with the origin of every value as a comment."""
    return "\n".join(_lines(resolved(loaded.recipe), (), loaded.origins)) + "\n"


def copy_recipe(name: str, to: str | Path) -> Path:
    """Write a packaged recipe to a new file for editing; it goes on extending its packaged parents."""
    source = find(name)
    if source.resolve() not in [file.resolve() for file in packaged_recipes().values()]:
        raise RecipeError(f"{name}: is a file of yours, not a packaged recipe; copy it with `cp`")
    target = Path(to)
    if target.is_dir():
        target /= source.name
    if target.suffix != ".yaml":
        raise RecipeError(f"{to}: a recipe's name ends in .yaml; use {target.with_suffix('.yaml')}")
    texts = {target.parent / name: source.parent / name for name in _own_files(load(source))} | {target: source}
    for to_file, from_file in texts.items():
        if to_file.exists() and (to_file == target or to_file.read_bytes() != from_file.read_bytes()):
            what = "" if to_file == target else "another file "
            raise RecipeError(f"{to_file}: {what}is there already; choose another place, or remove it first")
    try:
        for to_file, from_file in texts.items():
            if to_file != target:
                to_file.parent.mkdir(exist_ok=True)
            with to_file.open("xb" if to_file == target else "wb") as file:
                file.write(from_file.read_bytes())
    except FileNotFoundError:
        raise RecipeError(f"{target}: there is no folder {target.parent}; `mkdir -p {target.parent}` first") from None
    except OSError as error:
        raise RecipeError(f"{error.filename}: cannot be written: {error.strerror}") from None
    return target


def _own_files(loaded: Loaded) -> set[str]:
    """Data files that a packaged recipe brings along."""
    sources = [*loaded.recipe.data.train, *loaded.recipe.data.heldout]
    return {source.source.removeprefix("file:") for source in sources if source.source.startswith("file:")}


def diff(a: Loaded, b: Loaded) -> list[Difference]:
    """Every value that differs, in field order; defaults of an entry that only one of them has are left out."""
    left, right = dict(_leaves(resolved(a.recipe), ())), dict(_leaves(resolved(b.recipe), ()))
    found: list[Difference] = []
    for key in _in_order(list(left), list(right)):
        value_a, value_b = left.get(key), right.get(key)
        alone, origins = (left, a.origins) if value_b is None else (right, b.origins)
        if value_a == value_b:
            continue
        if (value_a is None or value_b is None) and (origins.get(key) == "default" or alone[key] in ("[]", "{}")):
            continue
        found.append(Difference(key, value_a, value_b))
    return found


def _in_order(left: list[str], right: list[str]) -> list[str]:
    """Both lists of keys in one, each key that only the second has behind the one it follows there."""
    merged, known = list(left), set(left)
    for before, key in zip([None, *right], right, strict=False):
        if key not in known:
            merged.insert(0 if before is None else merged.index(before) + 1, key)
            known.add(key)
    return merged


def _leaves(value: Any, key: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list) and value:
        for part, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(below, (*key, str(part)))
    else:
        yield ".".join(key), _flow(value) if isinstance(value, dict | list) else _scalar(value)


def _lines(
    value: Any, key: tuple[str, ...], origins: dict[str, str], indent: str = "", first: str = ""
) -> Iterator[str]:
    """The lines of a mapping or list; `first` goes before the first of them (the dash of a list entry)."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for i, (part, below) in enumerate(parts):
        here = (*key, str(part))
        lead = indent[: len(indent) - len(first)] + first if i == 0 and first else indent
        lead += f"{_key(part)}:" if isinstance(value, dict) else "-"
        if isinstance(below, dict | list) and below and not (isinstance(value, list) and isinstance(below, list)):
            if isinstance(value, list):
                yield from _lines(below, here, origins, f"{indent}  ", "- ")
            else:
                yield lead
                yield from _lines(below, here, origins, f"{indent}  ")
            continue
        dotted = ".".join(here)
        inner = (origin for name, origin in origins.items() if name.startswith(f"{dotted}."))
        origin = f"# {origins.get(dotted) or next(inner, 'default')}"
        if isinstance(below, str) and _fits_block(below):
            yield f"{f'{lead} |-':<{ORIGIN_COLUMN}} {origin}"
            yield from (f"{indent}  {line}".rstrip() for line in below.split("\n"))
        else:
            text = _flow(below) if isinstance(below, dict | list) else _scalar(below)
            yield f"{f'{lead} {text}':<{ORIGIN_COLUMN}} {origin}"


def _fits_block(text: str) -> bool:
    """Whether a text of several lines reads back unchanged from a literal block."""
    lines = text.split("\n")
    clean = all(line == line.rstrip() and line.isprintable() for line in lines)
    return len(lines) > 1 and clean and text[0] not in " \n" and text[-1] != "\n"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if _reads_as_text(value) else _quoted(value)
    return str(value)


def _key(name: Any) -> str:
    return str(name) if _PLAIN_KEY.fullmatch(str(name)) else _quoted(str(name))


def _reads_as_text(text: str) -> bool:
    if not text or not text.isprintable() or not text[0].isalpha() or text != text.strip():
        return False
    if text.lower() in ("yes", "no", "on", "off", "y", "n"):
        return False
    try:
        spot, problems = parse(f"a: {text} # b", "")
    except Unreadable:
        return False
    return not problems and isinstance(spot.value, dict) and spot.value["a"].value == text and spot.value["a"].plain


def _quoted(text: str) -> str:
    def escape(character: str) -> str:
        if character in '"\\':
            return f"\\{character}"
        return "\\n" if character == "\n" else character if character.isprintable() else f"\\U{ord(character):08X}"

    return f'"{"".join(map(escape, text))}"'


def _flow(value: Any) -> str:
    """A value in one line, inner lists and mappings in brackets."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(str(key))}: {_flow(below)}" for key, below in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    return _quoted(value) if isinstance(value, str) else _scalar(value)
