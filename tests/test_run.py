import json
from datetime import date
from functools import partial
from pathlib import Path

import pytest

from slmgrpo.errors import RecipeError, RunError
from slmgrpo.run import RunDir, create, damage, open_run, refuse_used


def checkpointed(run: RunDir, *steps: int, keep: int = 3) -> None:
    for step in steps:
        run.save_checkpoint(step, partial(_fill, step=step), keep)


def _fill(folder: Path, step: int) -> None:
    (folder / "adapter").mkdir()
    (folder / "adapter" / "weights").write_text(f"weights of step {step}")
    (folder / "trainer.pt").write_text("state")


def test_a_folder_that_cannot_be_written_is_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()  # root writes wherever it may, but not into a folder as if it were a file
    with pytest.raises(RecipeError, match="cannot be written"):
        RunDir(tmp_path).lock()


def test_two_runs_of_one_second_get_two_directories(tmp_path: Path) -> None:
    paths = {create("quickstart", None, tmp_path).path for _ in range(3)}
    assert len(paths) == 3


def test_a_directory_with_other_files_and_a_file_are_refused_as_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RecipeError, match="not empty and not a run"):
        create("x", tmp_path)
    with pytest.raises(RecipeError, match="is a file"):
        create("x", tmp_path / "notes.txt")


def test_a_run_that_says_running_without_a_process_was_killed(tmp_path: Path) -> None:
    run = create("x", tmp_path / "run")
    run.status("running", 3)
    assert run.state() == "killed"
    run.lock()
    assert RunDir(run.path).state() == "running"
    run.unlock()
    assert run.state() == "killed"
    run.status("interrupted", 3)
    assert (run.state(), run.finished_at()) == ("interrupted", None)


def test_a_finished_run_is_whole_with_its_last_checkpoint(tmp_path: Path) -> None:
    run = create("x", tmp_path / "run")
    assert run.finished_at() is None
    run.status("finished", 4)
    checkpointed(run, 2)
    assert run.finished_at() is None
    checkpointed(run, 4)
    assert run.finished_at() == 4


def test_a_place_that_cannot_be_written_is_refused_and_asking_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be made"):
        refuse_used(Path("/proc/slmgrpo/run"))
    refuse_used(tmp_path / "a" / "b")
    assert not list(tmp_path.iterdir())


def test_a_used_directory_is_refused_with_its_ways_out(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"already in use; continue that run with `slmgrpo train --resume"):
        create("x", tmp_path)


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    assert create("x", tmp_path).path == tmp_path


def test_a_folder_without_a_recipe_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="not a run directory"):
        open_run(tmp_path)
    with pytest.raises(RecipeError, match="no such run directory"):
        open_run(tmp_path / "missing")


def test_a_second_process_in_one_directory_is_refused(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path), RunDir(tmp_path)
    first.lock()
    with pytest.raises(RecipeError, match="another process is training"):
        second.lock()


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    checkpointed(run, 5, 10, 100, keep=2)
    assert run.steps() == [10, 100]
    assert run.latest_checkpoint() == (run.checkpoints / "step_100", [])


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda f: (f / "trainer.pt").write_text("stote"), "trainer.pt does not match its checksum"),
        (lambda f: (f / "adapter" / "weights").unlink(), "adapter/weights is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "manifest.json missing or unreadable"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, spoil, fault: str) -> None:
    run = RunDir(tmp_path)
    checkpointed(run, 1, 2)
    spoil(run.checkpoints / "step_2")
    folder, messages = run.latest_checkpoint()
    assert folder == run.checkpoints / "step_1"
    assert len(messages) == 1
    assert fault in messages[0]


def test_a_save_that_fails_leaves_no_half_folder_and_keeps_the_last_good_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    checkpointed(run, 1)

    def full(folder: Path) -> None:
        _fill(folder, 2)
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"No space left on device.*last good checkpoint is .*step_1"):
        run.save_checkpoint(2, full, keep=2)
    assert [f.name for f in run.checkpoints.iterdir()] == ["step_1"]
    assert damage(run.checkpoints / "step_1") is None


def test_rewind_cuts_steps_behind_the_checkpoint_and_a_half_line(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append(run.metrics, ({"step": step} for step in range(1, 8)))
    run.append(run.samples, ({"step": step, "text": "é", "day": date(2026, 1, step)} for step in (1, 1, 5, 6)))
    with run.metrics.open("a") as file:
        file.write('{"step": 8, "rew')
    run.rewind(5)
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == [1, 2, 3, 4, 5]
    assert [json.loads(line)["step"] for line in run.samples.read_text().splitlines()] == [1, 1, 5]


def test_rewind_removes_what_later_steps_left_and_half_written_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    checkpointed(run, 4, 8)
    run.append(run.metrics, ({"step": step} for step in range(1, 9)))
    run.evaluations.write_text('{"step": 4}\n{"step": 8}\n{"st')
    run.write_json("best.json", {"step": 8})
    late = ["eval/step_8/heldout/scores.json", "dynamics/step_8.parquet", "nonfinite/step_7.json"]
    late += ["nonfinite/step_7_rank_1.json", "nonfinite/step_10_rank_12.json"]
    early = ["eval/step_4/heldout/scores.json", "dynamics/step_4.parquet", "nonfinite/step_4_rank_7.json"]
    early += [".git/x", "eval/.notes", "dynamics/.notes.2", "eval/.python-version.3", "dynamics/step_8_of_mine.txt"]
    half = ["checkpoints/.partial_9_1/x", ".status.json.12", ".metrics.jsonl.7", "dynamics/.step_4.parquet.99"]
    half += ["eval/step_4/heldout/.scores.json.99", "nonfinite/.step_4_rank_1.json.5"]
    for name in (*late, *early, *half):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert run.rewind(4) == []
    assert run.steps() == [4]
    assert run.lines(run.evaluations) == [{"step": 4}]
    assert not [name for name in (*late, *half, "best.json") if (tmp_path / name).exists()]
    assert all((tmp_path / name).exists() for name in early)


def test_rewind_says_which_lines_were_lost(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 1}\n\x00\x00\n{"step": 3}\n')
    assert run.rewind(3) == [f"{run.metrics}: no readable line of step 2"]
    assert [line["step"] for line in run.lines(run.metrics)] == [1, 3]


def test_a_damaged_checkpoint_is_written_anew_when_its_step_comes_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    checkpointed(run, 2)
    (run.checkpoints / "step_2" / "trainer.pt").write_text("stote")
    checkpointed(run, 2)
    assert damage(run.checkpoints / "step_2") is None


@pytest.mark.parametrize("text", ["[]", '{"sha256": []}', '{"sha256": {}}', '{"sha256": 3}', "null", "\x00"])
def test_a_manifest_of_any_form_is_no_checkpoint(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    assert damage(tmp_path)


def test_a_half_line_is_cut_even_where_no_step_is(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 1}\n{"st')
    run.rewind(9)
    assert run.metrics.read_text() == '{"step": 1}\n'
