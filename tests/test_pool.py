"""Judging in worker processes: in order, on time, once, and never a zero for a fault of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.pool import Pool, Task

RULES = """
import os, time, signal

def length(completion): return float(len(completion))

def slow_if_asked(completion):
    if completion.startswith("stuck"):
        while True: time.sleep(1)
    return 1.0

def breaks(completion): raise ValueError("no such luck")

def dies(completion):
    if completion.startswith("die"):
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def dies_once(completion, marker):
    if not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0

def noted(completion, log):
    with open(log, "a") as file: file.write(completion + "\\n")
    return 1.0

def process(completion): return float(os.getpid())

def loaded(completion):
    import sys
    return float("torch" in sys.modules)
"""


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rules")
    (folder / "rules.py").write_text(RULES)
    return folder


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, timeout_s=1.0, sandbox="best") as made:
        yield made


def task(rules: Path, key: int, completion: str, *names: str, **columns: Any) -> Task:
    rewards = tuple(Reward(f"./rules.py:{name}", name=name, base=rules) for name in names)
    return Task(key, rewards, "", completion, (), columns)


def test_verdicts_come_in_the_order_of_submission(pool: Pool, rules: Path) -> None:
    tasks = [task(rules, i, "x" * (i % 50), "length") for i in range(300)]
    assert [v["length"].value for v in pool.grade(tasks)] == [float(i % 50) for i in range(300)]


def test_drain_gives_each_task_its_key(pool: Pool, rules: Path) -> None:
    for key in (7, 3, 5):
        pool.submit(task(rules, key, "a" * key, "length"))
    assert [(key, v["length"].value) for key, v in pool.drain()] == [(7, 7.0), (3, 3.0), (5, 5.0)]
    assert list(pool.drain()) == []


def test_a_stuck_rule_times_out_and_the_rest_of_its_row_goes_on(pool: Pool, rules: Path) -> None:
    tasks = [task(rules, i, f"row {i}", "slow_if_asked", "length") for i in range(40)]
    tasks[20] = task(rules, 20, "stuck", "slow_if_asked", "length")
    verdicts = pool.grade(tasks)
    assert (verdicts[20]["slow_if_asked"].value, verdicts[20]["slow_if_asked"].status) == (0.0, "timeout")
    assert verdicts[20]["length"].value == 5.0
    assert all(v["slow_if_asked"].value == 1.0 for i, v in enumerate(verdicts) if i != 20)


def test_a_rule_that_raises_is_an_error_and_never_a_zero(pool: Pool, rules: Path) -> None:
    verdict = pool.grade([task(rules, 0, "x", "breaks")])[0]["breaks"]
    assert (verdict.value, verdict.status) == (None, "error")
    assert "no such luck" in verdict.why


def test_a_rule_that_kills_its_process_is_an_error_and_the_others_are_judged(pool: Pool, rules: Path) -> None:
    verdicts = pool.grade([task(rules, i, "die" if i == 3 else f"live {i}", "dies") for i in range(20)])
    assert (verdicts[3]["dies"].value, verdicts[3]["dies"].status) == (None, "error")
    assert [v["dies"].value for i, v in enumerate(verdicts) if i != 3] == [1.0] * 19


def test_a_worker_that_dies_once_costs_nothing(pool: Pool, rules: Path, tmp_path: Path) -> None:
    verdict = pool.grade([task(rules, 0, "x", "dies_once", marker=str(tmp_path / "marker"))])[0]["dies_once"]
    assert verdict.value == 1.0


def test_a_worker_killed_from_outside_is_replaced(pool: Pool, rules: Path) -> None:
    first = pool.grade([task(rules, 0, "before", "process")])[0]["process"].value
    assert first is not None
    os.kill(int(first), signal.SIGKILL)
    verdicts = pool.grade([task(rules, i, f"after {i}", "process") for i in range(8)])
    assert all(v["process"].value not in (None, first) for v in verdicts)


def test_equal_judgements_are_made_once(pool: Pool, rules: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    tasks = [task(rules, i, f"text {i % 3}", "noted", log=str(log), unread=i) for i in range(30)]
    pool.grade(tasks)
    pool.grade(tasks)
    assert sorted(log.read_text().split("\n")[:-1]) == ["text 0", "text 1", "text 2"]


def test_workers_do_not_load_torch(pool: Pool, rules: Path) -> None:
    assert pool.grade([task(rules, 0, "x", "loaded")])[0]["loaded"].value == 0.0


def test_statuses_and_times_are_counted_per_rule(rules: Path) -> None:
    with Pool(1, timeout_s=5.0) as own:
        own.grade([task(rules, i, f"{i}", "length", "breaks") for i in range(4)])
        stats = own.stats()
    assert stats["length"].statuses == {"scored": 4}
    assert stats["breaks"].statuses == {"error": 4}
    assert 0 <= stats["length"].p50_s <= stats["length"].p95_s


def test_submitting_does_not_wait_for_judging(rules: Path) -> None:
    with Pool(1, timeout_s=30.0) as own:
        own.submit(task(rules, 0, "stuck", "slow_if_asked"))
        for i in range(1, 2000):
            own.submit(task(rules, i, "x" * 1000 + str(i), "length"))
        assert own.stats().get("slow_if_asked") is None


PARENT = """
import sys, time
sys.path.insert(0, {folder!r})
from pathlib import Path
from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.pool import Pool, Task
pool = Pool(2)
rule = Reward("./rules.py:process", name="process", base=Path({folder!r}))
pids = {{int(v["process"].value) for v in pool.grade([Task(i, (rule,), "", str(i), (), {{}}) for i in range(64)])}}
print(*pids, flush=True)
time.sleep(60)
"""


def test_workers_do_not_outlive_a_parent_that_is_killed(rules: Path) -> None:
    code = PARENT.format(folder=str(rules))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    assert pids
    for _ in range(100):
        if not any(_runs(pid) for pid in pids):
            return
        time.sleep(0.05)
    pytest.fail("five seconds later a worker still runs")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
