"""Whatever a file or a command line holds: a message that says where, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slmgrpo.errors import RecipeError
from slmgrpo.recipe_load import load
from slmgrpo.rewards import score
from slmgrpo.rewards.base import Verdict

DEEP = "[" * 5000 + "]" * 5000


def saved(folder: Path, text: str) -> Path:
    file = folder / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[" * 100_000, "not JSON that can be read"),
        ('{"completion": "x", "answer": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ('{"completion": ' + DEEP + "}", "line 2: "),
        ('{"completion": "x", "answer": ' + "[" * 120 + "]" * 120 + "}", "nested over 100 levels deep"),
        ('{"completion": "x", "completion_ids": 5}', "`completion_ids` is no list of token numbers"),
        ('{"completion": "x", "completion_ids": "abc"}', "`completion_ids` is no list of token numbers"),
        ('{"completion": "x", "completion_ids": [[1]]}', "`completion_ids` is no list of token numbers"),
        ('{"completion": "x"', "not JSON"),
        ("5", "not an object"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(line: str, says: str, tmp_path: Path) -> None:
    file = saved(tmp_path, '{"completion": "fine"}\n' + line + "\n")
    with pytest.raises(RecipeError, match=": line 2: ") as error:
        list(score.rows(file, {}))
    assert says in str(error.value)


@pytest.mark.parametrize("char", ["\u2028", "\u2029", "\x85"])
def test_a_row_ends_at_a_newline_and_nowhere_else(char: str, tmp_path: Path) -> None:
    row = {"completion": f"a{char}b", "answer": "1"}
    file = saved(tmp_path, "\ufeff" + 2 * (json.dumps(row, ensure_ascii=False) + "\r\n"))
    assert [row["completion"] for row in score.rows(file, {})] == [f"a{char}b"] * 2


def test_a_file_name_that_is_none_cannot_be_read() -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        list(score.rows(Path("a\0b"), {}))


@pytest.mark.parametrize("value", ["[" * 100_000, DEEP, "9" * 5000, "[[["])
def test_a_setting_of_any_form_is_refused_by_its_type(value: str) -> None:
    settings = score.parse_settings([f"math.correct:extract={value}"], ["math.correct"])
    with pytest.raises(RecipeError, match="use box, tag or lenient") as error:
        score.rewards_of(["math.correct"], settings)
    assert len(str(error.value)) < 200


def test_half_a_surrogate_pair_is_valid_json() -> None:
    line = score.Scored("\ud800", {"r": Verdict(0.0, read="\udfff \U0001f600 é")}).as_json()
    assert "\\ud800" in line and "\U0001f600 é" in line
    line.encode("utf-8")
    assert json.loads(line)["id"] == "\ud800" and json.loads(line)["read"] == "\udfff \U0001f600 é"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: circle.yaml\n", "circle.yaml: no such file"),
        ('name: "\\ud800"\n', "line 1: name: '\\ud800' holds half of a surrogate pair"),
    ],
)
def test_recipes_that_no_disk_can_hold_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "circle.yaml").symlink_to("circle.yaml")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load(tmp_path / "mine.yaml")
    assert says in str(error.value)
    with pytest.raises(RecipeError, match="no such file"):
        load(tmp_path / "circle.yaml")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--use", "length.repetition"], 0, "\\udfff"),
        (["--use", "length.repetition", "--json"], 0, "\\udfff"),
        (["--use", "length.repetition", "--sandbox", "banana"], 2, "'banana' is not one of"),
        (["--use", ":"], 2, "no module"),
        (["--use", "./leaves.py:rule"], 2, "fails at import: SystemExit: 3"),
    ],
)
def test_the_command_line_prints_and_refuses_without_a_traceback(
    arguments: list[str], code: int, says: str, tmp_path: Path
) -> None:
    (tmp_path / "leaves.py").write_text("import sys\nsys.exit(3)\n", encoding="utf-8")
    file = saved(tmp_path, '{"id": "\\udfff", "completion": "x", "completion_ids": [1]}\n')
    command = [sys.executable, "-m", "slmgrpo", "reward", "score", str(file), *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr and "Traceback" not in done.stderr
