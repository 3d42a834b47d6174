"""reward score, lint, attack, the signals of a run, the paper's rewards and the table in the README."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slmgrpo.errors import RecipeError
from slmgrpo.recipe import RewardUse
from slmgrpo.recipe_load import load
from slmgrpo.rewards import attack, catalogue, lint, score, signals
from slmgrpo.rewards.base import Reward, Verdict, load_rewards

MINE = "./my_reward.py:concise"
PAPER = ("gsm8k", "arc", "code", "code_revised")


def paper(study: str) -> list[RewardUse]:
    return load(f"studies/paper/{study}").recipe.rewards


def use(name: str, weight: float = 1.0, settings: dict | None = None, when: str | None = None) -> RewardUse:
    return RewardUse(use=name, weight=weight, settings=settings or {}, when=when)


def jsonl(folder: Path, rows: list[dict]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_score_reads_any_columns_and_says_what_it_read(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path,
        [
            {"id": "a", "pred": r"so \boxed{\frac12}", "gold": "0.5"},
            {"pred": [{"role": "assistant", "content": r"\boxed{3}"}], "gold": "4"},
            {"pred": "nothing", "gold": "4"},
        ],
    )
    rewards = score.rewards_of(["math.correct", "format.boxed_once"], {})
    scored = list(score.score(file, rewards, mapping=score.parse_mapping("completion=pred,answer=gold")))
    first = json.loads(scored[0].as_json())
    assert first["id"] == "a" and first["read"] == r"\frac12" and first["grader"] == score.grader_version()
    assert first["values"] == {"math.correct": 1.0, "format.boxed_once": 1.0}
    assert [item.id for item in scored] == ["a", "2", "3"]
    assert [item.verdicts["math.correct"].status for item in scored] == ["correct", "wrong", "no_answer"]
    text = score.as_text(scored)
    assert "math.correct: mean 0.3333 of 3; correct 1, wrong 1, no_answer 1" in text and "grader " in text


def test_scores_of_an_own_rule_name_its_version(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"completion": "x"}])
    graders = []
    for folder, value in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"def rule(completion): return {value}\n")
        scored = list(score.score(file, score.rewards_of(["./mine.py:rule"], {}, tmp_path / folder)))
        graders.append(json.loads(scored[0].as_json())["grader"])
        assert f"grader {graders[-1]}" in score.as_text(scored)
    assert graders[0] == graders[1] != graders[2]
    assert graders[0].startswith(f"{score.grader_version()}+mine.py-")


def test_one_rule_has_a_plain_reason(tmp_path: Path) -> None:
    file = jsonl(tmp_path, [{"completion": "Answer: B", "answer": "B", "choices": ["x", "y"]}])
    (item,) = score.score(file, score.rewards_of(["mcq.correct"], {}))
    assert json.loads(item.as_json())["why"] == "behind a cue"


def test_settings_and_mappings_are_parsed() -> None:
    uses = ["math.correct", "length.overlong"]
    assert score.parse_settings(["math.correct:extract=lenient", "length.overlong:margin=128"], uses) == {
        "math.correct": {"extract": "lenient"},
        "length.overlong": {"margin": 128},
    }
    assert score.parse_mapping("completion=pred,answer=a.b") == {"completion": "pred", "answer": "a.b"}


@pytest.mark.parametrize("pair", ["words=2", "./my_reward.py:concise:words=2"])
def test_the_only_rule_need_not_be_named_again(pair: str) -> None:
    assert score.parse_settings([pair], [MINE]) == {MINE: {"words": 2}}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (
            lambda f: score.parse_settings(["words=2"], [MINE, "code.parses"]),
            "--with words=2: write it as ./my_reward.py:concise:KEY=VALUE or code.parses:KEY=VALUE",
        ),
        (lambda f: score.parse_settings(["words"], [MINE]), "write it as ./my_reward.py:concise:KEY=VALUE"),
        (lambda f: score.parse_settings([f"{MINE}=2"], [MINE]), "write it as ./my_reward.py:concise:KEY=VALUE"),
        (lambda f: score.parse_mapping("pred"), "write it as completion=pred,answer=gold"),
        (lambda f: score.rewards_of([], {}), "name a rule"),
        (
            lambda f: score.rewards_of(["math.correct"], {"math.corect": {}}),
            "no such --use; did you mean `math.correct`",
        ),
        (lambda f: list(score.rows(f / "no.jsonl", {})), "cannot be read"),
        (lambda f: list(score.rows(jsonl(f, [{"text": "x"}]), {})), "use --map completion=COLUMN"),
        (lambda f: list(score.rows(jsonl(f, [{"text": "x"}]), {"completion": "txt"})), "did you mean `text`"),
        (
            lambda f: list(score.score(jsonl(f, [{"completion": "x", "gold": 1}]), [Reward("math.correct")])),
            "math.correct reads the column `answer`, the data has",
        ),
    ],
)
def test_mistakes_of_a_command_line_are_named(call: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        call(tmp_path)  # type: ignore[operator]
    assert says in str(error.value)


def test_attack_rows_are_read_with_their_nested_tests(tmp_path: Path) -> None:
    nested = {"prompt": "Write f.", "entry_point": "f", "tests": ["assert f(1) == 2"]}
    file = jsonl(tmp_path, [{"program": "def f(x): return x + 1", "prompt_tests": nested}])
    (row,) = score.rows(file, {"completion": "program"})
    assert row["tests"] == ["assert f(1) == 2"] and row["completion"].startswith("def f")


@pytest.mark.parametrize(
    ("study", "ok", "wrong", "right"),
    [
        ("gsm8k", True, 1.7, 2.0),
        ("arc", True, 1.5, 2.0),
        ("code", False, 2.1, 1.0),
        ("code_revised", False, 2.1, 2.0),
    ],
)
def test_lint_finds_the_papers_code_rewards_unsound(study: str, ok: bool, wrong: float, right: float) -> None:
    report = lint.lint(load_rewards(paper(study)))
    assert report.ok is ok
    assert (report.best_wrong, report.bare_right) == (pytest.approx(wrong), pytest.approx(right))
    assert ("out-earn" in lint.as_text(report)) and bool(report.fix) is not ok


def test_what_lint_advises_mends_it() -> None:
    uses = paper("code")
    fix = lint.lint(load_rewards(uses)).fix
    assert fix == (
        "set the weight of code.passes_tests to 2.11, "
        "or put `when: code.passes_tests` on code.not_trivial and format.tag_counts"
    )
    heavier = [use(u.use, 2.11 if u.use == "code.passes_tests" else u.weight, u.settings) for u in uses]
    assert lint.lint(load_rewards(heavier)).ok
    named = ("code.not_trivial", "format.tag_counts")
    behind = [use(u.use, u.weight, u.settings, "code.passes_tests" if u.use in named else None) for u in uses]
    assert lint.lint(load_rewards(behind)).ok


def test_lint_counts_penalties_gates_and_shares() -> None:
    def ok(*uses: RewardUse) -> bool:
        return lint.lint(load_rewards(uses, known={"max_tokens": 100})).ok

    right = use("math.correct", 1.0)
    assert ok(right, use("format.tagged", 0.9))
    assert not ok(right, use("format.tagged", 1.0))
    assert ok(right, use("length.overlong", 0.5, {"margin": 10}, "math.correct"))
    assert not ok(right, use("length.overlong", 1.0, {"margin": 10}, "math.correct"))
    assert not ok(right, use("length.repetition", -1.0))
    assert ok(use("code.fraction_passed", 1.0))
    assert not ok(use("format.tagged", 1.0))
    assert ok(right, use("math.steps_checked", 1.0))


@pytest.mark.parametrize("study", ["gsm8k", "arc"])
def test_no_trick_beats_an_honest_answer_where_lint_is_content(study: str) -> None:
    earned = attack.attack(load_rewards(paper(study)))
    assert any(item.honest for item in earned) and len([item for item in earned if not item.honest]) > 20
    assert not [item.name for item in earned if item.beats]
    assert "0 of" in attack.as_text(earned)


def test_what_wrong_programs_earn() -> None:
    earned_by = {item.name: item for item in attack.attack(load_rewards(paper("code")))}
    assert earned_by["wrong answer, reasoning_answer form"].total == pytest.approx(2.1)
    sound = attack.attack(load_rewards([use("code.passes_tests", 1.0), use("code.parses", 0.1)]))
    assert not [item.name for item in sound if item.beats]
    assert all((item.total or 0) <= 0.11 for item in sound if not item.honest)


def earned(name: str, value: float | None, *, honest: bool = False, beats: bool = False) -> attack.Earned:
    paid = {f"./my_rewards.py:the_rule_with_number_{n}": Verdict(value) for n in range(3)}
    return attack.Earned("math", name, honest, value, paid, beats)


def test_a_report_of_an_attack_ends_with_what_matters() -> None:
    tricks = [earned(f"idle trick number {n}", 0.0) for n in range(30)]
    beating = earned("a box for every number", 1.0, beats=True)
    others = [earned("half a trick", 0.5), earned("another half", 0.5), earned("a crash", None), earned("a loop", -1.0)]
    text = attack.as_text([earned("right answer", 1.0, honest=True), beating, *others, *tricks])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "1 of 35 tricks earn as much as a right answer" and lines[-2].strip() == beating.name
    assert text.index("honest ") < text.index("0 or less (31): a loop; idle") < text.index("half a trick; another half")
    assert text.index("half a trick") < text.index("BEATS ")


@pytest.mark.parametrize("study", PAPER)
def test_a_report_of_lint_fits_80_columns(study: str) -> None:
    rewards = load_rewards([*paper(study), use("slmgrpo.rewards.format:answer_present", 1.0)])
    text = lint.as_text(lint.lint(rewards), "my_recipe, " + "a source with a long name, " * 4)
    assert max(map(len, text.splitlines())) <= 80
    assert "slmgrpo.rewards.format:answer_present" in text


def test_the_readmes_own_rule_survives_the_attack(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "recipes" / "README.md").read_text(encoding="utf-8")
    (rule,) = re.findall(r"```python\n# last_digit.py\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "last_digit.py").write_text(rule, encoding="utf-8")
    rewards = load_rewards([use("./last_digit.py:right", 1.0)], base=tmp_path)
    items = attack.attack(rewards)
    assert [item.total for item in items if item.honest] == [1.0] * 4
    assert not [item.name for item in items if item.beats]


def test_means_statuses_and_times_of_a_step() -> None:
    rows = [{"r": Verdict(1.0, "correct")}, {"r": Verdict(0.0, "wrong")}, {"r": Verdict(None, "timeout")}]
    signal = signals.rule_signals(rows, {"r": [0.1, 0.2, 0.3, 4.0]})["r"]
    assert signal.mean == 0.5 and signal.statuses == {"correct": 1, "wrong": 1, "timeout": 1}
    assert (signal.p50_s, signal.p95_s) == (0.2, 4.0)
    assert signals.quantile([], 0.5) is None


RIGHT, FORM = Reward("math.correct", 1.0, required=True), Reward("format.tagged", 0.5)


def verdicts(*pairs: tuple[float | None, float]) -> list[dict[str, Verdict]]:
    return [{"math.correct": Verdict(right), "format.tagged": Verdict(form)} for right, form in pairs]


def test_errors_of_a_rule_are_counted_over_what_it_had_to_judge() -> None:
    """One code prompt among 24 that always fails is no small share of errors."""
    broken, right = Verdict(None, "error", why="no compiler"), Verdict(1.0, "correct")
    graded = [{"code.correct": broken, "format.tagged": right}] * 8 + [{"math.correct": right}] * 184
    (found,) = signals.rule_errors(graded)
    assert str(found) == "code.correct failed on 8 of 8 completions (first: no compiler)"
    assert found.share == 1.0


def test_the_share_of_variance_that_correctness_carries() -> None:
    def share(*groups: list[dict[str, Verdict]]) -> float | None:
        return signals.correctness_share(groups, (RIGHT, FORM))

    assert share(verdicts((1, 1), (0, 1))) == pytest.approx(1.0)
    assert share(verdicts((1, 1), (1, 0))) == pytest.approx(0.0)
    assert share(verdicts((1, 1), (0, 0))) == pytest.approx(2 / 3)
    assert share(verdicts((1, 1), (1, 1))) is None
    assert share(verdicts((None, 1), (1, 1), (0, 1))) == pytest.approx(1.0)
    assert share(verdicts((1, 0), (0, 0)), verdicts((1, 1), (1, 0))) == pytest.approx(0.5 / (0.5 + 0.125))


def test_a_warning_where_form_is_learnt_and_correctness_is_not() -> None:
    assert "gate the form rule" in signals.form_without_substance([0.5] * 20 + [1.0] * 20, [0.3] * 40)
    assert not signals.form_without_substance([0.5] * 20 + [1.0] * 20, [0.3] * 20 + [0.5] * 20)
    assert not signals.form_without_substance([0.5] * 40, [0.3] * 40)
    assert not signals.form_without_substance([1.0] * 10, [0.3] * 10)


def test_the_table_in_the_readme_is_the_docstrings() -> None:
    readme = (Path(catalogue.__file__).parent / "README.md").read_text(encoding="utf-8")
    assert catalogue.table() in readme, "run: python -m slmgrpo.rewards.catalogue"
