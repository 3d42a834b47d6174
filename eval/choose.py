"""What a command line of `slmgrpo eval` means: which targets, compared with which one, on which suites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slmgrpo.errors import RecipeError
from slmgrpo.eval import suites, targets
from slmgrpo.eval.suites import Loaded
from slmgrpo.eval.targets import Target
from slmgrpo.recipe import Grading, Recipe


def targets_of(
    texts: Sequence[str],
    against: str | None,
    *,
    base: str | None = None,
    alone: bool = False,
    out: Path | None = None,
    scales: str | None = None,
    headroom: bool = False,
) -> tuple[list[Target], str | None]:
    """(targets, the one to compare with first; its label, None for no comparison).

    No text: the newest run. One target with an adapter is compared with its base, unless `alone` or `against` says
    otherwise. scales: that target at each of them, compared with its scale 0 where that is among them. headroom: in
    folders of their own, since training rows are no evaluation.
    """
    chosen = [targets.parse(text, base=base) for text in texts or [str(targets.newest_run())]]
    opponent: Target | None = None
    if scales is not None:
        if len(chosen) > 1 or chosen[0].adapter is None or chosen[0].scale != 1:
            raise RecipeError("--scales: takes one target with an adapter, and without @ behind it")
        values = _numbers("--scales", scales)
        if not all(0 <= value <= 1 for value in values):
            raise RecipeError("--scales: each lies between 0 (the base) and 1 (the adapter)")
        chosen = [chosen[0].scaled(value) for value in values]
        opponent = next((target for target in chosen if target.scale == 0), None)
    if against is not None:
        opponent = targets.parse(against, base=base)
    elif len(chosen) == 1 and chosen[0].adapter is not None and not alone:
        opponent = chosen[0].bare()
    everything = ([opponent] if opponent and opponent not in chosen else []) + chosen
    apart = targets.told_apart(everything)
    label = None if opponent is None else apart[everything.index(opponent)].label
    if out is not None:
        apart = [replace(target, home=out / target.label.replace(":", "-")) for target in apart]
    elif headroom:
        apart = [replace(target, home=target.home.parent / "headroom" / target.home.name) for target in apart]
    return apart, label


def suites_of(
    names: Sequence[str], recipe: str | None, chosen: Sequence[Target], *, opponent: str | None = None, headroom: bool
) -> tuple[list[Loaded], Grading]:
    """The named suites, or the held-out (headroom: training) rows of a recipe, else of the first run; how to grade.

    opponent: label of the target to compare with; its run counts last.
    """
    own: tuple[Recipe, Path] | None = None
    if recipe is not None:
        from slmgrpo.recipe_load import load

        read = load(recipe)
        own = read.recipe, read.base
    elif run := next((t.run for t in sorted(chosen, key=lambda t: t.label == opponent) if t.run), None):
        own = targets.recipe_of(run)
    grading = own[0].grading if own else Grading()
    if headroom:
        if own is None:
            raise RecipeError("--headroom: looks at training rows; give a run, or --recipe")
        return suites.of_recipe(*own, part="train"), grading
    if names:
        found = [loaded for name in names for loaded in suites.find(name)]
        double = sorted({loaded.name for loaded in found if sum(other.name == loaded.name for other in found) > 1})
        if double:
            raise RecipeError(f"--suite: {double[0]} is named twice; name it once")
        return found, grading
    if own is None:
        raise RecipeError(
            "eval: on what? Give --suite (`slmgrpo eval suites` lists them), or --recipe for a recipe's held-out rows"
        )
    if not own[0].data.heldout:
        raise RecipeError(f"{own[0].name}: holds no rows out; give --suite (`slmgrpo eval suites` lists them)")
    return suites.of_recipe(*own), grading


def budgets_of(text: str | None) -> tuple[int, ...] | None:
    """`512,2048` as numbers."""
    if text is None:
        return None
    values = _numbers("--budgets", text)
    if any(value != int(value) or value < 1 for value in values):
        raise RecipeError(f"--budgets {text}: whole numbers of at least 1, as in 512,2048")
    return tuple(int(value) for value in values)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise RecipeError(f"{option} {text}: numbers with commas between them") from None
