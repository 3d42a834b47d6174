"""Verdicts are the same in any process, in any order, under any hash seed, and from the quick path."""

from __future__ import annotations

import random

from test_rewards_math import DIFFERENT, SAME
from test_rewards_mcq import CHOICES, NOT_C, C

from slmgrpo.rewards.base import Reward, Verdict
from slmgrpo.rewards.pool import Pool, Task

MATH = Reward("math.correct", required=True)
MCQ = Reward("mcq.correct", required=True)


def tasks() -> list[Task]:
    pairs = [*SAME, *DIFFERENT, (r"\frac{1}{2004!}", "9^{9^{9^{9}}}"), ("n \\equiv 2 \\pmod 4", "3"), ("", "5")]
    sums = [Task(i, (MATH,), "", f"\\boxed{{{given}}}", (), {"answer": gold}) for i, (gold, given) in enumerate(pairs)]
    row = {"answer": "C", "choices": CHOICES}
    return sums + [Task(1000 + i, (MCQ,), "", reply, (), row) for i, reply in enumerate([*C, *NOT_C])]


def here(task: Task) -> dict[str, Verdict]:
    return {r.name: r.judge(task.prompt, task.completion, task.completion_ids, task.columns) for r in task.rewards}


def test_verdicts_do_not_depend_on_process_order_or_neighbours() -> None:
    every = tasks()
    wanted = {task.key: here(task) for task in every}
    for seed, workers in ((1, 1), (2, 3)):
        shuffled = random.Random(seed).sample(every, len(every))
        with Pool(workers) as pool:
            verdicts = pool.grade(shuffled)
        assert {task.key: said for task, said in zip(shuffled, verdicts, strict=True)} == wanted


def test_a_quick_verdict_is_the_verdict() -> None:
    for task in tasks():
        for reward in task.rewards:
            quick = reward.quick(task.prompt, task.completion, task.completion_ids, task.columns)
            assert quick is None or quick == here(task)[reward.name]
