"""What confines a jailed program: namespaces, a private root, Landlock and limits, by plain system calls.

Everything here runs inside the fork server (`zygote.py`), which starts without site-packages: standard library only.
A step that the kernel refuses raises OSError with the step's name, and the caller tries the next rung.
Imports are few on purpose: each extension module and each touched page makes every later fork slower.
"""

# pathlib would be one more import:
# ruff: noqa: PTH208, PTH103, PTH106, PTH112, PTH114, PTH115, PTH116, PTH120, PTH211, PTH102
from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from typing import Final

NOBODY: Final = 65534
SCRATCH: Final = "/scratch/tmp"  # Landlock rules sit on its parent, so that a fresh mount needs no new rule
SCRATCH_MB: Final = 16
MEMORY_MB: Final = 1024
GROUP_MEMORY_MB: Final = 768
PIDS: Final = 48
FILES: Final = 64
THREADS: Final = 128
FILE_MB: Final = 16

libc = ctypes.CDLL(None, use_errno=True)
_MACHINE = os.uname().machine

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
CAP_KILL, CAP_SETUID, CAP_SYS_ADMIN = 1 << 5, 1 << 7, 1 << 21


def check(result: int, step: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")
    return result


def unshare(flags: int, step: str) -> None:
    check(libc.unshare(flags), step)


def setns(fd: int, kind: int) -> None:
    check(libc.setns(fd, kind), "setns")


def die_with_parent() -> None:
    check(libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PDEATHSIG)")


def no_new_privileges() -> None:
    check(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


# ---- a root of its own -------------------------------------------------------------------------------------------


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    names = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    check(libc.mount(*names[:3], ctypes.c_ulong(flags), names[3]), f"mount {target}")


def interpreter_paths() -> list[str]:
    """Folders a program may read: the standard library and the shared libraries its extension modules load."""
    wanted = [f"{sys.base_prefix}/lib", f"{sys.base_prefix}/lib64", "/lib", "/lib64", "/usr/lib", "/usr/lib64"]
    wanted += [*sys.path, "/usr/share/zoneinfo"]
    found: list[str] = []
    for path in map(os.path.abspath, wanted):
        if os.path.isdir(path) and not any(path == kept or path.startswith(kept + "/") for kept in found):
            found.append(path)
    return found


def mount_scratch() -> None:
    """An empty scratch folder in memory."""
    owner = NOBODY if os.getuid() == 0 else os.getuid()
    options = f"size={SCRATCH_MB}m,nr_inodes=2048,mode=700,uid={owner},gid={owner}"
    _mount("tmpfs", SCRATCH, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options)


def remount_scratch() -> None:
    check(libc.umount2(os.fsencode(SCRATCH), _MNT_DETACH), "umount scratch")
    mount_scratch()


def scratch_times() -> tuple[int, int]:
    """Changes with every file made in the folder, removed ones included."""
    status = os.stat(SCRATCH)
    return status.st_mtime_ns, status.st_ctime_ns


def private_root() -> None:
    """Leaves the host's file system for one that holds the interpreter, read-only, and the scratch folder."""
    sources = interpreter_paths()
    spots = ("/mnt", "/media", "/srv", "/run", "/tmp", "/var")
    base = next(s for s in spots if os.path.isdir(s) and not any(p.startswith(s + "/") for p in sources))
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for source in sources:
        target = base + source
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            continue
        os.makedirs(target, exist_ok=True)
        _mount(source, target, None, _MS_BIND | _MS_REC)
        kept = os.statvfs(target).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC | 1024 | 2048 | (1 << 21))
        _mount(None, target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | kept)
    os.mkdir(base + "/dev")
    for name in ("null", "zero", "urandom"):
        os.close(os.open(f"{base}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _mount(f"/dev/{name}", f"{base}/dev/{name}", None, _MS_BIND)
    for name in (SCRATCH, "/.old"):
        os.makedirs(base + name)
    os.symlink(SCRATCH, base + "/tmp")
    pivot_root = {"x86_64": 155, "aarch64": 41}[_MACHINE]
    check(libc.syscall(pivot_root, os.fsencode(base), os.fsencode(base + "/.old")), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/.old", _MNT_DETACH), "umount the host's root")
    os.rmdir("/.old")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    mount_scratch()


# ---- Landlock ----------------------------------------------------------------------------------------------------

_READ = 0b1100  # READ_FILE, READ_DIR
_FILE_BITS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_NEVER = 1 << 0 | 1 << 6 | 1 << 11 | 1 << 15  # execute, device files, device ioctls: nowhere


def landlock_abi() -> int:
    """The kernel's Landlock version, 0 without it."""
    return max(0, libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def landlock(readable: list[str], writable: list[str]) -> bool:
    """From here on: reading below `readable`, writing below `writable`, no TCP; False without Landlock."""
    abi = landlock_abi()
    if not abi:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    create = libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    ruleset = check(create, "landlock_create_ruleset")
    for paths, access in ((readable, _READ), (writable, ~_NEVER)):
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = access & handled if os.path.isdir(path) else access & handled & _FILE_BITS
            rule = struct.pack("=Qi", allowed, fd)
            check(libc.syscall(445, ruleset, 1, rule, ctypes.c_uint32(0)), f"landlock_add_rule {path}")
            os.close(fd)
    check(libc.syscall(446, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
    os.close(ruleset)
    return True


# ---- users and limits ---------------------------------------------------------------------------------------------


def drop_capabilities(kept: int = 0) -> None:
    check(libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)), "capset")


def set_limits() -> None:
    """Limits that server and children share; CPU time is per child."""
    for name, value in (
        (resource.RLIMIT_AS, MEMORY_MB << 20),
        (resource.RLIMIT_FSIZE, FILE_MB << 20),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
    ):
        resource.setrlimit(name, (value, value))


def limit_threads(proc: int, user: int | None) -> None:
    """At most so many threads more than the user has now, all processes counted (the kernel counts no other way)."""
    owner, count = os.getuid() if user is None else user, 0
    for name in os.listdir(proc):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=proc).st_uid == owner:
                    folder = os.open(f"{name}/task", os.O_RDONLY, dir_fd=proc)
                    count += len(os.listdir(folder))
                    os.close(folder)
    resource.setrlimit(resource.RLIMIT_NPROC, (count + THREADS, count + THREADS))
