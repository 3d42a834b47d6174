"""What confines a jailed program: namespaces, a private root, Landlock, seccomp and limits, by plain system calls.

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
from collections.abc import Mapping
from typing import Final, NamedTuple

NOBODY: Final = 65534
SCRATCH: Final = "/scratch/tmp"  # Landlock rules sit on its parent, so that a fresh mount needs no new rule
SCRATCH_MB: Final = 16
MEMORY_MB: Final = 1024
GROUP_MEMORY_MB: Final = 768
PIDS: Final = 48
FILES: Final = 64
THREADS: Final = 128
FILE_MB: Final = 16

_libc = ctypes.CDLL(None, use_errno=True)
_MACHINE = os.uname().machine

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_CLONE_THREAD, _CLONE_NEW_ANY = 0x10000, 0x7E020080
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
CAP_KILL, CAP_SETUID, CAP_SYS_ADMIN = 1 << 5, 1 << 7, 1 << 21


def _check(result: int, step: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")
    return result


def unshare(flags: int, step: str) -> None:
    _check(_libc.unshare(flags), step)


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def die_with_parent() -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl(PDEATHSIG)")


def no_new_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


# ---- a root of its own -------------------------------------------------------------------------------------------


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    names = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    _check(_libc.mount(*names[:3], ctypes.c_ulong(flags), names[3]), f"mount {target}")


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
    _check(_libc.umount2(os.fsencode(SCRATCH), _MNT_DETACH), "umount scratch")
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
    _check(_libc.syscall(pivot_root, os.fsencode(base), os.fsencode(base + "/.old")), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/.old", _MNT_DETACH), "umount the host's root")
    os.rmdir("/.old")
    _mount(None, "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    mount_scratch()


# ---- Landlock ----------------------------------------------------------------------------------------------------

_READ = 0b1100  # READ_FILE, READ_DIR
_FILE_BITS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
_NEVER = 1 << 0 | 1 << 6 | 1 << 11 | 1 << 15  # execute, device files, device ioctls: nowhere


def landlock_abi() -> int:
    """The kernel's Landlock version, 0 without it."""
    return max(0, _libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def landlock(readable: list[str], writable: list[str]) -> bool:
    """From here on: reading below `readable`, writing below `writable`, no TCP; False without Landlock."""
    abi = landlock_abi()
    if not abi:
        return False
    handled = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("QQQ", handled, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    create = _libc.syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    ruleset = _check(create, "landlock_create_ruleset")
    for paths, access in ((readable, _READ), (writable, ~_NEVER)):
        for path in paths:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = access & handled if os.path.isdir(path) else access & handled & _FILE_BITS
            rule = struct.pack("=Qi", allowed, fd)
            _check(_libc.syscall(445, ruleset, 1, rule, ctypes.c_uint32(0)), f"landlock_add_rule {path}")
            os.close(fd)
    _check(_libc.syscall(446, ruleset, ctypes.c_uint32(0)), "landlock_restrict_self")
    os.close(ruleset)
    return True


# ---- seccomp -----------------------------------------------------------------------------------------------------

_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# name -> number on (x86_64, aarch64); None where the call does not exist
_CALLS = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "chroot": (161, 51),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "delete_module": (176, 106), "execve": (59, 221),
    "execveat": (322, 281), "fanotify_init": (300, 262), "finit_module": (313, 273), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433), "init_module": (175, 105),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_uring_setup": (425, 425),
    "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104), "keyctl": (250, 219),
    "lookup_dcookie": (212, 18), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "mount": (165, 40), "mount_setattr": (442, 442), "move_mount": (429, 429),
    "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "open_tree": (428, 428), "perf_event_open": (298, 241),
    "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434), "pivot_root": (155, 41),
    "process_madvise": (440, 440), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218),
    "semget": (64, 190), "setdomainname": (171, 162), "sethostname": (170, 161),
    "settimeofday": (164, 170), "shmget": (29, 194), "swapoff": (168, 225), "swapon": (167, 224),
    "syslog": (103, 116), "umount2": (166, 39), "userfaultfd": (323, 282),
    "vhangup": (153, 58), "seccomp": (317, 277),
}  # fmt: skip
_NETWORK = {"connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "sendmsg": (46, 211), "sendmmsg": (307, 269)}
_FORKS = {"fork": (57, None), "vfork": (58, None)}
_SIGNALS = {
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
}  # fmt: skip
_CLONE, _CLONE3, _SOCKET, _SENDTO = (56, 220), (435, 435), (41, 198), (44, 206)
_UNSHARE, _SETNS = (272, 97), (308, 268)
_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _EPERM, _ENOSYS, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
Code = list[tuple[int, int, int, int]]


def _column() -> int:
    if _MACHINE not in _ARCH:
        raise OSError(f"no seccomp filter is known for {_MACHINE}")
    return list(_ARCH).index(_MACHINE)


def _refuse(calls: Mapping[str, tuple[int | None, int | None]]) -> Code:
    numbers = [pair[_column()] for pair in calls.values()]
    return [step for n in numbers if n is not None for step in ((_JEQ, 0, 1, n), (_RET, 0, 0, _EPERM))]


def _with_argument(numbers: tuple[int, int], argument: int, tests: Code) -> Code:
    """`tests` on one argument of a call (its low half); the call is allowed where they end."""
    body = [(_LD, 0, 0, 16 + 8 * argument), *tests, (_RET, 0, 0, _ALLOW)]
    return [(_JEQ, 0, len(body), numbers[_column()]), *body]


def base_filter() -> Code:
    """For server and children: refuses (EPERM) what no honest program needs."""
    code = _refuse(_CALLS)
    code += [(_JEQ, 0, 1, _CLONE3[_column()]), (_RET, 0, 0, _ENOSYS)]  # the C library falls back to clone
    code += _with_argument(_CLONE, 0, [(_JSET, 0, 1, _CLONE_NEW_ANY), (_RET, 0, 0, _EPERM)])
    only_pid = [(_JEQ, 1, 0, CLONE_NEWPID), (_RET, 0, 0, _EPERM)]  # which also takes a capability that children lack
    code += _with_argument(_UNSHARE, 0, only_pid) + _with_argument(_SETNS, 1, only_pid)
    families = [(_JEQ, 3, 0, 1), (_JEQ, 2, 0, 2), (_JEQ, 1, 0, 10), (_RET, 0, 0, _EPERM)]
    return code + _with_argument(_SOCKET, 0, families)  # unix, inet, inet6: vsock and the like are not namespaced


def child_filter(*, network: bool, forks: bool) -> Code:
    """For children only. network: the host's network and processes are in reach, so connections and signals are
    refused; forks: nothing counts processes, so only threads may start."""
    code: Code = []
    if network:
        code += _refuse(_NETWORK | _SIGNALS)
        address = [(_JEQ, 0, 2, 0), (_LD, 0, 0, 52), (_JEQ, 1, 0, 0), (_RET, 0, 0, _EPERM)]
        code += _with_argument(_SENDTO, 4, address)
    if forks:
        code += _refuse(_FORKS)
        code += _with_argument(_CLONE, 0, [(_JSET, 1, 0, _CLONE_THREAD), (_RET, 0, 0, _EPERM)])
    return code


def install(code: Code) -> None:
    start = [(_LD, 0, 0, 4), (_JEQ, 1, 0, _ARCH[_MACHINE]), (_RET, 0, 0, _KILL), (_LD, 0, 0, 0)]
    if _MACHINE == "x86_64":
        start += [(_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _EPERM)]
    steps = [*start, *code, (_RET, 0, 0, _ALLOW)]
    program = _Filter(len(steps), b"".join(struct.pack("HBBI", *step) for step in steps))
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "prctl(SECCOMP)")


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


# ---- users and limits ---------------------------------------------------------------------------------------------


def drop_capabilities(kept: int = 0) -> None:
    _check(_libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)), "capset")


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


class Confinement(NamedTuple):
    """What is left for each child to do to itself; all else it inherits from the server."""

    home: str
    user: int | None
    """A real change of user, which also ends all capabilities; None keeps the server's."""
    capabilities: bool
    """Some are left to be dropped."""
    filter: Code

    def apply(self, cpu_s: int) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        if self.user is not None:
            os.setresuid(self.user, self.user, self.user)
        elif self.capabilities:
            drop_capabilities()
        os.chdir(self.home)
        if self.filter:
            install(self.filter)
