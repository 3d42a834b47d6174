"""What a person sees of a run: the live table with its bar, and the summary at the end, in 80 columns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from slmgrpo.check import Report

SPARKS = "▁▂▃▄▅▆▇█"
SHOWN = 10
"""Steps in the live table."""


class LiveView:
    """Follows a run (callbacks.Observer): a redrawn table on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=SHOWN)
        self._every = max(1, steps // 20)
        self._stage = ""
        self._started = time.monotonic()
        self._first = 0
        self._overall = _bars(console)
        self._all = self._overall.add_task("step", total=steps, visible=False)
        self._parts = _bars(console)
        self._part = ("", self._parts.add_task("", visible=False))
        self._live = Live(self._draw(), console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._begin("")
            self._stage = ""
            self._overall.update(self._all, visible=False)
            self._live.update(self._draw(), refresh=True)
            self._live.stop()

    def stage(self, text: str) -> None:
        self._stage = text
        if text == "training":
            self._started = time.monotonic()
            self._overall.update(self._all, visible=True)
        if self._console.is_terminal:
            self._begin("")
            self._live.update(self._draw())
        else:
            self._console.print(text, soft_wrap=True)

    def progress(self, what: str, done: int, total: int) -> None:
        if self._console.is_terminal and total > 1:
            self._begin(what)
            self._parts.update(self._part[1], completed=done, total=total)

    def _begin(self, what: str) -> None:
        """A bar of its own for each part of a stage, so that its ETA knows nothing of the one before."""
        if self._part[0] != what:
            self._parts.remove_task(self._part[1])
            self._part = (what, self._parts.add_task(what, visible=bool(what)))

    def warn(self, text: str) -> None:
        self._console.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def step(self, metrics: Mapping[str, Any]) -> None:
        if not self._first:
            self._first = metrics["step"]
            self._overall.reset(self._all, completed=self._first - 1)
        self._rows.append(metrics)
        if self._console.is_terminal:
            self._overall.update(self._all, completed=metrics["step"], visible=True)
            self._live.update(self._draw())
            return
        if metrics["step"] % self._every == 0 or metrics["step"] in (1, self._steps):
            pace = (time.monotonic() - self._started) / (metrics["step"] - self._first + 1)
            left = pace * (self._steps - metrics["step"])
            self._console.print(f"{_line(metrics, self._steps)} ETA {left:.0f} s", soft_wrap=True)

    def _draw(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._rows:
            parts.append(steps_table(self._rows))
        if self._stage:
            parts.append(f"{self._stage} ...")
        return Group(*parts, self._overall, self._parts)


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=30),
        TextColumn("{task.completed:>6.0f}/{task.total:<6.0f}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
    )


def show(renderable: RenderableType) -> None:
    """Print to the terminal, or plain lines without trailing blanks where the output goes elsewhere."""
    console = Console()
    if console.is_terminal:
        console.print(renderable)
        return
    with console.capture() as captured:
        console.print(renderable)
    for line in captured.get().splitlines():
        console.print(line.rstrip(), soft_wrap=True, markup=False, highlight=False)


def steps_table(rows: Sequence[Mapping[str, Any]] | deque[Mapping[str, Any]]) -> Table:
    """One line a step: reward, accuracy per task, length, tokens per second, seconds."""
    tasks = list(rows[-1]["accuracy"])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("step", "reward", *(_short(task) for task in tasks), "length", "silent", "tok/s", "s"):
        table.add_column(heading, justify="right")
    for m in rows:
        table.add_row(
            str(m["step"]),
            _number(m["reward"], 3),
            *(_number(m["accuracy"].get(task), 2) for task in tasks),
            _number(m["length"], 1),
            _number(m["silent"], 2),
            _number(m["tokens_per_s"], 0),
            _number(m["seconds"]["total"], 1),
        )
    return table


def summary(
    name: str, metrics: Sequence[Mapping[str, Any]], before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> RenderableType:
    """Held-out accuracy before and after with 95 % intervals, and the reward's curve."""
    parts: list[RenderableType] = []
    if after:
        table = Table(
            title=f"{name}: held-out accuracy, 95 % intervals", box=None, pad_edge=False, title_justify="left"
        )
        for heading in ("task", "rows", "before", "after", "change"):
            table.add_column(heading, justify="left" if heading == "task" else "right")
        for task, now in after["tasks"].items():
            old = before["tasks"].get(task) if before else None
            change = "" if old is None else f"{100 * (now['accuracy'] - old['accuracy']):+.0f} points"
            table.add_row(task, str(now["n"]), _interval(old), _interval(now), change)
        tokens = [
            "mean tokens",
            "",
            _number(before["mean_tokens"] if before else None, 1),
            _number(after["mean_tokens"], 1),
            "",
        ]
        table.add_row(*tokens)
        parts += ["", table]
    curve = [m["reward"] for m in metrics if m["reward"] is not None]
    if curve:
        parts += ["", f"reward {curve[0]:.2f} {sparkline(curve, 48)} {curve[-1]:.2f}"]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """Means of `width` equal parts, drawn from the lowest to the highest."""
    width = min(width, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(SPARKS[min(int((m - low) / span * len(SPARKS)), len(SPARKS) - 1)] for m in means)


def pairs_table(pairs: Sequence[tuple[str, str]]) -> Table:
    """Name and value, for plans and reports."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    return table


def check_report(report: Report) -> RenderableType:
    """What `slmgrpo check` found: numbers, prompts as the model sees them, then what must be mended."""
    pairs = [
        ("recipe", report.recipe),
        (
            "plan",
            f"{report.plan.steps:,} steps of {report.plan.prompts_per_step} prompts x {report.plan.group_size} = "
            f"{report.plan.completions_per_step:,} completions",
        ),
        ("rewards", ", ".join(report.rules)),
        ("training rows", f"{report.train_rows:,}: " + ", ".join(f"{count:,} {task}" for task, count in report.tasks)),
        ("held-out rows", f"{report.heldout_rows:,}"),
        (
            "overlap",
            f"{report.same_as_training} held-out questions are training questions, "
            f"{report.similar_to_training} share 13 words with one",
        ),
        ("repeated", f"{report.duplicates:,} training questions"),
    ]
    if report.absent:  # what the others hold says nothing of overlap
        pairs = [*pairs[:3], ("not at hand", ", ".join(report.absent))]
    pairs += [
        (
            f"gold, {gold.part}",
            f"{gold.source}: {gold.graded:,} graded of {gold.rows:,} rows, {gold.full:,} get full marks by "
            f"{', '.join(gold.rules)}; "
            f"{len(gold.empty_paid)} emptied and {len(gold.wrong_paid)} corrupted ones are paid as much",
        )
        for gold in report.golds
    ]
    parts: list[RenderableType] = [pairs_table(pairs)]
    if report.lengths:
        parts += ["", f"prompt lengths in tokens (longest {report.lengths.longest}, budget {report.lengths.budget})"]
        most = max(count for _, count in report.lengths.histogram)
        parts += [
            Text(f"  up to {limit:>6,} {count:>7,} {'█' * max(1, round(40 * count / most))}")
            for limit, count in report.lengths.histogram
        ]
    for number, prompt in enumerate(report.prompts, 1):
        parts += ["", Text(f"prompt {number} of {len(report.prompts)}", style="bold"), Text(prompt)]
    for heading, sentences in (
        ("not checked", report.unchecked),
        ("known", report.warnings),
        ("to mend", report.problems),
    ):
        if sentences:
            listed = Table.grid(padding=(0, 1))
            listed.add_column(no_wrap=True)
            listed.add_column(overflow="fold")
            for sentence in sentences:
                listed.add_row("  -", Text(sentence))
            parts += ["", Text(heading, style="bold"), listed]
    verdict = f"{len(report.problems)} problem{'s' * (len(report.problems) > 1)}" if report.problems else "ready"
    if report.unchecked and not report.problems:
        verdict = "ready, but for what was not checked"
    if report.absent:
        verdict = f"{verdict}, data not checked" if report.problems else "data not checked"
    return Group(*parts, Text(f"\n{report.recipe}: {verdict}"))


def _line(m: Mapping[str, Any], steps: int) -> str:
    accuracy = " ".join(f"{_short(task)} {value:.2f}" for task, value in m["accuracy"].items())
    return (
        f"step {m['step']}/{steps} reward {_number(m['reward'], 2)} {accuracy} length {m['length']:.0f} "
        f"{_number(m['tokens_per_s'], 0)} tok/s"
    )


def _short(task: str) -> str:
    """`tiny:math` as `math`, `hub:openai/gsm8k` as `gsm8k`."""
    return task.split(":")[-1].split("/")[-1][:12]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        return "-"
    return f"{100 * rate['accuracy']:.0f} % [{100 * rate['low']:.0f}, {100 * rate['high']:.0f}]"
