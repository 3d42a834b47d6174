"""Held-out accuracy during training, by the engine of the policy and the graders of `slmgrpo eval`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from slmgrpo.eval.complete import Ask, Problem, complete
from slmgrpo.eval.grading import Graded, Grader
from slmgrpo.eval.stats import Rate, rate
from slmgrpo.recipe import Recipe
from slmgrpo.rewards.pool import Pool
from slmgrpo.rollout.engine import Engine
from slmgrpo.rollout.groups import Progress, Prompted
from slmgrpo.run import RunDir


@dataclass(frozen=True)
class Heldout:
    """Accuracy per task from one sampled completion a row; length in tokens, entropy in nats a token.

    With accuracy these are the four evaluation signals of 2609.39321. reward: None where no row could be judged;
    entropy: mean -log p of the sampled tokens (signals.sampled_entropy).
    """

    tasks: dict[str, Rate]
    mean_tokens: float
    truncated: float
    reward: float | None
    entropy: float | None

    def as_json(self) -> dict[str, Any]:
        tasks = {task: asdict(value) | {"accuracy": value.value} for task, value in self.tasks.items()}
        return {
            "tasks": tasks,
            "mean_tokens": self.mean_tokens,
            "truncated": self.truncated,
            "reward": self.reward,
            "entropy": self.entropy,
        }


def grade(
    prompts: Sequence[Prompted],
    *,
    engine: Engine,
    pool: Pool,
    tokenizer: Any,
    recipe: Recipe,
    max_error_rate: float,
    progress: Progress,
) -> list[Graded]:
    """Sample once a row with the settings of training, and grade."""
    problems = _problems(prompts)
    grader = Grader(problems, pool, max_error_rate=max_error_rate)
    ask = Ask(samples=1, greedy=False, max_tokens=recipe.sampling.max_tokens)
    for done, one in enumerate(complete(problems, ask, engine=engine, tokenizer=tokenizer), 1):
        grader.submit(one)
        progress("writing", done, len(problems))
    by_id = {one.written.id: one for one in grader.results(progress)}
    return [by_id[problem.id] for problem in problems]


def scores_of(graded: Sequence[Graded], prompts: Sequence[Prompted]) -> Heldout:
    """Accuracy of all rows, each graded once, in the order of the prompts."""
    tasks: dict[str, list[bool]] = {}
    for one, prompt in zip(graded, prompts, strict=True):
        tasks.setdefault(prompt.row["task"], []).append(one.correct)
    tokens = sum(len(one.written.token_ids) for one in graded)
    cut = sum(one.written.finish_reason == "length" for one in graded)
    rates = {task: rate(sum(hits), len(hits)) for task, hits in tasks.items()}
    rewards = [one.reward for one in graded if one.reward is not None]
    log_prob = math.fsum(one.written.log_prob for one in graded)
    return Heldout(
        tasks=rates,
        mean_tokens=tokens / len(graded),
        truncated=cut / len(graded),
        reward=fmean(rewards) if rewards else None,
        entropy=None if math.isnan(log_prob) or not tokens else -log_prob / tokens,
    )


def write(run: RunDir, step: int, scores: Heldout, graded: Sequence[Graded], prompts: Sequence[Prompted]) -> None:
    """eval/step_N/heldout/: samples first, so that scores stand for a whole evaluation."""
    folder = run.eval_dir(step, "heldout")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.jsonl").unlink(missing_ok=True)
    run.append(folder / "samples.jsonl", (_line(*pair) for pair in zip(graded, _problems(prompts), strict=True)))
    run.write_json(str((folder / "scores.json").relative_to(run.path)), scores.as_json())


def _problems(prompts: Sequence[Prompted]) -> list[Problem]:
    return [Problem(p.row, p.prompt_ids, p.prefill, p.rewards) for p in prompts]


def _line(one: Graded, problem: Problem) -> dict[str, Any]:
    return {
        "id": one.written.id,
        "task": problem.row["task"],
        "text": one.written.text,
        "correct": one.correct,
        "verdicts": {name: asdict(verdict) for name, verdict in one.verdicts.items()},
        "tokens": len(one.written.token_ids),
        "finish_reason": one.written.finish_reason,
    }
