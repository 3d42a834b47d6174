"""Which rules judge which rows: a recipe's rewards joined with its sources, every column that they read checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slmgrpo.data import Rows, load_sources
from slmgrpo.errors import PlanError, RecipeError, RunError
from slmgrpo.prompts import columns
from slmgrpo.recipe import Recipe, Source
from slmgrpo.rewards.base import Reward, load_rewards
from slmgrpo.rewards.sandbox import Mode, Rung, probe


def rules_of(recipe: Recipe, source: Source, base: Path) -> tuple[Reward, ...]:
    """The rules for a source's rows: its own, else the recipe's."""
    uses = recipe.rewards if source.rewards is None else source.rewards
    if not uses:
        raise RecipeError(f"rewards: {source.source} has no rule; add one under `rewards:` or under the source")
    return load_rewards(uses, base=base, known={"max_tokens": recipe.sampling.max_tokens})


def rows_of(sources: Sequence[Source], rules: Sequence[Sequence[Reward]], recipe: Recipe, base: Path) -> Rows:
    """The sources' rows with every column that their rules and the prompt read."""
    read = columns(recipe.prompt)
    needs = {id(s): read.union(*(r.columns for r in own)) for s, own in zip(sources, rules, strict=True)}
    return load_sources(sources, base=base, need=lambda source: needs[id(source)])


def sandbox_of(recipe: Recipe, rules: Sequence[Sequence[Reward]]) -> Rung | None:
    """The sandbox that this machine gives a recipe's rules on code; None without such rules."""
    return sandbox_in(recipe.grading.sandbox, rules, "grading.sandbox=")


def sandbox_in(mode: Mode, rules: Sequence[Sequence[Reward]], given_as: str) -> Rung | None:
    """The sandbox for rules on code, found by running a program in it. given_as: where a person sets the mode."""
    if not any(reward.use.startswith("code.") for own in rules for reward in own):
        return None
    try:
        return probe(mode)
    except RunError as error:
        raise PlanError(f"{given_as}{mode}: {error}") from None
