"""Several gloo ranks against one: the same completions and adapter; signals, disagreement, dead and late ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slmgrpo import pulse
from slmgrpo.errors import PlanError
from slmgrpo.interrupt import Interrupted
from slmgrpo.pulse import Pulse
from slmgrpo.ranks import ALONE, _Fault, raise_shared

CHILD = Path(__file__).with_name("rank_child.py")


def two_ranks(*arguments: str | Path) -> dict[str, Any]:
    """The last line that the first of two ranks prints, as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(CHILD), *map(str, arguments)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    return json.loads(outputs[0].splitlines()[-1])


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that two ranks do in one launch: starting them costs most of the time."""
    return two_ranks("same,trouble", tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def same(seen: dict[str, Any]) -> dict[str, Any]:
    return seen["same"]


NAMES = ["plain", "everything gathered"]


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_learn_what_one_with_twice_the_accumulation_learns(same: dict[str, Any], name: str) -> None:
    assert same[name]["difference"] < 1e-4


def test_two_ranks_write_the_tokens_that_one_writes(same: dict[str, Any]) -> None:
    assert same["plain"]["moved"] > 0.01
    assert same["plain"]["live"]["completions"] == 6 * 8
    assert same["plain"]["live"]["equal"] >= 0.999


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_report_the_metrics_that_one_reports(same: dict[str, Any], name: str) -> None:
    one, two = same[name]["metrics"]
    timed = ("seconds", "rule_seconds", "tokens_per_s")
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - set(timed):
            assert b[key] == (pytest.approx(a[key], rel=1e-3, abs=1e-5) if isinstance(a[key], float) else a[key]), key


@pytest.fixture
def trouble(seen: dict[str, Any]) -> dict[str, Any]:
    return seen["trouble"]


def test_a_signal_to_one_rank_saves_and_ends_all_at_the_same_step(trouble: dict[str, Any]) -> None:
    assert trouble["signal"] == {
        "ends": ["Interrupted: SIGTERM"] * 2,
        "state": "interrupted",
        "step": 1,
        "checkpoints": ["step_1"],
    }


def test_another_adapter_on_one_rank_stops_all_with_a_message(trouble: dict[str, Any]) -> None:
    ends = trouble["other adapter"]["ends"]
    assert all("guard rank_equality: step 2: the adapter of rank 1 is not that of rank 0" in end for end in ends)
    assert trouble["other adapter"]["state"] == "failed"
    assert trouble["other adapter"]["checkpoints"] == []


def test_an_error_on_one_rank_is_named_on_all(trouble: dict[str, Any]) -> None:
    assert all("rank 1: " in end and "broken on one rank" in end for end in trouble["error"]["ends"]), trouble["error"]
    assert trouble["error"]["state"] == "failed"


def test_a_rank_that_keeps_the_others_waiting_in_a_reward_is_named(trouble: dict[str, Any]) -> None:
    first, second = trouble["late"]
    assert "for rank 1 (" in first
    assert "step 1, grading" in first
    assert second == "finished: "


def test_of_errors_and_signals_all_ranks_raise_the_same() -> None:
    error, other, stop = (_Fault.of(e) for e in (PlanError("a"), ValueError("b"), Interrupted(signal.SIGTERM)))
    with pytest.raises(PlanError, match=r"^rank 1: a$"):
        raise_shared([None, error, other, stop], None, 0)
    with pytest.raises(PlanError, match=r"^a$"):
        raise_shared([error, error], None, 1)
    with pytest.raises(Interrupted):
        raise_shared([None, stop], None, 0)
    raise_shared([None, None], None, 0)


def test_a_rank_alone_shares_with_itself() -> None:
    assert ALONE.own([1, 2]) == [1, 2]
    assert ALONE.gather_shares([1, 2]) == [1, 2]
    assert ALONE.others("x") == []
    with pytest.raises(ValueError, match="as it is"), ALONE.together():
        raise ValueError("as it is")


def test_who_is_awaited_is_read_from_the_signs_of_life(tmp_path: Path) -> None:
    with ExitStack() as stack:
        for rank, stage in enumerate(["writing", "grading", "writing"]):
            beat = Pulse()
            beat.start(tmp_path / "ranks", rank)
            beat.step(3)
            beat.stage(stage)
            if rank != 1:
                stack.enter_context(beat.waiting())
        (tmp_path / "ranks" / "rank_7.json").write_text("{half")
        beats = pulse.read(tmp_path / "ranks")
    assert [beat.rank for beat in beats] == [0, 1, 2]
    seconds, late = pulse.awaited(beats, beats[0].since + 40)
    assert (round(seconds), [beat.rank for beat in late]) == (40, [1])
    assert str(late[0]).endswith("step 4, grading")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_job_with_its_name_and_the_run_resumes_on_one(tmp_path: Path, rank: int) -> None:
    run = tmp_path / "run"
    steps = ["train.steps=6", "train.save_every=1", "train.prompts_per_step=4", "data.heldout=[]"]
    settings = [f"--set={value}" for value in (*steps, "model.backend=transformers", "grading.workers=1")]
    slmgrpo = [sys.executable, "-m", "slmgrpo", "train"]
    process = subprocess.Popen(
        [*slmgrpo, "quickstart", *settings, "--gpus", "2", "--out", str(run)], stderr=subprocess.PIPE, text=True
    )
    try:
        while not (run / "checkpoints" / "step_1").exists():
            assert process.poll() is None, "the run ended before the kill"
            time.sleep(0.05)
        os.kill(json.loads((run / "ranks" / f"rank_{rank}.json").read_text())["pid"], signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 1
    named = rf"rank {rank} \(.+, process \d+\), step \d, .+: was killed by SIGKILL, and the other ranks"
    assert re.search(named, said), said
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert f"slmgrpo train --resume {run}" in said
    resumed = subprocess.run([*slmgrpo, "--resume", str(run), "--gpus", "1"], capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
