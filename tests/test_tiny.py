"""The embedded model's package, its tasks and its weights."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from slmgrpo import tiny
from slmgrpo.errors import RecipeError
from slmgrpo.tiny import tasks

EVERY_TASK = pytest.mark.parametrize("task", tasks.TASKS)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return json.loads((tiny.path() / "build.json").read_text())


@pytest.fixture(scope="module")
def loaded() -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(tiny.path()), AutoTokenizer.from_pretrained(tiny.path())


@EVERY_TASK
def test_splits_share_no_question_and_no_core(task: str) -> None:
    train, test = tasks.rows(task, "train"), tasks.rows(task, "test")
    assert {row["answer"] for row in train}
    assert not {row["id"].split(":")[2] for row in train} & {row["id"].split(":")[2] for row in test}
    assert not {row["question"] for row in train} & {row["question"] for row in test}
    assert 0.15 < len(test) / (len(train) + len(test)) < 0.25


@EVERY_TASK
def test_rows_come_in_the_same_order_at_any_length(task: str) -> None:
    everything = tasks.rows(task, "train")
    assert tasks.rows(task, "train") == everything
    assert tasks.rows(task, "train", 10) == everything[:10]
    assert len({row["id"] for row in everything}) == len(everything)


def test_first_rows_are_pinned() -> None:
    first = {task: tasks.rows(task, "test", 1)[0]["id"] for task in tasks.TASKS}
    assert first == {"math": "tiny:math:25+51", "mcq": "tiny:mcq:44*91", "code": "tiny:code:5,41:5"}


@EVERY_TASK
@pytest.mark.parametrize("split", tasks.SPLITS)
def test_every_worked_completion_holds_the_right_answer(task: str, split: str) -> None:
    for row in tasks.rows(task, split):
        text = tasks.worked(row)
        thought, answer = re.fullmatch(r"<think>(.+)</think>(.+)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        assert answer == tasks.answered(row["task"], row["answer"])
        for left, right in re.findall(r"([\d+*-]+)=\+?(-?\d+)", thought):
            assert eval(left) == int(right)
        assert really_right(row, row["answer"])


def really_right(row: dict[str, Any], answer: str) -> bool:
    """Judges an answer from the question's text alone, or by the row's tests."""
    if row["task"] == "tiny:code":
        names: dict[str, Any] = {}
        exec(answer, names)
        for line in [*row["tests"], *re.sub(r"(f\(\d+\))=", r"assert \1==", row["question"]).splitlines()[1:]]:
            exec(line, names)
        return True
    value = eval(re.search(r"\d+[+*-]\d+", row["question"])[0])  # type: ignore[index]
    if row["task"] == "tiny:math":
        return str(value) == answer
    return f"\n{answer}) {value % 10}" in row["question"] and row["choices"]["ABCD".index(answer)] == str(value % 10)


def test_code_is_graded_on_other_examples_than_the_question_shows() -> None:
    for row in tasks.rows("code", "train"):
        shown = set(re.findall(r"f\(\d+\)", row["question"]))
        assert len(row["tests"]) >= 6
        assert not shown & set(re.findall(r"f\(\d+\)", " ".join(row["tests"])))


def test_ordinary_graders_read_both_styles() -> None:
    from slmgrpo.rewards import math, mcq, programs

    rng = random.Random(0)
    for row in tasks.rows("math", "test", 50):
        assert math.correct(tasks.worked(row), row["answer"]).value == 1.0
        assert math.correct(tasks.guess(row, rng), row["answer"]).status in ("correct", "wrong")
    for row in tasks.rows("mcq", "test", 50):
        assert mcq.correct(tasks.worked(row), row["answer"], row["choices"]).value == 1.0
        assert mcq.correct(tasks.guess(row, rng), row["answer"], row["choices"]).status in ("correct", "wrong")
    for row in tasks.rows("code", "test", 50):
        assert (programs.handed_in(tasks.worked(row), row["question"], "f").source or "").strip() == row["answer"]


@EVERY_TASK
def test_guesses_are_mostly_wrong_and_never_think(task: str) -> None:
    rng = random.Random(0)
    rows = tasks.rows(task, "test")
    guesses = [tasks.guess(row, rng) for row in rows]
    right = sum(text == tasks.answered(row["task"], row["answer"]) for row, text in zip(rows, guesses, strict=True))
    assert right / len(rows) < 0.35
    assert not any("<think>" in text for text in guesses)


@pytest.mark.parametrize(
    ("task", "split", "message"),
    [("maths", "train", "there are tiny:math, tiny:mcq, tiny:code"), ("math", "eval", "there are train and test")],
)
def test_unknown_tasks_and_splits_are_refused_with_the_known_ones(task: str, split: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        tasks.rows(task, split)


def test_weights_are_what_the_script_in_the_tree_made(record: dict[str, Any]) -> None:
    from slmgrpo.tiny import build

    assert record["sources_sha256"] == build.checksum(*build.sources())
    assert record["weights_sha256"] == build.checksum(tiny.path() / "model.safetensors")


def test_package_is_small_and_whole(record: dict[str, Any]) -> None:
    sizes = {file.name: file.stat().st_size for file in tiny.path().iterdir()}
    assert sum(sizes.values()) < 6 * 2**20
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "build.json"} <= set(sizes)
    assert 500_000 < record["parameters"] < 1_500_000


def test_saved_tokenizer_is_the_scripts_and_keeps_all_printable_text(loaded: Any) -> None:
    from slmgrpo.tiny import build

    _, words = loaded
    assert words.get_vocab() == build.tokenizer().get_vocab()
    text = "<think>a, b .c</think>\\boxed{B}\n```python\ndef f(x): return x - 1 # ~\n```"
    assert words.decode(words.encode(text), skip_special_tokens=True) == text


def test_chat_template_opens_the_assistants_turn_and_extends_earlier_turns(loaded: Any) -> None:
    _, words = loaded
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "What is 12+34?"}]
    opened = words.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert opened == "<|begin|><|system|>s<|end|><|user|>What is 12+34?<|end|><|assistant|>"
    answered = words.apply_chat_template([*turns, {"role": "assistant", "content": "x"}], tokenize=False)
    assert answered == opened + "x<|end|>"
    assert words.encode(opened)[0] == words.bos_token_id
    assert {words.eos_token_id, words.pad_token_id} < set(words.all_special_ids)


@EVERY_TASK
def test_completions_are_short(task: str, loaded: Any) -> None:
    _, words = loaded
    for row in tasks.rows(task, "test"):
        assert len(words.encode(tasks.worked(row))) <= 24


def test_base_model_guesses_two_times_in_three_and_is_right_when_it_thinks(loaded: Any, record: dict[str, Any]) -> None:
    from slmgrpo.tiny import build

    model, words = loaded
    measured = build.measure(model, words, seed=1, questions=40, samples=2)
    for task, now in measured.items():
        assert now["thinks"] == pytest.approx(1 / 3, abs=0.2)
        assert now["temperature_1"] == pytest.approx(record["accuracy"][task]["temperature_1"], abs=0.2)
        assert now["always_thinking"] >= 0.85
