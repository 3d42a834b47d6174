"""Do the rules pay the data's own answers in full, and nothing as much for an empty or a wrong one?"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slmgrpo.data import Row
from slmgrpo.prompts import parts
from slmgrpo.rewards.base import Reward, Verdict, total
from slmgrpo.rewards.pool import Pool, Task

BOX, FENCE = ("\\boxed{", "}"), ("```python\n", "\n```")
WRAPS = (BOX, FENCE, ("<answer>", "</answer>"), ("<answer>\\boxed{", "}</answer>"), ("", ""))
"""Ways of giving an answer that are tried, the first of the equally good ones wins."""
TRIED_ROWS = 3
THOUGHT = "Let me see."
MOST_WORDS = 6
"""Words of prose in an answer to a question of mathematics."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a completion is written around an answer: a thought or none, then the answer in its wrapping."""

    before: str
    after: str

    def __call__(self, answer: str) -> str:
        return f"{self.before}{answer}{self.after}"


@dataclass(frozen=True, slots=True)
class Miss:
    """A row that was not paid as it should be: the rule and its reason."""

    row_id: str
    rule: str
    why: str


@dataclass(frozen=True)
class GoldReport:
    """One source's gold answers under its rules.

    part: train or held-out; rows: all that the source has.
    graded: rows of the sample that have a gold answer; full: those whose gold gets full marks; short, ungradeable:
    those whose gold does not, or cannot be judged; without: rows with no answer to write (code without a solution).
    empty_paid, wrong_paid: rows where an emptied or corrupted completion earns as much as the gold.
    solutions: rows whose answer is a whole solution: it equals itself, but no model will box it.
    """

    source: str
    part: str
    rules: tuple[str, ...]
    rows: int
    example: str
    """A gold completion as it was graded."""
    graded: int
    full: int
    short: tuple[Miss, ...]
    ungradeable: tuple[Miss, ...]
    empty_paid: tuple[str, ...]
    wrong_paid: tuple[str, ...]
    solutions: tuple[str, ...]
    without: int
    errors: tuple[Miss, ...]
    """Rules that raised."""

    @property
    def where(self) -> str:
        """The source as sentences name it: the same file may be cut into training and held-out rows."""
        return self.source if self.part == "train" else f"{self.source} ({self.part})"

    def findings(self, tolerated: float) -> tuple[list[str], list[str]]:
        """(problems, warnings) in sentences; a warning is what at most this share of the rows has."""
        problems, warnings = [], []
        for rows, what in (
            (self.errors, "make a rule fail"),
            (self.short, "have a gold answer without full marks"),
            (self.ungradeable, "have a gold answer that cannot be judged (their groups learn nothing)"),
            (self.empty_paid, "pay an empty completion as much as the gold answer"),
            (self.wrong_paid, "pay a wrong completion as much as the gold answer"),
            (self.solutions, "have a whole solution for an answer (set `extract: gsm8k` or `boxed`)"),
        ):
            if not rows:
                continue
            first = rows[0]
            example = first if isinstance(first, str) else f"{first.row_id}: {first.rule} says: {first.why}"
            serious = rows is self.errors or len(rows) > tolerated * self.graded
            (problems if serious else warnings).append(
                f"{self.where}: {len(rows)} of {self.graded} rows {what}, as {example}"
            )
        return problems, warnings

    @property
    def unchecked(self) -> list[str]:
        if not self.without:
            return []
        return [f"{self.where}: {self.without} rows have no solution to grade; tests without one stay unchecked"]


def gold_answer(row: Mapping[str, Any], rules: Sequence[Reward]) -> str | None:
    """What a right completion says: the solution for rules on code, else the answer; None where the row has none."""
    if not _on_code(rules):
        return None if row.get("answer") is None else str(row["answer"])
    for name in ("canonical_solution", "solution", "code", "answer"):
        code = row.get(name)
        if isinstance(code, str) and code.strip():
            names = rf"(?m)^(?:async +def|def|class) +{re.escape(str(row.get('entry_point')))}\b"
            body = not re.search(names, code) and re.search(names, row["question"])
            return f"{row['question']}{code}" if body else code  # HumanEval's solutions go on where the question ends
    return None


def gold_completion(row: Mapping[str, Any], rules: Sequence[Reward], form: Form | None = None) -> str | None:
    """A completion that should get full marks: the answer in a box, or the solution in a code block."""
    answer = gold_answer(row, rules)
    if answer is None:
        return None
    return (form or Form(*(FENCE if _on_code(rules) else BOX)))(answer)


def wrong_answer(row: Row, rules: Sequence[Reward], others: Sequence[Row]) -> str | None:
    """A wrong answer of the same kind: the next letter, one more, another's answer, a function that does nothing."""
    if _on_code(rules):
        entry = row.get("entry_point")
        return f"def {entry}(*args, **kwargs):\n    return None" if entry else "pass"
    answer = str(row["answer"])
    if row.get("choices"):
        place = ord(answer) - ord("A")
        return chr(ord("A") + (place + 1) % len(row["choices"]))
    if re.fullmatch(r"-?\d{1,18}", answer):
        return str(int(answer) + 1)
    return next((str(other["answer"]) for other in others if other.get("answer") not in (None, row["answer"])), None)


def check_golds(
    source: str,
    rows: Sequence[Row],
    rules: Sequence[Reward],
    pool: Pool,
    prefill: str,
    tokenizer: Any,
    *,
    part: str,
    most: int,
) -> GoldReport:
    """Grade gold, emptied and corrupted completions of up to `most` rows, evenly over the source."""
    chosen = [rows[place * len(rows) // min(most, len(rows))] for place in range(min(most, len(rows)))]
    with_gold = [row for row in chosen if gold_answer(row, rules) is not None]
    grade = _grader(rules, pool, prefill, tokenizer)
    form = _best_form(with_gold[:TRIED_ROWS], rules, prefill, grade)
    golds = grade([(row, form(gold_answer(row, rules) or "")) for row in with_gold])
    empties = grade([(row, form("")) for row in with_gold])
    wrong = [(row, answer) for row in with_gold if (answer := wrong_answer(row, rules, with_gold)) is not None]
    wrongs = dict(
        zip((row["id"] for row, _ in wrong), grade([(row, form(answer)) for row, answer in wrong]), strict=True)
    )
    short, ungradeable, errors, empty_paid, wrong_paid = [], [], [], [], []
    full = 0
    for row, gold, empty in zip(with_gold, golds, empties, strict=True):
        errors += [Miss(row["id"], name, v.why) for name, v in gold.items() if v.status == "error"]
        best = total(gold, rules)
        misses = [Miss(row["id"], r.name, gold[r.name].why or gold[r.name].status) for r in _missed(gold, rules)]
        if best is None:
            judged = [Miss(row["id"], r.name, gold[r.name].why) for r in rules if gold[r.name].value is None]
            ungradeable += judged[:1]
            continue
        if misses:
            short += misses[:1]
            continue
        full += 1
        for verdicts, paid in ((empty, empty_paid), (wrongs.get(row["id"]), wrong_paid)):
            value = None if verdicts is None else total(verdicts, rules)
            if value is not None and value >= best:
                paid.append(row["id"])
    return GoldReport(
        source=source,
        part=part,
        rules=tuple(rule.name for rule in rules),
        rows=len(rows),
        example=prefill + form(gold_answer(with_gold[0], rules) or "") if with_gold else "",
        graded=len(with_gold),
        full=full,
        short=tuple(short),
        ungradeable=tuple(ungradeable),
        empty_paid=tuple(empty_paid),
        wrong_paid=tuple(wrong_paid),
        solutions=tuple(row["id"] for row in with_gold if _is_solution(row, rules)),
        without=len(chosen) - len(with_gold),
        errors=tuple(errors),
    )


Grade = Callable[[Sequence[tuple[Row, str]]], list[dict[str, Verdict]]]


def _grader(rules: Sequence[Reward], pool: Pool, prefill: str, tokenizer: Any) -> Grade:
    def grade(pairs: Sequence[tuple[Row, str]]) -> list[dict[str, Verdict]]:
        texts = [text for _, text in pairs]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"] if tokenizer and texts else [()] * len(texts)
        return pool.grade(
            [
                Task(key, tuple(rules), row["question"], prefill + text, tuple(own), row)
                for key, ((row, text), own) in enumerate(zip(pairs, ids, strict=True))
            ]
        )

    return grade


def _best_form(rows: Sequence[Row], rules: Sequence[Reward], prefill: str, grade: Grade) -> Form:
    """The form whose golds are paid best: a rule of the user's own, or one for format, may want tags or a thought."""
    close = f"{THOUGHT}\n</think>\n\n"
    thoughts = ("", f"<think>\n{close}") if parts("", prefill).closed else (close,)
    wraps = sorted(WRAPS, key=lambda wrap: wrap != (FENCE if _on_code(rules) else BOX))
    forms = [Form(thought + before, after) for before, after in wraps for thought in thoughts]
    graded = iter(grade([(row, form(gold_answer(row, rules) or "")) for form in forms for row in rows]))
    worth = []
    for _ in forms:
        verdicts = [next(graded) for _ in rows]
        worth.append((sum(not _missed(v, rules) for v in verdicts), sum(total(v, rules) or 0.0 for v in verdicts)))
    return forms[worth.index(max(worth))]


def _missed(verdicts: Mapping[str, Verdict], rules: Sequence[Reward]) -> list[Reward]:
    """Rules that decide (the required ones, else all that pay) and did not pay in full."""
    deciding = [rule for rule in rules if rule.required] or [rule for rule in rules if rule.weight > 0]
    values = [(rule, verdicts[rule.name].value) for rule in deciding]
    return [rule for rule, value in values if value is None or value < rule.bounds.high]


def _is_solution(row: Row, rules: Sequence[Reward]) -> bool:
    if not any(rule.use.startswith("math.") and rule.is_correctness for rule in rules):
        return False
    answer = str(row["answer"])
    prose = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", answer)
    return "####" in answer or "\\boxed" in answer or len(prose) > MOST_WORDS


def _on_code(rules: Sequence[Reward]) -> bool:
    return any("tests" in rule.columns for rule in rules)
