"""CPU time per program: the sandbox against the ways other projects run model-written code.

Each arm judges the same programs, from a parent that has imported torch, as a trainer has; the last line is JSON.
    python tests/benchmarks/sandbox.py [--quick]
A ratio of CPU times (user and system, of the arm and all its processes) is a ratio of programs per second and core,
and stands on a busy machine; the wall times beside it, with everything pinned to one core, do not.
vs_evalplus: a forked process per task that runs all tests in itself and reports through shared memory.
vs_human_eval: a manager process and a forked process per task. vs_bare_python: `python -I -S` on program + tests.
The comparison runners are our own code, written in the way those projects work; none of them is a jail.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import multiprocessing
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from slmgrpo.rewards import sandbox

DATA = Path(__file__).parents[2].parent / "shared/data/code/mbpp_test.jsonl"
SLOW = "mbpp_123"  # five seconds of arithmetic in its own tests: hides what the runners cost
FORK = multiprocessing.get_context("fork")
TIMEOUT_S = 10.0


class Problem(NamedTuple):
    program: str
    prompt: str
    entry_point: str
    tests: list[str]


def problems(count: int) -> list[Problem]:
    """MBPP's reference solutions with their three asserts; without the shared data, problems of the same size."""
    if DATA.exists():
        rows = [json.loads(line) for line in DATA.read_text().splitlines()]
        rows = [row for row in rows if row["id"] != SLOW]
        made = [Problem(r["canonical_solution"], r["prompt"], r["entry_point"], r["tests"]) for r in rows]
        return made[:: len(made) // count][:count]
    made = []
    for n in range(count):
        program = f"import re\n\n\ndef scale(xs):\n    return [x * {n} for x in xs]\n"
        tests = [f"assert scale([{k}, {k + 1}]) == [{k * n}, {(k + 1) * n}]" for k in range(3)]
        made.append(Problem(program, "Write a function to scale a list.", "scale", tests))
    return made


# ---- ours --------------------------------------------------------------------------------------------------------


def run_ours(problem: Problem) -> bool:
    outcome = sandbox.run_tests(
        problem.program,
        tests=problem.tests,
        entry_point=problem.entry_point,
        test_kind="asserts",
        prompt=problem.prompt,
    )
    return outcome.status == "passed"


# ---- plain interpreter per program --------------------------------------------------------------------------------


def run_bare_python(problem: Problem) -> bool:
    text = "\n".join([problem.program, *problem.tests])
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", text],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
    )
    return done.returncode == 0


# ---- in-process runners, as a forked child would be -----------------------------------------------------------------


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    sink, before = io.StringIO(), sys.stdin
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        sys.stdin = sink
        yield
        sys.stdin = before


@contextlib.contextmanager
def scratch() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        before = Path.cwd()
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def disarm(memory: int | None) -> None:
    """What those runners do in place of a jail: limits, and dangerous functions set to None."""
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    faulthandler.disable()
    os.environ["OMP_NUM_THREADS"] = "1"
    for owner, names in (
        (os, "kill system putenv remove removedirs rmdir fchdir setuid fork forkpty killpg rename renames truncate"),
        (os, "replace unlink fchmod fchown chmod chown chroot lchown getcwd chdir"),
        (shutil, "rmtree move chown"),
        (subprocess, "Popen"),
    ):
        for name in names.split():
            setattr(owner, name, None)
    for name in ("ipdb", "joblib", "resource", "psutil", "tkinter"):
        sys.modules[name] = None  # type: ignore[assignment]


def evalplus_child(problem: Problem, calls: list[Any], status: Any, details: Any, progress: Any) -> None:
    with scratch():
        kept = shutil.rmtree, os.rmdir, os.chdir, os.unlink, os.getcwd
        disarm(4 << 30)
        names: dict[str, Any] = {}
        try:
            with silence():
                exec(problem.program, names)
            for number, test in enumerate(calls):
                with alarm(1.0), silence():
                    exec(test, names)
                details[number] = True
                progress.value += 1
            status.value = 1
        except BaseException:
            status.value = 2
        shutil.rmtree, os.rmdir, os.chdir, os.unlink, os.getcwd = kept


def run_as_evalplus(problem: Problem) -> bool:
    """One forked process per task; per-test results in shared values."""
    status, progress = FORK.Value("i", 0), FORK.Value("i", 0)
    details = FORK.Array("b", [False] * len(problem.tests))
    process = FORK.Process(target=evalplus_child, args=(problem, problem.tests, status, details, progress))
    process.start()
    process.join(timeout=TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()
    return status.value == 1 and all(details[:])


def human_eval_child(text: str, result: Any) -> None:
    with scratch():
        kept = shutil.rmtree, os.rmdir, os.chdir, os.unlink, os.getcwd
        disarm(None)
        try:
            with silence(), alarm(TIMEOUT_S):
                exec(text, {})
            result.append("passed")
        except BaseException as error:
            result.append(f"failed: {error}")
        shutil.rmtree, os.rmdir, os.chdir, os.unlink, os.getcwd = kept


def run_as_human_eval(problem: Problem) -> bool:
    """A manager's server process for the result list, and one forked process, per task."""
    manager = FORK.Manager()
    result = manager.list()
    process = FORK.Process(target=human_eval_child, args=("\n".join([problem.program, *problem.tests]), result))
    process.start()
    process.join(timeout=TIMEOUT_S + 1)
    if process.is_alive():
        process.kill()
    passed = list(result) == ["passed"]
    manager.shutdown()
    return passed


# ---- measurement -------------------------------------------------------------------------------------------------


def cpu_s() -> float:
    """CPU seconds of this process, of all it has waited for, and of the living below it and theirs."""
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    times: dict[int, tuple[int, int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            times[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    ticks, below = 0, {os.getpid()}
    while more := {pid for pid, (parent, _) in times.items() if parent in below} - below:
        ticks += sum(times[pid][1] for pid in more)
        below |= more
    return sum(use.ru_utime + use.ru_stime for use in own) + ticks / os.sysconf("SC_CLK_TCK")


def measure(arms: dict[str, Callable[[Problem], bool]], work: list[Problem], rounds: int) -> dict[str, list[float]]:
    """(CPU, wall) seconds per program of each arm: medians of interleaved rounds."""
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, run in arms.items():
            cpu, wall = cpu_s(), time.perf_counter()
            right = sum(map(run, work))
            wall = time.perf_counter() - wall
            seen[name].append(((cpu_s() - cpu) / len(work), wall / len(work)))
            if right != len(work):
                raise SystemExit(f"{name}: {len(work) - right} of {len(work)} reference solutions refused")
    return {name: [statistics.median(column) for column in zip(*pairs, strict=True)] for name, pairs in seen.items()}


def parts() -> dict[str, float]:
    """Where our time goes: the least wall milliseconds of each step on one core."""
    box, limits = sandbox.Sandbox("strict"), sandbox.Limits()
    box.start()

    def least(step: Callable[[], object], times: int = 150) -> float:
        def once() -> float:
            began = time.perf_counter()
            step()
            return time.perf_counter() - began

        return min(once() for _ in range(times)) * 1e3

    def judged(calls: int) -> float:
        task = {"tests": ["f(1)\n" * calls], "entry_point": "f", "prompt": "", "setup": "", "check": False}
        return least(lambda: box.run("def f(x):\n    return x + 1\n", task, limits))

    empty = least(lambda: box.run_stdio("", [{"input": "", "output": ""}], limits, sandbox.same_output))
    none, hundred = judged(0), judged(100)
    box.close()
    return {"one child": empty, "program and judge": none, "one call": (hundred - none) / 100}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    torch.ones(64, 64).sum()
    rung = sandbox.probe("strict")
    work = problems(20 if quick else 125)
    arms = {
        "ours": run_ours,
        "evalplus": run_as_evalplus,
        "human_eval": run_as_human_eval,
        "bare_python": run_bare_python,
    }
    measure(arms, work[:3], rounds=1)
    seen = measure(arms, work, rounds=7 if quick else 9)
    cpu, wall = seen["ours"]
    for name, (arm_cpu, arm_wall) in seen.items():
        print(
            f"{name:12s} {arm_cpu * 1e3:7.2f} ms CPU a program ({arm_cpu / cpu:5.2f} times ours), "
            f"{arm_wall * 1e3:7.2f} ms on one core ({arm_wall / wall:5.2f} times ours)"
        )
    print("of which, in ms:", ", ".join(f"{name} {value:.2f}" for name, value in parts().items()))
    result = {f"vs_{name}": round(arm[0] / cpu, 2) for name, arm in seen.items() if name != "ours"}
    walls = {f"wall_vs_{name}": round(arm[1] / wall, 2) for name, arm in seen.items() if name != "ours"}
    print(json.dumps({**result, **walls, "rung": rung.number, "programs": len(work)}))


if __name__ == "__main__":
    main()
