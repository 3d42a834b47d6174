"""Suites: every packaged one is whole and true to the recipes, its rules grade real rows, wrong ones are explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slmgrpo.errors import RecipeError
from slmgrpo.eval import rows, suites
from slmgrpo.gold_check import gold_completion
from slmgrpo.recipe_load import load as load_recipe
from slmgrpo.rewards.base import judge_all
from slmgrpo.rewards.shuffle import shuffle_options

DATA = Path(__file__).parent.parent / "../shared/data"
PACKAGED = list(suites.packaged_suites())
EVERY = pytest.mark.parametrize("name", PACKAGED)
VERIFIED = [name for name in PACKAGED if suites.find(name)[0].suite.verified]


@EVERY
def test_packaged_suites_say_what_they_are_and_whose(name: str) -> None:
    suite = suites.find(name)[0].suite
    assert suite.description.endswith(".")
    assert suite.licence and suite.citation and suite.group
    assert suite.sampling.budgets == sorted(set(suite.sampling.budgets))
    assert suite.verified == (suite.group != "paper")
    assert suite.file or suite.data.source.startswith("tiny:") or not suite.verified


@pytest.mark.parametrize(("group", "recipe"), [("math", "_math"), ("mcq", "_mcq"), ("code", "_code")])
def test_suites_ask_as_the_recipes_of_their_domain_do(group: str, recipe: str) -> None:
    wanted = load_recipe(recipe, ["model=tiny"]).recipe.prompt.system
    assert {loaded.suite.prompt.system for loaded in suites.find(group)} == {wanted}


def real_rows(name: str) -> list[dict]:
    loaded = suites.find(name)[0]
    if loaded.suite.file and not (DATA / loaded.suite.file.path).is_file():
        pytest.skip(f"{DATA / loaded.suite.file.path} is not here")
    found, notes = rows.rows_of(loaded, data=DATA, limit=6 if "code.passes_tests" in _uses(loaded) else 60)
    assert not notes
    return found


def _uses(loaded: suites.Loaded) -> list[str]:
    return [use.use for use in loaded.suite.rewards]


@pytest.mark.parametrize("name", VERIFIED)
def test_rules_pay_the_golds_of_real_rows_and_nothing_else(name: str) -> None:
    rules, also = suites.find(name)[0].rules()
    graded, unsure = 0, 0
    for row in real_rows(name):
        gold = gold_completion(row, rules)
        if gold is None:
            continue
        for rule in (*rules, *also):
            right = judge_all([rule], row["question"], gold, (), row)[rule.name]
            assert right.status == "correct", (row["id"], gold, right)
        for other in ("", _wrong(row, gold)):
            wrong = judge_all(rules, row["question"], other, (), row)
            assert not any(verdict.value for verdict in wrong.values()), (row["id"], other, wrong)
            unsure += any(verdict.value is None for verdict in wrong.values())
        graded += 1
    assert unsure <= 0.05 * graded  # a gold that no formula reads is only ever equal to its copy
    if name == "code_contests":  # no solutions among its rows: a program that echoes must fail, one that cheats passes
        _check_stdio(real_rows(name)[0], rules)
    else:
        assert graded >= 6


def _wrong(row: dict, gold: str) -> str:
    if row.get("choices"):
        return "\\boxed{A}" if row["answer"] != "A" else "\\boxed{B}"
    return "```python\ndef f(): return None\n```" if "```" in gold else "\\boxed{-987654.25}"


def _check_stdio(row: dict, rules) -> None:
    table = {test["input"]: test["output"] for test in row["tests"]}
    cheat = f"```python\nimport sys\nprint({table!r}[sys.stdin.read()])\n```"
    echo = "```python\nprint(input())\n```"
    verdicts = [judge_all(rules, row["question"], text, (), row)["code.passes_tests"] for text in (cheat, echo)]
    assert [verdict.value for verdict in verdicts] == [1.0, 0.0], verdicts


@pytest.mark.parametrize("name", [name for name in VERIFIED if not name.startswith("tiny")])
def test_a_limit_takes_the_same_rows_every_time_and_a_larger_one_holds_them(name: str) -> None:
    loaded = suites.find(name)[0]
    real_rows(name)
    some, more = ([row["id"] for row in rows.rows_of(loaded, data=DATA, limit=n)[0]] for n in (5, 15))
    assert len(some) == 5
    assert set(some) <= set(more)


def _suite_file(folder: Path, text: str, data: list[dict] | None = None) -> suites.Loaded:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data or []))
    (folder / "mine.yaml").write_text(text)
    return suites.find(str(folder / "mine.yaml"))[0]


def test_columns_as_hub_data_sets_have_them_become_answers_tests_and_options(tmp_path: Path) -> None:
    head = "data: {source: 'file:rows.jsonl', columns: {question: q}}\n"
    listed = _suite_file(
        tmp_path,
        head + "answer_in_list: final\nkeep: {kind: [a]}\nrewards: [{use: math.correct}]\n",
        [{"q": "One?", "final": ["1"], "kind": "a"}, {"q": "Two?", "final": ["2"], "kind": "b"}],
    )
    found, _ = rows.rows_of(listed)
    assert [(row["question"], row["answer"]) for row in found] == [("One?", "1")]
    tests = {
        "public": {"input": ["1\n"], "output": ["2\n"]},
        "hidden": {"input": ["2\n", "3\n"], "output": ["3\n", "4\n"]},
    }
    stdio = _suite_file(
        tmp_path,
        head + "stdio_tests_in: [public, hidden]\nmost_tests: 2\nrewards: [{use: code.passes_tests}]\n",
        [{"q": "Add one.", **tests}],
    )
    found, _ = rows.rows_of(stdio)
    assert found[0]["tests"] == [{"input": "1\n", "output": "2\n"}, {"input": "2\n", "output": "3\n"}]
    listed = [{"input": "1\n", "output": "2\n"}]
    kinds = _suite_file(
        tmp_path,
        head + "stdio_tests_in: [t]\nempty: [checker]\nrewards: [{use: code.passes_tests}]\n",
        [
            {"q": "List.", "t": listed, "checker": None},
            {"q": "JSON.", "t": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}), "checker": ""},
            {"q": "By name.", "t": json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [2]}), "checker": None},
            {"q": "None.", "t": "", "checker": None},
            {"q": "Checked.", "t": listed, "checker": "print(1)"},
        ],
    )
    found, notes = rows.rows_of(kinds)
    assert [(row["question"], row["tests"]) for row in found] == [("List.", listed), ("JSON.", listed)]
    assert any("2 rows without tests of standard input are left out" in note for note in notes)
    spread = _suite_file(
        tmp_path,
        head + "choices_in: [right, w1, w2]\nrewards: [{use: mcq.correct}]\n",
        [{"q": f"Which {i}?", "right": "yes", "w1": "no", "w2": "never"} for i in range(30)],
    )
    found, _ = rows.rows_of(spread)
    assert all(row["choices"]["ABC".index(row["answer"])] == "yes" for row in found)
    assert {row["answer"] for row in found} == {"A", "B", "C"}
    assert rows.rows_of(spread)[0] == found


def test_a_recipes_own_rows_are_suites_with_its_prompt_rules_and_two_budgets() -> None:
    loaded = load_recipe("quickstart")
    found = suites.of_recipe(loaded.recipe, loaded.base)
    assert [suite.name for suite in found] == ["heldout_math", "heldout_mcq", "heldout_code"]
    assert found[0].suite.sampling.budgets == [32, 128]
    assert found[2].rules()[0][0].use == "code.passes_tests"
    assert suites.of_recipe(loaded.recipe, loaded.base, "train")[0].name == "train_math"


def test_a_recipes_options_are_in_the_order_of_training_and_its_sampling_is_whole(tmp_path: Path) -> None:
    data = [{"question": f"Which is {i}?", "choices": list("abcd"), "answer": "C"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    (tmp_path / "mine.yaml").write_text(
        "model: tiny\ntrain: {steps: 1}\nseed: 5\nsampling: {engine: hf, min_p: 0.1}\nrewards: [{use: mcq.correct}]\n"
        "data:\n  train: [{source: 'tiny:mcq'}]\n  heldout:\n"
        "    - {source: 'file:rows.jsonl', shuffle_options: item}\n"
        "    - {source: 'file:rows.jsonl', shuffle_options: member}\n"
    )
    loaded = load_recipe(tmp_path / "mine.yaml")
    item, member = suites.of_recipe(loaded.recipe, loaded.base)
    assert item.suite.sampling.min_p == 0.1
    saved = suites.Suite.model_validate(item.suite.model_dump(mode="json", by_alias=True), by_alias=True)
    for suite in (item, suites.Loaded(saved, loaded.base)):  # as `eval` has it, and as `eval regrade` reads it
        found, _ = rows.rows_of(suite)
        assert [row["choices"] for row in found] == [
            shuffle_options(row, seed=5)["choices"] for row in read_rows(member)
        ]
        assert all(row["choices"]["ABCD".index(row["answer"])] == "c" for row in found)
        assert len({row["answer"] for row in found}) > 1
    assert {row["answer"] for row in read_rows(member)} == {"C"}


def read_rows(loaded: suites.Loaded) -> list[dict]:
    return rows.rows_of(loaded)[0]


@pytest.mark.parametrize(
    "unreadable",
    [
        ["1", "2"],
        [{"stdin": "1", "stdout": "2"}],
        [{"input": 1, "output": 2}],
        {"input": ["1", "2"], "output": ["2"]},
        {"input": "12", "output": "34"},
        {"input": ["1"], "output": None},
        {"inputs": [["1"]], "outputs": [["2"]]},
        "5",
        5,
        "[" * 100_000,
    ],
)
def test_tests_of_standard_input_that_cannot_be_read_are_left_out(tmp_path: Path, unreadable: object) -> None:
    good = [{"input": "1", "output": "2"}]
    loaded = _suite_file(
        tmp_path,
        "data: {source: 'file:rows.jsonl'}\nstdio_tests_in: [t]\nrewards: [{use: code.passes_tests}]\n",
        [{"question": "Good?", "t": good}, {"question": "Bad?", "t": unreadable}],
    )
    found, notes = rows.rows_of(loaded)
    assert [row["tests"] for row in found] == [good]
    assert any("1 rows without tests" in note for note in notes)


def test_a_copy_is_the_same_suite(tmp_path: Path) -> None:
    made = suites.copy("gsm8k", tmp_path / "mine.yaml")
    assert suites.load(made).suite.model_copy(update={"name": "gsm8k"}) == suites.find("gsm8k")[0].suite
    with pytest.raises(RecipeError, match="exists"):
        suites.copy("gsm8k", made)


WHOLE = "data: {source: 'file:rows.jsonl'}\nrewards: [{use: math.correct}]\n"
BAD = {
    "the name of training's own scores": (
        f"name: heldout\n{WHOLE}",
        "name: `heldout` cannot be the folder of its evaluations",
    ),
    "a name that is no folder": (f"name: my/suite\n{WHOLE}", "name: `my/suite` cannot be the folder"),
    "a name that is another folder": (f"name: ..\n{WHOLE}", "name: `..` cannot be the folder"),
    "unknown key": ("prompt: {sistem: x}\n", "line 1: prompt.sistem: no such key; did you mean `system`?"),
    "missing": ("rewards: [{use: math.correct}]\n", "data: is required"),
    "wrong type": ("sampling: {samples: many}\n", "sampling.samples: must be a valid integer, not `many`"),
    "out of range": ("sampling: {samples: 0}\n", "sampling.samples: must be greater than or equal to 1, not `0`"),
    "repeated key": ("verified: true\nverified: true\n", "line 2: verified: repeated key"),
    "not a mapping": ("- a\n", "a suite is a mapping"),
    "not yaml": ("a: b: c\n", "a second `:` in one line"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_suite_is_explained_with_its_lines(tmp_path: Path, name: str) -> None:
    text, expected = BAD[name]
    with pytest.raises(RecipeError) as caught:
        _suite_file(tmp_path, text)
    assert expected in str(caught.value)
    assert "mine.yaml" in str(caught.value).splitlines()[0]


def test_an_unknown_suite_gets_a_suggestion() -> None:
    with pytest.raises(RecipeError, match="did you mean `gsm8k`"):
        suites.find("gsm8")


def test_missing_data_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"gsm8k_test\.jsonl is not there"):
        rows.rows_of(suites.find("gsm8k")[0], data=tmp_path)
    with pytest.raises(RecipeError, match="names no file for --data"):
        rows.rows_of(suites.find("numina")[0], data=tmp_path)


def test_a_rule_that_is_reported_beside_has_its_own_name() -> None:
    rules, also = suites.find("gsm8k")[0].rules()
    assert [rule.name for rule in (*rules, *also)] == ["math.correct", "math.correct (extract=lenient)"]
