"""What a step leaves behind, from hand-made groups."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slmgrpo.callbacks import FormWatch, rollout_metrics, sample_lines, step_metrics
from slmgrpo.rewards.base import Reward, Verdict
from slmgrpo.rollout.engine import Completion
from slmgrpo.rollout.groups import Group, Member, Prompted
from slmgrpo.run import Clock

RULES = (Reward("math.correct", required=True), Reward("format.boxed_once", weight=0.25))


def group(task: str, *right: bool | None, form: float = 1.0) -> Group:
    members = []
    for i, correct in enumerate(right):
        value = None if correct is None else float(correct)
        status = "ungradeable" if correct is None else "correct" if correct else "wrong"
        verdicts = {
            "math.correct": Verdict(value, status, read="7"),
            "format.boxed_once": Verdict(form),
        }
        completion = Completion(0, i, (5, 6, 7 + i), (-0.1, -0.2, -0.3), "length" if i == 0 else "stop")
        members.append(Member(completion, "text", verdicts, None if value is None else value + 0.25 * form))
    row = {"id": f"{task}:1", "task": task, "question": "?"}
    return Group(Prompted(row, (1, 2), "", RULES), tuple(members))


def test_a_step_counts_accuracy_statuses_and_shares_per_task() -> None:
    groups = [group("math", True, False, None, False), group("science", False, False, False, False)]
    rollout = rollout_metrics(groups, [[1.0, -1.0, 0.0, -1.0], [0.0] * 4], lambda token: "mark")
    line = step_metrics(3, rollout, {"loss": 0.5}, Clock(), trained=4, dropped=4)
    assert line["accuracy"] == {"math": 0.25, "science": 0.0}
    assert line["statuses"]["math.correct"] == {"correct": 1, "ungradeable": 1, "wrong": 6}
    assert line["rules"] == {"format.boxed_once": 1.0, "math.correct": 1 / 7}
    assert line["correctness_share"] == {"math": 1.0, "science": None}
    assert (line["unjudged"], line["silent"], line["truncated"]) == (1 / 8, 0.5, 0.25)
    assert (line["length"], line["tokens"], line["loss"]) == (3.0, 24, 0.5)
    assert line["pass_histogram"] == [1, 0, 1, 0, 0, 0]
    assert line["entropy"] == pytest.approx(0.2) and line["entropy_by_class"] == {"mark": pytest.approx(0.2)}


def test_a_timeline_keeps_what_is_named_and_the_rest_is_other() -> None:
    clock, rollout = Clock(), rollout_metrics([group("math", True)], [[0.0]])
    clock.start -= 10
    clock.stages |= {"generation": 4.0, "reward_wait": 1.0, "other": 2.0}
    line = step_metrics(1, rollout, {}, clock, trained=0, dropped=1, trunk_tokens=0)
    assert line["seconds"]["generation"] == 4
    assert line["seconds"]["other"] == pytest.approx(5, abs=0.1)
    assert (line["trunk_tokens"], line["packing_efficiency"]) == (0, None)
    line = step_metrics(1, rollout, {}, clock, trained=1, dropped=0, trunk_tokens=30, padded_tokens=40)
    assert line["packing_efficiency"] == 0.75


def test_right_programs_that_hold_the_expected_values_are_counted() -> None:
    rows = group("code", True, True, False, True)
    tests = ["assert f(3) == 107", "assert f(4) == 208"]
    texts = (
        "return {3: 107, 4: 208}[x]",
        "return x * 101 - 196",
        "return [107, 208][x]",
        "return 107 if x < 4 else 208",
    )
    members = tuple(
        replace(member, text=f"```python\ndef f(x):\n    {text}\n```")
        for member, text in zip(rows.members, texts, strict=True)
    )
    prompted = replace(rows.prompted, row=rows.prompted.row | {"tests": tests, "entry_point": "f"})
    line = rollout_metrics([Group(prompted, members)], [[0.0] * 4])
    assert line["hard_coded"] == 2 / 3


def test_samples_say_what_was_read_and_what_each_rule_gave() -> None:
    first, second = sample_lines(3, [group("math", True, False)], [[0.7, -0.7]])
    assert first["values"] == {"math.correct": 1.0, "format.boxed_once": 1.0}
    assert first["read"] == {"math.correct": "7"}
    assert (second["advantage"], second["finish_reason"], second["step"]) == (-0.7, "stop", 3)


def test_form_that_is_learnt_while_answers_stay_wrong_is_warned_of_once() -> None:
    watch = FormWatch()
    warnings = [text for _ in range(60) for text in watch.see([group("math", True, False, False, False)])]
    assert len(warnings) == 1
    assert warnings[0].startswith("format.boxed_once: form is learnt")


def test_no_warning_where_answers_get_better_too() -> None:
    watch = FormWatch()
    for step in range(60):
        right = [i < step / 7.5 for i in range(8)]
        assert watch.see([group("math", *right)]) == []
