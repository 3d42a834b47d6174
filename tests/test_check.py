from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import CHATML, tokenizer_with
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from slmgrpo.check import Report, check
from slmgrpo.errors import RecipeError
from slmgrpo.gold_check import gold_completion, wrong_answer
from slmgrpo.overlap import overlap, repeated, words
from slmgrpo.recipe_load import load
from slmgrpo.rewards.base import Reward, load_rewards
from slmgrpo.view import check_report

SUMS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(40)]
PLANETS = ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")
LETTERS = [
    {"question": f"Which is number {n}?", "choices": list(PLANETS[:4]), "answer": "ABCD"[n % 4]} for n in range(20)
]
CODE = [
    {
        "question": f"Write add_{n}(x) that adds {n}.",
        "tests": [f"assert add_{n}(1) == {n + 1}", f"assert add_{n}(-1) == {n - 1}"],
        "entry_point": f"add_{n}",
        "canonical_solution": f"def add_{n}(x):\n    return x + {n}",
    }
    for n in range(3)
]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def checked(folder: Path, recipe: str, *, template: str | None = CHATML, **files: list[dict[str, Any]]) -> Report:
    """Write a recipe and its data files, and check it with a byte tokenizer."""
    for name, rows in files.items():
        write_rows(folder / f"{name}.jsonl", rows)
    path = folder / "mine.yaml"
    path.write_text("model: tiny\ntrain: {steps: 5, prompts_per_step: 2}\ngrading: {sandbox: best}\n" + recipe)
    return check(load(path), tokenizer_with(template), graded_rows=20)


MATH = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: math.correct}]\n"
WITH_HELDOUT = (
    "data: {train: [{source: 'file:train.jsonl'}], heldout: [{source: 'file:test.jsonl'}]}\n"
    "rewards: [{use: math.correct}]\n"
)


def rules(*uses: str) -> tuple[Reward, ...]:
    from slmgrpo.recipe import RewardUse

    return load_rewards([RewardUse(use=use) for use in uses])


def test_a_sound_recipe_has_no_problems(tmp_path: Path) -> None:
    report = checked(tmp_path, WITH_HELDOUT, train=SUMS[:30], test=SUMS[30:])
    assert (report.problems, report.warnings, report.unchecked) == ((), (), ())
    assert (report.train_rows, report.heldout_rows, report.plan.steps) == (30, 10, 5)
    assert [(gold.graded, gold.full) for gold in report.golds] == [(20, 20), (10, 10)]
    assert report.golds[0].example == "\\boxed{0}"
    assert len(report.prompts) == 3
    assert report.prompts[0] == "<|im_start|>user\nWhat is 0 + 0?<|im_end|>\n<|im_start|>assistant\n"
    assert report.lengths is not None
    assert sum(count for _, count in report.lengths.histogram) == 30
    assert report.ok


def test_every_domain_is_graded_by_its_own_rules(tmp_path: Path) -> None:
    recipe = (
        "data:\n  train:\n"
        "    - {source: 'file:sums.jsonl', rewards: [{use: math.correct}]}\n"
        "    - {source: 'file:letters.jsonl', rewards: [{use: mcq.correct}]}\n"
        "    - {source: 'file:code.jsonl', rewards: [{use: code.passes_tests}]}\n"
    )
    report = checked(tmp_path, recipe, sums=SUMS, letters=LETTERS, code=CODE)
    assert report.problems == ()
    assert [gold.full for gold in report.golds] == [20, 20, 3]
    assert [gold.example.split("\n")[0] for gold in report.golds] == ["\\boxed{0}", "\\boxed{A}", "```python"]
    assert report.tasks == (("sums", 40), ("letters", 20), ("code", 3))


def test_code_without_a_solution_is_said_to_be_unchecked(tmp_path: Path) -> None:
    bare = [{key: value for key, value in row.items() if key != "canonical_solution"} for row in CODE]
    recipe = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: code.passes_tests}]\n"
    report = checked(tmp_path, recipe, train=bare)
    assert report.unchecked == ("file:train.jsonl: 3 rows have no solution to grade; tests without one stay unchecked",)


def test_a_wrong_solution_is_found(tmp_path: Path) -> None:
    recipe = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: code.passes_tests}]\n"
    report = checked(tmp_path, recipe, train=[*CODE[:2], CODE[2] | {"canonical_solution": "def add_2(x): return 0"}])
    (problem,) = report.problems
    assert "1 of 3 rows have a gold answer without full marks, as train:3: code.passes_tests says: " in problem


def test_tests_that_a_function_of_nothing_passes_are_found(tmp_path: Path) -> None:
    recipe = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: code.passes_tests}]\n"
    report = checked(tmp_path, recipe, train=[row | {"tests": ["assert True"]} for row in CODE])
    assert any("3 of 3 rows pay a wrong completion as much as the gold answer" in line for line in report.problems)


@pytest.mark.parametrize(
    "answer", ["{n} and {n} is {m}.\n#### {m}", "So \\boxed{{{m}}}.", "Two times {n} is always the same as {m} in all."]
)
def test_solutions_in_place_of_answers_are_found(tmp_path: Path, answer: str) -> None:
    rows = [row | {"answer": answer.format(n=n, m=2 * n)} for n, row in enumerate(SUMS)]
    report = checked(tmp_path, MATH, train=rows)
    assert [line for line in report.problems if "20 of 20 rows have a whole solution for an answer" in line]


def test_gold_answers_that_a_rule_does_not_pay_are_found(tmp_path: Path) -> None:
    recipe = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: math.numeric_close}]\n"
    report = checked(tmp_path, recipe, train=[row | {"answer": f"x{n}"} for n, row in enumerate(SUMS)])
    assert "file:train.jsonl: 20 of 20 rows have a gold answer that cannot be judged" in report.problems[0]


def test_a_few_bad_rows_are_a_warning(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(100)]
    rows[50]["answer"] = "\\frac{1}{"
    write_rows(tmp_path / "train.jsonl", rows)
    (tmp_path / "mine.yaml").write_text("model: tiny\ntrain: {steps: 5, prompts_per_step: 2}\n" + MATH)
    report = check(load(tmp_path / "mine.yaml"), tokenizer_with(CHATML))
    assert report.problems == ()
    assert "1 of 100 rows have a gold answer" in report.warnings[0]


def test_a_rule_that_pays_empty_answers_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def kind(completion: str, answer: str) -> float:\n    return 1.0\n")
    recipe = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: './mine.py:kind'}]\n"
    report = checked(tmp_path, recipe, train=SUMS)
    assert [line.split(" rows ")[1].split(" as ")[0] for line in report.problems] == [
        "pay an empty completion",
        "pay a wrong completion",
    ]


def test_a_rule_that_fails_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def broken(completion: str, answer: str) -> float:\n    return 1 / 0\n")
    recipe = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: './mine.py:broken'}]\n"
    report = checked(tmp_path, recipe, train=SUMS)
    assert "20 of 20 rows make a rule fail, as train:1: ./mine.py:broken says: ZeroDivisionError" in report.problems[0]


@pytest.mark.parametrize(
    ("condition", "example"),
    [
        ("completion == answer", "0"),
        ("completion == f'<answer>{answer}</answer>'", "<answer>0</answer>"),
        (
            "'</think>' in completion and f'boxed{{{answer}}}' in completion",
            "<think>\nLet me see.\n</think>\n\n\\boxed{0}",
        ),
    ],
)
def test_a_rule_of_ones_own_may_want_another_form(tmp_path: Path, condition: str, example: str) -> None:
    (tmp_path / "mine.py").write_text(f"def own(completion: str, answer: str) -> float:\n    return {condition}\n")
    recipe = "data: {train: [{source: 'file:train.jsonl'}]}\nrewards: [{use: './mine.py:own'}]\n"
    report = checked(tmp_path, recipe, train=SUMS)
    assert report.problems == ()
    assert report.golds[0].example == example


def test_an_opened_thought_is_judged_with_the_completion(tmp_path: Path) -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    report = checked(tmp_path, MATH, template=template, train=SUMS)
    assert report.problems == ()
    assert report.prefill == "<think>\n"
    assert report.golds[0].example == "<think>\nLet me see.\n</think>\n\n\\boxed{0}"


def test_long_prompts_are_counted(tmp_path: Path) -> None:
    rows = [*SUMS[:38], {"question": "Add up: " + "1 + " * 300 + "1", "answer": "301"}, SUMS[39]]
    report = checked(tmp_path, MATH, train=rows)
    assert report.lengths is not None
    assert (report.lengths.dropped, report.lengths.budget) == (1, 512)
    assert report.warnings == (
        "file:train.jsonl: 1 of 40 prompts are longer than prompt.max_tokens=512 and left out, as train:39",
    )
    assert report.problems == ()
    report = checked(tmp_path, MATH + "prompt: {max_tokens: 8}\n", train=SUMS)
    assert "file:train.jsonl: 40 of 40 prompts are longer than prompt.max_tokens=8" in report.problems[0]


def test_prompts_without_room_for_their_completions_are_a_problem_before_training(tmp_path: Path) -> None:
    report = checked(tmp_path, MATH + "sampling: {max_tokens: 1020}\n", train=SUMS)
    assert report.problems[0].startswith("data.train: the prompt of train:")
    assert "and sampling.max_tokens=1020 make " in report.problems[0]
    assert "tokens, tiny has 1024 positions\nset sampling.max_tokens=" in report.problems[0]


@pytest.mark.parametrize(
    ("template", "prompt", "problem"),
    [
        (None, "", "model.id: tiny has no chat template; set model.chat_template"),
        (CHATML, "{enable_thinking: true}", "prompt.enable_thinking: the model's chat template does not know it"),
        (CHATML, "{user: 'Say {answer}.'}", "prompt.user: {answer} would show the model what it is graded by"),
        (f"{CHATML}<think>", "{prefill: <think>}", "prompt.prefill: the model's chat template writes <think> itself"),
    ],
)
def test_prompts_that_training_would_refuse_are_to_mend(
    tmp_path: Path, template: str | None, prompt: str, problem: str
) -> None:
    report = checked(tmp_path, MATH + (prompt and f"prompt: {prompt}\n"), template=template, train=SUMS)
    assert problem in report.problems[0]
    assert not report.ok and report.unchecked == ()
    assert (report.prompts, report.lengths) == ((), None)
    assert report.golds[0].full == 20


def test_a_model_folder_that_is_not_there_is_to_mend(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", SUMS)
    (tmp_path / "mine.yaml").write_text(f"model: ./nowhere\ntrain: {{steps: 5, prompts_per_step: 2}}\n{MATH}")
    report = check(load(tmp_path / "mine.yaml"), graded_rows=20)
    assert report.problems[0].startswith("prompts: model.id: ") and "nowhere" in report.problems[0]


def test_options_are_shuffled_as_in_training_and_rows_without_any_are_to_mend(tmp_path: Path) -> None:
    recipe = (
        "data: {{train: [{{source: 'file:train.jsonl', shuffle_options: item}}]}}\nrewards: [{{use: {}.correct}}]\n"
    )
    report = checked(tmp_path, recipe.format("mcq"), train=[row | {"answer": "A"} for row in LETTERS])
    assert report.problems == ()
    assert "always naming A is right in 100%" not in report.warnings[0]
    assert not all("A. Mercury" in prompt for prompt in report.prompts)
    report = checked(tmp_path, recipe.format("math"), train=SUMS)
    assert "shuffle_options: train:1 has no `choices`" in report.problems[0]


def test_a_template_without_system_role_is_mentioned(tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML
    report = checked(tmp_path, MATH + "prompt: {system: Be brief.}\n", template=template, train=SUMS)
    assert "the chat template has no system role: prompt.system starts the first user text" in report.warnings


def test_heldout_rows_seen_in_training_are_counted(tmp_path: Path) -> None:
    report = checked(
        tmp_path, WITH_HELDOUT, train=SUMS, test=[*SUMS[:3], {"question": "What is 1 + 0?", "answer": "1"}]
    )
    assert report.same_as_training == 3
    assert "3 of 4 held-out questions are training questions, as test:1" in report.problems


def test_repeated_training_questions_are_counted(tmp_path: Path) -> None:
    report = checked(tmp_path, MATH, train=[*SUMS, SUMS[0], SUMS[1] | {"answer": "7"}])
    assert report.duplicates == 2
    assert "2 of 42 training questions repeat an earlier one, as train:41" in report.warnings
    assert "1 of 2 repeated questions have another answer than before, as train:42" in report.warnings


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    recipe = (
        "data: {train: [{source: 'file:train.jsonl'}], heldout: [{source: 'file:missing.jsonl'}]}\n"
        "rewards: [{use: math.correct}]\n"
    )
    with pytest.raises(RecipeError) as error:
        checked(tmp_path, recipe, train=[{"answer": "1"}])
    text = str(error.value)
    assert "missing.jsonl: no such file" in text
    assert "no column `question`" in text


def test_faulty_rules_of_every_source_come_at_once(tmp_path: Path) -> None:
    recipe = (
        "data:\n  train:\n"
        "    - {source: 'file:train.jsonl', rewards: [{use: './gone.py:a'}]}\n"
        "    - {source: 'file:train.jsonl', rewards: [{use: './lost.py:b'}]}\n"
    )
    with pytest.raises(RecipeError) as error:
        checked(tmp_path, recipe, train=SUMS)
    assert "gone.py" in str(error.value)
    assert "lost.py" in str(error.value)


def away_from_the_hub(folder: Path, recipe: str) -> subprocess.CompletedProcess[str]:
    """`slmgrpo check` where nothing listens at the hub's address, and with an empty cache."""
    (folder / "mine.yaml").write_text("model: someone/small\ntrain: {steps: 5, prompts_per_step: 2}\n" + recipe)
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(folder / "cache"), "COLUMNS": "80"}
    command = [sys.executable, "-m", "slmgrpo", "check", "mine.yaml"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


HUB = "hub:someone/questions"


def test_without_the_hub_all_else_is_checked_and_the_data_listed(tmp_path: Path) -> None:
    write_rows(tmp_path / "test.jsonl", SUMS)
    done = away_from_the_hub(
        tmp_path,
        f"data: {{train: [{{source: '{HUB}'}}], heldout: [{{source: 'file:test.jsonl'}}]}}\n"
        "rewards: [{use: math.correct}]\n",
    )
    assert (done.returncode, done.stderr) == (2, "")
    text = " ".join(done.stdout.split())
    assert (
        "plan 5 steps of 2 prompts x 8 = 16 completions rewards math.correct not at hand hub:someone/questions" in text
    )
    assert "gold, held-out file:test.jsonl: 40 graded of 40 rows, 40 get full marks by math.correct" in text
    assert "not checked - hub:someone/questions: the hub cannot be reached (http://127.0.0.1:9: " in text
    assert "`hf download someone/questions --repo-type dataset --local-dir data/questions`" in text
    assert "- prompts: model.id: someone/small: the hub cannot be reached" in text
    assert "write `model: ./models/small`" in text
    assert text.endswith("mine: data not checked")


def test_without_the_hub_a_missing_rule_and_a_missing_file_are_named_too(tmp_path: Path) -> None:
    done = away_from_the_hub(
        tmp_path,
        f"data: {{train: [{{source: '{HUB}'}}], heldout: [{{source: 'file:gone.jsonl'}}]}}\n"
        "rewards: [{use: './lost.py:rule'}]\n",
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert [name for name in ("lost.py", "gone.jsonl", HUB) if name not in done.stderr] == []
    assert "Retrying" not in done.stderr


def test_a_report_tells_training_from_held_out_golds_and_says_how_many_are_graded(tmp_path: Path) -> None:
    bad = [row | {"answer": "\\frac{1}{"} for row in SUMS]
    recipe = (
        "data: {train: [{source: 'file:a.jsonl', split: 'train[:-40]'}], "
        "heldout: [{source: 'file:a.jsonl', split: 'train[-40:]'}]}\nrewards: [{use: math.correct}]\n"
    )
    report = checked(tmp_path, recipe, a=[*SUMS, *bad])
    assert [problem.split(" rows ")[0] for problem in report.problems[:1]] == ["file:a.jsonl (held-out): 20 of 20"]
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(check_report(report))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if line.startswith("gold, train     file:a.jsonl: 20 graded of 40 rows, 20 get")]
    assert [line for line in lines if line.startswith("gold, held-out  file:a.jsonl: 20 graded of 40 rows, 0 get")]
    listed = lines[lines.index("to mend") + 1 : -2]
    assert listed[0].startswith("  - file:a.jsonl (held-out): ")
    assert len(listed) > len(report.problems)
    assert {line[:4] for line in listed} == {"  - ", "    "}


def test_a_column_that_a_rule_reads_is_missed_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        checked(tmp_path, MATH, train=[{"question": "x", "solution": "5"}])
    assert "train.jsonl:1: no column `answer`; the row has question, solution; did you mean" in str(error.value)


def test_a_gold_completion_wears_what_its_rule_reads() -> None:
    assert gold_completion({"answer": "68"}, rules("math.correct")) == "\\boxed{68}"
    assert gold_completion(CODE[0], rules("code.passes_tests")) == ("```python\ndef add_0(x):\n    return x + 0\n```")
    humaneval = {
        "question": "def f(x):\n    '''Add one.'''\n",
        "canonical_solution": "    return x + 1\n",
        "entry_point": "f",
        "tests": ["assert f(1) == 2"],
    }
    assert "def f(x):\n    '''Add one.'''\n    return x + 1\n" in str(
        gold_completion(humaneval, rules("code.passes_tests"))
    )
    assert gold_completion({"question": "?", "tests": ["assert f()"]}, rules("code.passes_tests")) is None


def test_wrong_answers_are_of_the_same_kind() -> None:
    math = rules("math.correct")
    assert wrong_answer({"answer": "-1"}, math, []) == "0"
    assert wrong_answer({"answer": "D", "choices": ["a", "b", "c", "d"]}, rules("mcq.correct"), []) == "A"
    assert wrong_answer({"answer": "x+1"}, math, [{"answer": "x+1"}, {"answer": "y"}]) == "y"
    assert wrong_answer({"answer": "x+1"}, math, [{"answer": "x+1"}]) is None


def question(text: str, number: int = 0, **more: Any) -> dict[str, Any]:
    return {"id": f"{number}", "question": text, **more}


def test_spelling_does_not_hide_a_seen_question() -> None:
    seen = overlap([question("What  is the Answer, then?")], [question("what is the answer then")])
    assert (seen.same, seen.similar) == (("0",), ())


def test_signs_inside_a_word_tell_sums_from_differences() -> None:
    assert words("What is 54+81?") != words("What is 54-81?")


def test_thirteen_words_in_common_are_noticed_and_twelve_are_not() -> None:
    shared = "a tank holds twelve litres and loses two litres each hour until it"
    assert len(words(shared)) == 13
    train = [question(f"Once {shared} breaks")]
    assert overlap(train, [question(f"Then {shared} stops")]).similar == ("0",)
    assert overlap(train, [question(f"Then {shared.rsplit(' ', 1)[0]} she stops")]).similar == ()


def test_a_template_that_many_rows_share_is_no_leak() -> None:
    frame = "answer the following question with one number and nothing else please and thank you"
    train = [question(f"{frame} {n} and {n}") for n in range(11)]
    assert overlap(train, [question(f"{frame} 99 and 98")]).similar == ()
    assert overlap(train[:10], [question(f"{frame} 99 and 98")]).similar == ("0",)


def test_the_same_stem_with_other_options_is_no_repetition() -> None:
    rows = [
        question("Which?", 1, choices=["a", "b"], answer="A"),
        question("Which?", 2, choices=["a", "c"], answer="A"),
        question("which", 3, choices=["a", "b"], answer="B"),
    ]
    assert repeated(rows) == (["3"], ["3"])


@given(st.lists(st.text(), max_size=8))
def test_a_set_compared_with_itself_is_all_seen(texts: list[str]) -> None:
    rows = [question(text, number) for number, text in enumerate(texts)]
    assert len(overlap(rows, rows).same) == len(rows)
