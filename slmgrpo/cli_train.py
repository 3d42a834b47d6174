"""The commands `train`, `plan` and `launch`: parse, call, print; imports nothing heavy."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slmgrpo.errors import RecipeError
from slmgrpo.interrupt import Interrupted

if TYPE_CHECKING:
    from slmgrpo.plan import Plan
    from slmgrpo.ranks import Ranks
    from slmgrpo.recipe import Recipe
    from slmgrpo.run import RunDir

launch_app = typer.Typer(
    help="Start a recipe on a cluster.\n\nExample: `slmgrpo launch slurm code_3b --nodes 2 --gpus 8 --out runs/code`",
    no_args_is_help=True,
)

RecipeArg = Annotated[str, typer.Argument(help="A recipe file, or the name of a packaged one.", metavar="RECIPE")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a value, as in `--set train.steps=20`; may be repeated.", metavar="KEY=VALUE"),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")]


def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe file, or the name of a packaged one.", metavar="RECIPE")
    ] = None,
    overrides: SetOption = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; by default runs/NAME-DATE-TIME.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run from its last checkpoint.")] = None,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Resume although the recipe was changed, by --set or in recipe.json."),
    ] = False,
    gpus: Annotated[
        str,
        typer.Option(help="GPUs of each machine, one process each; auto: all. Without CUDA: so many CPU processes."),
    ] = "auto",
    nodes: Annotated[int, typer.Option(help="Machines that run this same command together.", min=1)] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(help="Where the machines meet, on one of them.", metavar="HOST:PORT")
    ] = None,
) -> None:
    """Train a recipe and write a run directory.

    Example: `slmgrpo train recipes/quickstart.yaml --set train.steps=20`
    """
    from slmgrpo import launch, ranks
    from slmgrpo import plan as plans
    from slmgrpo import run as runs

    if (recipe is None) == (resume is None):
        which = "not both" if recipe else "`slmgrpo recipes` lists the packaged ones"
        raise RecipeError(f"train: give a recipe, or --resume RUN; {which}")
    if resume is not None:
        if out or name:
            raise RecipeError("train: a resumed run keeps its folder and name; take --out and --name away")
        from slmgrpo.resume import recipe_of

        run = runs.open_run(resume)
        spec, base = recipe_of(run, overrides or (), allow_changes=allow_changes)
        if not overrides and not allow_changes and (last := run.finished_at()):
            longer = shlex.join(["slmgrpo", "train", "--resume", str(resume), "--set", f"train.steps={2 * last}"])
            typer.echo(f"{resume}: finished at step {last}; to go further: {longer} --allow-changes")
            return
    else:
        from slmgrpo.recipe_load import load

        assert recipe is not None
        loaded = load(recipe, overrides or ())
        run, base = None, loaded.base
        spec = loaded.recipe.model_copy(update={"name": name}) if name else loaded.recipe
    typed = None
    if recipe is not None:
        kept = [value for value in overrides or () if not value.startswith("train.steps=")]
        typed = ["slmgrpo", "train", recipe, *([] if gpus == "auto" else ["--gpus", gpus]), *_sets(kept)]
    if ranks.of_environment().world > 1:
        planned = plans.plan(spec, gpus=ranks.of_environment().world, nodes=nodes, base=base)
        with ranks.joined() as joined:
            _train(spec, planned, base, out, run, typed, joined)
        return
    here = launch.gpus_here(gpus)
    planned = plans.plan(spec, gpus=here * nodes, nodes=nodes, base=base)
    if planned.gpus == 1:
        _train(spec, planned, base, out, run, typed, ranks.ALONE)
        return
    if run is None and out is None and nodes > 1:
        raise RecipeError(
            f"train: --nodes {nodes} needs --out, a run directory on a file system that all machines share"
        )
    place = run.path if run else out or runs.fresh(spec.name)
    if run is None:
        runs.refuse_used(place)
    arguments = ["train", "--gpus", gpus, "--nodes", str(nodes), *_sets(overrides)]
    if recipe is not None:
        arguments += [recipe, "--out", str(place), *(["--name", name] if name else [])]
    else:
        arguments += ["--resume", str(place), *(["--allow-changes"] if allow_changes else [])]
    launch.launch(arguments, place, gpus=here, nodes=nodes, rendezvous=rendezvous)


def _sets(overrides: list[str] | None) -> list[str]:
    return [part for value in overrides or () for part in ("--set", value)]


def _train(
    spec: Recipe, plan: Plan, base: Path, out: Path | None, run: RunDir | None, typed: list[str] | None, ranks: Ranks
) -> None:
    """Train in this process; the first rank shows it. typed: the command, for a longer run to be proposed."""
    from rich.console import Console

    from slmgrpo import view
    from slmgrpo.callbacks import Silent
    from slmgrpo.train import train as run_training

    if not ranks.first:
        run_training(spec, plan, base=base, out=out, resume=run, observer=Silent(), ranks=ranks)
        return
    console = Console()
    try:
        with view.LiveView(console, plan.steps) as live:
            outcome = run_training(spec, plan, base=base, out=out, resume=run, observer=live, ranks=ranks)
    except Interrupted as stop:
        console.print(f"interrupted: {stop.saved or 'stopped before anything was saved'}", soft_wrap=True)
        raise
    metrics = [json.loads(line) for line in outcome.run.metrics.read_text().splitlines()]
    console.print(view.summary(spec.name, metrics, outcome.before, outcome.after))
    console.print(f"\nrun: {outcome.run.path}", soft_wrap=True)
    longer = [shlex.join([*typed, "--set", f"train.steps={2 * plan.steps}"])] if typed and not spec.train.epochs else []
    path = shlex.quote(str(outcome.run.path))
    following = [f"slmgrpo diagnose {path}", f"slmgrpo eval {path}", *longer]
    console.print("next: " + "\n      ".join(following), soft_wrap=True)


@launch_app.command()
def slurm(
    recipe: RecipeArg,
    out: Annotated[Path, typer.Option(help="Run directory, on a file system that all machines share.")],
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    gpus: Annotated[int, typer.Option(help="GPUs of each.", min=1)] = 8,
    to: Annotated[Path | None, typer.Option(help="The script; by default NAME.slurm.")] = None,
    overrides: SetOption = None,
) -> None:
    """Write a job script for Slurm's sbatch; submitted again it goes on with the run.

    Example: `slmgrpo launch slurm code_3b --nodes 2 --gpus 8 --out runs/code`
    """
    from slmgrpo import launch
    from slmgrpo import plan as plans
    from slmgrpo.recipe_load import load

    loaded = load(recipe, overrides or ())
    plans.plan(loaded, gpus=gpus * nodes, nodes=nodes)
    file = to or Path(f"{loaded.recipe.name}.slurm")
    if not file.parent.is_dir():
        raise RecipeError(f"{file}: there is no folder {file.parent}; make it, or choose another --to")
    if file.exists():
        raise RecipeError(f"{file}: is there already; choose another --to, or remove it")
    file.write_text(launch.slurm_script(recipe, overrides or (), out, name=loaded.recipe.name, gpus=gpus, nodes=nodes))
    typer.echo(f"{file}: add your partition and time, then `sbatch {file}`")


def plan(
    recipe: RecipeArg,
    gpus: Annotated[
        int, typer.Option(help="GPUs of each machine, one process each; without CUDA: CPU processes.", min=1)
    ] = 1,
    nodes: Annotated[int, typer.Option(help="Machines.", min=1)] = 1,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show every derived number of a recipe, without torch, a GPU or a download.

    Example: `slmgrpo plan recipes/code_3b.yaml --gpus 8`
    """
    from dataclasses import asdict

    from slmgrpo import plan as plans
    from slmgrpo import view
    from slmgrpo.recipe_load import load

    loaded = load(recipe, overrides or ())
    planned = plans.plan(loaded, gpus=gpus * nodes, nodes=nodes)
    if as_json:
        typer.echo(json.dumps(asdict(planned), indent=2))
    else:
        view.show(view.pairs_table(plans.describe(planned)))
