"""What is installed, which device and engines can run, how strong the sandbox is, and the command that mends a gap."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from slmgrpo.errors import RunError
from slmgrpo.model import cache_dir

NEEDED = ("unsloth", "torch", "trl", "transformers", "peft", "bitsandbytes", "datasets", "math-verify")
EXTRAS = {"vllm": "vllm", "reasoning-gym": "reasoning"}


@dataclass(frozen=True)
class Finding:
    """One line of `slmgrpo doctor`. mend: a command or setting that helps, where something is missing."""

    name: str
    state: Literal["ok", "absent", "fault"]
    detail: str
    mend: str = ""


def examine() -> list[Finding]:
    """All findings; a `fault` keeps training on this machine from working."""
    found = [Finding("python", "ok", f"{platform.python_version()} on {platform.platform(terse=True)}")]
    found += [_package(name) for name in NEEDED]
    found += [_extra(name, extra) for name, extra in EXTRAS.items()]
    device = _device()
    found += [device, _engines(device), *_sandbox(), _cache()]
    return found


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "fault", "not installed", "pip install slmgrpo")


def _extra(name: str, extra: str) -> Finding:
    try:
        return Finding(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "absent", "not installed", f"pip install 'slmgrpo[{extra}]'")


def _device() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("device", "fault", "torch is missing", "pip install slmgrpo")
    import torch

    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Finding("device", "ok", f"{count} x {name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free")
    detail = f"no GPU: CPU, {os.cpu_count()} cores, float32; for the tiny model and 135M, not for 1.5B and up"
    if shutil.which("nvidia-smi"):
        return Finding("device", "fault", "a driver is there, but torch sees no GPU", "check CUDA_VISIBLE_DEVICES")
    return Finding("device", "ok", detail)


def _engines(device: Finding) -> Finding:
    if importlib.util.find_spec("vllm") is None:
        return Finding("engines", "ok", "hf")
    cuda = device.state == "ok" and not device.detail.startswith("no GPU")
    return Finding("engines", "ok", "hf, vllm, unsloth" if cuda else "hf, vllm (unsloth needs CUDA)")


def _sandbox() -> list[Finding]:
    from slmgrpo.rewards.sandbox import probe

    try:
        rung = probe()
    except RunError as error:
        return [Finding("sandbox", "fault", str(error))]
    state = "ok" if rung.number <= 3 else "fault"
    return [
        Finding("sandbox", state, f"rung {rung.number} of 4, {rung.name} (1 is the strongest; strict accepts 1 to 3)"),
        Finding("  protects", "ok", rung.protects),
        Finding("  does not", "ok", rung.does_not),
    ]


def _cache() -> Finding:
    folder = cache_dir()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if os.access(existing, os.W_OK):
        return Finding("cache", "ok", str(folder))
    return Finding("cache", "fault", f"{folder} cannot be written", f"export XDG_CACHE_HOME={Path.cwd()}/.cache")
