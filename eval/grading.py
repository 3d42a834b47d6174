"""Verdicts on completions by the rules of training, and which answers to a problem are equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from slmgrpo.errors import RunError
from slmgrpo.eval.complete import Problem, Written
from slmgrpo.rewards.base import Reward, Verdict, gated, total
from slmgrpo.rewards.pool import Pool, Task
from slmgrpo.rewards.signals import rule_errors

JUDGED = ("correct", "wrong", "no_answer", "timeout")


@dataclass(frozen=True)
class Graded:
    """A completion with its verdicts, gates applied.

    correct: right by every deciding rule that could judge. status: `correct`, or why it is not.
    read: the answer as the first deciding rule read it. label: equal for equal answers of a problem's samples.
    """

    written: Written
    verdicts: Mapping[str, Verdict]
    correct: bool
    status: str
    reward: float | None
    read: str | None
    label: int | None = None


class Grader:
    """Grades beside generation: `submit` never waits, `results` has everything submitted, in that order."""

    def __init__(self, problems: Sequence[Problem], pool: Pool, *, max_error_rate: float) -> None:
        self._problems = {problem.id: problem for problem in problems}
        self._pool = pool
        self._max_error_rate = max_error_rate
        self._submitted: list[Written] = []

    def submit(self, one: Written) -> None:
        problem = self._problems[one.id]
        task = Task(
            key=len(self._submitted),
            rewards=(*problem.rules, *problem.also),
            prompt=str(problem.row.get("question", "")),
            completion=problem.prefill + one.text,
            completion_ids=one.token_ids,
            columns=problem.row,
        )
        self._submitted.append(one)
        self._pool.submit(task)

    def results(self, progress: Callable[[str, int, int], None] = lambda what, done, total: None) -> list[Graded]:
        graded: list[Graded] = []
        for key, verdicts in self._pool.drain():
            one = self._submitted[key]
            graded.append(_judged(one, self._problems[one.id], verdicts))
            progress("grading", len(graded), len(self._submitted))
        for broken in rule_errors(one.verdicts for one in graded):
            if broken.share > self._max_error_rate:
                raise RunError(
                    f"{broken}; mend the rule or the data and run the same command again: what is written is kept"
                )
        return graded


def _judged(one: Written, problem: Problem, verdicts: Mapping[str, Verdict]) -> Graded:
    settled = gated(verdicts, problem.rules) | {rule.name: verdicts[rule.name] for rule in problem.also}
    statuses = [_decided(rule, settled[rule.name]) for rule in problem.deciding]
    judged = [status for status in statuses if status in JUDGED]
    correct = bool(judged) and all(status == "correct" for status in judged)
    status = "correct" if correct else next(status for status in judged or statuses if status != "correct")
    read = next((settled[rule.name].read for rule in problem.deciding if settled[rule.name].read is not None), None)
    return Graded(one, settled, correct, status, total(verdicts, problem.rules), read)


def _decided(rule: Reward, verdict: Verdict) -> str:
    """The verdict's status; a rule on correctness may also say it by a bare 1 or 0."""
    if rule.is_correctness and verdict.status == "scored":
        return "correct" if verdict.value == 1.0 else "wrong"
    return verdict.status


def label_answers(graded: Sequence[Graded], problems: Sequence[Problem], pool: Pool) -> list[Graded]:
    """Give equal answers among a problem's drawn samples, at all budgets, equal labels; None where none was read.

    Right answers are equal, options are equal as letters, others where the problem's own rule takes one for the gold
    of the other. Rules that read no `answer` (tests of programs) label nothing.
    """
    by_id = {problem.id: problem for problem in problems}
    groups: dict[str, list[int]] = {}
    for place, one in enumerate(graded):
        votes = all("answer" in rule.columns for rule in by_id[one.written.id].deciding)
        if votes and one.read is not None and not one.written.greedy:
            groups.setdefault(one.written.id, []).append(place)
    pairs: dict[tuple[str, str, str], bool] = {}
    for name, places in groups.items():
        if not by_id[name].row.get("choices"):
            wrong = sorted({str(graded[place].read) for place in places if not graded[place].correct})
            pairs |= {(name, a, b): False for a, b in combinations(wrong, 2)}
    tasks = [_equality(by_id[name], a, b, number) for number, (name, a, b) in enumerate(pairs)]
    for pair, verdicts in zip(pairs, pool.grade(tasks), strict=True):
        pairs[pair] = all(verdict.status == "correct" for verdict in verdicts.values())
    labelled = list(graded)
    for name, places in groups.items():
        heads: list[int] = []
        for place in sorted(places, key=lambda place: _order(graded[place].written)):
            one = graded[place]
            same = next((head for head in heads if _same(one, graded[head], name, pairs)), None)
            if same is None:
                heads.append(place)
            label = heads.index(place if same is None else same)
            labelled[place] = replace(one, label=label)
    return labelled


def _order(one: Written) -> tuple[int, int]:
    """Without it labels would depend on which completion was written first."""
    return one.member, one.budget or 0


def _same(one: Graded, other: Graded, name: str, pairs: Mapping[tuple[str, str, str], bool]) -> bool:
    if one.correct or other.correct:
        return one.correct == other.correct
    a, b = sorted((str(one.read), str(other.read)))
    return a == b or pairs.get((name, a, b), False)


def _equality(problem: Problem, gold: str, given: str, number: int) -> Task:
    completion = f"<answer>\\boxed{{{given}}}</answer>"
    columns = {**problem.row, "answer": gold}
    return Task(number, problem.deciding, str(problem.row.get("question", "")), completion, (), columns)
