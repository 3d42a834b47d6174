"""Evaluates targets on suites: renders, writes, grades, scores; interrupted ones go on, changed settings never mix."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slmgrpo import prompts
from slmgrpo.data import Row
from slmgrpo.errors import PlanError, RecipeError
from slmgrpo.eval import scores, store, suites
from slmgrpo.eval.complete import BATCH_TOKENS, Ask, Problem, Written, complete_within_memory
from slmgrpo.eval.grading import Graded, Grader, label_answers
from slmgrpo.eval.rows import rows_of
from slmgrpo.eval.samples import lines_of
from slmgrpo.eval.targets import Target
from slmgrpo.recipe import Grading, RewardUse, Sampling
from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.pool import Pool
from slmgrpo.rewards.score import grader_version
from slmgrpo.rules import sandbox_in
from slmgrpo.run import sha256


class Watcher(Protocol):
    """Whoever waits: stages, progress over all units, and notes that must be read."""

    def stage(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


class Silent:
    """Watches nothing: for tests and scripts."""

    def stage(self, text: str) -> None: ...

    def progress(self, what: str, done: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True)
class Options:
    """What a command line changes; None: as the suite says."""

    samples: int | None = None
    greedy: bool = False
    """A greedy completion beside the drawn ones."""
    budgets: tuple[int, ...] | None = None
    budgets_as: str = "--budgets {}"
    """How a person gives them."""
    temperature: float | None = None
    seed: int = 0
    limit: int | None = None
    data: Path | None = None
    best_of: str | None = None
    """A rule whose highest value chooses among the drawn samples."""
    fresh: bool = False
    """Remove what an earlier evaluation with other settings left."""
    batch_tokens: int = BATCH_TOKENS
    grading: Grading = field(default_factory=Grading)


@dataclass(frozen=True)
class Unit:
    """One target on one suite, all of it checked; its results go to `folder`."""

    target: Target
    loaded: suites.Loaded
    problems: list[Problem]
    settings: dict[str, Any]
    folder: Path
    ask: Ask

    @property
    def sampling(self) -> Sampling:
        return Sampling(**{name: self.settings[name] for name in ("temperature", "top_p", "top_k", "min_p", "stop")})

    @property
    def grader(self) -> str:
        return grader_version((*self.problems[0].rules, *self.problems[0].also))

    def origin(self, options: Options) -> dict[str, Any]:
        """Where problems and rules came from, for `slmgrpo eval regrade`."""
        return {
            "suite": self.loaded.suite.model_dump(mode="json", by_alias=True),
            "base": str(self.loaded.base.resolve()),
            "data": str(options.data.resolve()) if options.data else None,
        }


def evaluate(
    targets: Sequence[Target], loaded: Sequence[suites.Loaded], options: Options, watcher: Watcher
) -> list[store.Evaluated]:
    """Evaluate every target on every suite, suites in order; targets of one base share the loaded model.

    All that can be refused is refused before the first token is written.
    """
    if options.temperature is not None and not 0 < options.temperature < math.inf:
        raise RecipeError(f"--temperature {options.temperature:g}: more than 0; for greedy completions use --samples 1")
    watcher.stage("reading data")
    read = {}
    for suite in loaded:
        read[suite.name], notes = rows_of(suite, data=options.data, limit=options.limit)
        for note in [*notes, *warnings(suite)]:
            watcher.note(note)
    grading = options.grading
    sandbox_in(grading.sandbox, [rules for suite in loaded for rules in suite.rules()], "--sandbox ")
    groups: dict[Any, list[Target]] = {}
    for target in targets:
        groups.setdefault(str(target.base), []).append(target)
    found: dict[tuple[str, str], store.Evaluated] = {}
    workers = grading.workers or max(1, min(16, os.cpu_count() or 1))
    with Pool(workers, timeout_s=grading.timeout_s, sandbox=grading.sandbox) as pool:
        for group in groups.values():
            found |= {
                (one.suite, one.label): one for one in _evaluate_base(group, loaded, read, options, pool, watcher)
            }
    return [found[suite.name, target.label] for suite in loaded for target in targets]


def _evaluate_base(
    targets: Sequence[Target],
    loaded: Sequence[suites.Loaded],
    read: Mapping[str, list[Row]],
    options: Options,
    pool: Pool,
    watcher: Watcher,
) -> Iterator[store.Evaluated]:
    from slmgrpo.eval.models import Bench
    from slmgrpo.rollout.hf import unfit

    watcher.stage(f"loading {targets[0].base.model.id}")
    bench = Bench(targets[0].base, targets)
    if why := unfit(bench.model.config):
        raise PlanError(f"{targets[0].text}: eval writes with the hf engine, which {why}; use --lm-eval TASKS")
    units = [unit_of(bench, target, suite, read[suite.name], options) for suite in loaded for target in targets]
    for unit in units:
        with writing_to(unit.folder):
            store.open_folder(unit.folder, unit.settings, unit.origin(options), fresh=options.fresh)
    missing = [unit for unit in units if not store.finished(unit.folder)]
    for unit in missing:
        with writing_to(unit.folder):
            (unit.folder / store.PARTIAL).open("a").close()  # what an earlier evaluation opened may be read-only now
    total = sum(len(unit.problems) * (unit.ask.samples + unit.ask.greedy) for unit in missing)
    done = 0
    for unit in units:
        if unit in missing:
            watcher.stage(f"{unit.loaded.name}: {unit.target.label}")
            yield _run(unit, bench, options, pool, watcher, (done, total))
            done += len(unit.problems) * (unit.ask.samples + unit.ask.greedy)
        else:
            saved = store.load(unit.folder, unit.target.label)
            if saved.grader != unit.grader:
                watcher.note(
                    f"{unit.folder}: graded by another version of the rules; `slmgrpo eval regrade {unit.folder}` "
                    "applies the present one"
                )
            yield saved


@contextmanager
def writing_to(folder: Path, advice: str = "use --out for another folder") -> Iterator[None]:
    """What the file system refuses in the block is one message."""
    try:
        yield
    except OSError as error:
        raise RecipeError(f"{folder}: cannot be written ({error.strerror}); {advice}") from None


def unit_of(bench: Any, target: Target, loaded: suites.Loaded, rows: Sequence[Row], options: Options) -> Unit:
    """Render and check. bench: anything with `tokenizer`, `context` (tokens or None) and `dtype`."""
    suite, sampling = loaded.suite, loaded.suite.sampling
    rules, also = loaded.rules()
    if options.best_of:
        also = (*also, chooser(options.best_of, loaded.base))
    rendered = prompts.render_all(rows, suite.prompt, bench.tokenizer)
    problems = [Problem(row, r.ids, r.prefill, rules, also) for row, r in zip(rows, rendered, strict=True)]
    longest = max(len(problem.prompt_ids) for problem in problems)
    budgets = _budgets(loaded, options, longest, bench.context)
    samples = options.samples or sampling.samples
    drawn = samples if samples > 1 or options.temperature is not None else 0
    greedy = options.greedy or not drawn
    chosen = {
        "suite": suite.name,
        "suite_digest": store.digest(
            suite.model_dump(mode="json", exclude={"description", "citation", "verified", "group"})
        ),
        "rows": len(rows),
        "rows_digest": store.digest(
            [[row["id"], row["question"], row.get("answer"), row.get("tests")] for row in rows]
        ),
        "prompts_digest": store.digest([problem.prompt_ids for problem in problems]),
        "first_prompt": rendered[0].text if suite.republish else "",
        "prefill": rendered[0].prefill,
        "examples": len(suite.prompt.examples),
        "samples": drawn,
        "greedy": greedy,
        "budgets": budgets,
        "temperature": options.temperature or sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": sampling.stop,
        "seed": options.seed,
        "best_of": options.best_of,
        "model": target.base.model.id,
        "revision": target.base.model.revision,
        "dtype": bench.dtype,
        "merged": [sha256(folder / "adapter_model.safetensors") for folder in target.base.merged],
        "adapter": sha256(target.adapter / "adapter_model.safetensors") if target.adapter else None,
        "scale": target.scale,
    }
    ask = Ask(drawn, greedy, max(budgets))
    return Unit(target, loaded, problems, chosen, target.home / suite.name, ask)


def chooser(use: str, base: Path) -> Reward:
    """The rule of `--best-of`."""
    rule = Reward.from_use(RewardUse(use=use), base=base)
    if rule.is_correctness:
        raise RecipeError(f"--best-of {use}: a rule on correctness knows the answer; best-of by it is pass@n")
    return Reward(rule.use, 0.0, rule.settings, None, False, scores.BEST_OF, base)


def _budgets(loaded: suites.Loaded, options: Options, longest: int, context: int | None) -> list[int]:
    """Token budgets, ascending; a recipe's own rows take a shorter second one where the context ends."""
    wanted = sorted(set(options.budgets or loaded.suite.sampling.budgets))
    room = None if context is None else context - longest
    if room is not None and wanted[-1] > room:
        if loaded.of_recipe and not options.budgets and room >= wanted[0]:
            return sorted({wanted[0], room})
        advice = f"use {options.budgets_as.format(room)}" if room > 0 else "leave this suite out"
        raise RecipeError(
            f"{loaded.name}: a budget of {wanted[-1]} tokens behind the longest prompt ({longest}) goes beyond the "
            f"model's context of {context}; {advice}"
        )
    return wanted


def warnings(loaded: suites.Loaded) -> Iterator[str]:
    suite = loaded.suite
    if suite.group and not suite.verified:
        yield f"{suite.name}: not verified: no test has graded real rows of it"
    if not suite.republish:
        yield f"{suite.name}: its authors ask not to publish the questions ({suite.licence}); the samples hold no texts"


def _run(
    unit: Unit, bench: Any, options: Options, pool: Pool, watcher: Watcher, position: tuple[int, int]
) -> store.Evaluated:
    """Write what is missing, grade everything, leave scores and samples. position: (done before, of how many)."""
    from slmgrpo.rollout.hf import HfEngine

    settings, started = unit.settings, time.perf_counter()
    grader = Grader(unit.problems, pool, max_error_rate=options.grading.max_error_rate)
    done, total = position
    with store.partial(unit.folder) as (file, saved), bench.turned_into(unit.target) as model:
        for one in saved:
            submit(one, settings["budgets"], bench.tokenizer, grader)
        done += len(saved)
        for one in complete_within_memory(
            unit.problems,
            unit.ask,
            make_engine=lambda tokens: HfEngine(
                model, bench.tokenizer, unit.sampling, settings["seed"], max_batch_tokens=tokens
            ),
            tokenizer=bench.tokenizer,
            note=watcher.note,
            done={one.key for one in saved},
            batch_tokens=options.batch_tokens,
        ):
            file.write(store.completion_line(one))
            file.flush()
            submit(one, settings["budgets"], bench.tokenizer, grader)
            done += 1
            watcher.progress("writing", done, total)
    graded = label_answers(grader.results(watcher.progress), unit.problems, pool)
    return conclude(unit, graded, seconds=time.perf_counter() - started)


def conclude(unit: Unit, graded: Sequence[Graded], *, seconds: float) -> store.Evaluated:
    """Leave scores and samples in the unit's folder. graded: every completion at every budget."""
    if {one.status for one in graded} == {"scored"}:
        rules = ", ".join(rule.use for rule in unit.problems[0].rules)
        raise RecipeError(f"{unit.loaded.name}: none of its rules ({rules}) says right or wrong; mark one @correctness")
    lines = lines_of(graded, unit.problems, questions=unit.loaded.suite.republish)
    took = round(seconds, 2)
    return store.save(unit.target.label, unit.folder, unit.settings, lines, unit.grader, seconds=took)


def submit(one: Written, budgets: Sequence[int], tokenizer: Any, grader: Grader) -> None:
    """Grade a completion as it is and as it would have been at each shorter budget."""
    grader.submit(one)
    for budget in budgets[:-1]:
        if cut := one.cut(budget, tokenizer):
            grader.submit(cut)
