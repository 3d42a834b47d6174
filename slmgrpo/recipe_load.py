"""A recipe file, its parents and `--set` overrides become one Recipe, or one error that names every problem."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.recipe import Recipe, resolved
from slmgrpo.recipe_validate import Key, lookup, validate
from slmgrpo.recipe_yaml import Problem, Spot, Unreadable, Where, parse, read_text

PACKAGED = Path(__file__).parent / "recipes"
MAX_LEVELS = 3


@dataclass(frozen=True)
class Loaded:
    """A recipe and where each of its values comes from.

    origins: dotted key -> `recipes/_math.yaml:12`, `--set` or `default`.
    """

    recipe: Recipe
    origins: dict[str, str]
    path: Path

    @property
    def base(self) -> Path:
        """The folder that relative paths in the recipe start from."""
        return self.path.parent


def load(path_or_name: str | Path, overrides: Sequence[str] = (), *, placed: bool = False) -> Loaded:
    """Read a recipe file, or the packaged recipe of that name, with its parents and `a.b=c` overrides on top.

    placed: its paths do not start at its folder, as in the recipe.json of a run.
    """
    path = find(path_or_name)
    try:
        tree, problems = merged_tree(path)
    except Unreadable as error:
        raise _error(path, error.problems) from None
    for override in overrides:
        try:
            tree = _override(tree, override)
        except Unreadable as error:
            problems += error.problems
    problems += _unwritable(tree)
    known = {problem.key for problem in problems}
    recipe, more = validate(tree)
    problems += [problem for problem in more if problem.key not in known]
    if problems or recipe is None:
        raise _error(path, problems)
    if not recipe.name:
        recipe = recipe.model_copy(update={"name": path.stem})
    origins = dict(_origins(resolved(recipe), tree))
    return Loaded(recipe if placed else _placed(recipe, origins, path.parent), origins, path)


def _unwritable(tree: Spot, key: Key = ()) -> Iterator[Problem]:
    """Texts with half of a surrogate pair, as from the escape `\\ud800`: no file can hold them."""
    if isinstance(tree.value, dict | list):
        parts = tree.value.items() if isinstance(tree.value, dict) else enumerate(tree.value)
        for part, spot in parts:
            yield from _unwritable(spot, (*key, part))
    elif isinstance(tree.value, str) and any("\ud800" <= char <= "\udfff" for char in tree.value):
        text = f"{tree.value[:40]!a} holds half of a surrogate pair; write the character itself"
        yield Problem(tree.where, ".".join(map(str, key)), text)


# Files


def find(path_or_name: str | Path, *, beside: Path | None = None) -> Path:
    """The file itself where there is one, else the packaged recipe `recipes/NAME.yaml` or `NAME`."""
    text = str(path_or_name)
    path = Path(text) if beside is None else beside / text
    if "\0" in text:
        raise RecipeError(f"{text!r}: not a file name")
    if _is_file(path):
        return path
    packaged = packaged_recipes()
    name = text.removeprefix("recipes/").removesuffix(".yaml")
    if name in packaged:
        return packaged[name]
    if _exists(path):
        return path
    here = Path.cwd() if beside is None else beside
    names = {**{name: name for name in packaged}, **{file.stem: file.name for file in here.glob("*.yaml")}}
    near = [names[close] for close in difflib.get_close_matches(Path(name).name, names, n=3, cutoff=0.6)]
    near = near or [
        f"`slmgrpo recipes` lists the packaged ones: {', '.join(n for n in packaged if '/' not in n and n[0] != '_')}"
    ]
    hint = f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near[0] in names.values() else near[0]
    raise RecipeError(f"{text}: no such recipe; {hint}")


def packaged_recipes() -> dict[str, Path]:
    """Name -> file of the recipes that come with the package, parents (`_base`) included."""
    files = sorted(PACKAGED.rglob("*.yaml"))
    return {file.relative_to(PACKAGED).with_suffix("").as_posix(): file for file in files}


def shown(path: Path) -> str:
    """A path as messages show it: packaged recipes as `recipes/NAME.yaml`, others as short as they can be."""
    try:
        return f"recipes/{_real(path).relative_to(_real(PACKAGED)).as_posix()}"
    except ValueError:
        pass
    try:
        return _real(path).relative_to(Path.cwd()).as_posix()
    except ValueError:
        return str(path)


def _real(path: Path) -> Path:
    """The path without links; links in a circle stay as they are, where `Path.resolve` raises."""
    return Path(os.path.realpath(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists() or path.is_symlink()
    except OSError:
        return False


# Parents


def merged_tree(path: Path) -> tuple[Spot, list[Problem]]:
    """The file's tree merged over its parent's, over that one's parent; and what is wrong inside the files."""
    chain: list[tuple[Path, Spot]] = []
    problems: list[Problem] = []
    at: Path | None = path
    while at is not None:
        tree, wrong = parse(read_text(at, shown(at)), shown(at))
        problems += wrong
        if not isinstance(tree.value, dict):
            text = "a recipe is a mapping of sections, as in `model: tiny`"
            raise Unreadable(*problems, Problem(tree.where, "", text))
        tree = _expand(tree)
        chain.append((at, tree))
        at = _parent(tree, at, [file for file, _ in chain])
    merged = chain[-1][1]
    for file, tree in reversed(chain[:-1]):
        merged = _merge(_rebased(merged, chain, file), tree)
    return merged, problems


def _parent(tree: Spot, path: Path, chain: list[Path]) -> Path | None:
    spot = tree.value.get("extends")
    if spot is None or spot.value is None:
        return None
    if not isinstance(spot.value, str) or not spot.value:
        raise Unreadable(Problem(spot.where, "extends", "names one parent file, as in `extends: _math.yaml`"))
    try:
        parent = find(spot.value, beside=path.parent)
    except RecipeError as error:
        raise Unreadable(Problem(spot.where, "extends", str(error))) from None
    if _real(parent) in [_real(file) for file in chain]:
        names = " -> ".join(shown(file) for file in [*chain, parent])
        raise Unreadable(Problem(spot.where, "extends", f"comes back to itself: {names}"))
    if len(chain) >= MAX_LEVELS:
        text = (
            f"more than {MAX_LEVELS} levels; extend {shown(chain[-1])} directly and copy what {shown(chain[-2])} adds"
        )
        raise Unreadable(Problem(spot.where, "extends", text))
    return parent


def _merge(parent: Spot, child: Spot) -> Spot:
    if not isinstance(parent.value, dict) or not isinstance(child.value, dict):
        return child
    merged = dict(parent.value)
    for key, spot in child.value.items():
        merged[key] = _merge(merged[key], spot) if key in merged else spot
    return replace(child, value=merged)


def _expand(tree: Spot) -> Spot:
    """`model: some/id` is short for `model: {id: some/id}`."""
    model = tree.value.get("model") if isinstance(tree.value, dict) else None
    if model is None or not isinstance(model.value, str):
        return tree
    return replace(tree, value={**tree.value, "model": replace(model, value={"id": model}, plain=False)})


def _rebased(tree: Spot, chain: list[tuple[Path, Spot]], child: Path) -> Spot:
    """Relative paths in a parent start from the parent's folder: rewrite them to start from the child's."""
    parent = chain[[file for file, _ in chain].index(child) + 1][0]
    if parent.parent.resolve() == child.parent.resolve():
        return tree
    way = os.path.relpath(parent.parent.resolve(), child.parent.resolve())

    def visit(spot: Spot) -> Spot:
        if isinstance(spot.value, dict):
            return replace(spot, value={key: visit(value) for key, value in spot.value.items()})
        if isinstance(spot.value, list):
            return replace(spot, value=[visit(value) for value in spot.value])
        text = spot.value
        if not isinstance(text, str):
            return spot
        if text.startswith("file:") and not text.startswith(("file:/", "file:~")):
            return replace(spot, value="file:" + os.path.normpath(f"{way}/{text[5:]}"))
        if text.startswith(("./", "../")) and "\n" not in text:
            moved = os.path.normpath(f"{way}/{text}")
            return replace(spot, value=moved if moved.startswith("../") else f"./{moved}")
        return spot

    return visit(tree)


def _placed(recipe: Recipe, origins: dict[str, str], folder: Path) -> Recipe:
    """`./` and `../` of a model or adapter start at the recipe's folder, of a `--set` at the working directory."""

    def place(key: str, text: str) -> str:
        if origins.get(key) == "--set" or not text.startswith(("./", "../")):
            return text
        return str((folder / text).resolve())

    model = recipe.model.model_copy(update={"id": place("model.id", recipe.model.id)})
    adapter = recipe.adapter and place("adapter", recipe.adapter)
    return recipe.model_copy(update={"model": model, "adapter": adapter})


# Overrides


def _override(tree: Spot, override: str) -> Spot:
    """The tree with one `a.b=c` applied; the value is YAML of one line."""
    name, equals, text = override.partition("=")
    where = Where(f"--set {override}")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise Unreadable(Problem(where, "", "write it as KEY=VALUE, as in `--set sampling.group_size=16`"))
    if not text.strip():
        raise Unreadable(Problem(where, "", f"no value; write `{name}=null` for none or `{name}=''` for empty text"))
    if keys[0] == "extends":
        raise Unreadable(Problem(where, "", "the parent is set in the file only"))
    spot, problems = parse(text, where.file, line=None)
    if problems:
        raise Unreadable(*problems)
    if spot.plain and isinstance(spot.value, str) and spot.value != text.strip():
        raise Unreadable(Problem(where, "", f"YAML reads this as `{spot.value}`; put quotes around the value"))
    if keys == ["model"] and isinstance(spot.value, str):
        keys = ["model", "id"]
    return _put(tree, keys, spot, where, ())


def _put(tree: Spot, keys: list[str], spot: Spot, where: Where, done: Key) -> Spot:
    if not keys:
        return _merge(tree, spot)
    key, rest = keys[0], keys[1:]
    if isinstance(tree.value, list):
        count = len(tree.value)
        if not key.isdecimal() or int(key) >= count:
            path = ".".join(map(str, done))
            entries = f"it has {count} entr{'y' if count == 1 else 'ies'}, as in `{path}.0`" if count else "it is empty"
            raise Unreadable(Problem(where, "", f"`{path}` is a list; {entries}"))
        items = list(tree.value)
        items[int(key)] = _put(items[int(key)], rest, spot, where, (*done, int(key)))
        return replace(tree, value=items)
    old = tree.value if isinstance(tree.value, dict) else {}
    if key.isdecimal() and key not in old:
        raise Unreadable(Problem(where, "", f"`{'.'.join(map(str, done))}` is a list; it is empty"))
    below = old.get(key, Spot({}, where)) if rest else old.get(key, Spot(None, where))
    if rest and not isinstance(below.value, dict | list):
        below = Spot({}, where)
    return Spot({**old, key: _put(below, rest, spot, where, (*done, key))}, tree.where)


# Results


def _origins(value: Any, tree: Spot, key: Key = ()) -> Iterator[tuple[str, str]]:
    """Where each resolved leaf comes from; empty lists and mappings are leaves."""
    parts: list[tuple[str | int, Any]] = []
    if isinstance(value, dict | list):
        parts = list(value.items() if isinstance(value, dict) else enumerate(value))
    for part, below in parts:
        yield from _origins(below, tree, (*key, part))
    if not parts and key:
        spot, own = lookup(tree, key)
        origin = "--set" if spot.where.line is None else str(spot.where)
        yield ".".join(map(str, key)), origin if own else "default"


def _error(path: Path, problems: Sequence[Problem]) -> RecipeError:
    """One message for all problems, in the order of the lines."""
    file = shown(path)

    def line(problem: Problem) -> str:
        where = problem.where
        if where is None or (where.file == file and where.line is None):
            place = ""
        elif where.file == file:
            place = f"line {where.line}: "
        else:
            place = f"{where}: "
        dotted = problem.key
        if dotted and where is not None and where.file.partition("=")[0] == f"--set {dotted}":
            dotted = ""
        return f"  {place}{dotted}{': ' if dotted else ''}{problem.text}"

    def order(problem: Problem) -> tuple[bool, str, int]:
        where = problem.where or Where(file)
        return where.file != file, where.file, where.line or 0

    lines = list(dict.fromkeys(line(problem) for problem in sorted(problems, key=order)))
    return RecipeError(f"{file}: {len(lines)} problem{'' if len(lines) == 1 else 's'}\n" + "\n".join(lines))
