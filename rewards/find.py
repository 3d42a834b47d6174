"""Finds a rule by the name a recipe gives it and reads its parameters: what is data, what is a setting."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    module = _load_file(use, Path(place), base) if place.endswith(".py") else _load_module(use, place)
    rule = getattr(module, name, None)
    if not callable(rule):
        raise RecipeError(
            f"rewards: `{use}`: {place} has no function `{name}`{closest(name, _public_functions(module))}"
        )
    return rule


def _load_module(use: str, place: str) -> Any:
    try:
        return importlib.import_module(place)
    except ImportError as error:
        raise RecipeError(
            f"rewards: `{use}`: cannot import {place} ({error}); install it or correct the path"
        ) from error


def _load_file(use: str, path: Path, base: Path | None) -> Any:
    file = (path if path.is_absolute() else (base or Path.cwd()) / path).resolve()
    if not file.is_file():
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
    except Exception as error:  # whatever the user's file does at import is the user's to mend
        del sys.modules[name]
        raise RecipeError(f"rewards: `{use}`: {file} fails at import: {type(error).__name__}: {error}") from error
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
