"""The commands: parse, call, print; imports nothing heavy."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from slmgrpo.cli_dynamics import dynamics_app
from slmgrpo.cli_eval import eval_app, export
from slmgrpo.cli_train import JsonOption, RecipeArg, SetOption, launch_app, plan, train
from slmgrpo.errors import SlmgrpoError
from slmgrpo.interrupt import Interrupted

app = typer.Typer(
    name="slmgrpo",
    help="GRPO fine-tuning of small language models from YAML recipes.\n\n"
    "Start with `slmgrpo train recipes/quickstart.yaml`: a minute or two on a laptop, no GPU, no downloads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
recipes_app = typer.Typer(
    help="List, show, copy and compare recipes.\n\nExample: `slmgrpo recipes show code_3b`", invoke_without_command=True
)
reward_app = typer.Typer(
    help="Score completions with any rules, and look for holes in a recipe's.\n\n"
    "Example: `slmgrpo reward lint code_3b`",
    no_args_is_help=True,
)
app.command()(train)
app.command()(plan)
app.add_typer(recipes_app, name="recipes")
app.add_typer(reward_app, name="reward")
app.add_typer(eval_app, name="eval")
app.add_typer(dynamics_app, name="dynamics")
app.add_typer(launch_app, name="launch")
app.command()(export)


@recipes_app.callback()
def recipes(ctx: typer.Context) -> None:
    """List the packaged recipes; `show`, `copy` and `diff` work on them and on your own."""
    if ctx.invoked_subcommand:
        return
    from slmgrpo import view
    from slmgrpo.recipe_show import list_recipes

    for folder, listed in itertools.groupby(list_recipes(), key=lambda recipe: str(Path(recipe.name).parent)):
        if folder != ".":
            typer.echo(f"\n{folder}/")
        view.show(view.pairs_table([(Path(recipe.name).name, recipe.description) for recipe in listed]))


@recipes_app.command()
def show(recipe: RecipeArg, overrides: SetOption = None) -> None:
    """Print a recipe with its parents merged in and each value's origin as a comment.

    Example: `slmgrpo recipes show code_3b`
    """
    from slmgrpo.recipe_load import load
    from slmgrpo.recipe_show import show as text_of

    typer.echo(text_of(load(recipe, overrides or ())), nl=False)


@recipes_app.command()
def copy(
    recipe: Annotated[str, typer.Argument(help="A packaged recipe.", metavar="RECIPE")],
    to: Annotated[Path, typer.Argument(help="The new file.", metavar="TO")],
) -> None:
    """Make a recipe of your own to edit.

    Example: `slmgrpo recipes copy math_1.5b my_math.yaml`
    """
    from slmgrpo.recipe_show import copy_recipe

    made = copy_recipe(recipe, to)
    typer.echo(f"{made}: edit it, then `slmgrpo check {made}` and `slmgrpo train {made}`")


@recipes_app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A recipe.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
) -> None:
    """Show the values in which two recipes differ.

    Example: `slmgrpo recipes diff math_3b code_3b`
    """
    from rich.table import Table

    from slmgrpo import view
    from slmgrpo.recipe_load import load
    from slmgrpo.recipe_show import diff as differences

    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("key", a, b):
        table.add_column(heading, overflow="fold")
    for difference in differences(load(a), load(b)):
        table.add_row(difference.key, difference.a or "-", difference.b or "-")
    view.show(table)


@app.command()
def check(recipe: RecipeArg, overrides: SetOption = None) -> None:
    """Look at recipe, plan, data, prompts and rewards together, without training.

    Not looked at: cold_start.data, the rows of eval.suites, and whether report_to's packages are installed.

    Example: `slmgrpo check recipes/quickstart.yaml`
    """
    from rich.console import Console

    from slmgrpo import view
    from slmgrpo.check import check as examine
    from slmgrpo.recipe_load import load

    console = Console()
    with console.status("reading data, rendering prompts, grading gold answers"):
        report = examine(load(recipe, overrides or ()))
    view.show(view.check_report(report))
    if not report.ok:
        raise typer.Exit(2)


@reward_app.command()
def score(
    file: Annotated[Path, typer.Argument(help="A jsonl file of completions.", metavar="FILE")],
    use: Annotated[list[str], typer.Option(help="A rule; may be given several times.", metavar="RULE")],
    settings: Annotated[
        list[str] | None, typer.Option("--with", help="A rule's setting; may be repeated.", metavar="RULE:KEY=VALUE")
    ] = None,
    mapping: Annotated[str, typer.Option("--map", help="What rules call it = what the file calls it, ...")] = "",
    as_json: JsonOption = False,
    sandbox: Annotated[
        Literal["strict", "best", "off"], typer.Option(help="For code: strict, best or off.")
    ] = "strict",
) -> None:
    """Score saved completions: the value of each rule, the answer read and why.

    Example: `slmgrpo reward score samples.jsonl --use math.correct --map completion=text,answer=gold`
    """
    from slmgrpo.rewards import score as scoring

    rewards = scoring.rewards_of(use, scoring.parse_settings(settings or (), use), Path.cwd())
    scored = scoring.score(file, rewards, mapping=scoring.parse_mapping(mapping), sandbox=sandbox)
    if as_json:
        for item in scored:
            typer.echo(item.as_json())
    else:
        typer.echo(scoring.as_text(list(scored)))


@reward_app.command()
def lint(recipe: RecipeArg, overrides: SetOption = None) -> None:
    """Fail where the best wrong answer can out-earn a bare right one, and say the smallest change that mends it.

    Example: `slmgrpo reward lint recipes/code_3b.yaml`
    """
    from slmgrpo.rewards import lint as linting

    ok = True
    for title, rewards in _reward_sets(recipe, overrides):
        report = linting.lint(rewards)
        typer.echo(linting.as_text(report, title))
        ok &= report.ok
    if not ok:
        raise typer.Exit(2)


@reward_app.command()
def attack(recipe: RecipeArg, overrides: SetOption = None) -> None:
    """Show what each trick of the adversarial suite earns under a recipe's rules.

    Example: `slmgrpo reward attack recipes/code_3b.yaml`
    """
    from slmgrpo.recipe_load import load
    from slmgrpo.rewards import attack as attacking

    grading = load(recipe, overrides or ()).recipe.grading
    beaten = False
    for title, rewards in _reward_sets(recipe, overrides):
        earned = attacking.attack(rewards, timeout_s=grading.timeout_s, sandbox=grading.sandbox)
        typer.echo(f"{title}\n{attacking.as_text(earned)}")
        beaten |= any(item.beats for item in earned)
    if beaten:
        raise typer.Exit(2)


def _reward_sets(recipe: str, overrides: list[str] | None) -> Iterator[tuple[str, Any]]:
    """Each distinct set of rules of a recipe, with the first source that uses it."""
    from slmgrpo.recipe_load import load
    from slmgrpo.rules import rules_of

    loaded = load(recipe, overrides or ())
    seen = set()
    for source in loaded.recipe.data.train:
        rewards = rules_of(loaded.recipe, source, loaded.base)
        if str(rewards) not in seen:
            seen.add(str(rewards))
            yield f"{loaded.recipe.name}, {source.source}", rewards


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="A run directory, finished or not.", metavar="RUN")],
    as_json: JsonOption = False,
) -> None:
    """Name what a run's curves show, with evidence, confidence and the usual remedy.

    Example: `slmgrpo diagnose runs/mine`
    """
    from slmgrpo.diagnose import diagnose as read_curves

    found = read_curves(run)
    typer.echo(json.dumps(found.as_json(), indent=2) if as_json else found.as_text())


@app.command()
def doctor() -> None:
    """Show what is installed, which device and engines can run, how strong the sandbox is, and what mends a gap.

    Example: `slmgrpo doctor`
    """
    from slmgrpo import doctor as clinic
    from slmgrpo import view

    found = clinic.examine()
    marks = {"ok": "", "absent": "(optional) ", "fault": "FAULT: "}
    rows = [(f.name, f"{marks[f.state]}{f.detail}" + (f"; {f.mend}" if f.mend else "")) for f in found]
    view.show(view.pairs_table(rows))
    if any(f.state == "fault" for f in found):
        raise typer.Exit(1)


def main() -> None:
    """Run a command; a user's mistake prints its message and exits 2, a broken run 1, a signal 128 + its number."""
    logging.lastResort = None
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # half a surrogate pair, or what the terminal cannot show
    try:
        app(standalone_mode=True)
    except Interrupted as stop:
        _leave(stop.exit_code)
    except SlmgrpoError as error:
        if str(error) and os.environ.get("RANK", "0") == "0":  # of many ranks one speaks; all have a log
            typer.echo(str(error), err=True)
        _leave(error.exit_code)
    except BrokenPipeError:
        _leave(0)


def _leave(code: int) -> None:
    sys.stderr.flush()
    with _ignore_closed_pipe():
        sys.stdout.flush()
    sys.exit(code)


@contextmanager
def _ignore_closed_pipe() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
