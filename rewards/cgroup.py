"""Control groups that count a jail's processes and memory, on hosts that let us make them (version 1 or 2)."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import suppress
from pathlib import Path


def _mounts() -> tuple[dict[str, Path], Path | None]:
    """Where the version 1 controllers are mounted, by name, and where version 2 is."""
    first: dict[str, Path] = {}
    second = None
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, target, kind, options = line.split()[:4]
        if kind == "cgroup":
            first |= {name: Path(target) for name in ("pids", "memory") if name in options.split(",")}
        elif kind == "cgroup2":
            second = Path(target)
    return first, second


def _own(controller: str) -> str:
    """This process's group in a version 1 controller, or in version 2 for an empty name."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return path
    return "/"


def _make(parent: Path, name: str, settings: dict[str, int]) -> Path:
    folder = parent / name
    folder.mkdir()
    try:
        for key, value in settings.items():
            (folder / key).write_text(str(value))
    except OSError:
        folder.rmdir()
        raise
    with suppress(OSError):  # where swap is counted at all
        (folder / "memory.swap.max").write_text("0")
    return folder


def create(pids: int, memory_mb: int) -> list[Path]:
    """The folders of a new group with these limits; OSError where the host allows none."""
    first, second = _mounts()
    name = f"slmgrpo-{os.getpid()}-{secrets.token_hex(4)}"
    memory = memory_mb << 20
    problem = OSError("no pids and memory controllers are mounted")
    if first.keys() >= {"pids", "memory"}:
        wanted = {"pids": {"pids.max": pids}, "memory": {"memory.limit_in_bytes": memory}}
        made: list[Path] = []
        try:
            for controller, settings in wanted.items():
                made.append(_make_below(first[controller], _own(controller), name, settings))
            return made
        except OSError as error:
            remove(made)
            problem = error
    if second is not None:
        try:
            return [_make_below(second, _own(""), name, {"pids.max": pids, "memory.max": memory})]
        except OSError as error:
            problem = error
    raise problem


def _make_below(mount: Path, own: str, name: str, settings: dict[str, int]) -> Path:
    """In this process's own group or, where that one may not have children with limits, in the topmost."""
    problem: OSError | None = None
    for parent in dict.fromkeys((mount / own.strip("/"), mount)):
        _sweep(parent)
        with suppress(OSError):
            if (parent / "cgroup.subtree_control").exists():
                (parent / "cgroup.subtree_control").write_text("+pids +memory")
        try:
            return _make(parent, name, settings)
        except OSError as error:
            problem = error
    raise problem or OSError(f"no group can be made below {mount}")


def _sweep(parent: Path) -> None:
    """Removes empty groups that a killed run left; fresh ones may be about to be filled."""
    for folder in parent.glob("slmgrpo-*-*"):
        with suppress(OSError):
            if not Path(f"/proc/{folder.name.split('-')[1]}").exists() and folder.stat().st_mtime < time.time() - 60:
                folder.rmdir()


def remove(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
