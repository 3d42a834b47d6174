"""`slmgrpo check`: recipe, plan, data, prompts and rewards looked at together before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from slmgrpo.data import Row, Rows
from slmgrpo.errors import RecipeError, SlmgrpoError
from slmgrpo.gold_check import GoldReport, check_golds
from slmgrpo.overlap import Overlap, overlap, repeated
from slmgrpo.plan import Plan, plan
from slmgrpo.prompts import Rendered, render_all, set_chat_template
from slmgrpo.questions import check_context, ordered
from slmgrpo.recipe import Recipe, Source, is_path
from slmgrpo.recipe_load import Loaded
from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.pool import Pool
from slmgrpo.rewards.shuffle import one_letter_baseline
from slmgrpo.rules import rows_of, rules_of
from slmgrpo.sources import hub_silence, out_of_reach

T = TypeVar("T")

TOLERATED = 0.05
"""Share of rows that may be at fault in one respect before it is a problem: real data sets have bad rows."""


@dataclass(frozen=True)
class Lengths:
    """Prompt lengths in tokens. histogram: (up to so many tokens, prompts); dropped: longer than `budget`."""

    budget: int
    longest: int
    mean: float
    histogram: tuple[tuple[int, int], ...]
    dropped: int


@dataclass(frozen=True)
class Report:
    """What was found. `problems` must be mended, `warnings` be known; `unchecked` could not be looked at."""

    recipe: str
    plan: Plan
    rules: tuple[str, ...]
    absent: tuple[str, ...]
    """Sources on a hub that cannot be reached now; all numbers are without them."""
    train_rows: int
    heldout_rows: int
    tasks: tuple[tuple[str, int], ...]
    """Training rows of each task."""
    golds: tuple[GoldReport, ...]
    """One for each source, the held-out ones last."""
    prompts: tuple[str, ...]
    """Three training prompts as the model sees them."""
    prefill: str
    """What the template and the recipe have written of the model's turn."""
    lengths: Lengths | None
    heldout_lengths: Lengths | None
    same_as_training: int
    """Held-out rows whose question is a training question."""
    similar_to_training: int
    """Held-out rows that share 13 words with a training question."""
    duplicates: int
    """Training rows whose question stood in an earlier row."""
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    unchecked: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems and not self.absent


def check(loaded: Loaded, tokenizer: Any = None, *, graded_rows: int = 100) -> Report:
    """Look at everything that can be looked at without the model's weights.

    tokenizer: the model's; None loads it. graded_rows: rows of each source whose gold answer is graded.
    Raises RecipeError with all that would stop a run before its first step.
    """
    base = loaded.base
    found = _read(loaded.recipe, base)
    recipe, rules, train, heldout, planned = found.recipe, found.rules, found.train, found.heldout, found.plan
    sources = [*recipe.data.train, *recipe.data.heldout]
    parts = ["train"] * len(recipe.data.train) + ["held-out"] * len(recipe.data.heldout)
    findings = _Findings([], [*train.notes, *heldout.notes], list(dict.fromkeys(found.absent.values())))
    grouped = list(_by_source(train, heldout, recipe))
    shown, rendered = grouped, []
    try:
        tokenizer = tokenizer or _load_tokenizer(recipe)
    except SlmgrpoError as error:
        own = is_path(recipe.model.id)  # a folder is there or not, a hub may be reached elsewhere
        (findings.problems if own else findings.unchecked).append(f"prompts: {error}")
    try:
        shown = [
            [ordered(row, source.shuffle_options, recipe.seed) for row in rows]
            for source, rows in zip(sources, grouped, strict=True)
        ]
        if tokenizer:
            set_chat_template(tokenizer, recipe.model, base)
            rendered = render_all([row for rows in shown for row in rows], recipe.prompt, tokenizer)
            _check_context(train, heldout, rendered, recipe)
    except SlmgrpoError as error:
        findings.problems.append(str(error))
    _judge_prompts(train, heldout, rendered, recipe, findings)
    prefill = rendered[0].prefill if rendered else recipe.prompt.prefill
    workers = recipe.grading.workers or planned.reward_workers
    with Pool(workers, timeout_s=recipe.grading.timeout_s, sandbox=recipe.grading.sandbox) as pool:
        golds = tuple(
            check_golds(source.source, rows, own, pool, prefill, tokenizer, part=part, most=graded_rows)
            for source, part, rows, own in zip(sources, parts, grouped, rules, strict=True)
        )
    for source, rows in zip(sources, grouped, strict=True):
        said = source.rows and min(source.rows, source.limit or source.rows)
        if said and said != len(rows):
            findings.problems.append(f"{source.source}: the recipe says rows: {source.rows}, it has {len(rows)}")
    for gold in golds:
        serious, slight = gold.findings(TOLERATED)
        findings.problems.extend(serious)
        findings.warnings.extend(slight)
        findings.unchecked.extend(gold.unchecked)
    for source, rows in zip(sources, shown, strict=True):
        if rows and all(row.get("choices") for row in rows):
            always = one_letter_baseline(rows)
            findings.warnings.append(
                f"{source.source}: always naming {always.letter} is right in {always.share:.0%} of {always.rows} rows"
            )
    seen = overlap(train, heldout)
    again, contrary = repeated(train)
    _judge_repetitions(seen, again, contrary, train, heldout, findings)
    return Report(
        recipe=recipe.name,
        plan=planned,
        rules=found.rule_names,
        absent=tuple(found.absent),
        train_rows=len(train),
        heldout_rows=len(heldout),
        tasks=tuple(Counter(row["task"] for row in train).items()),
        golds=golds,
        prompts=tuple(rendered[i].text for i in sorted({0, len(train) // 2, len(train) - 1}) if rendered),
        prefill=prefill,
        lengths=_lengths(rendered[: len(train)], recipe.prompt.max_tokens),
        heldout_lengths=_lengths(rendered[len(train) :], recipe.prompt.max_tokens),
        same_as_training=len(seen.same),
        similar_to_training=len(seen.similar),
        duplicates=len(again),
        problems=tuple(findings.problems),
        warnings=tuple(findings.warnings),
        unchecked=tuple(findings.unchecked),
    )


@dataclass(frozen=True)
class _Findings:
    problems: list[str]
    warnings: list[str]
    unchecked: list[str]

    def weigh(self, count: int, of: int, sentence: str) -> None:
        """A problem where it is more than the tolerated share, else a warning."""
        (self.problems if count > TOLERATED * of else self.warnings).append(f"{count} of {of} {sentence}")


@dataclass(frozen=True)
class _Found:
    """What could be read. recipe, rules: without the absent sources; absent: source -> what to do about it."""

    recipe: Recipe
    rules: list[tuple[Reward, ...]]
    rule_names: tuple[str, ...]
    train: Rows
    heldout: Rows
    plan: Plan
    absent: dict[str, str]


def _read(recipe: Recipe, base: Path) -> _Found:
    """Rules of every source, both sets of rows and the plan; whatever of it is at fault is reported together."""
    faults: list[str] = []

    def attempt(action: Callable[[], T]) -> T | None:
        try:
            return action()
        except SlmgrpoError as error:
            faults.extend(str(error).splitlines())
            return None

    absent: dict[str, str] = {}
    kept: list[list[Source]] = [[], []]
    rules: list[list[tuple[Reward, ...]]] = [[], []]
    names: dict[str, None] = {}
    for part, sources in enumerate((recipe.data.train, recipe.data.heldout)):
        for source in sources:
            own = attempt(partial(rules_of, recipe, source, base)) or ()
            names |= dict.fromkeys(rule.name for rule in own)
            if advice := out_of_reach(source, base):
                absent[source.source] = advice
            else:
                kept[part].append(source)
                rules[part].append(own)
    train, heldout = (attempt(partial(rows_of, some, own, recipe, base)) for some, own in zip(kept, rules, strict=True))
    number = len(train) if train is not None and len(kept[0]) == len(recipe.data.train) else None
    planned = attempt(partial(plan, recipe, base=base, rows=number)) if train is not None else None
    if faults or train is None or heldout is None or planned is None:
        raise RecipeError("\n".join(dict.fromkeys([*faults, *absent.values()])))
    data = recipe.data.model_copy(update={"train": kept[0], "heldout": kept[1]})
    present = recipe.model_copy(update={"data": data})
    return _Found(present, [*rules[0], *rules[1]], tuple(names), train, heldout, planned, absent)


def _load_tokenizer(recipe: Recipe) -> Any:
    from slmgrpo.model import load_tokenizer, locate

    name = locate(recipe.model.id)
    if not Path(name).is_dir() and (silence := hub_silence()):
        from huggingface_hub import try_to_load_from_cache

        files = ("tokenizer_config.json", "config.json")
        if not any(isinstance(try_to_load_from_cache(name, f, revision=recipe.model.revision), str) for f in files):
            raise RecipeError(
                f"model.id: {name}: the hub cannot be reached ({silence}) and the tokenizer is not in the cache; where "
                f"it can be reached run `hf download {name} --local-dir models/{name.rsplit('/', 1)[-1]}`, copy the "
                f"folder here and write `model: ./models/{name.rsplit('/', 1)[-1]}`"
            )
    return load_tokenizer(recipe)


def _check_context(train: Rows, heldout: Rows, rendered: Sequence[Rendered], recipe: Recipe) -> None:
    from slmgrpo.model import positions

    def kept(rows: Rows, prompts: Sequence[Rendered]) -> dict[str, int]:
        sizes = {row["id"]: len(prompt.ids) for row, prompt in zip(rows, prompts, strict=True)}
        return {row_id: size for row_id, size in sizes.items() if size <= recipe.prompt.max_tokens}

    parts = kept(train, rendered[: len(train)]), kept(heldout, rendered[len(train) :])
    check_context(*parts, recipe, positions(recipe))


def _by_source(train: Rows, heldout: Rows, recipe: Recipe) -> Iterator[list[Row]]:
    for rows, sources in ((train, recipe.data.train), (heldout, recipe.data.heldout)):
        for index in range(len(sources)):
            yield [row for row in rows if row["source_index"] == index]


def _lengths(rendered: Sequence[Rendered], budget: int) -> Lengths | None:
    if not rendered:
        return None
    sizes = [len(prompt.ids) for prompt in rendered]
    return Lengths(
        budget=budget,
        longest=max(sizes),
        mean=sum(sizes) / len(sizes),
        histogram=tuple(sorted(Counter(1 << max(4, (size - 1).bit_length()) for size in sizes).items())),
        dropped=sum(size > budget for size in sizes),
    )


def _judge_prompts(
    train: Rows, heldout: Rows, rendered: Sequence[Rendered], recipe: Recipe, findings: _Findings
) -> None:
    budget = recipe.prompt.max_tokens
    fits = {id(row): len(p.ids) <= budget for row, p in zip((*train, *heldout), rendered, strict=False)}
    sources = (*recipe.data.train, *recipe.data.heldout)
    for source, rows in zip(sources, _by_source(train, heldout, recipe), strict=True):
        long = [row["id"] for row in rows if not fits.get(id(row), True)]
        if long:
            (findings.problems if len(long) == len(rows) else findings.warnings).append(
                f"{source.source}: {len(long)} of {len(rows)} prompts are longer than prompt.max_tokens={budget} and "
                f"left out, as {long[0]}"
            )
    if any(prompt.system_in_user for prompt in rendered):
        findings.warnings.append("the chat template has no system role: prompt.system starts the first user text")


def _judge_repetitions(
    seen: Overlap, again: list[str], contrary: list[str], train: Rows, heldout: Rows, findings: _Findings
) -> None:
    if seen.same:
        findings.weigh(len(seen.same), len(heldout), f"held-out questions are training questions, as {seen.same[0]}")
    for ids, of, what in (
        (seen.similar, len(heldout), "held-out questions share 13 words with a training question"),
        (again, len(train), "training questions repeat an earlier one"),
        (contrary, len(again), "repeated questions have another answer than before"),
    ):
        if ids:
            findings.warnings.append(f"{len(ids)} of {of} {what}, as {ids[0]}")
