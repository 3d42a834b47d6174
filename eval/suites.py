"""Benchmark suites as YAML: data, prompt, rules, sampling, licence; packaged ones, your own, a recipe's rows."""

from __future__ import annotations

import difflib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from slmgrpo.errors import RecipeError
from slmgrpo.recipe import Prompt, Recipe, RewardUse, Section, Source
from slmgrpo.recipe_validate import Key, lookup, plain
from slmgrpo.recipe_yaml import Problem, Spot, Unreadable, parse, read_text
from slmgrpo.rewards.base import Reward, load_rewards

PACKAGED = Path(__file__).parent / "suites"
HELDOUT = "heldout"
"""What training calls the scores of a recipe's own held-out rows, among those of suites."""
LONGER = 4
"""The second token budget of a recipe's own rows is this many times the trained one."""


class SuiteFile(Section):
    path: str
    """Within the folder that `--data` names; it holds the wanted rows only."""
    columns: dict[str, str] = Field(default={})
    """What rules and prompts call it -> what the file calls it."""


class SuiteSampling(Section):
    samples: int = Field(default=1, ge=1)
    """Completions a problem: one is greedy, more are drawn."""
    temperature: float = Field(default=0.6, gt=0)
    """Of the drawn ones."""
    top_p: float = Field(default=0.95, gt=0, le=1)
    """1: off."""
    top_k: int = Field(default=0, ge=0)
    """0: off."""
    budgets: list[int] = Field(default=[512, 2048], min_length=1)
    """Tokens a completion may have. The longest is written; shorter ones are its beginnings, scored as cut off."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """0: off."""
    stop: list[str] = Field(default=[])
    """A completion also ends behind any of these texts."""


class Suite(Section):
    name: str = ""
    """Defaults to the file's name."""
    description: str = ""
    """One sentence."""
    group: str = ""
    """`--suite GROUP` takes the verified suites of a group, or all where none is."""
    data: Source
    """Where the rows come from."""
    configs: list[str] = Field(default=[])
    """Configurations of the hub data set whose rows make one suite."""
    file: SuiteFile | None = None
    """The same rows as a plain file, for `--data DIR`."""
    constants: dict[str, Any] = Field(default={})
    """Columns with the same value in every row that lacks them."""
    keep: dict[str, list[str | int]] = Field(default={})
    """Only rows whose column has one of these values."""
    empty: list[str] = Field(default=[])
    """Only rows where these columns hold nothing."""
    answer_in_list: str | None = None
    """A column with a list whose first entry is the answer."""
    stdio_tests_in: list[str] = Field(default=[])
    """Columns that become tests of standard input and output: {input: [...], output: [...]}, its JSON, or a list."""
    choices_in: list[str] = Field(default=[])
    """Columns with one option each, the right one first; their order then depends on the question alone."""
    seed: int = 0
    """Of the order of options where `data.shuffle_options` is item."""
    most_tests: int = Field(default=8, ge=1)
    """Of those tests, the first ones."""
    prompt: Prompt = Prompt()
    """How a row becomes a prompt."""
    rewards: list[RewardUse] = Field(min_length=1)
    """Rules; those on correctness decide what counts as right."""
    also: list[RewardUse] = Field(default=[])
    """Rules that are reported beside and decide nothing."""
    sampling: SuiteSampling = SuiteSampling()
    """How completions are written."""
    licence: str = ""
    """Of the rows."""
    republish: bool = True
    """False: its authors ask that questions do not appear in plain text; samples then hold none."""
    citation: str = ""
    """Whom to cite."""
    verified: bool = False
    """A test grades right and wrong answers to real rows of it."""


@dataclass(frozen=True)
class Loaded:
    """A suite and the folder that its relative paths start from. of_recipe: it is a recipe's own rows."""

    suite: Suite
    base: Path
    of_recipe: bool = False

    @property
    def name(self) -> str:
        return self.suite.name

    def rules(self) -> tuple[tuple[Reward, ...], tuple[Reward, ...]]:
        """(rules, rules reported beside)."""
        known = {"max_tokens": max(self.suite.sampling.budgets)}
        rules = load_rewards(self.suite.rewards, base=self.base, known=known)
        names = {rule.name for rule in rules}
        also = []
        for use in self.suite.also:
            rule = Reward.from_use(use, base=self.base, known=known)
            label = (
                f"{rule.use} ({' '.join(f'{k}={v}' for k, v in use.settings.items())})" if use.settings else rule.use
            )
            if label in names:
                raise RecipeError(f"{self.name}: also: {label} is among the rules already; take it out")
            names.add(label)
            also.append(Reward(rule.use, 0.0, rule.settings, None, False, label, self.base))
        return rules, tuple(also)


# Finding and reading


def packaged_suites() -> dict[str, Path]:
    return {file.stem: file for file in sorted(PACKAGED.glob("*.yaml"))}


def find(name: str) -> list[Loaded]:
    """The suites that a word means: a file, a packaged suite, or a group of packaged ones."""
    path = Path(name)
    if name.endswith((".yaml", ".yml")) and path.is_file():
        return [load(path)]
    packaged = packaged_suites()
    if name in packaged:
        return [load(packaged[name])]
    every = [load(file) for file in packaged.values()]
    group = [suite for suite in every if suite.suite.group == name]
    if group:
        return [suite for suite in group if suite.suite.verified] or group
    groups = sorted({suite.suite.group for suite in every})
    near = difflib.get_close_matches(Path(name).stem, [*packaged, *groups], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else "`slmgrpo eval suites` lists them"
    raise RecipeError(f"{name}: no such {'file' if name.endswith('.yaml') else 'suite'}; {hint}")


def load(path: Path) -> Loaded:
    """One suite file, or an error that names all its problems with their lines."""
    shown = f"suites/{path.name}" if path.parent.resolve() == PACKAGED.resolve() else str(path)
    try:
        tree, problems = parse(read_text(path, shown), shown)
        if not isinstance(tree.value, dict):
            raise Unreadable(Problem(tree.where, "", "a suite is a mapping, as in `data: {source: ...}`"))
    except Unreadable as error:
        raise _error(shown, error.problems) from None
    data = plain(tree)
    try:
        suite = Suite.model_validate(data, strict=True, by_alias=True, by_name=False)
    except ValidationError as error:
        raise _error(shown, [*problems, *_problems(error, tree)]) from None
    if problems:
        raise _error(shown, problems)
    name = suite.name or path.stem
    if name == HELDOUT or not re.fullmatch(r"\w[\w.-]*", name):
        raise RecipeError(
            f"{shown}: name: `{name}` cannot be the folder of its evaluations; use letters, digits, _, . and -, and "
            f"not {HELDOUT}, which is training's own"
        )
    return Loaded(suite.model_copy(update={"name": name}), path.parent)


def copy(name: str, to: Path) -> Path:
    """A packaged suite as a file to edit."""
    packaged = packaged_suites()
    if name not in packaged:
        find(name)  # raises with a suggestion, or it is a group or a file
        raise RecipeError(f"{name}: copy takes one packaged suite; `slmgrpo eval suites` lists them")
    target = to / f"{name}.yaml" if to.is_dir() else to
    if target.exists():
        raise RecipeError(f"{target}: exists; choose another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(packaged[name], target)
    return target


def of_recipe(recipe: Recipe, base: Path, part: str = HELDOUT) -> list[Loaded]:
    """A recipe's held-out (or training) sources as suites, with the recipe's prompt, rules and sampling."""
    found: list[Loaded] = []
    sampling = SuiteSampling(
        temperature=recipe.sampling.temperature,
        top_p=recipe.sampling.top_p,
        top_k=recipe.sampling.top_k,
        min_p=recipe.sampling.min_p,
        budgets=[recipe.sampling.max_tokens, LONGER * recipe.sampling.max_tokens],
        stop=recipe.sampling.stop,
    )
    for source in recipe.data.heldout if part == HELDOUT else recipe.data.train:
        stem = re.split(r"[:/]", source.source)[-1].rsplit(".", 1)[0]
        name = re.sub(r"[^\w-]+", "_", f"{part}_{stem}")
        count = sum(suite.name == name or suite.name.startswith(f"{name}-") for suite in found)
        rewards = recipe.rewards if source.rewards is None else source.rewards
        if not rewards:
            raise RecipeError(f"{recipe.name}: {source.source} has no rule that could grade it")
        suite = Suite(
            name=f"{name}-{count + 1}" if count else name,
            data=source.model_copy(update={"rewards": None}),
            seed=recipe.seed,
            prompt=recipe.prompt,
            rewards=rewards,
            sampling=sampling,
        )
        found.append(Loaded(suite, base, of_recipe=True))
    return found


# Errors in the style of recipes


def _problems(error: ValidationError, tree: Spot) -> Iterator[Problem]:
    seen: set[Key] = set()
    for detail in error.errors(include_url=False):
        key = tuple(part for part in detail["loc"] if not str(part).startswith(("list[", "literal[")))
        if key in seen:
            continue
        seen.add(key)
        yield Problem(lookup(tree, key)[0].where, ".".join(map(str, key)), _sentence(detail, key))


def _sentence(detail: Mapping[str, Any], key: Key) -> str:
    if detail["type"] == "missing":
        return "is required"
    if detail["type"] == "extra_forbidden":
        names = _names(Suite, key[:-1])
        near = difflib.get_close_matches(str(key[-1]), names, n=1, cutoff=0.6)
        return f"no such key; did you mean `{near[0]}`?" if near else f"no such key; there are {', '.join(names)}"
    value = detail["input"]
    shown = f", not `{value}`" if isinstance(value, str | int | float) else ""
    return f"{detail['msg'].replace('Input should be', 'must be').replace('List should', 'must')}{shown}"


def _names(section: type[BaseModel], key: Key) -> list[str]:
    """The keys that a section has, under the names that a file uses."""
    for part in key:
        if isinstance(part, int):
            continue
        field = section.model_fields.get(str(part))
        inner = [arg for arg in _arguments(field.annotation) if _is_section(arg)] if field else []
        if not inner:
            return []
        section = inner[0]
    return [str(field.serialization_alias or name) for name, field in section.model_fields.items()]


def _arguments(annotation: Any) -> list[Any]:
    inner = getattr(annotation, "__args__", ())
    return [annotation, *(part for arg in inner for part in _arguments(arg))]


def _is_section(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, BaseModel)


def _error(shown: str, problems: Sequence[Problem]) -> RecipeError:
    lines = []
    for problem in sorted(problems, key=lambda p: (p.where.line or 0) if p.where else 0):
        line = f"line {problem.where.line}: " if problem.where and problem.where.line else ""
        lines.append(f"  {line}{problem.key}{': ' if problem.key else ''}{problem.text}")
    lines = list(dict.fromkeys(lines))
    return RecipeError(f"{shown}: {len(lines)} problem{'s' * (len(lines) > 1)}\n" + "\n".join(lines))
