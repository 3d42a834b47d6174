"""From samples to numbers with intervals: accuracy, pass@k, votes, rates, lengths; scores.json as lm-eval has it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from slmgrpo.errors import RunError
from slmgrpo.eval import stats
from slmgrpo.eval.samples import Sample
from slmgrpo.eval.stats import Estimate

RATES = ("no_answer", "ungradeable", "timeout", "error")
"""Statuses that are shown as rates beside accuracy; all of them count as not correct."""
LOWER_IS_BETTER = ("truncated", "tokens", *RATES)
BEST_OF = "best-of"
"""Name of the rule that chooses for best@n."""


def scores(samples: Sequence[Sample]) -> dict[str, Estimate]:
    """All metrics of one suite at one budget.

    `accuracy` is over the drawn samples where there are any (avg@n), else over the greedy ones; with both, `greedy`
    stands beside it. A single sample a problem gets Wilson's interval, means over samples the bootstrap over problems.
    """
    drawn, greedy = _by_problem(samples, greedy=False), _by_problem(samples, greedy=True)
    main = drawn or greedy
    n = len(main[0])
    found = {"accuracy": _share(main, lambda s: s.correct)}
    if drawn and greedy:
        found["greedy"] = _share(greedy, lambda s: s.correct)
    for k in (2**i for i in range(1, n.bit_length()) if 2**i <= n):
        found[f"pass@{k}"] = stats.mean([stats.pass_at_k(sum(s.correct for s in own), n, k) for own in main])
    if n > 1:
        found |= _over_answers(main, n)
    found["truncated"] = _share(main, lambda s: not s.finished)
    for status in RATES:
        found[status] = _share(main, lambda s, status=status: s.status == status)
    found["accuracy_finished"] = _finished(main)
    found["tokens"] = stats.mean([fmean(s.tokens for s in own) for own in main], share=False)
    for name in main[0][0].values:
        known = [[s.values[name] for s in own if s.values[name] is not None] for own in main]
        tops, bottoms = [math.fsum(v for v in own if v is not None) for own in known], [float(len(o)) for o in known]
        share = all(0 <= top <= bottom for top, bottom in zip(tops, bottoms, strict=True))
        found[f"rule {name}"] = stats.ratio(tops, bottoms, share=share)
    return found


def correct_by_problem(samples: Sequence[Sample]) -> dict[str, float]:
    """id -> share of right samples, over the drawn ones where there are any: what paired comparisons compare."""
    main = _by_problem(samples, greedy=False) or _by_problem(samples, greedy=True)
    return {own[0].id: fmean(s.correct for s in own) for own in main}


def headroom(samples: Sequence[Sample]) -> stats.Difference:
    """How much the best of the drawn samples beats the greedy one: what GRPO could teach."""
    greedy = {own[0].id: float(own[0].correct) for own in _by_problem(samples, greedy=True)}
    return stats.paired(list(greedy.values()), best_by_problem(samples))


def best_by_problem(samples: Sequence[Sample]) -> list[float]:
    """1 where any of a problem's drawn samples is right."""
    return [float(any(s.correct for s in own)) for own in _by_problem(samples, greedy=False)]


def _by_problem(samples: Sequence[Sample], *, greedy: bool) -> list[list[Sample]]:
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.greedy == greedy:
            groups.setdefault(sample.id, []).append(sample)
    sizes = Counter(len(own) for own in groups.values())
    if len(sizes) > 1:
        # Dividing by the number that was asked for would lower every score without a word.
        raise RunError(
            f"samples: problems have {sorted(sizes)} samples each, not the same number; remove samples.jsonl and "
            "evaluate again"
        )
    return list(groups.values())


def _share(groups: Sequence[Sequence[Sample]], what: Callable[[Sample], bool]) -> Estimate:
    return stats.mean([fmean(map(what, own)) for own in groups])


def _finished(groups: Sequence[Sequence[Sample]]) -> Estimate:
    """Accuracy among completions that ended by themselves."""
    right = [sum(s.correct and s.finished for s in own) for own in groups]
    ended = [sum(s.finished for s in own) for own in groups]
    if len(groups[0]) == 1 and sum(ended):
        return stats.mean([float(hit) for hit, over in zip(right, ended, strict=True) if over])
    return stats.ratio(right, ended)


def _over_answers(groups: Sequence[Sequence[Sample]], n: int) -> dict[str, Estimate]:
    """The vote, the best by a rule, and how many different answers there are; each where it has a meaning."""
    found = {}
    if BEST_OF in groups[0][0].values:
        best = [stats.best_of([s.values[BEST_OF] for s in own], [s.correct for s in own]) for own in groups]
        found[f"best@{n}"] = stats.mean(best)
    if any(s.label is not None for own in groups for s in own):
        votes = []
        for own in groups:
            right = {s.label: s.correct for s in own if s.label is not None}
            votes.append(stats.vote([s.label for s in own], right))
        found[f"maj@{n}"] = stats.mean(votes)
        different = [float(len({s.label for s in own if s.label is not None})) for own in groups]
        found["distinct"] = stats.mean(different, share=False)
    else:
        different = [float(len({s.text for s in own})) for own in groups]
        found["distinct_texts"] = stats.mean(different, share=False)
    return found


def as_json(
    suite: str,
    by_budget: Mapping[int, Mapping[str, Estimate]],
    settings: Mapping[str, Any],
    *,
    problems: int,
    model_name: str,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """scores.json. The upper part is what lm-evaluation-harness writes, a token budget in the place of its filter."""
    results: dict[str, Any] = {"alias": suite}
    for budget, metrics in by_budget.items():
        for name, found in metrics.items():
            if not math.isnan(found.value):
                results[f"{name},{budget}"] = found.value
                results[f"{name}_stderr,{budget}"] = "N/A" if math.isnan(found.stderr) else found.stderr
    names = {name for metrics in by_budget.values() for name in metrics}
    return {
        "results": {suite: results},
        "group_subtasks": {suite: []},
        "configs": {suite: {"task": suite, "metadata": dict(settings)}},
        "versions": {suite: settings["suite_digest"]},
        "n-shot": {suite: settings["examples"]},
        "higher_is_better": {suite: {name: name not in LOWER_IS_BETTER for name in sorted(names)}},
        "n-samples": {suite: {"original": problems, "effective": problems}},
        "config": {"model": "slmgrpo", "model_args": model_name, "random_seed": settings["seed"]},
        "model_name": model_name,
        "slmgrpo": {
            "budgets": {str(b): {name: _clean(e) for name, e in m.items()} for b, m in by_budget.items()},
            "problems": problems,
            **extra,
        },
    }


def _clean(found: Estimate) -> dict[str, Any]:
    """Without NaN and infinity, which JSON does not know."""
    return {name: value if math.isfinite(value) else None for name, value in asdict(found).items()}
