"""Finds a rule by the name a recipe gives it and reads its parameters: what is data, what is a setting."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import math
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slmgrpo.errors import RecipeError

Rule = Callable[..., Any]


def closest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else ""


def _public_functions(module: Any) -> list[str]:
    return sorted(name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_")


def rules_of(module: Any) -> list[str]:
    return [name for name in _public_functions(module) if vars(module)[name].__module__ == module.__name__]


RULE_MODULES = ("math", "mcq", "code", "format", "length")


@functools.lru_cache(maxsize=256)
def load(use: str, *, base: Path | None = None) -> Rule:
    """Find a rule: `math.correct` under slmgrpo.rewards, `pkg.mod:name`, or `./file.py:name` relative to `base`."""
    place, colon, name = use.rpartition(":")
    if not colon:
        place, _, name = use.rpartition(".")
        if place not in RULE_MODULES:
            known = [
                f"{m}.{n}" for m in RULE_MODULES for n in rules_of(importlib.import_module(f"slmgrpo.rewards.{m}"))
            ]
            hint = closest(use, known) or "; a rule of your own is `./file.py:name` or `pkg.mod:name`"
            raise RecipeError(f"rewards: there is no rule `{use}`{hint}")
        module = importlib.import_module(f"slmgrpo.rewards.{place}")
        if name not in rules_of(module):
            raise RecipeError(f"rewards: slmgrpo.rewards.{place} has no `{name}`{closest(name, rules_of(module))}")
        return vars(module)[name]
    module = _module(use, place, base)
    own_version(use, base=base)  # of the file as it is now; it may be edited while a run goes on
    rule = getattr(module, name, None)
    if not callable(rule):
        raise RecipeError(
            f"rewards: `{use}`: {place} has no function `{name}`{closest(name, _public_functions(module))}"
        )
    if inspect.isclass(rule) or inspect.iscoroutinefunction(rule):
        what = "a class" if inspect.isclass(rule) else "an `async def`"
        raise RecipeError(f"rewards: `{use}`: `{name}` is {what}; a rule is a plain function of one completion")
    try:
        inspect.signature(rule)
    except (TypeError, ValueError):
        raise RecipeError(f"rewards: `{use}`: the parameters of `{name}` cannot be read; wrap it in a `def`") from None
    return rule


@functools.cache
def own_version(use: str, *, base: Path | None = None) -> str:
    """`mine.py-1f0c02ab33de`: a digest of the file of a rule of your own, not of what it imports; "" if packaged."""
    place, colon, _ = use.rpartition(":")
    file = Path(getattr(_module(use, place, base), "__file__", None) or "") if colon else Path()
    return f"{file.name}-{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}" if file.is_file() else ""


def _module(use: str, place: str, base: Path | None) -> Any:
    return _load_file(use, Path(place), base) if place.endswith(".py") else _load_module(use, place)


def _load_module(use: str, place: str) -> Any:
    if not all(part.isidentifier() for part in place.split(".")):
        raise RecipeError(f"rewards: `{use}`: no module; a rule of your own is `./file.py:name` or `pkg.mod:name`")
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise RecipeError(
            f"rewards: `{use}`: cannot import {place} ({error}); install it or correct the path"
        ) from error
    except (Exception, SystemExit) as error:
        raise _fails_at_import(use, place, error) from error


def _fails_at_import(use: str, place: Any, error: BaseException) -> RecipeError:
    """Whatever the user's file does at import, sys.exit included, is the user's to mend."""
    return RecipeError(f"rewards: `{use}`: {place} fails at import: {type(error).__name__}: {error}")


def _load_file(use: str, path: Path, base: Path | None) -> Any:
    try:
        file = (path if path.is_absolute() else (base or Path.cwd()) / path).resolve()
        there = file.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # no name of a file, or links in a circle
        raise RecipeError(f"rewards: `{use}`: no such file ({error})") from None
    if not there:
        raise RecipeError(f"rewards: `{use}`: no file {file}; paths are relative to the recipe")
    name = f"slmgrpo_user_rule_{file.stem}_{hashlib.sha1(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise RecipeError(f"rewards: `{use}`: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _fails_at_import(use, file, error) from error
    return module


@dataclass(frozen=True, slots=True)
class Signature:
    """A rule's parameters by role. `batched`: a TRL reward function, which takes lists."""

    data: tuple[str, ...]
    optional: frozenset[str]
    settings: tuple[str, ...]
    needed_settings: frozenset[str]
    batched: bool
    open_ended: bool


@functools.lru_cache(maxsize=256)
def signature(rule: Rule) -> Signature:
    data, optional, settings, needed, open_ended = [], set(), [], set(), False
    for parameter in inspect.signature(rule).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            open_ended = True
        elif parameter.kind is parameter.KEYWORD_ONLY:
            settings.append(parameter.name)
            if parameter.default is parameter.empty:
                needed.add(parameter.name)
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            data.append(parameter.name)
            if parameter.default is not parameter.empty:
                optional.add(parameter.name)
    batched = "completions" in data
    return Signature(tuple(data), frozenset(optional), tuple(settings), frozenset(needed), batched, open_ended)


# ---- values of settings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Above:
    """`Annotated[float, Above(0)]`: a setting that must be larger than `low`."""

    low: float


@functools.lru_cache(maxsize=256)
def _annotations(rule: Rule) -> Mapping[str, Any]:
    """A rule's annotations; those of a file that cannot be resolved are not checked."""
    try:
        return typing.get_type_hints(rule, include_extras=True)
    except Exception:  # names that exist for type checkers only, in whatever form the user's file writes them
        return {}


def wrong_value(rule: Rule, key: str, value: Any) -> str:
    """What is wrong with the value of a setting by the annotation of its parameter, and what to use; else nothing."""
    annotation = _annotations(rule).get(key, Any)
    if _fits(value, annotation):
        return ""
    return f"`{key}` is {reprlib.repr(value)}; use {_allowed(annotation)}"


def _fits(value: Any, annotation: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        bounds = [extra for extra in inside[1:] if isinstance(extra, Above)]
        return _fits(value, inside[0]) and all(value > bound.low for bound in bounds)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inside)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in inside)
    if annotation in (None, type(None)):
        return value is None
    if annotation in (int, float):
        return isinstance(value, int | annotation) and not isinstance(value, bool)
    if annotation in (str, bool):
        return isinstance(value, annotation)
    kind = origin or annotation
    if kind in (list, tuple, set, frozenset) or kind in (Sequence, Iterable):
        return isinstance(value, list | tuple) and all(_fits(part, inside[0]) for part in value if len(inside) == 1)
    if kind in (dict, Mapping):
        return isinstance(value, Mapping)
    return True


def _allowed(annotation: Any) -> str:
    origin, inside = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return " ".join([_allowed(inside[0]), *(f"above {e.low:g}" for e in inside[1:] if isinstance(e, Above))])
    if origin is Literal:
        *most, last = (str(choice) for choice in inside)
        return f"{', '.join(most)} or {last}" if most else last
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_allowed(part) for part in inside)
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    kind = origin or annotation
    if kind in words:
        return words[kind]
    return "a mapping" if kind in (dict, Mapping) else "a finite number" if annotation is Any else "a list"
