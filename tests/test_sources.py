from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slmgrpo.data import Rows, load_sources
from slmgrpo.errors import RecipeError
from slmgrpo.recipe import Source

SHARED = Path(__file__).parents[2] / "shared" / "data"
ROWS = [{"question": f"What is {n}+1?", "answer": str(n + 1), "topic": "sums"} for n in range(10)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The same rows as jsonl, csv or parquet, by the file's ending."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        import csv

        with path.open("w", newline="") as lines:
            writer = csv.DictWriter(lines, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        import pyarrow as pa
        from pyarrow import parquet

        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def load(folder: Path, *sources: Source, need: Any = ("answer",)) -> Rows:
    return load_sources(sources, base=folder, need=need)


def hub_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out like a data-set repository on the hub, and a cache of its own."""
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    arc = [{"question": "Which?", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}] * 3
    write(folder / "arc" / "data" / "train-00000-of-00001.parquet", arc)
    write(folder / "arc" / "data" / "test-00000-of-00001.parquet", arc[:1])
    return folder / "arc"


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_the_same_rows_come_out_of_every_kind_of_file(tmp_path: Path, ending: str) -> None:
    write(tmp_path / f"sums.{ending}", ROWS)
    rows = load(tmp_path, Source(source=f"file:sums.{ending}"))
    assert [(row["question"], row["answer"], row["topic"]) for row in rows] == [tuple(row.values()) for row in ROWS]
    assert rows[3]["id"] == "sums:4"
    assert {row["task"] for row in rows} == {"sums"}
    assert (rows[0]["source_index"], rows[0]["source_weight"]) == (0, 1.0)


def test_paths_start_at_the_recipe_then_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, here = tmp_path / "recipe", tmp_path / "here"
    recipe.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    write(here / "a.jsonl", ROWS[:2])
    assert len(load(recipe, Source(source="file:a.jsonl"))) == 2
    write(recipe / "a.jsonl", ROWS[:5])
    assert len(load(recipe, Source(source="file:a.jsonl"))) == 5


def test_columns_are_renamed_and_ids_kept(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"id": 7, "problem": "Why?", "gold": 4, "subject": "life"}])
    columns = {"question": "problem", "answer": "gold", "task": "subject"}
    (row,) = load(tmp_path, Source(source="file:a.jsonl", columns=columns))
    assert row == {
        "id": "7",
        "question": "Why?",
        "answer": "4",
        "task": "life",
        "source_index": 0,
        "source_weight": 1.0,
    }


def test_a_column_that_rules_know_as_the_runs_own_is_left_out_and_said(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [ROWS[0] | {"completion": "old text", "prompt": "x"}])
    rows = load(tmp_path, Source(source="file:a.jsonl"))
    assert "completion" not in rows[0]
    assert [note for note in rows.notes if "`completion` is left out" in note]


def test_the_limit_takes_the_first_rows_and_reads_no_further(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    path.write_text(path.read_text() + "broken\n")
    assert len(load(tmp_path, Source(source="file:a.jsonl", limit=4))) == 4


def test_one_file_is_cut_into_training_and_heldout_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    for first, second in [("train[:-3]", "train[-3:]"), ("train[:70%]", "train[70%:]"), ("train[:7]", "train[7:]")]:
        cut = [load(tmp_path, Source(source="file:a.jsonl", split=split)) for split in (first, second)]
        assert [len(part) for part in cut] == [7, 3]
        assert [row["question"] for part in cut for row in part] == [row["question"] for row in ROWS]


def test_repeated_ids_are_numbered_within_and_across_sources(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [ROWS[0] | {"id": "x"}, ROWS[1] | {"id": "x"}, ROWS[2] | {"id": "x#2"}])
    write(tmp_path / "b.jsonl", [ROWS[3] | {"id": "x"}])
    rows = load(tmp_path, Source(source="file:a.jsonl"), Source(source="file:b.jsonl"))
    assert [row["id"] for row in rows] == ["x", "x#3", "x#2", "x#4"]
    assert "2 rows have an id that another row has" in rows.notes[0]


def test_options_with_digit_labels_get_letters(tmp_path: Path) -> None:
    choices = {"text": ["frog", "dog", "log"], "label": ["1", "2", "3"]}
    write(tmp_path / "a.jsonl", [{"question": "Which?", "choices": choices, "answer": "3"}])
    (row,) = load(tmp_path, Source(source="file:a.jsonl"))
    assert (row["choices"], row["answer"]) == (["frog", "dog", "log"], "C")


def test_tests_are_a_list_in_every_spelling(tmp_path: Path) -> None:
    spellings: list[Any] = [["assert f(1)"], "assert f(1)", '["assert f(1)"]']
    write(tmp_path / "a.jsonl", [{"question": "f", "tests": tests} for tests in spellings])
    assert [row["tests"] for row in load(tmp_path, Source(source="file:a.jsonl"), need=("tests",))] == [
        ["assert f(1)"]
    ] * 3


def test_needs_may_depend_on_the_source(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    write(tmp_path / "b.jsonl", [{"question": "f", "tests": ["assert f(1)"]}])
    sources = [Source(source="file:a.jsonl", weight=3), Source(source="file:b.jsonl")]
    rows = load(tmp_path, *sources, need=lambda source: ("tests",) if "b.jsonl" in source.source else ("answer",))
    assert Counter((row["source_index"], row["source_weight"]) for row in rows) == {(0, 3.0): 10, (1, 1.0): 1}


def test_the_tiny_tasks_are_sources() -> None:
    rows = load(Path(), *(Source(source=f"tiny:{task}", limit=5) for task in ("math", "mcq", "code")))
    assert Counter(row["task"] for row in rows) == {"tiny:math": 5, "tiny:mcq": 5, "tiny:code": 5}
    test = load(Path(), Source(source="tiny:math", split="test", limit=50))
    train = load(Path(), Source(source="tiny:math"))
    assert not {row["question"] for row in test} & {row["question"] for row in train}


def test_a_folder_stands_in_for_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_folder(tmp_path, monkeypatch)
    rows = load(tmp_path, Source(source="hub:./arc", columns={"answer": "answerKey"}))
    assert (rows[0]["choices"], rows[0]["answer"], rows[0]["id"]) == (["x", "y"], "B", "arc:1")
    assert len(load(tmp_path, Source(source="hub:./arc", columns={"answer": "answerKey"}, split="test"))) == 1
    assert len(load(tmp_path, Source(source="hub:./arc", columns={"answer": "answerKey"}, split="train[1:]"))) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"split": "validation"}, "hub:./arc: Unknown split"),
        ({"config": "main"}, "BuilderConfig 'main' not found"),
        ({}, "hub:./arc[train] row 1: no column `answer`"),
        ({}, "did you mean `columns: {answer: answerKey}`? (and 2 more rows)"),
    ],
)
def test_a_hub_problem_names_the_set_and_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: dict[str, Any], message: str
) -> None:
    hub_folder(tmp_path, monkeypatch)
    with pytest.raises(RecipeError) as error:
        load(tmp_path, Source.model_validate({"source": "hub:./arc"} | source))
    assert message in str(error.value)


def test_offline_the_hub_says_how_to_get_the_data(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from slmgrpo.data import load_sources; from slmgrpo.recipe import Source\n"
        "load_sources([Source(source='hub:someone/questions')], base=Path())"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert "hf download someone/questions --repo-type dataset --local-dir data/questions" in done.stderr
    assert "`source: hub:./data/questions`, or use file:" in done.stderr


def test_a_data_set_in_the_cache_is_read_where_the_hub_does_not_answer(tmp_path: Path) -> None:
    write(tmp_path / "questions" / "train.parquet", ROWS)
    program = (
        "import datasets; from pathlib import Path\n"
        "from slmgrpo.data import load_sources; from slmgrpo.recipe import Source\n"
        f"datasets.load_dataset({str(tmp_path / 'questions')!r})\n"
        "cache = Path(datasets.config.HF_DATASETS_CACHE)\n"
        "(cache / 'questions').rename(cache / 'someone___questions')\n"
        "rows = load_sources([Source(source='hub:someone/questions')], base=Path(), need=('answer',))\n"
        "print(len(rows), rows[9]['answer'], datasets.logging.get_verbosity() == datasets.logging.WARNING)"
    )
    env = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    env["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    assert done.stdout == "10 10 True\n", done.stderr
    assert "Retrying" not in done.stderr
    assert "HEAD" not in done.stderr


def test_without_reasoning_gym_the_command_that_installs_it_is_named() -> None:
    if find_spec("reasoning_gym"):
        pytest.skip("reasoning-gym is installed")
    with pytest.raises(RecipeError) as error:
        load(Path(), Source(source="reasoning_gym:leg_counting"))
    assert "is not installed; run `pip install 'slmgrpo[reasoning]'`" in str(error.value)


def test_reasoning_gym_writes_rows() -> None:
    pytest.importorskip("reasoning_gym", reason="needs the extra `reasoning`")
    train, test = (
        load(Path(), Source(source="reasoning_gym:leg_counting", split=split, limit=20, options={"max_animals": 3}))
        for split in ("train", "test")
    )
    assert len(train) == 20
    assert (train[0]["task"], train[0]["id"]) == ("reasoning_gym:leg_counting", "reasoning_gym:leg_counting:1")
    assert train[0]["answer"].isdigit()
    again = load(Path(), Source(source="reasoning_gym:leg_counting", limit=20, options={"max_animals": 3}))
    assert [row["question"] for row in again] == [row["question"] for row in train]
    assert [row["question"] for row in test] != [row["question"] for row in train]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"source": "reasoning_gym:leg_countin"}, "no such task in reasoning-gym; did you mean `leg_counting`?"),
        ({"options": {"max_animalz": 3}}, "reasoning_gym:leg_counting: options: "),
        ({"options": {"min_animals": -3}}, "reasoning_gym:leg_counting: options: "),
        ({"split": "dev"}, "no split `dev`; there are train and test"),
    ],
)
def test_reasoning_gym_problems_are_named(source: dict[str, Any], message: str) -> None:
    pytest.importorskip("reasoning_gym", reason="needs the extra `reasoning`")
    with pytest.raises(RecipeError) as error:
        load(Path(), Source.model_validate({"source": "reasoning_gym:leg_counting"} | source))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "source", "count"),
    [
        ("math/gsm8k_train_5000.jsonl", {}, 5000),
        ("math/math500.jsonl", {"columns": {"answer": "solution"}, "extract": "boxed"}, 500),
        ("mcq/arc_challenge_test.jsonl", {}, 1150),
        ("mcq/mmlu_stem_test.jsonl", {}, 3018),
        ("code/mbpp_train.jsonl", {"columns": {"question": "prompt", "answer": "canonical_solution"}}, 374),
    ],
)
def test_real_files_load(name: str, source: dict[str, Any], count: int) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"{name} is not beside the repository")
    rows = load(SHARED, Source.model_validate({"source": f"file:{name}"} | source))
    assert len(rows) == count
    assert len({row["id"] for row in rows}) == count


# name: (file, content, settings of the source, columns that are needed, text of the message)
MALFORMED: dict[str, tuple[str, str | bytes, dict[str, Any], tuple[str, ...], str]] = {
    "no such file": ("b.jsonl", "", {"source": "file:a.jsonl"}, (), "a.jsonl: no such file; did you mean `b.jsonl`?"),
    "far from any file": (
        "b.jsonl",
        "",
        {"source": "file:questions"},
        (),
        "questions: no such file; paths start at the recipe's folder, then the working directory",
    ),
    "a folder": ("d/b.jsonl", "", {"source": "file:d"}, (), "file:d: a folder; name the file in it, or use `hub:./d`"),
    "another ending": ("a.json", "[]", {}, (), "file:a.json: cannot read `.json`; use .jsonl, .csv or .parquet"),
    "empty jsonl": ("a.jsonl", "", {}, (), "file:a.jsonl: no rows in split `train`"),
    "only blank lines": ("a.jsonl", "\n\n", {}, (), "file:a.jsonl: no rows in split `train`"),
    "cut to nothing": (
        "a.jsonl",
        '{"question": "x"}\n',
        {"split": "train[5:]"},
        (),
        "file:a.jsonl: no rows in split `train[5:]`; a source must have at least one",
    ),
    "a list in place of lines": ("a.jsonl", '[{"question": "x"}]', {}, (), "a.jsonl:1: a list in place of a {...}"),
    "pretty-printed": ("a.jsonl", '{\n "question": "x"}', {}, (), "a.jsonl:1: not JSON: "),
    "broken in the middle": ("a.jsonl", '{"question": "x"}\n\n{"question": }', {}, (), "a.jsonl:3: not JSON: "),
    "a bare number": ("a.jsonl", '{"question": "x"}\n7', {}, (), "a.jsonl:2: the int `7` in place of a {...}"),
    "not UTF-8": ("a.jsonl", b'{"question": "caf\xe9"}', {}, (), "a.jsonl:1: not UTF-8 at byte 18; save the file as"),
    "nested too deeply": ("a.jsonl", "[" * 100_000, {}, (), "a.jsonl:1: not JSON"),
    "a number without end": ("a.jsonl", '{"question": %s}' % ("9" * 5000), {}, (), "a.jsonl:1: not JSON that can be"),
    "no question": (
        "a.jsonl",
        '{"problem": "x"}\n{"problem": "y"}',
        {},
        (),
        "a.jsonl:1: no column `question`; the row has problem; did you mean `columns: {question: problem}`? (and 1",
    ),
    "no answer": (
        "a.jsonl",
        '{"question": "x", "other": 1}',
        {},
        ("answer",),
        "a.jsonl:1: no column `answer`; the row has question, other; name it by `columns: {answer: ...}`",
    ),
    "answer missing further down": (
        "a.jsonl",
        '{"question": "x", "answer": "1"}\n{"question": "y"}',
        {},
        ("answer",),
        "a.jsonl:2: no column `answer`; the row has question",
    ),
    "mapped to nothing": (
        "a.jsonl",
        '{"question": "x", "gold": "1"}',
        {"columns": {"answer": "golden"}},
        ("answer",),
        "a.jsonl:1: no column `golden` for columns.answer; the row has question, gold",
    ),
    "empty answer": ("a.jsonl", '{"question": "x", "answer": ""}', {}, ("answer",), "a.jsonl:1: `answer` is empty"),
    "NaN for an answer": (
        "a.jsonl",
        '{"question": "x", "answer": NaN}',
        {},
        ("answer",),
        "a.jsonl:1: `answer` is empty",
    ),
    "null question": ("a.jsonl", '{"question": null}', {}, (), "a.jsonl:1: `question` is empty"),
    "blank question": (
        "a.jsonl",
        '{"question": "  "}',
        {},
        (),
        "a.jsonl:1: `question` must be text, not the text `  `",
    ),
    "question of messages": (
        "a.jsonl",
        '{"question": [{"role": "user"}]}',
        {},
        (),
        "a.jsonl:1: `question` must be text, not a list",
    ),
    "list of answers": (
        "a.jsonl",
        '{"question": "x", "answer": ["1"]}',
        {},
        ("answer",),
        "a.jsonl:1: `answer` must be text or a number, not a list",
    ),
    "answer is an index": (
        "a.jsonl",
        '{"question": "x", "choices": ["p", "q"], "answer": 1}',
        {},
        ("answer",),
        "a.jsonl:1: `answer` is `1`, not one of A, B; set `extract: index` if it counts from 0",
    ),
    "index behind the last option": (
        "a.jsonl",
        '{"question": "x", "choices": ["p", "q"], "answer": 2}',
        {"extract": "index"},
        ("answer",),
        "a.jsonl:1: `answer` is `2`; extract: index needs a whole number from 0 to 1",
    ),
    "one option": (
        "a.jsonl",
        '{"question": "x", "choices": ["p"], "answer": "A"}',
        {},
        ("answer",),
        "a.jsonl:1: `choices` has 1 options; 2 to 26 can be lettered",
    ),
    "no mark": (
        "a.jsonl",
        '{"question": "x", "answer": "5"}',
        {"extract": "gsm8k"},
        ("answer",),
        "a.jsonl:1: no `####` in `answer`; extract: gsm8k reads the number behind it",
    ),
    "tests of numbers": (
        "a.jsonl",
        '{"question": "x", "tests": [1]}',
        {},
        ("tests",),
        "a.jsonl:1: `tests` must be a list of texts or of mappings, not a list",
    ),
    "no tests": ("a.jsonl", '{"question": "x", "tests": []}', {}, ("tests",), "a.jsonl:1: `tests` is empty"),
    "csv with too many fields": (
        "a.csv",
        "question,answer\nWhat, then?,5\n",
        {},
        (),
        "a.csv:2: 3 fields, the header has 2; quote commas",
    ),
    "csv with an open quote": (
        "a.csv",
        'question,answer\n"What,5\n',
        {},
        (),
        "a.csv:2: not CSV: unexpected end of data",
    ),
    "csv with one name twice": (
        "a.csv",
        "question,question\na,b\n",
        {},
        (),
        "a.csv:1: two columns are called `question`; give each its own name",
    ),
    "csv with semicolons": ("a.csv", "question;answer\na;b\n", {}, (), "a.csv:2: no column `question`; the row has"),
    "csv in Latin-1": ("a.csv", b"question\ncaf\xe9\n", {}, (), "not UTF-8; save the file as UTF-8"),
    "no parquet": ("a.parquet", "question\n", {}, (), "a.parquet row 1 or a later one: not readable parquet: "),
    "split of a file": (
        "a.jsonl",
        '{"question": "x"}',
        {"split": "test"},
        (),
        "file:a.jsonl: a file has no split `test`; take `split` out, or cut as in `train[:-200]`",
    ),
    "config of a file": (
        "a.jsonl",
        '{"question": "x"}',
        {"config": "main"},
        (),
        "file:a.jsonl: config is for hub data sets; take it out",
    ),
    "options of a file": (
        "a.jsonl",
        '{"question": "x"}',
        {"options": {"size": 1}},
        (),
        "file:a.jsonl: options are for reasoning_gym; take them out",
    ),
    "no kind": ("a.jsonl", "", {"source": "a.jsonl"}, (), "a.jsonl: no such kind of source; write tiny:, file:, hub:"),
    "misspelt kind": (
        "a.jsonl",
        "",
        {"source": "flie:a.jsonl"},
        (),
        "no such kind of source; did you mean `file:a.jsonl`?",
    ),
    "nothing behind the kind": ("a.jsonl", "", {"source": "file:"}, (), "file:: no such kind of source; did you mean"),
    "no such tiny task": ("a.jsonl", "", {"source": "tiny:maths"}, (), "tiny:maths: no such task; there are tiny:math"),
    "no such tiny split": (
        "a.jsonl",
        "",
        {"source": "tiny:math", "split": "dev"},
        (),
        "tiny:math: no split `dev`; there are train and test",
    ),
    "no such hub folder": (
        "a.jsonl",
        "",
        {"source": "hub:./arc"},
        (),
        "./arc: no such file; paths start at the recipe's",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_source_is_named_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    file, content, settings, need, message = MALFORMED[name]
    monkeypatch.chdir(tmp_path)
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RecipeError) as error:
        load(tmp_path, Source.model_validate({"source": f"file:{file}"} | settings), need=need)
    assert message in str(error.value)
    assert str(error.value).startswith("data: 1 problem\n  ")


def test_all_problems_of_all_sources_come_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [{"question": ""}, {"question": "x"}, {"question": "y", "answer": []}])
    with pytest.raises(RecipeError) as error:
        load(tmp_path, Source(source="file:a.jsonl"), Source(source="tiny:maths"), Source(source="file:b.jsonl"))
    assert str(error.value).splitlines() == [
        "data: 4 problems",
        "  a.jsonl:1: no column `answer`; the row has question; name it by `columns: {answer: ...}` (and 1 more row)",
        "  a.jsonl:3: `answer` is empty",
        "  tiny:maths: no such task; there are tiny:math, tiny:mcq, tiny:code",
        "  b.jsonl: no such file; did you mean `a.jsonl`?",
    ]


def test_many_kinds_of_problem_are_cut_short(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"question": "x", "answer": f"#### {n} or"} for n in range(20)])
    with pytest.raises(RecipeError) as error:
        load(tmp_path, Source(source="file:a.jsonl", extract="gsm8k"))
    lines = str(error.value).splitlines()
    assert len(lines) == 10
    assert lines[-1] == "  file:a.jsonl: 12 more kinds of unreadable row"


def test_reading_data_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ROWS)
    program = (
        "import sys; from pathlib import Path\n"
        "from slmgrpo.data import load_sources; from slmgrpo.recipe import Source\n"
        f"load_sources([Source(source='file:a.jsonl')], base=Path({str(tmp_path)!r}))\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "label", "x"]), inner),
    max_leaves=6,
)
records = st.fixed_dictionaries(
    {"question": st.just("Why?") | json_values},
    optional=dict.fromkeys(("answer", "choices", "tests", "id", "task", "prompt"), json_values),
)
extracts = st.sampled_from([None, "gsm8k", "boxed", "letter", "index"])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(records, max_size=3), extracts, st.sets(st.sampled_from(["answer", "choices", "tests"])))
def test_whatever_a_row_holds_it_loads_or_is_named(
    tmp_path: Path, rows: list[dict[str, Any]], extract: Any, need: set[str]
) -> None:
    write(tmp_path / "a.jsonl", rows)
    try:
        loaded = load(tmp_path, Source(source="file:a.jsonl", extract=extract), need=need)
    except RecipeError as error:
        assert "a.jsonl" in str(error)
        return
    for row in loaded:
        assert row["question"].strip()
        assert need <= set(row)
        if row.get("choices") and row.get("answer") is not None:
            assert "A" <= row["answer"] < chr(ord("A") + len(row["choices"]))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["jsonl", "csv", "parquet"]), st.binary(max_size=60), st.integers(0, 200))
def test_a_damaged_file_is_named_and_never_a_traceback(tmp_path: Path, ending: str, noise: bytes, place: int) -> None:
    path = write(tmp_path / f"a.{ending}", ROWS[:3])
    whole = path.read_bytes()
    path.write_bytes(whole[:place] + noise + whole[place + len(noise) :])
    try:
        load(tmp_path, Source(source=f"file:a.{ending}"))
    except RecipeError as error:
        assert f"a.{ending}" in str(error)
