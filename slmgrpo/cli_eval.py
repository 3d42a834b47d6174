"""The commands `eval` and `export`: parse, call, print; imports nothing heavy."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from slmgrpo.errors import RecipeError
from slmgrpo.interrupt import Interrupted, Interrupts

if TYPE_CHECKING:
    from slmgrpo.eval.compare import Comparison
    from slmgrpo.eval.store import Evaluated
    from slmgrpo.eval.targets import Target


class RunByDefault(TyperGroup):
    """`eval TARGET` is `eval run TARGET`: what is no subcommand, or a run of that name, is a target."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = bool(args) and args[0] in (*self.commands, "--help")
        if not known or (Path(args[0]) / "recipe.json").is_file():
            args = ["run", *args]
        return super().parse_args(ctx, args)


eval_app = typer.Typer(
    cls=RunByDefault,
    help="Evaluate runs, adapters and models. `slmgrpo eval` alone evaluates the newest run against its base; "
    "`slmgrpo eval TARGET ...` is `slmgrpo eval run TARGET ...`.",
)

PathArg = Annotated[Path, typer.Argument(help="A run, or a folder with evaluations.", metavar="PATH")]
SandboxOption = Annotated[str, typer.Option(help="For code: strict, best or off.")]
MarkdownOption = Annotated[bool, typer.Option("--markdown", help="Print Markdown in place of a table.")]


@eval_app.command()
def run(
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            help="RUN, RUN:best, RUN:STEP, an adapter, a folder, a hub id, tiny; @0.5 behind it scales the adapter.",
            metavar="TARGET",
        ),
    ] = None,
    suite: Annotated[
        list[str] | None, typer.Option(help="A suite, a group of suites or a file.", metavar="NAME")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Evaluate on this recipe's held-out rows, with its prompt.", metavar="RECIPE")
    ] = None,
    against: Annotated[str | None, typer.Option(help="Compare with this target.", metavar="TARGET")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Do not compare a single run with its base.")] = False,
    samples: Annotated[int | None, typer.Option(help="Completions a problem; 1: greedy.", min=1)] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="A greedy completion beside the drawn ones.")] = False,
    budgets: Annotated[str | None, typer.Option(help="Token budgets, as in 512,2048.", metavar="N,N")] = None,
    temperature: Annotated[float | None, typer.Option(help="Draw at this temperature, also a single sample.")] = None,
    seed: Annotated[int, typer.Option(help="Of the drawn samples.", min=0)] = 0,
    limit: Annotated[int | None, typer.Option(help="Only so many problems, always the same ones.", min=1)] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with the suites' plain files.", metavar="DIR")] = None,
    best_of: Annotated[
        str | None, typer.Option(help="A rule that chooses among the drawn samples.", metavar="RULE")
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help="Scales of one target's adapter, as in 0,0.25,0.5,0.75,1.", metavar="C,C")
    ] = None,
    headroom: Annotated[
        bool, typer.Option("--headroom", help="Greedy against best-of-k on the recipe's training rows.")
    ] = False,
    base: Annotated[str | None, typer.Option(help="The model under an adapter.", metavar="MODEL")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the evaluations.", metavar="DIR")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Remove evaluations made with other settings.")] = False,
    batch_tokens: Annotated[int | None, typer.Option(help="Tokens held in memory at once.", min=1)] = None,
    sandbox: Annotated[str | None, typer.Option(help="For code: strict, best or off.")] = None,
    lm_eval: Annotated[
        str | None, typer.Option("--lm-eval", help="Run these tasks of lm-evaluation-harness instead.", metavar="TASKS")
    ] = None,
    as_markdown: MarkdownOption = False,
) -> None:
    """Evaluate targets side by side on suites, or on their recipe's held-out rows.

    Example: `slmgrpo eval runs/mine --suite math --samples 8`
    """
    from slmgrpo.eval import choose
    from slmgrpo.eval import evaluate as evaluating
    from slmgrpo.recipe import Grading

    if headroom and samples == 1:
        raise RecipeError("--headroom --samples 1: the best of one sample is that sample; use --samples 2 or more")
    chosen, opponent = choose.targets_of(
        targets or [], against, base=base, alone=alone, out=out, scales=scales, headroom=headroom
    )
    if lm_eval:
        from slmgrpo.eval.harness import hand_over

        given = {"suite": suite, "recipe": recipe, "samples": samples, "greedy": greedy, "budgets": budgets}
        given |= {"temperature": temperature, "seed": seed, "data": data, "best-of": best_of, "headroom": headroom}
        if idle := [f"--{name}" for name, value in given.items() if value]:
            raise RecipeError(f"--lm-eval: the harness has its own prompts and sampling; leave {', '.join(idle)} out")
        hand_over(chosen, lm_eval, limit=limit, stage=lambda text: typer.echo(text, err=True))
        return
    loaded, grading = choose.suites_of(suite or [], recipe, chosen, opponent=opponent, headroom=headroom)
    if sandbox:
        grading = Grading.model_validate(grading.model_dump() | {"sandbox": _sandbox(sandbox)})
    options = evaluating.Options(
        samples=samples or (8 if headroom else None),
        greedy=greedy or headroom,
        budgets=choose.budgets_of(budgets),
        temperature=temperature,
        seed=seed,
        limit=limit or (100 if headroom else None),
        data=data,
        best_of=best_of,
        fresh=fresh,
        batch_tokens=batch_tokens or evaluating.BATCH_TOKENS,
        grading=grading,
    )
    with Interrupts(), Watch() as watch:
        try:
            found = evaluating.evaluate(chosen, loaded, options, watch)
        except Interrupted as stop:
            watch.note(f"{stop}: what is written is kept; the same command goes on from there")
            raise
    if headroom:
        _print_headroom(found, as_markdown)
    else:
        _print(found, _pairs(found, opponent), chosen, as_markdown)


@eval_app.command()
def show(
    path: PathArg,
    suite: Annotated[str | None, typer.Option(help="Only this suite.", metavar="NAME")] = None,
    wrong: Annotated[bool, typer.Option("--wrong", help="Also print samples that are not correct.")] = False,
    count: Annotated[int, typer.Option(help="How many of them.", min=1)] = 5,
    as_markdown: MarkdownOption = False,
) -> None:
    """Show saved evaluations again, and samples that went wrong.

    Example: `slmgrpo eval show runs/mine --wrong`
    """
    from slmgrpo.eval import store

    found = [one for one in store.find(path) if suite in (None, one.suite)]
    if not found:
        raise RecipeError(f"{path}: no evaluation on {suite}; leave --suite out to see what is there")
    _print(found, [], [], as_markdown)
    if wrong:
        for one in found:
            for line in [line for line in one.lines if not line["correct"]][:count]:
                typer.echo(_wrong(one, line))


@eval_app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="The evaluations to compare with.", metavar="A")],
    b: Annotated[list[Path], typer.Argument(help="The evaluations to compare, one folder for each seed.", metavar="B")],
    as_markdown: MarkdownOption = False,
) -> None:
    """Compare saved evaluations problem by problem, without a model; several of one kind also over their seeds.

    Example: `slmgrpo eval compare runs/mine/eval/base runs/mine/eval/step_60`
    """
    from slmgrpo.eval import compare as comparing
    from slmgrpo.eval import table

    found, pairs = comparing.saved_pairs(a, b)
    comparisons = _print(found, pairs, [], as_markdown)
    for sentence in table.over_runs(comparisons):
        typer.echo(f"- {sentence}" if as_markdown else wrapped(sentence))


@eval_app.command()
def regrade(
    path: PathArg,
    data: Annotated[Path | None, typer.Option(help="Folder with the suites' plain files.", metavar="DIR")] = None,
    sandbox: SandboxOption = "strict",
) -> None:
    """Grade saved samples again by the present rules, without a model.

    Example: `slmgrpo eval regrade runs/mine`
    """
    from slmgrpo.eval import store
    from slmgrpo.eval.regrade import regrade as again
    from slmgrpo.eval.table import share
    from slmgrpo.recipe import Grading

    grading = Grading.model_validate({"sandbox": _sandbox(sandbox)})
    for before in store.find(path):
        done = again(before, grading, data=data)
        budget = before.settings["budgets"][-1]
        old, new = (share(side.by_budget[budget]["accuracy"]) for side in (done.before, done.after))
        ids = f": {', '.join(done.changed[:3])}{' ...' if len(done.changed) > 3 else ''}" if done.changed else ""
        typer.echo(f"{before.label} {before.suite}: {old} -> {new}, {len(done.changed)} problems changed{ids}")


@eval_app.command()
def suites(
    copy: Annotated[str | None, typer.Option(help="Copy this suite to edit it.", metavar="NAME")] = None,
    to: Annotated[Path, typer.Option(help="Where the copy goes.", metavar="FILE")] = Path(),
) -> None:
    """List the packaged suites, or copy one.

    Example: `slmgrpo eval suites --copy gsm8k --to mine.yaml`
    """
    from slmgrpo.eval import suites as packaged
    from slmgrpo.eval.evaluate import writing_to

    if copy is not None:
        with writing_to(to, "choose another --to"):
            made = packaged.copy(copy, to)
        typer.echo(f"{made}: edit it, then `slmgrpo eval TARGET --suite {made}`")
        return
    for name in packaged.packaged_suites():
        suite = packaged.find(name)[0].suite
        mark = "" if suite.verified else " (not verified)"
        typer.echo(f"{name:<17} {suite.group:<6} {suite.description}{mark}")


def export(
    target: Annotated[str, typer.Argument(help="RUN, RUN:best, RUN:STEP; @0.5 behind it scales it.", metavar="RUN")],
    to: Annotated[Literal["adapter", "merged"], typer.Option(help="The adapter alone, or merged into its base.")],
    out: Annotated[Path, typer.Option(help="The new folder.", metavar="DIR")],
) -> None:
    """Write a run's result with a model card, and check that it says what the run says.

    Example: `slmgrpo export runs/mine --to merged --out mine`
    """
    from slmgrpo.eval.targets import parse
    from slmgrpo.export import export as write

    with Watch() as watch:
        done = write(parse(target), to, out, stage=watch.stage)
    typer.echo(f"{done.folder}: {done.equal} of {done.checked} greedy outputs equal the run's ({done.dtype})")
    typer.echo(
        f"next: slmgrpo eval {done.folder} --suite NAME" if done.form == "merged" else f"card: {done.folder}/README.md"
    )


def _pairs(found: list[Evaluated], opponent: str | None) -> list[tuple[Evaluated, Evaluated]]:
    before = {one.suite: one for one in found if one.label == opponent}
    return [(before[one.suite], one) for one in found if opponent is not None and one.label != opponent]


def _print(
    found: list[Evaluated], pairs: list[tuple[Evaluated, Evaluated]], chosen: list[Target], as_markdown: bool
) -> list[Comparison]:
    from slmgrpo.eval import compare as comparing
    from slmgrpo.eval import table
    from slmgrpo.eval.evaluate import writing_to

    comparisons = comparing.compare(pairs)
    for target in chosen:
        own = [one for one in comparisons if one.b == target.label]
        if own:
            with writing_to(target.home):
                comparing.save(own, target.home)
    draw = table.markdown if as_markdown else table.text
    for title, rows in (*table.main_table(found, comparisons), *table.details(found)):
        typer.echo(draw(title, rows) + "\n")
    for note in table.notes(found, comparisons):
        typer.echo(f"- {note}" if as_markdown else wrapped(note))
    for home in sorted({str(one.folder.parent) for one in found}):
        typer.echo(f"samples: {home}")
    return comparisons


def _print_headroom(found: list[Evaluated], as_markdown: bool) -> None:
    from slmgrpo.eval import table

    draw = table.markdown if as_markdown else table.text
    title = f"headroom on training rows: {table.how(found[0].settings)}"
    typer.echo(draw(title, table.headroom_table(found)))
    typer.echo(
        wrapped("headroom: best of the drawn less greedy, points with 95 % intervals; near 0 there is little to learn")
    )


def wrapped(text: str) -> str:
    return textwrap.fill(text, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _wrong(one: Evaluated, line: dict[str, Any]) -> str:
    why = "; ".join(f"{name}: {verdict['why']}" for name, verdict in line["verdicts"].items() if verdict["why"])
    text = line["text"] if len(line["text"]) <= 1500 else f"... {line['text'][-1500:]}"
    head = f"--- {one.label} {one.suite} {line['id']}: {line['status']}, read {line['read']!r}, gold {line['gold']!r}"
    return f"\n{head}\n{line.get('question', '')}\n> {text}\n{why}"


def _sandbox(text: str) -> str:
    if text not in ("strict", "best", "off"):
        raise RecipeError(f"--sandbox {text}: one of strict, best and off")
    return text


class Watch:
    """A bar with ETA on a terminal, a line now and then elsewhere (evaluate.Watcher)."""

    def __enter__(self) -> Watch:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=None)
        self._stage, self._started, self._spoke = "", time.monotonic(), time.monotonic()
        self._first: int | None = None
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def stage(self, text: str) -> None:
        self._stage = text
        self._bar.update(self._task, description=text[:26])
        if not self._console.is_terminal:
            self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def progress(self, what: str, done: int, total: int) -> None:
        if what == "writing":
            self._bar.update(self._task, completed=done, total=total)
            if self._first is None:
                self._first, self._started = done, time.monotonic()
        now = time.monotonic()
        if self._console.is_terminal or now - self._spoke < 30 or what != "writing" or done == self._first:
            return
        left = (now - self._started) / (done - (self._first or 0)) * (total - done)
        self._spoke = now
        self._console.print(f"{self._stage}: {done}/{total}, ETA {left:.0f} s", markup=False, highlight=False)

    def note(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)
