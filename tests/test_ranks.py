"""Several gloo ranks against one: the same completions and adapter; signals, disagreement, dead and late ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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
def same(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return two_ranks("same", tmp_path_factory.mktemp("same"))


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
