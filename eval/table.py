"""Evaluations as tables of at most 80 columns and as Markdown to paste, an interval on every number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slmgrpo.eval import stats
from slmgrpo.eval.compare import SAME, Comparison, remarks
from slmgrpo.eval.samples import at_budget
from slmgrpo.eval.scores import best_by_problem, headroom
from slmgrpo.eval.stats import Difference, Estimate
from slmgrpo.eval.store import Evaluated

PER_TABLE = 3
"""Targets side by side in 80 columns."""
POINTS = ("tokens", "distinct", "distinct_texts")
"""Metrics that are no shares."""
MISSING = stats.ratio([], [])
"""Of a metric that one target has and another has not."""
LONG = 14
"""Letters of a target's name."""

Table = list[list[str]]
"""Rows of cells, the heading first."""


def main_table(evaluated: Sequence[Evaluated], comparisons: Sequence[Comparison]) -> Iterator[tuple[str, Table]]:
    """(title, table) for what was evaluated alike: accuracy at each budget, and the change against the base."""
    changes = {(one.suite, one.budget, one.b): one for one in comparisons}
    for own in _alike(evaluated):
        suite = own[0].suite
        heading = ["tokens", "target", "accuracy %"] + (["change", "p", "won:lost"] if comparisons else [])
        table = [heading]
        for budget in own[0].settings["budgets"]:
            for one in own:
                row = [str(budget), one.label[-LONG:], share(one.by_budget[budget]["accuracy"])]
                if comparisons:
                    row += _change(changes.get((suite, budget, one.label)))
                table.append(row)
        yield f"{suite}: {own[0].problems} problems, {how(own[0].settings)}", table


def details(evaluated: Sequence[Evaluated]) -> Iterator[tuple[str, Table]]:
    """(title, table) for what was evaluated alike: every other metric at the longest budget, targets side by side."""
    for own in _alike(evaluated):
        budget = own[0].settings["budgets"][-1]
        for start in range(0, len(own), PER_TABLE):
            part = own[start : start + PER_TABLE]
            table = [["", *(one.label[-LONG:] for one in part)]]
            metrics = [one.by_budget[budget] for one in part]
            for name in dict.fromkeys(name for has in metrics for name in has if not _repeated(name, has)):
                found = [has.get(name, MISSING) for has in metrics]
                if any(estimate.value for estimate in found):
                    show = number if name in POINTS or name.startswith("rule ") else share
                    table.append([name.replace("_", " ").removeprefix("rule "), *map(show, found)])
            yield f"{own[0].suite} at {budget} tokens, % with 95 % intervals", table


def headroom_table(evaluated: Sequence[Evaluated]) -> Table:
    """Greedy against the best of the drawn samples: where there is none, GRPO has nothing to teach."""
    table = [["rows", "target", "greedy %", f"best of {evaluated[0].settings['samples']} %", "headroom"]]
    for one in evaluated:
        budget = one.settings["budgets"][0]
        greedy = one.by_budget[budget]["greedy"]
        gap = headroom(at_budget(one.lines, budget))
        best = stats.mean(best_by_problem(at_budget(one.lines, budget)))
        table.append([one.suite, one.label[-LONG:], share(greedy), share(best), change(gap)])
    return table


def notes(evaluated: Sequence[Evaluated], comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Sentences below the tables."""
    yield "[ ]: 95 % intervals: Wilson's for single samples, the bootstrap over problems for means of several"
    if comparisons:
        single = not evaluated[0].settings["samples"]
        test = "exact McNemar" if single else "sign flips over problems"
        yield f"p: {test}, Holm's correction over {len(comparisons)} comparisons; change with the paired bootstrap"
    for one in {(one.suite, one.settings["rows_digest"]): one for one in evaluated}.values():
        golds = Counter(line["gold"] for line in one.lines)
        letter, count = golds.most_common(1)[0]
        if all(isinstance(gold, str) and len(gold) == 1 and gold.isalpha() for gold in golds):
            yield f"{one.suite}: always {letter} would be right in {100 * count / golds.total():.0f} %"
    yield from remarks(comparisons)


def over_runs(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """The mean change of several runs that differ by their seed, with Student's interval over runs."""
    groups: dict[tuple[str, int], list[float]] = {}
    for one in comparisons:
        groups.setdefault((one.suite, one.budget), []).append(one.difference.value)
    for (suite, budget), values in groups.items():
        if len(values) > 1:
            found = stats.over_seeds(values)
            shown = f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
            yield f"{suite} at {budget} tokens: {shown} points over {len(values)} runs"


def text(title: str, table: Table) -> str:
    """Aligned columns under a title; numbers to the left edge of their column."""
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join([title, *(f"  {line}".rstrip() for line in lines)])


def markdown(title: str, table: Table) -> str:
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in table]
    return "\n".join([f"**{title}**", "", rows[0], "|" + "---|" * len(table[0]), *rows[1:], ""])


def share(found: Estimate) -> str:
    if math.isnan(found.value):
        return "-"
    return f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def number(found: Estimate) -> str:
    if math.isnan(found.value):
        return "-"
    digits = 0 if abs(found.value) >= 100 else 1 if abs(found.value) >= 10 else 2
    return f"{found.value:.{digits}f} [{found.low:.{digits}f}, {found.high:.{digits}f}]"


def change(found: Difference) -> str:
    return f"{100 * found.value:+.1f} [{100 * found.low:+.0f}, {100 * found.high:+.0f}]"


def p_value(p: float) -> str:
    return "<.001" if p < 0.001 else "1" if p > 0.9995 else f"{p:.3f}".lstrip("0")


def how(settings: Mapping[str, Any]) -> str:
    """`greedy`, or `8 samples at temperature 0.6`."""
    drawn = f"{settings['samples']} samples at temperature {settings['temperature']:g}" if settings["samples"] else ""
    return " and ".join(filter(None, (drawn, "greedy" if settings["greedy"] else "")))


def _change(one: Comparison | None) -> list[str]:
    if one is None:
        return ["", "", ""]
    found = one.difference
    return [change(found), p_value(one.p), f"{found.wins}:{found.losses}"]


def _repeated(name: str, metrics: Mapping[str, Estimate]) -> bool:
    """Accuracy has a table of its own; so has a rule whose mean it is."""
    return name == "accuracy" or (name.startswith("rule ") and metrics[name].value == metrics["accuracy"].value)


def _alike(evaluated: Sequence[Evaluated]) -> list[list[Evaluated]]:
    """Those that compare: a run may hold the same suite with other budgets, rows or samples too."""
    groups: dict[tuple[str, str], list[Evaluated]] = {}
    for one in evaluated:
        groups.setdefault((one.suite, str([one.settings[name] for name in SAME])), []).append(one)
    return list(groups.values())
