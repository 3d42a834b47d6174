"""What can be evaluated: a run's checkpoints, adapters at any scale, hub models, folders, the embedded model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slmgrpo import run as runs
from slmgrpo.errors import RecipeError
from slmgrpo.recipe import Model, Recipe
from slmgrpo.run import RunDir

EVALS = Path("evals")
"""Where evaluations lie that belong to no run."""


@dataclass(frozen=True)
class Base:
    """A model that several targets may share.

    merged: adapters folded into it first. folder: where a relative `chat_template` starts.
    """

    model: Model
    merged: tuple[Path, ...] = ()
    folder: Path = Path()


@dataclass(frozen=True)
class Target:
    """One thing to evaluate: a base with or without an adapter, whose update is multiplied by `scale`.

    label: its name in tables. home: folder that its evaluations go to. run: where it is from a run directory.
    """

    text: str
    label: str
    base: Base
    adapter: Path | None
    home: Path
    scale: float = 1.0
    run: RunDir | None = None

    def scaled(self, scale: float) -> Target:
        suffix = "" if scale == 1 else f"@{scale:g}"
        home = self.home.with_name(self.home.name + suffix)
        return replace(self, text=self.text + suffix, label=self.label + suffix, home=home, scale=scale)

    def bare(self) -> Target:
        """What training started from: the same base without the adapter."""
        home = self.home.parent / "base"
        return Target(f"base of {self.text}", "base", self.base, None, home, run=self.run)


def parse(text: str, *, base: str | None = None) -> Target:
    """`RUN`, `RUN:best`, `RUN:40`, an adapter's or a model's folder, a hub id, `tiny`, `pypi:NAME`; each with `@SCALE`.

    base: the model under an adapter, where it is another than the adapter names.
    """
    body, scale = _scale(text)
    run_path, colon, which = body.rpartition(":")
    if Path(body).is_dir():
        target = _folder(body, base)
    elif colon and (Path(run_path) / "recipe.json").is_file():
        target = _run(Path(run_path), which)
    elif body == "tiny" or body.startswith("pypi:"):
        target = _model(body)
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", body) and not body.startswith(("./", "../", "runs/", "evals/")):
        target = _hub(body, base)
    else:
        raise RecipeError(
            f"{text}: no such run, adapter or model; give a run directory (`ls runs`), a folder, a hub id like "
            "org/name, or tiny"
        )
    if scale != 1 and target.adapter is None:
        raise RecipeError(f"{text}: @{scale:g} scales an adapter, and {body} has none")
    return target.scaled(scale) if scale != 1 else target


def newest_run(root: Path = Path("runs")) -> Path:
    """The run directory under `root` that was written to last and has a checkpoint."""
    found = [folder for folder in root.glob("*") if (folder / "recipe.json").is_file() and RunDir(folder).steps()]
    if not found:
        raise RecipeError(
            f"eval: there is no run with a checkpoint under {root}/; name a target, as in `slmgrpo eval tiny`"
        )
    return max(found, key=lambda folder: (folder / "status.json").stat().st_mtime)


def recipe_of(run: RunDir) -> tuple[Recipe, Path]:
    """The recipe of a run and the folder that its relative paths start from."""
    try:
        recipe = Recipe.model_validate(run.read_json("recipe.json"))
    except ValueError as error:
        reason = ": ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise RecipeError(
            f"{run.path}/recipe.json: not a recipe of this version ({reason}); mend it, or evaluate the run's adapter: "
            f"`slmgrpo eval {run.path}/checkpoints/step_N/adapter --base MODEL --suite NAME`"
        ) from None
    return recipe, Path(run.read_json("env.json")["base"])


def told_apart(targets: Sequence[Target]) -> list[Target]:
    """Targets whose labels differ: those that are called the same get the name of their run or folder in front."""
    counts = Counter(target.label for target in targets)
    apart = [
        replace(t, label=f"{t.run.path.name if t.run else t.home.parent.name}:{t.label}") if counts[t.label] > 1 else t
        for t in targets
    ]
    again = Counter(target.label for target in apart)
    double = next((target for target in apart if again[target.label] > 1), None)
    if double:
        raise RecipeError(f"eval: {double.text} is given twice; name each target once")
    return apart


def _scale(text: str) -> tuple[str, float]:
    body, at, number = text.rpartition("@")
    if not at:
        return text, 1.0
    try:
        scale = float(number)
    except ValueError:
        raise RecipeError(f"{text}: behind @ stands the adapter's scale, a number from 0 to 1") from None
    if not 0 <= scale <= 1:
        raise RecipeError(f"{text}: the adapter's scale lies between 0 (the base) and 1 (the adapter)")
    return body, scale


def _folder(body: str, base: str | None) -> Target:
    path = Path(body)
    if (path / "recipe.json").is_file():
        return _run(path, "last")
    if (path / "adapter" / "adapter_config.json").is_file():
        path = path / "adapter"
    if (path / "adapter_config.json").is_file():
        run = next((parent for parent in path.absolute().parents if (parent / "recipe.json").is_file()), None)
        if run is not None and path.parent.parent.name == "checkpoints" and base is None:
            return _run(_near(run), path.parent.name)
        return _adapter(body, path, base)
    if (path / "config.json").is_file():
        return _model(body)
    raise RecipeError(
        f"{body}: neither a run (recipe.json), nor an adapter (adapter_config.json), nor a model (config.json)"
    )


def _near(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _run(path: Path, which: str) -> Target:
    run = runs.open_run(path)
    recipe, folder = recipe_of(run)
    step = _step(run, which)
    checkpoint = run.checkpoints / f"step_{step}"
    if fault := runs.damage(checkpoint):
        raise RecipeError(f"{checkpoint}: damaged ({fault}); use another of {_kept(run)}")
    label = f"step_{step}"
    base = Base(recipe.model, merged_of(run, recipe), folder)
    return Target(f"{path}:{step}", label, base, checkpoint / "adapter", path / "eval" / label, run=run)


def merged_of(run: RunDir, recipe: Recipe) -> tuple[Path, ...]:
    """The adapters that the run's model has folded in; one that changed since the run began is refused."""
    if not recipe.merge_adapter:
        return ()
    if not recipe.adapter:
        return (run.path / "cold_start" / "adapter",)
    from slmgrpo.model import locate_adapter

    adapter = locate_adapter(recipe.adapter)
    before = run.read_json("env.json").get("merged")
    if before and runs.sha256(adapter / "adapter_model.safetensors") != before:
        raise RecipeError(
            f"{run.path}: {adapter} is not the adapter that the run has merged (did {recipe.adapter} train on?); put "
            f"the adapter_model.safetensors with sha256 {before} back there"
        )
    return (adapter,)


def _step(run: RunDir, which: str) -> int:
    steps = run.steps()
    if not steps:
        raise RecipeError(f"{run.path}: no checkpoint yet; train it first")
    if which == "last":
        return steps[-1]
    if which == "best":
        if (best := run.best()) and best["step"] in steps:
            return best["step"]
        scored = {step: score for step in steps if (score := _heldout_accuracy(run, step)) is not None}
        if not scored:
            raise RecipeError(
                f"{run.path}:best: the recipe names no eval.best and no checkpoint has held-out scores; use :last or a "
                f"step of {_kept(run)}"
            )
        return max(scored, key=lambda step: (scored[step], step))
    number = which.removeprefix("step_")
    if not number.isdigit() or int(number) not in steps:
        raise RecipeError(f"{run.path}:{which}: no such checkpoint; there are last, best, {_kept(run)}")
    return int(number)


def _kept(run: RunDir) -> str:
    return ", ".join(map(str, run.steps()))


def _heldout_accuracy(run: RunDir, step: int) -> float | None:
    """Mean over tasks of the accuracy that training measured at this step."""
    path = run.eval_dir(step, "heldout") / "scores.json"
    if not path.is_file():
        return None
    tasks = json.loads(path.read_text())["tasks"]
    return sum(task["accuracy"] for task in tasks.values()) / len(tasks)


def _model(body: str) -> Target:
    name = Path(body).name if Path(body).is_dir() else body.removeprefix("pypi:").rsplit("/", 1)[-1]
    return Target(body, name, Base(Model(id=body, backend="transformers")), None, EVALS / _slug(body) / "model")


def _adapter(body: str, path: Path, base: str | None) -> Target:
    config = json.loads((path / "adapter_config.json").read_text())
    model_id = base or config.get("base_model_name_or_path")
    if not model_id:
        raise RecipeError(f"{body}: the adapter does not name its base model; give it with --base")
    template = path / "chat_template.jinja"
    model = Model(
        id=model_id, chat_template=str(template.absolute()) if template.is_file() else None, backend="transformers"
    )
    return Target(body, _slug(Path(body).name), Base(model), path, EVALS / _slug(body) / "adapter")


def _hub(body: str, base: str | None) -> Target:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(body, allow_patterns=["adapter_*", "chat_template.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return _model(body)  # whoever loads it says what is wrong
    if not (folder / "adapter_config.json").is_file():
        return _model(body)
    return _adapter(body, folder, base)


def _slug(text: str) -> str:
    return re.sub(r"[^\w.-]+", "--", text.strip("./")) or "model"
