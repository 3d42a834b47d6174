"""Shuffled options: what each member of a group sees, writes and is graded by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from byte_tokenizer import CHATML, tokenizer_with

from slmgrpo.callbacks import Silent
from slmgrpo.errors import RecipeError
from slmgrpo.plan import plan
from slmgrpo.prompts import render
from slmgrpo.questions import check_context, lengths_of, prompted_of
from slmgrpo.recipe_load import load
from slmgrpo.train import train

RECIPE = """
model: tiny
data: {train: [{source: "file:choices.jsonl", shuffle_options: ORDER}]}
prompt: {max_tokens: 128}
rewards: [{use: mcq.correct}]
sampling: {max_tokens: 12, group_size: 6}
train: {steps: 1, prompts_per_step: 8}
"""


def trained(folder: Path, order: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.replace("ORDER", order))
    loaded = load(folder / "recipe.yaml")
    outcome = train(loaded.recipe, plan(loaded), base=folder, out=folder / "run", resume=None, observer=Silent())
    return [json.loads(line) for line in outcome.run.samples.read_text().splitlines()]


def rows() -> list[dict[str, Any]]:
    """Every right answer is the option `7`, in place B of the file."""
    return [
        {"id": f"q{i}", "question": f"What is {i}+{7 - i}?", "choices": ["3", "7", "5", "9"], "answer": "B"}
        for i in range(8)
    ]


@pytest.mark.parametrize(("order", "orders_of_a_group"), [("item", 1), ("member", 6)])
def test_each_completion_is_graded_by_the_options_that_it_saw(
    tmp_path: Path, order: str, orders_of_a_group: int
) -> None:
    samples = trained(tmp_path, order, rows())
    assert len(samples) == 8 * 6
    seen = 0
    for question in {sample["id"] for sample in samples}:
        own = [sample for sample in samples if sample["id"] == question]
        orders = {tuple(sample["option_order"]["order"]) for sample in own}
        assert len(orders) <= orders_of_a_group
        seen = max(seen, len(orders))
        for sample in own:
            right = "ABCD"[sample["option_order"]["order"].index(1)]
            if sample["statuses"]["mcq.correct"] in ("correct", "wrong"):
                read = sample["read"]["mcq.correct"]
                assert (sample["values"]["mcq.correct"] == 1.0) == (read == right)
    assert seen > 1 if order == "member" else seen == 1


def test_a_question_that_lists_its_options_itself_cannot_be_shuffled(tmp_path: Path) -> None:
    listed = [row | {"question": row["question"] + "\nA) 3\nB) 7\nC) 5\nD) 9"} for row in rows()]
    with pytest.raises(RecipeError, match="its question lists them itself"):
        trained(tmp_path, "item", listed)
    assert not (tmp_path / "run").exists()


def test_a_row_that_is_too_long_in_another_order_of_its_options_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("ORDER", "member"))
    tokenizer = tokenizer_with(CHATML)
    tokenizer.add_tokens(["B. 7"])  # as in the file's order; in any other the prompt has 3 tokens more
    row = rows()[0] | {"source_index": 0}
    length = len(render(row, load(tmp_path / "recipe.yaml").recipe.prompt, tokenizer).ids)
    for limit, kept in ((length, 0), (length + 3, 1)):
        recipe = load(tmp_path / "recipe.yaml", [f"prompt.max_tokens={limit}"]).recipe
        assert len(prompted_of([row], recipe.data.train, [()], recipe, tokenizer)) == kept


def test_prompts_whose_completions_go_beyond_the_context_are_named_with_what_fits(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("ORDER", "item"))
    recipe = load(tmp_path / "recipe.yaml", ["prompt.max_tokens=512"]).recipe
    row = rows()[0] | {"source_index": 0}
    kept = prompted_of([row], recipe.data.train, [()], recipe, tokenizer_with(CHATML))
    lengths = lengths_of(kept)
    length = lengths["q0"]
    check_context(lengths, lengths, recipe, length + 12)
    check_context(lengths, lengths, recipe, None)
    for train_rows, heldout, where in ((lengths, {}, "train"), ({}, lengths, "heldout")):
        with pytest.raises(RecipeError) as raised:
            check_context(train_rows, heldout, recipe, length + 11)
        assert str(raised.value) == (
            f"data.{where}: the prompt of q0 ({length} tokens) and sampling.max_tokens=12 make {length + 12} tokens, "
            f"tiny has {length + 11} positions\nset sampling.max_tokens=11 or prompt.max_tokens={length - 1}"
        )
    with pytest.raises(RecipeError, match=r"lower sampling\.max_tokens and prompt\.max_tokens"):
        check_context(lengths, {}, recipe, 12)
