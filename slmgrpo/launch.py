"""Worker processes by torchrun's elastic agent: one a GPU, on one machine or several; and who of them failed how."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slmgrpo import pulse
from slmgrpo.errors import PlanError, RecipeError, RunError
from slmgrpo.interrupt import Interrupted
from slmgrpo.ranks import LAUNCHER
from slmgrpo.run import RunDir

SHUTDOWN_S = 45
"""When one worker has failed or a signal came, so long the others may take to save and end; then they are killed."""
STOPPED = {128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM}
"""Exit codes of a worker that was asked to stop."""


def gpus_here(asked: str) -> int:
    """Workers of this machine: all its GPUs for `auto`, or so many; without CUDA that many CPU processes."""
    import torch

    present = torch.cuda.device_count()
    if asked == "auto":
        return max(present, 1)
    if not asked.isdecimal() or int(asked) < 1:
        raise RecipeError(f"--gpus {asked}: write auto, or how many of this machine's GPUs")
    if present and int(asked) > present:
        raise PlanError(f"--gpus {asked}: this machine shows {present}; use --gpus {present}, or auto")
    return int(asked)


def launch(arguments: Sequence[str], run: Path, *, gpus: int, nodes: int = 1, rendezvous: str | None = None) -> None:
    """Run `slmgrpo ARGUMENTS` in `gpus` workers here; returns when all have ended well.

    nodes: machines that do the same; they meet at `rendezvous` (HOST:PORT, HOST one of them). run: where the workers
    leave signs of life. Raises RunError that names the worker that failed first, or Interrupted.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)  # said in our words below
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=gpus,
        run_id=_run_id(run) if nodes > 1 else uuid.uuid4().hex,
        rdzv_backend="c10d",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        shutdown_timeout=SHUTDOWN_S,
        **_meeting(nodes, rendezvous),
    )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // gpus)))
    os.environ[LAUNCHER] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-m", "slmgrpo", *arguments)
    except SignalException as stop:
        raise Interrupted(stop.sigval.value) from None
    except ChildFailedError as failed:
        error = _what_failed(failed, run)
        _note(error, run)
        raise error from None


def _what_failed(failed: Any, run: Path) -> BaseException:
    """The first failure in a sentence; what the workers themselves have said already gets no second message."""
    rank, first = failed.get_first_failure()
    codes = {failure.exitcode for failure in failed.failures.values()}
    if codes <= STOPPED:
        return Interrupted(next(abs(code) % 128 for code in codes))
    beats = {beat.rank: beat for beat in pulse.read(run / "ranks")}
    at_work = rank in beats and beats[rank].pid == first.pid  # else it is the beat of an earlier attempt
    where = str(beats[rank]) if at_work else f"rank {rank} (process {first.pid}), before it was at work"
    if first.exitcode < 0:
        how = f"was killed by {signal.Signals(-first.exitcode).name}"
    else:
        how = f"ended with code {first.exitcode}"
    if 2 in codes and first.exitcode > 0:
        return RecipeError("")
    rest = (
        f"; see {run}/logs; resume with `slmgrpo train --resume {shlex.quote(str(run))}`"
        if (run / "recipe.json").is_file()
        else ""
    )
    return RunError(f"{where}: {how}, and the other ranks were stopped{rest}")


def _note(error: BaseException, run: Path) -> None:
    """Into status.json, where the first rank was killed and could not say it."""
    directory = RunDir(run)
    if (run / "status.json").is_file() and directory.state() == "killed":
        directory.status("failed", directory.read_json("status.json")["step"], error=str(error))


def _meeting(nodes: int, rendezvous: str | None) -> dict[str, Any]:
    """Where the agents of all machines find each other, and by which network the workers speak."""
    if nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return {"rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
    if rendezvous is None:
        raise RecipeError(f"--nodes {nodes}: the machines need a place to meet; add --rendezvous HOST:PORT")
    host, _, port = rendezvous.rpartition(":")
    try:
        target = socket.gethostbyname(host)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, int(port)))  # sends nothing: asks the kernel which way it would go
            own = probe.getsockname()[0]
    except (OSError, ValueError) as error:
        raise RecipeError(f"--rendezvous {rendezvous}: not a HOST:PORT that this machine can reach ({error})") from None
    if name := _interface(own):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    return {"rdzv_endpoint": rendezvous, "local_addr": own, "rdzv_configs": {"is_host": str(own == target).lower()}}


def _interface(address: str) -> str | None:
    """The network interface that has this IPv4 address."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()))  # SIOCGIFADDR
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def _run_id(run: Path) -> str:
    """The same on every machine that trains into this directory."""
    return str(run.resolve()).replace("/", "_")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SLURM = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --output={name}-%j.log
#SBATCH --signal=TERM@{grace_s}
# Written by `slmgrpo launch slurm`. Add your partition, account, time and memory, then `sbatch` it.
# The run directory must be on a file system that all nodes share. A second submission goes on with the run.
set -euo pipefail
cd {folder}
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
if [ -e {out}/recipe.json ]; then what=(--resume {out}); else what=({what} --out {out}); fi
exec srun --kill-on-bad-exit=1 {program} train "${{what[@]}}" \\
    --gpus {gpus} --nodes {nodes} --rendezvous "$head:$port"
"""


def slurm_script(recipe: str, overrides: Sequence[str], out: Path, *, name: str, gpus: int, nodes: int) -> str:
    """A job script for sbatch: one task a machine, which starts that machine's workers."""
    what = [recipe, *(part for value in overrides for part in ("--set", value))]
    return SLURM.format(
        name=shlex.quote(name),
        nodes=nodes,
        gpus=gpus,
        grace_s=120,
        folder=shlex.quote(str(Path.cwd())),
        out=shlex.quote(str(out)),
        what=shlex.join(what),
        program=f"{shlex.quote(sys.executable)} -m slmgrpo",
    )
