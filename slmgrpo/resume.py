"""What a resumed run goes on with: its own recipe, or a changed one where that is allowed, shown and noted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.eval.targets import merged_of
from slmgrpo.model import locate_adapter
from slmgrpo.plan import Plan
from slmgrpo.recipe import Recipe
from slmgrpo.recipe_load import Loaded, load
from slmgrpo.recipe_show import Difference, diff
from slmgrpo.run import RunDir, sha256

FIXED = (
    "model",
    "adapter",
    "merge_adapter",
    "cold_start",
    "lora",
    "trainer",
    "seed",
    "optimizer.name",
    "train.prompts_per_step",
    "train.updates_per_rollout",
)
"""What a checkpoint's state belongs to: another value is another run."""


def recipe_of(run: RunDir, overrides: Sequence[str] = (), *, allow_changes: bool = False) -> tuple[Recipe, Path]:
    """The recipe to go on with and the folder that its paths start from.

    It is the run's recipe.json with `a.b=c` overrides on top. RecipeError shows every difference from what the run was
    trained with so far, unless changes are allowed and none of them is FIXED.
    """
    now = load(run.path / "recipe.json", overrides, placed=True)
    env = run.read_json("env.json")
    if "base" not in env or "recipe" not in env:
        raise RecipeError(f"{run.path}/env.json: has no `base` or no `recipe`; was it edited?")
    changes = _changes(run, now.recipe)
    fixed = [
        change for change in changes if change.key in FIXED or change.key.startswith(tuple(f"{k}." for k in FIXED))
    ]
    shown = "\n".join(f"  {_text(change)}" for change in changes)
    if fixed:
        raise RecipeError(
            f"{run.path}: {', '.join(change.key for change in fixed)} cannot change within a run\n{shown}\n"
            f"start a new run, from this one's adapter with --set adapter={run.path}"
        )
    if changes and not allow_changes:
        raise RecipeError(
            f"{run.path}: the recipe is not the one that this run was trained with so far\n{shown}\n"
            "add --allow-changes to go on with the new values, or start a new run"
        )
    merged_of(run, now.recipe)
    return now.recipe, Path(env["base"])


def accept(run: RunDir, recipe: Recipe, plan: Plan) -> list[str]:
    """Make a changed recipe the run's own and note the change in env.json; returns what changed, as text."""
    changes = _changes(run, recipe)
    if not changes:
        return []
    env = run.read_json("env.json")
    note = {
        "time": datetime.now().isoformat(timespec="seconds"),
        "step": max(run.steps(), default=0),
        "changed": {change.key: [change.a, change.b] for change in changes},
    }
    run.write_json("env.json", env | {"recipe": _plain(recipe), "changes": [*env.get("changes", []), note]})
    run.write_json("plan.json", asdict(plan))
    run.write_json("recipe.json", _plain(recipe))
    return [f"the recipe is changed from here on: {_text(change)}" for change in changes]


def begin(run: RunDir, recipe: Recipe, plan: Plan, environment: dict[str, Any]) -> None:
    """The files of a new run; recipe.json comes last, so that a folder with it is a whole run directory.

    env.json has the recipe too: recipe.json may be edited, and an edit must show.
    """
    if recipe.merge_adapter and recipe.adapter:  # of which the base is made: eval, export and resume ask for the same
        merged = sha256(locate_adapter(recipe.adapter) / "adapter_model.safetensors")
        environment = environment | {"merged": merged}
    run.write_json("plan.json", asdict(plan))
    run.write_json("env.json", environment | {"recipe": _plain(recipe)})
    run.write_json("recipe.json", _plain(recipe))


def _changes(run: RunDir, recipe: Recipe) -> list[Difference]:
    try:
        before = Recipe.model_validate(run.read_json("env.json")["recipe"])
    except ValueError as error:
        raise RecipeError(
            f"{run.path}/env.json: `recipe` is none ({str(error).splitlines()[0]}); was it edited?"
        ) from None
    now = Recipe.model_validate(_plain(recipe))  # a float's default may be written as an int
    return diff(Loaded(before, {}, run.path), Loaded(now, {}, run.path))


def _plain(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", by_alias=True, exclude={"extends"})


def _text(change: Difference) -> str:
    return f"{change.key}: {change.a or 'absent'} -> {change.b or 'absent'}"
