"""The recipe's suites on the live policy while it trains, by its own engine: scores, what they cost, the best step."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from slmgrpo.callbacks import Observer
from slmgrpo.data import Row
from slmgrpo.errors import RecipeError
from slmgrpo.eval import store, suites
from slmgrpo.eval.complete import Problem, complete_within_memory
from slmgrpo.eval.evaluate import Options, Unit, conclude, submit, unit_of, warnings
from slmgrpo.eval.grading import Graded, Grader, label_answers
from slmgrpo.eval.rows import rows_of
from slmgrpo.eval.suites import HELDOUT, Loaded
from slmgrpo.eval.targets import Base, Target, merged_of
from slmgrpo.interrupt import Interrupts
from slmgrpo.model import Policy
from slmgrpo.ranks import ALONE, Ranks
from slmgrpo.recipe import Recipe
from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.pool import Pool
from slmgrpo.rollout.engine import Engine
from slmgrpo.run import RunDir


def suites_of(recipe: Recipe, base: Path) -> list[Loaded]:
    """The suites of `eval.suites`, files beside the recipe; refuses what is missing, also an `eval.best`."""
    found: list[Loaded] = []
    for name in recipe.eval.suites:
        path = str(base / name) if name.endswith((".yaml", ".yml")) else name
        try:
            found += suites.find(path)
        except RecipeError as error:
            raise RecipeError(f"eval.suites: {error}") from None
    names = [loaded.name for loaded in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise RecipeError(f"eval.suites: {double} is there twice; name each suite once")
    if recipe.eval.best is not None:
        _check_best(recipe, found)
    return found


def _check_best(recipe: Recipe, found: Sequence[Loaded]) -> None:
    suite, _, metric = str(recipe.eval.best).partition("/")
    known = {loaded.name: recipe.eval.samples or loaded.suite.sampling.samples for loaded in found}
    if recipe.data.heldout:
        known[HELDOUT] = 1
    if suite not in known:
        raise RecipeError(f"eval.best={recipe.eval.best}: {suite} is not evaluated; there are {', '.join(known)}")
    metrics = ["accuracy", *(f"pass@{2**i}" for i in range(1, known[suite].bit_length()) if 2**i <= known[suite])]
    if metric not in metrics:
        raise RecipeError(f"eval.best={recipe.eval.best}: write {suite}/METRIC, one of {', '.join(metrics)}")


@dataclass
class Suites:
    """A recipe's suites with their rows, read before anything is written."""

    recipe: Recipe
    base: Path
    read: list[tuple[Loaded, list[Row]]]
    notes: list[str]
    ranks: Ranks = ALONE
    started: float = field(default_factory=time.perf_counter)
    spent: float = 0.0
    """Seconds of all evaluations since `started`."""

    @classmethod
    def of(cls, recipe: Recipe, base: Path, ranks: Ranks = ALONE) -> Suites:
        made = cls(recipe, base, [], [], ranks)
        for loaded in suites_of(recipe, base):
            rows, notes = rows_of(loaded, limit=recipe.eval.limit)
            made.read.append((loaded, rows))
            made.notes += [*notes, *warnings(loaded)]
        return made

    def rules(self) -> list[tuple[Reward, ...]]:
        return [loaded.rules()[0] for loaded, _ in self.read]

    def check(self, policy: Policy, engine: Engine) -> None:
        """Refuse what does not fit the context."""
        for loaded, rows in self.read:
            self._unit(policy, engine, loaded, rows, Target("", "", Base(self.recipe.model), None, Path()))

    def evaluate(
        self,
        run: RunDir,
        step: int,
        *,
        policy: Policy,
        engine: Engine,
        pool: Pool,
        max_error_rate: float,
        observer: Observer,
        interrupts: Interrupts,
    ) -> dict[str, float]:
        """SUITE/METRIC at this step, at the longest budget; a suite that is whole in the run directory is only read.

        Each rank evaluates its share of the problems, the first one writes.
        """
        found: dict[str, float] = {}
        origin = Base(self.recipe.model, merged_of(run, self.recipe), self.base)
        for loaded, rows in self.read:
            folder = run.eval_dir(step, loaded.name)
            if not self.ranks.gather(store.finished(folder))[0]:
                started = time.perf_counter()
                observer.stage(f"{loaded.name}, step {step}")
                with tempfile.TemporaryDirectory() as scratch:
                    policy.save_adapter(Path(scratch))
                    target = Target("", f"step_{step}", origin, Path(scratch), folder.parent, run=run)
                    unit = self._unit(policy, engine, loaded, rows, target)
                graded: list[Graded] = []
                with self.ranks.together(interrupts):
                    graded = self._graded(
                        unit, self.ranks.own(unit.problems), policy, engine, pool, max_error_rate, observer
                    )
                graded = [one for part in self.ranks.gather(graded) for one in part]
                with self.ranks.together():
                    if self.ranks.first:
                        store.open_folder(folder, unit.settings, unit.origin(self._options()), fresh=True)
                        conclude(unit, graded, seconds=time.perf_counter() - started)
            done = store.load(folder)
            longest = done.by_budget[max(done.by_budget)]
            found |= {f"{loaded.name}/{name}": one.value for name, one in longest.items() if math.isfinite(one.value)}
        return found

    def _graded(
        self,
        unit: Unit,
        problems: Sequence[Problem],
        policy: Policy,
        engine: Engine,
        pool: Pool,
        max_error_rate: float,
        observer: Observer,
    ) -> list[Graded]:
        """Every completion of these problems of the unit, at every budget."""
        grader = Grader(problems, pool, max_error_rate=max_error_rate)
        total = len(problems) * (unit.ask.samples + unit.ask.greedy)
        written = complete_within_memory(
            problems,
            unit.ask,
            make_engine=lambda tokens: engine.under(unit.sampling, unit.settings["seed"], max_batch_tokens=tokens),
            tokenizer=policy.tokenizer,
            note=observer.warn,
        )
        for done, one in enumerate(written, 1):
            submit(one, unit.settings["budgets"], policy.tokenizer, grader)
            observer.progress("writing", done, total)
        return label_answers(grader.results(observer.progress), problems, pool)

    def _unit(self, policy: Policy, engine: Engine, loaded: Loaded, rows: Sequence[Row], target: Target) -> Unit:
        return unit_of(_Live(policy, engine), target, loaded, rows, self._options())

    def _options(self) -> Options:
        wanted = self.recipe.eval
        budgets = None if wanted.budgets is None else tuple(wanted.budgets)
        return Options(samples=wanted.samples, budgets=budgets, budgets_as="eval.budgets=[{}]", limit=wanted.limit)

    def record(
        self, run: RunDir, step: int, metrics: Mapping[str, float], *, seconds: float, save: Callable[[], object]
    ) -> str:
        """One line in evaluations.jsonl, and the step's checkpoint by `save()` where `eval.best` is highest at it.

        metrics: SUITE/METRIC. Returns what a person should read.
        """
        self.spent += seconds
        share = self.spent / (time.perf_counter() - self.started)
        if self.ranks.first and step not in {line["step"] for line in run.lines(run.evaluations)}:
            line = {"step": step, "seconds": round(seconds, 3), "share": round(share, 4), "metrics": dict(metrics)}
            run.append(run.evaluations, [line])
        text = ", ".join(f"{name} {value:.3f}" for name, value in metrics.items() if name.endswith("/accuracy"))
        text = f"step {step}: {text}; {seconds:.1f} s, evaluations take {100 * share:.0f} % of the time"
        if (name := self.recipe.eval.best) is None or step == 0:
            return text
        before = self.ranks.gather(run.best())[0]
        if before is None or before["step"] > step or metrics[name] > before["value"]:
            save()
            if self.ranks.first:
                run.write_json("best.json", {"step": step, "metric": name, "value": metrics[name]})
            text += f"; the best {name} so far"
        return text


class _Live:
    """What `unit_of` asks of a bench, by the policy in training."""

    def __init__(self, policy: Policy, engine: Engine) -> None:
        self.tokenizer = policy.tokenizer
        self.dtype = str(next(policy.model.parameters()).dtype).removeprefix("torch.")
        self.context = engine.context


def heldout_metrics(scores: Mapping[str, Any] | None) -> dict[str, float]:
    """`heldout/accuracy`, the mean over tasks. scores: as eval/step_N/heldout/scores.json has them."""
    if scores is None:
        return {}
    return {f"{HELDOUT}/accuracy": fmean(task["accuracy"] for task in scores["tasks"].values())}
