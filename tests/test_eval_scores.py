"""From samples to scores and tables: metrics on samples made by hand, cut budgets, votes by the real graders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slmgrpo.errors import RecipeError, RunError
from slmgrpo.eval import scores, table
from slmgrpo.eval.compare import SAME
from slmgrpo.eval.complete import Problem, Written
from slmgrpo.eval.grading import Grader, label_answers
from slmgrpo.eval.samples import Sample, at_budget, lines_of, read_lines, written_of
from slmgrpo.eval.store import Evaluated
from slmgrpo.recipe import RewardUse
from slmgrpo.rewards.base import Reward, Verdict, correctness
from slmgrpo.rewards.pool import Pool

SAMPLE = Sample("p0", 0, False, "", 10, True, False, "wrong", "1", 0, 0.0, {"rule": 0.0})


def samples_of(table: list[str], **changed: Any) -> list[Sample]:
    """One problem a word: + right, - wrong, n no answer, t truncated and wrong."""
    status = {"+": "correct", "-": "wrong", "n": "no_answer", "t": "wrong"}
    return [
        replace(
            SAMPLE,
            id=f"p{i}",
            member=member,
            correct=sign == "+",
            status=status[sign],
            finished=sign != "t",
            label={"+": 0, "-": 1, "n": None, "t": 2}[sign],
            **changed,
        )
        for i, word in enumerate(table)
        for member, sign in enumerate(word)
    ]


def test_accuracy_pass_at_k_and_votes_are_means_over_problems() -> None:
    found = scores.scores(samples_of(["++--", "+---", "----", "++++"]))
    assert found["accuracy"].value == pytest.approx((2 + 1 + 0 + 4) / 16)
    assert found["pass@2"].value == pytest.approx((5 / 6 + 1 / 2 + 0 + 1) / 4)
    assert found["pass@4"].value == pytest.approx(3 / 4)
    assert found["maj@4"].value == pytest.approx((0.5 + 0 + 0 + 1) / 4)
    assert found["distinct"].value == pytest.approx((2 + 2 + 1 + 1) / 4)


def test_single_samples_have_wilson_intervals_and_no_pass_at_k() -> None:
    found = scores.scores(samples_of(["+", "-", "n", "t"]))
    assert found["accuracy"].value == 0.25
    assert (round(found["accuracy"].low, 3), round(found["accuracy"].high, 3)) == (0.046, 0.699)
    assert found["no_answer"].value == found["truncated"].value == 0.25
    assert found["accuracy_finished"].value == pytest.approx(1 / 3)
    assert not [name for name in found if "@" in name]


def test_greedy_stands_beside_the_drawn_samples() -> None:
    drawn = samples_of(["+-", "--"])
    greedy = [replace(sample, greedy=True, correct=True) for sample in samples_of(["+", "-"])]
    found = scores.scores([*drawn, *greedy])
    assert found["accuracy"].value == 0.25
    assert found["greedy"].value == 1.0
    assert scores.correct_by_problem([*drawn, *greedy]) == {"p0": 0.5, "p1": 0.0}


def test_headroom_is_what_the_best_of_k_beats_the_greedy_one_by() -> None:
    drawn, greedy = samples_of(["+-", "--", "-+"]), samples_of(["-", "-", "+"])
    gap = scores.headroom([*drawn, *(replace(sample, greedy=True) for sample in greedy)])
    assert gap.value == pytest.approx(1 / 3)
    assert (gap.wins, gap.losses) == (1, 0)


def test_best_of_n_takes_the_sample_that_its_rule_likes_most() -> None:
    samples = samples_of(["+-", "-+"])
    chosen = [replace(s, values={"rule": float(s.correct), scores.BEST_OF: float(s.member == 0)}) for s in samples]
    found = scores.scores(chosen)
    assert found["best@2"].value == 0.5


def test_missing_samples_are_an_error_not_a_smaller_denominator() -> None:
    with pytest.raises(RunError, match="not the same number"):
        scores.scores(samples_of(["++", "+"]))


def evaluated(label: str, budgets: list[int], words: list[str]) -> Evaluated:
    settings = dict.fromkeys(SAME, "") | {"budgets": budgets, "rows": len(words), "samples": 0, "greedy": True}
    by_budget = {budget: scores.scores(samples_of(words)) for budget in budgets}
    return Evaluated(label, "s", Path(label), settings, [{"gold": "7"}], by_budget, "")


@pytest.mark.parametrize("order", [["silent", "other"], ["other", "silent"]])
def test_a_model_without_a_readable_answer_stands_beside_one_with_answers(order: list[str]) -> None:
    both = {"silent": evaluated("silent", [32], ["nn", "nn"]), "other": evaluated("other", [32], ["+-", "--"])}
    [(_, found)] = table.details([both[name] for name in order])
    cells = {row[0]: dict(zip(found[0][1:], row[1:], strict=True)) for row in found[1:]}
    assert cells["maj@2"]["silent"] == "-" and cells["maj@2"]["other"].startswith("25.0 ")
    assert cells["distinct"]["silent"] == "-" and cells["distinct"]["other"].startswith("1.50 ")
    assert cells["distinct texts"]["silent"].startswith("1.00 ") and cells["distinct texts"]["other"] == "-"


def test_what_was_not_evaluated_alike_gets_tables_of_its_own() -> None:
    both = [evaluated("long", [32, 128], ["+", "-"]), evaluated("short", [32, 99], ["+", "-", "+"])]
    found = list(table.main_table(both, []))
    assert [title.partition(" problems")[0] for title, _ in found] == ["s: 2", "s: 3"]
    assert [[row[:2] for row in rows[1:]] for _, rows in found] == [
        [["32", "long"], ["128", "long"]],
        [["32", "short"], ["99", "short"]],
    ]
    assert [title[:10] for title, _ in table.details(both)] == ["s at 128 t", "s at 99 to"]
    assert len(list(table.notes(both, []))) == 1


def test_scores_json_has_the_shape_of_lm_eval(tmp_path) -> None:
    settings = {"suite_digest": "abc", "examples": 0, "seed": 0, "adapter": None, "scale": 1.0, "model": "m"}
    by_budget = {n: scores.scores(samples_of(["+-", "--", "++"])) for n in (32, 96)}
    value = scores.as_json("gsm8k", by_budget, settings, problems=3, model_name="m", extra={})
    value = json.loads(json.dumps(value, allow_nan=False))
    assert value["results"]["gsm8k"]["accuracy,96"] == 0.5
    assert value["results"]["gsm8k"]["accuracy_stderr,96"] > 0
    assert value["higher_is_better"]["gsm8k"]["truncated"] is False
    utils = pytest.importorskip("lm_eval.utils", reason="lm-evaluation-harness is not installed")
    table = utils.make_table(value)
    assert "gsm8k" in table and "accuracy" in table and "96" in table


def _problem(rule: str, row: dict[str, Any]) -> Problem:
    return Problem({"id": "p", "question": "?", **row}, (1,), "", (Reward.from_use(RewardUse(use=rule)),))


def _graded(problem: Problem, texts: list[str]):
    with Pool(1, timeout_s=10.0, sandbox="best") as pool:
        grader = Grader([problem], pool, max_error_rate=0.0)
        for member, text in enumerate(texts):
            grader.submit(Written("p", member, False, (1, 2, 3), text, "stop"))
        return label_answers(grader.results(), [problem], pool)


def test_equal_answers_vote_together_however_they_are_written() -> None:
    problem = _problem("math.correct", {"answer": "\\frac{3}{4}"})
    texts = [r"\boxed{0.75}", r"\boxed{3/4}", r"\boxed{1/2}", r"\boxed{0.5}", r"\boxed{\frac12}", r"\boxed{7}", "none"]
    found = _graded(problem, texts)
    labels = [one.label for one in found]
    assert [one.correct for one in found] == [True, True, False, False, False, False, False]
    assert labels[0] == labels[1]
    assert labels[2] == labels[3] == labels[4]
    assert len(set(labels)) == 4
    assert labels[-1] is None


def test_answers_that_differ_never_share_a_label_between_budgets() -> None:
    problem = _problem("math.correct", {"answer": "4"})
    whole = [Written("p", member, False, (1, 2, 3), text, "stop") for member, text in enumerate([r"\boxed{7}"] * 2)]
    whole.append(Written("p", 2, False, (1, 2, 3), r"\boxed{5}", "stop"))
    cut = replace(whole[2], token_ids=(1, 2), text=r"\boxed{4}", finish_reason="length", budget=2)
    with Pool(1, timeout_s=10.0, sandbox="best") as pool:
        grader = Grader([problem], pool, max_error_rate=0.0)
        for one in (*whole, cut):
            grader.submit(one)
        lines = lines_of(label_answers(grader.results(), [problem], pool), [problem], questions=True)
    found = scores.scores(at_budget(lines, 2))
    assert (found["maj@3"].value, found["distinct"].value) == (0.0, 2.0)


def test_options_vote_as_letters_and_programs_do_not_vote() -> None:
    letters = _graded(
        _problem("mcq.correct", {"answer": "B", "choices": ["x", "y", "z"]}), [r"\boxed{A}", r"\boxed{C}"]
    )
    assert letters[0].label != letters[1].label
    program = "```python\ndef f(x): return x\n```"
    code = _graded(_problem("code.passes_tests", {"tests": ["assert f(2) == 2"], "entry_point": "f"}), [program])
    assert code[0].correct
    assert code[0].label is None


@correctness
def bare(completion: str) -> float:
    return float("yes" in completion)


def test_a_rule_on_correctness_may_answer_with_a_bare_number() -> None:
    from slmgrpo.eval.grading import _judged

    problem = _problem(f"{__name__}:bare", {})
    one = Written("p", 0, False, (1,), "yes", "stop")
    right, wrong = (_judged(one, problem, {problem.rules[0].name: Verdict(value)}) for value in (1.0, 0.5))
    assert (right.status, wrong.status) == ("correct", "wrong")


def test_lines_give_back_every_budget_and_can_be_graded_again() -> None:
    class Letters:
        def decode(self, ids: Any, skip_special_tokens: bool) -> str:
            return "".join(chr(i) for i in ids)

    text = r"so \boxed{5} no \boxed{4}"
    whole = Written("p", 0, False, tuple(map(ord, text)), text, "stop")
    cut = whole.cut(12, Letters())
    assert cut is not None and cut.text == r"so \boxed{5}"
    assert whole.cut(len(text), Letters()) is None
    problem = _problem("math.correct", {"answer": "4"})
    with Pool(1) as pool:
        grader = Grader([problem], pool, max_error_rate=0.0)
        grader.submit(whole)
        grader.submit(cut)
        lines = lines_of(grader.results(), [problem], questions=True)
    short, long = at_budget(lines, 12)[0], at_budget(lines, 99)[0]
    assert (short.read, short.correct, short.finished, short.tokens) == ("5", False, False, 12)
    assert (long.read, long.correct, long.finished, long.tokens) == ("4", True, True, len(text))
    assert written_of(lines) == [whole, cut]
    hidden = lines_of(grader_results(problem, whole), [problem], questions=False)[0]
    assert "question" not in hidden and hidden["text"] == "" and hidden["token_ids"] == []


def grader_results(problem: Problem, one: Written):
    with Pool(1) as pool:
        grader = Grader([problem], pool, max_error_rate=0.0)
        grader.submit(one)
        return grader.results()


def test_a_half_line_at_the_end_is_left_out_and_a_broken_one_in_the_middle_named(tmp_path) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text('{"a": 1}\n{"a": ')
    assert read_lines(file) == [{"a": 1}]
    file.write_text('{"a": 1}\n{"a": \n{"a": 2}\n')
    with pytest.raises(RecipeError, match=r"samples\.jsonl:2: not JSON"):
        read_lines(file)


def broken(completion: str, answer: str) -> float:
    raise ZeroDivisionError("my mistake")


def test_a_rule_that_fails_too_often_stops_the_evaluation() -> None:
    with pytest.raises(RunError, match=r"broken failed on 1 of 1 completions \(first: .*my mistake"):
        _graded(_problem(f"{__name__}:broken", {"answer": "1"}), ["x"])
