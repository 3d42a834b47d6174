"""Launching: what is refused before a process starts, the Slurm script, two machines as two network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from slmgrpo import launch
from slmgrpo.errors import RecipeError
from slmgrpo.pulse import Pulse

SLMGRPO = [sys.executable, "-m", "slmgrpo"]
STAND_IN = """#!/bin/bash
# In Slurm's place: one task, run here; `scontrol show hostnames` names one machine.
if [ "$(basename "$0")" = scontrol ]; then echo localhost; exit; fi
while [ "${1:0:2}" = -- ]; do shift; done
printf '%s\\n' "$@"
"""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "some"], "--gpus some: write auto, or how many of this machine's GPUs"),
        (["--gpus", "7"], "on 7 GPUs is not the same number of whole groups for each"),
        (["--gpus", "2", "--set", "trainer=trl"], "this baseline runs in one process; use --gpus 1"),
        (["--gpus", "2", "--nodes", "2"], "--nodes 2 needs --out"),
        (["--gpus", "2", "--nodes", "2", "--out", "run"], "the machines need a place to meet; add --rendezvous"),
    ],
)
def test_what_cannot_be_launched_is_refused_before_anything_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = subprocess.run(
        [*SLMGRPO, "train", "quickstart", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_plan_counts_the_gpus_of_all_machines(tmp_path: Path) -> None:
    command = [*SLMGRPO, "plan", "quickstart", "--gpus", "4", "--nodes", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    planned = json.loads(done.stdout)
    assert (planned["gpus"], planned["prompts_per_rank"]) == (8, 3)


def test_a_script_for_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    command = [*SLMGRPO, "launch", "slurm", "quickstart", "--out", "run", "--to", "jobs/a.slurm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, "there is no folder jobs; make it" in done.stderr) == (2, True), done.stderr


def test_a_worker_that_never_came_to_work_is_not_taken_for_one_of_an_earlier_attempt(tmp_path: Path) -> None:
    beat = Pulse()
    beat.start(tmp_path / "ranks", 1)
    beat.step(30)
    beat.stage("writing")
    for pid, said in ((os.getpid(), "step 31, writing: "), (7, "rank 1 (process 7), before it was at work: ")):
        failure = ProcessFailure(local_rank=1, pid=pid, exitcode=-9, error_file="")
        assert said in str(launch._what_failed(ChildFailedError("slmgrpo", {1: failure}), tmp_path))


def test_a_rendezvous_must_be_reachable() -> None:
    with pytest.raises(RecipeError, match="not a HOST:PORT"):
        launch._meeting(2, "no.such.host.invalid:29500")
    with pytest.raises(RecipeError, match="not a HOST:PORT"):
        launch._meeting(2, "localhost")


def test_the_slurm_script_starts_one_launcher_a_machine_and_resumes_when_submitted_again(tmp_path: Path) -> None:
    script = tmp_path / "job.slurm"
    command = [
        "launch",
        "slurm",
        "quickstart",
        "--nodes",
        "2",
        "--gpus",
        "3",
        "--out",
        "my runs/a",
        "--to",
        str(script),
    ]
    settings = ["--set", "data.heldout=[]", "--set", "description='it''s mine'"]
    done = subprocess.run([*SLMGRPO, *command, *settings], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert "#SBATCH --ntasks-per-node=1" in script.read_text()
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(STAND_IN)
        (tmp_path / name).chmod(0o755)
    job = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]"}

    def started() -> list[str]:
        return subprocess.run(["bash", str(script)], env=job, capture_output=True, text=True, check=True).stdout.split(
            "\n"
        )[:-1]

    first = started()
    assert first[1:] == [
        *["-m", "slmgrpo", "train", "quickstart", *settings, "--out", "my runs/a"],
        *["--gpus", "3", "--nodes", "2", "--rendezvous", "localhost:20007"],
    ]
    (tmp_path / "my runs/a").mkdir(parents=True)
    (tmp_path / "my runs/a/recipe.json").write_text("{}")
    assert started()[4:6] == ["--resume", "my runs/a"]


def namespaces() -> str | None:
    """Why two network namespaces cannot be made here; None where they can."""
    if shutil.which("ip") is None:
        return "needs `ip` (iproute2)"
    made = subprocess.run(["ip", "netns", "add", "slmgrpo-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "slmgrpo-try"], capture_output=True)
    return f"cannot make network namespaces: {made.stderr.strip()}" if made.returncode else None


@pytest.mark.slow
def test_two_machines_as_network_namespaces_train_what_one_does(tmp_path: Path) -> None:
    if reason := namespaces():
        pytest.skip(reason)
    names, settings = ["slmgrpo-a", "slmgrpo-b"], ["train.steps=3", "train.prompts_per_step=4", "data.heldout=[]"]
    common = [f"--set={value}" for value in (*settings, "model.backend=transformers", "grading.workers=1")]
    commands = [f"netns add {name}" for name in names]
    commands += ["link add va netns slmgrpo-a type veth peer name vb netns slmgrpo-b"]
    for name, link, address in zip(names, ("va", "vb"), ("10.99.0.1/24", "10.99.0.2/24"), strict=True):
        commands += [
            f"-n {name} addr add {address} dev {link}",
            f"-n {name} link set {link} up",
            f"-n {name} link set lo up",
        ]
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        for name in names:
            train = [
                *SLMGRPO,
                "train",
                "quickstart",
                *common,
                "--gpus",
                "1",
                "--nodes",
                "2",
                "--out",
                str(tmp_path / "run"),
            ]
            where = ["ip", "netns", "exec", name]
            processes.append(
                subprocess.Popen(
                    [*where, *train, "--rendezvous", "10.99.0.1:29500"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said = [process.communicate(timeout=240)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], said
    finally:
        for process in processes:
            process.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    alone = [*SLMGRPO, "train", "quickstart", *common, "--gpus", "1", "--out", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True)
    import torch
    from safetensors.torch import load_file

    one, two = (
        load_file(tmp_path / name / "checkpoints" / "step_3" / "adapter" / "adapter_model.safetensors")
        for name in ("alone", "run")
    )
    flat = [torch.cat([part[name].flatten() for name in sorted(part)]) for part in (one, two)]
    assert float((flat[0] - flat[1]).norm() / flat[0].norm()) < 1e-4
