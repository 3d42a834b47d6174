"""Accuracy of the policy on rows it is not trained on, by the engine and graders of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slmgrpo.rewards.pool import Pool

from slmgrpo.eval.stats import Rate, rate
from slmgrpo.recipe import Recipe
from slmgrpo.rollout.engine import Engine
from slmgrpo.rollout.groups import Group, Progress, Prompted, generate_and_grade
from slmgrpo.run import Clock, RunDir

HELDOUT_KEY = 2**31 - 1
"""The step that keys the sampling noise: the same before and after training, so that runs compare."""


@dataclass(frozen=True)
class Heldout:
    """Accuracy per task, one sampled completion a row, and the mean length in tokens."""

    tasks: dict[str, Rate]
    mean_tokens: float
    truncated: float

    def as_json(self) -> dict[str, Any]:
        tasks = {task: asdict(value) | {"accuracy": value.value} for task, value in self.tasks.items()}
        return {"tasks": tasks, "mean_tokens": self.mean_tokens, "truncated": self.truncated}


def heldout(
    prompts: Sequence[Prompted],
    *,
    engine: Engine,
    pool: Pool,
    tokenizer: Any,
    recipe: Recipe,
    run: RunDir,
    step: int,
    progress: Progress,
) -> Heldout:
    """Sample once a row with the settings of training, grade, and write eval/step_N/heldout/."""
    groups = generate_and_grade(
        prompts,
        engine=engine,
        pool=pool,
        tokenizer=tokenizer,
        recipe=recipe,
        step=HELDOUT_KEY,
        group_size=1,
        clock=Clock(),
        progress=progress,
    )
    scores = _scores(groups)
    folder = run.eval_dir(step, "heldout")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "samples.jsonl").unlink(missing_ok=True)
    run.append(folder / "samples.jsonl", (_sample(group) for group in groups))
    run.write_json(str((folder / "scores.json").relative_to(run.path)), scores.as_json())
    return scores


def _scores(groups: Sequence[Group]) -> Heldout:
    members = [(group.prompted.row["task"], group.members[0]) for group in groups]
    tasks = {}
    for task in dict.fromkeys(task for task, _ in members):
        hits = [member.correct for name, member in members if name == task]
        tasks[task] = rate(sum(hits), len(hits))
    tokens = sum(len(member.completion.token_ids) for _, member in members)
    cut = sum(member.completion.finish_reason == "length" for _, member in members)
    return Heldout(tasks, tokens / len(members), cut / len(members))


def _sample(group: Group) -> dict[str, Any]:
    member = group.members[0]
    return {
        "id": group.prompted.row["id"],
        "task": group.prompted.row["task"],
        "text": member.text,
        "correct": member.correct,
        "verdicts": {name: asdict(verdict) for name, verdict in member.verdicts.items()},
        "tokens": len(member.completion.token_ids),
        "finish_reason": member.completion.finish_reason,
    }
