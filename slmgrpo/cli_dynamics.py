"""The commands `dynamics`: parse, call, print; imports nothing heavy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from slmgrpo.cli_eval import RunByDefault, Watch, wrapped
from slmgrpo.errors import RecipeError
from slmgrpo.interrupt import Interrupts

if TYPE_CHECKING:
    from slmgrpo.eval.targets import Target

dynamics_app = typer.Typer(
    cls=RunByDefault,
    help="What training did to the tensors, beside what noise alone would do. `slmgrpo dynamics RUN` is "
    "`slmgrpo dynamics run RUN`.",
    no_args_is_help=True,
)


@dynamics_app.command()
def run(
    path: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    by: Annotated[Literal["layer", "module", "role"], typer.Option(help="How tensors are put together.")] = "module",
    step: Annotated[int | None, typer.Option(help="A measured step; by default the last one.", min=1)] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown in place of a table.")] = False,
) -> None:
    """Show how far a run's LoRA tensors moved, and how many times as far as noise alone would have moved them.

    Example: `slmgrpo dynamics runs/mine --by layer`
    """
    from slmgrpo import run as runs
    from slmgrpo.dynamics import probe, table
    from slmgrpo.eval.table import markdown, text

    opened = runs.open_run(path)
    measured = [one for one in probe.steps(opened) if one]
    if not measured:
        raise RecipeError(
            f"{path}: nothing is measured yet; `dynamics.every` of its recipe says how often the tensors are"
        )
    if step is not None and step not in measured:
        raise RecipeError(f"{path}: step {step} was not measured; there are {', '.join(map(str, measured))}")
    at = step or measured[-1]
    rows = probe.read(opened, at)
    title = f"{path}: {len(rows)} tensors, step {at}"
    typer.echo((markdown if as_markdown else text)(title, table.update_table(table.grouped(rows, by), by)))
    curve = [table.coherence_of(probe.read(opened, one)) for one in measured]
    shown = ", ".join(f"{one} {value:.2f}" for one, value in zip(measured, curve, strict=True))
    for note in (f"coherence by step: {shown}", *table.NOTES):
        typer.echo(f"- {note}" if as_markdown else wrapped(note))


@dynamics_app.command()
def shift(
    target: Annotated[
        str,
        typer.Argument(help="RUN, RUN:STEP, an adapter, or a model without one (tiny, pypi:NAME).", metavar="TARGET"),
    ],
    recipe: Annotated[
        str | None, typer.Option(help="Prompts from this recipe's held-out rows.", metavar="RECIPE")
    ] = None,
    limit: Annotated[int, typer.Option(help="So many prompts of a recipe.", min=1)] = 16,
    seeds: Annotated[int, typer.Option(help="Draws of the noise.", min=1)] = 3,
    base: Annotated[str | None, typer.Option(help="The model under an adapter.", metavar="MODEL")] = None,
) -> None:
    """Show how far each block's output moved, beside untrained noise of the same norm in the same tensors.

    A model without an adapter shows the noise alone: 1 % of each weight. Example: `slmgrpo dynamics shift runs/mine`
    """
    from slmgrpo.adapter import add_adapter
    from slmgrpo.dynamics import shift as shifting
    from slmgrpo.eval import choose, models, targets
    from slmgrpo.eval.rows import rows_of
    from slmgrpo.eval.table import text
    from slmgrpo.model import quiet
    from slmgrpo.prompts import render_all

    chosen = targets.parse(target, base=base)
    with quiet():
        model, tokenizer = models.load_base(chosen.base)
    if recipe is not None or chosen.run is not None:
        if recipe is None and chosen.run and not targets.recipe_of(chosen.run)[0].data.heldout:
            raise RecipeError(
                f"dynamics shift: {target} holds no rows out; give --recipe, whose rows become the prompts"
            )
        (loaded, *_), _grading = choose.suites_of([], recipe, [chosen], headroom=False)
        rows, _notes = rows_of(loaded, data=None, limit=limit)
        prompts = [rendered.ids for rendered in render_all(rows, loaded.suite.prompt, tokenizer)]
    else:
        prompts = [tokenizer(prompt)["input_ids"] for prompt in shifting.PROMPTS]
    if chosen.adapter is not None:
        with quiet():
            model = add_adapter(model, chosen.adapter, "tuned", models.ADVICE)
        shifting.scale(model, "tuned", chosen.scale)
    adapter = "tuned" if chosen.adapter is not None else None
    with quiet():
        found = shifting.measure(model, tokenizer, prompts, adapter=adapter, seeds=seeds)
    noise = "noise of equal norms" if adapter else "noise of 1 % of each weight"
    title = f"{target}: shift of the residual stream{'' if adapter else ' by noise alone'}, %, {len(prompts)} prompts"
    typer.echo(text(title, shifting.table(found)))
    for note in shifting.notes(found, noise):
        typer.echo(wrapped(note))


@dynamics_app.command()
def principal(
    target: Annotated[str, typer.Argument(help="RUN, RUN:STEP or an adapter.", metavar="TARGET")],
    top: Annotated[int, typer.Option(help="So many singular directions of each base weight.", min=1)] = 16,
    base: Annotated[str | None, typer.Option(help="The model under an adapter.", metavar="MODEL")] = None,
) -> None:
    """Show how much of an update lies in the top singular directions of the weights that it changes, beside chance.

    Example: `slmgrpo dynamics principal runs/mine --top 32`
    """
    from slmgrpo.adapter import add_adapter
    from slmgrpo.dynamics import probe, table, update
    from slmgrpo.eval import models, targets
    from slmgrpo.eval.table import text
    from slmgrpo.model import quiet

    chosen = targets.parse(target, base=base)
    if chosen.adapter is None:
        raise RecipeError(f"dynamics principal: {target} has no adapter; give a run or an adapter")
    with quiet():
        model, _ = models.load_base(chosen.base)
        model = add_adapter(model, chosen.adapter, "tuned", models.ADVICE)
    shares: dict[str, list[tuple[update.Principal, tuple[int, int]]]] = {}
    for name, layer in probe.lora_layers(model).items():
        moved = probe.factors(layer, "tuned")
        directions = update.top_directions(probe.base_weight(layer), min(top, *moved.shape))
        found = update.principal_shares(moved, *directions), moved.shape
        shares.setdefault(probe.Place.of(name).module, []).append(found)
    title = f"{target}: share of ||dW||^2 in the top {top} singular directions of W"
    typer.echo(text(title, table.principal_table(shares, top)))
    typer.echo(wrapped("output: left directions, input: right ones; chance: top / d_out, top / d_in"))


@dynamics_app.command()
def compare(
    a: Annotated[str, typer.Argument(help="RUN, RUN:STEP or an adapter.", metavar="A")],
    b: Annotated[
        list[str], typer.Argument(help="Adapters of the same base; another seed of A is the measure.", metavar="B")
    ],
    path: Annotated[bool, typer.Option("--eval", help="Evaluate the straight line from A to B, on A's rows.")] = False,
    samples: Annotated[int | None, typer.Option(help="Completions a problem on the line; 1: greedy.", min=1)] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many problems on the line.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Folder for the line's evaluations.", metavar="DIR")] = Path("evals/line"),
) -> None:
    """Compare updates tensor by tensor: cosines and shared directions, beside chance.

    Example: `slmgrpo dynamics compare runs/mine runs/other runs/mine_seed_43 --eval`
    """
    from slmgrpo.dynamics import geometry
    from slmgrpo.eval import targets
    from slmgrpo.eval.table import text

    first, *others = (targets.parse(one) for one in (a, *b))
    bare = next((one.text for one in (first, *others) if one.adapter is None), None)
    if bare:
        raise RecipeError(f"dynamics compare: {bare} has no adapter; give runs or adapters")
    assert first.adapter is not None
    updates = geometry.load(first.adapter)
    for other in others:
        assert other.adapter is not None
        found = geometry.pairs(updates, geometry.load(other.adapter))
        typer.echo(text(f"{first.text} and {other.text}", geometry.table(found)) + "\n")
    for note in geometry.notes(updates):
        typer.echo(wrapped(note))
    if path:
        _line(first, others[0], out, samples, limit)


def _line(a: Target, b: Target, out: Path, samples: int | None, limit: int | None) -> None:
    """Accuracy at five points from one adapter to the other."""
    from dataclasses import replace

    from slmgrpo import run as runs
    from slmgrpo.dynamics import geometry
    from slmgrpo.eval import choose, evaluate, table, targets

    if a.run is None or not targets.recipe_of(a.run)[0].data.heldout:
        raise RecipeError(f"dynamics compare --eval: {a.text} is no run with held-out rows; name such a run first")
    loaded, grading = choose.suites_of([], None, [a], headroom=False)
    assert a.adapter is not None and b.adapter is not None
    adapters = {a.text: a.adapter, b.text: b.adapter}
    ends = {name: runs.sha256(folder / "adapter_model.safetensors") for name, folder in adapters.items()}
    if (out / "line.json").is_file() and json.loads((out / "line.json").read_text()) != ends:
        raise RecipeError(f"dynamics compare --eval: {out} holds the line between other adapters; choose another --out")
    x, y = geometry.load(a.adapter), geometry.load(b.adapter)
    runs.write_text(out / "line.json", json.dumps(ends))
    points = []
    for t in (0.0, 0.25, 0.5, 0.75, 1.0):
        folder = out / f"t_{t:g}"
        geometry.save(geometry.between(x, y, t), a.adapter, folder / "adapter")
        points.append(replace(a, text=f"t={t:g}", label=f"t={t:g}", adapter=folder / "adapter", home=folder, scale=1.0))
    options = evaluate.Options(samples=samples, limit=limit, grading=grading)
    with Interrupts(), Watch() as watch:
        found = evaluate.evaluate(points, loaded, options, watch)
    for title, rows in table.main_table(found, []):
        typer.echo("\n" + table.text(f"from {a.text} (t=0) to {b.text} (t=1): {title}", rows))
    typer.echo(f"samples: {out}")
