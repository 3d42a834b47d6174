"""The reward contract: how rules are found, called, gated and summed."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slmgrpo.errors import RecipeError
from slmgrpo.rewards.base import Reward, Status, Total, Verdict, gated, load, load_rewards, missing_columns, total


def use(name: str, **more: Any) -> Any:
    return SimpleNamespace(**({"use": name, "weight": 1.0, "settings": {}, "when": None, "required": None} | more))


def own_rule(folder: Path, body: str) -> Path:
    (folder / "mine.py").write_text(body, encoding="utf-8")
    return folder


CONCISE = (
    "def concise(completion: str, *, words: int = 3):\n    return 1.0 if len(completion.split()) <= words else 0.0\n"
    "class Concise: pass\n"
    "async def later(completion): return 1.0\n"
)


def test_a_rule_of_ones_own_is_found_beside_the_recipe(tmp_path: Path) -> None:
    reward = Reward.from_use(use("./mine.py:concise", settings={"words": 2}), base=own_rule(tmp_path, CONCISE))
    assert reward.judge("q", "two words").value == 1.0
    assert reward.judge("q", "now three words").value == 0.0
    assert not reward.required


def test_a_reward_pickles_by_its_import_path(tmp_path: Path) -> None:
    reward = Reward.from_use(use("./mine.py:concise"), base=own_rule(tmp_path, CONCISE))
    again = pickle.loads(pickle.dumps(reward))
    assert again == reward and again.judge("q", "short").value == 1.0 and again.__name__ == "./mine.py:concise"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("math.corect", "slmgrpo.rewards.math has no `corect`; did you mean `correct`?"),
        ("maths.correct", "there is no rule `maths.correct`; did you mean `math.correct`?"),
        ("no_such_package_here:rule", "cannot import no_such_package_here"),
        ("./nowhere.py:rule", "paths are relative to the recipe"),
        ("./mine.py:concize", "did you mean `concise`?"),
        (":", "no module"),
        (".:rule", "no module"),
        ("./mine.py:", "has no function ``"),
        ("./a\0b.py:rule", "no such file"),
        ("./circle.py:rule", "no such file"),
        ("./mine.py:Concise", "is a class; a rule is a plain function"),
        ("./mine.py:later", "is an `async def`; a rule is a plain function"),
        ("builtins:dict", "is a class"),
        ("builtins:max", "cannot be read; wrap it in a `def`"),
        ("./leaves.py:rule", "fails at import: SystemExit: 3"),
        ("leaves_too:rule", "leaves_too fails at import: SystemExit: 3"),
        ("breaks:rule", "breaks fails at import: ZeroDivisionError"),
    ],
)
def test_what_is_no_rule_is_refused_with_a_suggestion(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("leaves.py", "leaves_too.py"):
        (tmp_path / file).write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    (tmp_path / "breaks.py").write_text("1 / 0\n", encoding="utf-8")
    (tmp_path / "circle.py").symlink_to("circle.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RecipeError, match="rewards: ") as error:
        load(name, base=own_rule(tmp_path, CONCISE))
    assert says in str(error.value)


def test_every_problem_of_the_reward_list_is_said_at_once(tmp_path: Path) -> None:
    uses = [use("./mine.py:concise", settings={"word": 2}), use("math.corect"), use("./mine.py:concise")]
    with pytest.raises(RecipeError) as error:
        load_rewards(uses, base=own_rule(tmp_path, CONCISE))
    assert "no setting `word`; did you mean `words`?" in str(error.value) and "no `corect`" in str(error.value)


def test_a_gate_must_name_a_rule_and_not_itself(tmp_path: Path) -> None:
    own_rule(tmp_path, "def a(completion): return 1\ndef b(completion): return 1\n")
    with pytest.raises(RecipeError, match="names no rule of this recipe; did you mean"):
        load_rewards([use("./mine.py:a", when="./mine.py:bb"), use("./mine.py:b")], base=tmp_path)
    with pytest.raises(RecipeError, match="comes back to itself"):
        load_rewards([use("./mine.py:a", when="./mine.py:b"), use("./mine.py:b", when="./mine.py:a")], base=tmp_path)


def test_settings_that_the_run_knows_are_filled_in(tmp_path: Path) -> None:
    own_rule(tmp_path, "def tight(completion_ids, *, max_tokens):\n    return len(completion_ids) < max_tokens\n")
    with pytest.raises(RecipeError, match="needs `with: "):
        load_rewards([use("./mine.py:tight")], base=tmp_path)
    (reward,) = load_rewards([use("./mine.py:tight")], base=tmp_path, known={"max_tokens": 2, "other": 1})
    assert reward.judge("", "", [1]).value == 1.0 and reward.judge("", "", [1, 2]).value == 0.0


def test_columns_that_the_data_lacks_are_named_before_training(tmp_path: Path) -> None:
    own_rule(tmp_path, "def r(prompt, completion, anser, extra=None): return 1\n")
    rewards = load_rewards([use("./mine.py:r")], base=tmp_path)
    assert missing_columns(rewards, ["answer", "question"]) == [
        "rewards: ./mine.py:r reads the column `anser`, the data has answer, question; did you mean `answer`?"
    ]
    assert missing_columns(rewards, ["anser"]) == []


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("math.correct", {"extract": "banana"}, "`extract` is 'banana'; use box, tag or lenient"),
        ("math.correct", {"extract": None}, "`extract` is None; use box, tag or lenient"),
        ("math.correct", {"extract": 5}, "`extract` is 5; use box, tag or lenient"),
        ("format.tagged", {"style": "xml"}, "`style` is 'xml'; use think, think_answer or reasoning_answer"),
        ("math.numeric_close", {"relative": "a"}, "`relative` is 'a'; use a number"),
        ("math.numeric_close", {"relative": float("nan")}, "`relative` is nan; use a number"),
        ("math.steps_checked", {"most": True}, "`most` is True; use a number"),
        ("length.repetition", {"n": 2.5}, "`n` is 2.5; use a whole number"),
        ("code.passes_tests", {"timeout_s": 0}, "`timeout_s` is 0; use a number above 0"),
        ("code.fraction_passed", {"timeout_s": -5}, "`timeout_s` is -5; use a number above 0"),
        ("code.passes_tests", {"timeout_s": float("inf")}, "`timeout_s` is inf; use a number above 0"),
        ("./own.py:r", {"a": "x"}, "`a` is 'x'; use a whole number or null"),
        ("./own.py:r", {"b": "x"}, "`b` is 'x'; use a list"),
        ("./own.py:r", {"b": [1]}, "`b` is [1]; use a list"),
        ("./own.py:r", {"c": float("inf")}, "`c` is inf; use a finite number"),
        ("./own.py:r", {"d": []}, "`d` is []; use a mapping"),
    ],
)
def test_settings_have_the_type_that_the_rule_states(
    name: str, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    body = "def r(completion, *, a: int | None = 0, b: list[str] = [], c=1, d: dict[str, int] = {}): return 1\n"
    (tmp_path / "own.py").write_text(body, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load_rewards([use(name, settings=settings)], base=tmp_path)
    assert str(error.value) == f"rewards: {name}: {says}"


def test_settings_of_the_stated_type_and_of_none_are_taken(tmp_path: Path) -> None:
    body = "def r(completion, *, a: int | None = 0, b: 'list[str]' = [], c=1, d: float = 1, e: Unheard = 1): return 1\n"
    (tmp_path / "taken.py").write_text(body.replace(", e: Unheard = 1", ""), encoding="utf-8")
    (tmp_path / "unread.py").write_text("from __future__ import annotations\n" + body, encoding="utf-8")
    fine = [{"a": None, "b": ["x"], "c": "any", "d": 1}, {"a": 3, "b": [], "c": [2], "d": 0.5}]
    for settings in fine:
        assert load_rewards([use("./taken.py:r", settings=settings)], base=tmp_path)
    assert load_rewards([use("./unread.py:r", settings={"e": "x"})], base=tmp_path)


@pytest.mark.parametrize(
    "body",
    ["__import__('sys').exit(3)", "1 / 0", "'text'", "float('nan')", "[][0]", "(_ for _ in ()).throw(KeyError('x'))"],
)
def test_a_bug_in_a_rule_is_an_error_and_never_a_zero(body: str, tmp_path: Path) -> None:
    own_rule(tmp_path, f"def r(completion): return {body}\n")
    verdict = Reward.from_use(use("./mine.py:r"), base=tmp_path).judge("", "x")
    assert verdict.value is None and verdict.status == "error" and verdict.why


def test_rewards_answer_to_the_signature_of_trl(tmp_path: Path) -> None:
    own_rule(tmp_path, "def r(completion, answer): return None if answer == '?' else completion == answer\n")
    reward = Reward.from_use(use("./mine.py:r"), base=tmp_path)
    chats = [[{"role": "assistant", "content": text}] for text in "abc"]
    assert reward(prompts=["p"] * 3, completions=chats, answer=["a", "x", "?"], trainer_state=None) == [1.0, 0.0, None]
    assert Total((reward,))(prompts=["p"] * 3, completions=list("abc"), answer=["a", "x", "?"]) == [1.0, 0.0, None]


def test_a_reward_function_of_trl_is_a_rule(tmp_path: Path) -> None:
    body = (
        "def r(completions, solution, **kwargs):\n"
        "    return [float(c[0]['content'] == s) for c, s in zip(completions, solution)]\n"
    )
    reward = Reward.from_use(use("./mine.py:r"), base=own_rule(tmp_path, body))
    assert reward.columns == ("solution",)
    assert reward.judge("p", "yes", (), {"solution": "yes", "more": 1}).value == 1.0


RIGHT = Reward("right", 2.0, required=True)
STYLE = Reward("style", 0.5, when="right")
SHORT = Reward("short", -0.25)


@pytest.mark.parametrize(
    ("right", "style", "short", "expected"),
    [
        (1.0, 1.0, 1.0, 2.25),
        (1.0, 1.0, 0.0, 2.5),
        (0.0, 1.0, 1.0, -0.25),
        (None, 1.0, 1.0, None),
        (1.0, None, 1.0, 1.75),
        (1.0, 1.0, None, 2.5),
    ],
)
def test_the_total_is_a_weighted_sum_behind_gates(
    right: float | None, style: float | None, short: float | None, expected: float | None
) -> None:
    verdicts = {"right": Verdict(right), "style": Verdict(style), "short": Verdict(short)}
    assert total(verdicts, (RIGHT, STYLE, SHORT)) == expected


def test_gates_pass_none_on_and_say_so() -> None:
    settled = gated({"right": Verdict(None, "timeout"), "style": Verdict(1.0)}, (RIGHT, STYLE))
    assert settled["style"].value is None and settled["style"].status == "gated"
    settled = gated({"right": Verdict(0.0, "wrong"), "style": Verdict(1.0)}, (RIGHT, STYLE))
    assert settled["style"] == Verdict(0.0, "gated", why="right is 0")


@pytest.mark.parametrize("status", ["error", "timeout"])
def test_a_rule_that_fails_leaves_no_total_and_is_no_zero_beside_siblings(status: Status) -> None:
    """A rule that says None by itself is absent, one that broke is not."""
    form = Reward("form", 0.25)
    watched, behind = replace(SHORT, weight=0.0), Reward("behind", 0.5, when="short")
    failed = {"short": Verdict(None, status), "form": Verdict(1.0), "behind": Verdict(1.0)}
    assert total(failed, (form, SHORT)) is None
    assert total(failed, (form, watched)) == 0.25
    assert total(failed, (form, watched, behind)) is None
    assert total({**failed, "short": Verdict(None)}, (form, SHORT, behind)) == 0.25


def test_a_row_that_no_rule_can_judge_has_no_total() -> None:
    assert total({"short": Verdict(None)}, (SHORT,)) is None
