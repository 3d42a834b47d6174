"""Which system calls a jailed program is refused, as small filters for the kernel.

Runs inside the fork server too: standard library only. What the server itself never needs is refused to it and so to
all its children (`base_filter`); the rest each child refuses itself (`child_filter`).
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Mapping
from typing import Final

from slmgrpo.rewards.jail import CLONE_NEWPID, check, libc

_MACHINE: Final = os.uname().machine
_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_CLONE_THREAD, _CLONE_NEW_ANY = 0x10000, 0x7E020080
_O_TRUNC: Final = 0o1000

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
    "vhangup": (153, 58), "seccomp": (317, 277), "open_tree_attr": (467, 467),
}  # fmt: skip
# where the host's files, network and processes are in reach: what Landlock does not cover
_OUTSIDE = {
    "bind": (49, 200), "chmod": (90, None), "chown": (92, None), "connect": (42, 203), "creat": (85, None),
    "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54),
    "file_setattr": (469, 469), "fremovexattr": (199, 16), "fsetxattr": (190, 7), "futimesat": (261, None),
    "inotify_add_watch": (254, 27), "ioprio_set": (251, 30), "lchown": (94, None), "listen": (50, 201),
    "lremovexattr": (198, 15), "lsetxattr": (189, 6), "migrate_pages": (256, 238), "openat2": (437, 437),
    "pidfd_send_signal": (424, 424), "process_mrelease": (448, 448), "removexattr": (197, 14),
    "removexattrat": (466, 466), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sendmmsg": (307, 269), "sendmsg": (46, 211), "setpriority": (141, 140),
    "setxattr": (188, 5), "setxattrat": (463, 463), "tgkill": (234, 131), "tkill": (200, 130), "truncate": (76, 45),
    "utime": (132, None), "utimensat": (280, 88), "utimes": (235, None),
}  # fmt: skip
_KILL_CALL = {"kill": (62, 129)}
_FORKS = {"fork": (57, None), "vfork": (58, None)}
_CLONE, _CLONE3, _SOCKET, _SENDTO = (56, 220), (435, 435), (41, 198), (44, 206)
_UNSHARE, _SETNS, _PRLIMIT, _FCNTL, _IOCTL = (272, 97), (308, 268), (302, 261), (72, 25), (16, 29)
_OPEN, _OPENAT = (2, None), (257, 56)
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


def _with_argument(numbers: tuple[int | None, int | None], argument: int, tests: Code) -> Code:
    """`tests` on one argument of a call (its low half); the call is allowed where they end."""
    body = [(_LD, 0, 0, 16 + 8 * argument), *tests, (_RET, 0, 0, _ALLOW)]
    number = numbers[_column()]
    return [] if number is None else [(_JEQ, 0, len(body), number), *body]


def base_filter(*, outside: bool, truncation: bool) -> Code:
    """For server and children: refuses (EPERM) what no honest program needs.

    outside: the host's files, network and processes are in reach; truncation: and Landlock does not cover it yet.
    """
    code = _refuse(_CALLS)
    code += [(_JEQ, 0, 1, _CLONE3[_column()]), (_RET, 0, 0, _ENOSYS)]  # the C library falls back to clone
    code += _with_argument(_CLONE, 0, [(_JSET, 0, 1, _CLONE_NEW_ANY), (_RET, 0, 0, _EPERM)])
    only_pid = [(_JEQ, 1, 0, CLONE_NEWPID), (_RET, 0, 0, _EPERM)]  # which also takes a capability that children lack
    code += _with_argument(_UNSHARE, 0, only_pid) + _with_argument(_SETNS, 1, only_pid)
    families = [(_JEQ, 3, 0, 1), (_JEQ, 2, 0, 2), (_JEQ, 1, 0, 10), (_RET, 0, 0, _EPERM)]
    code += _with_argument(_SOCKET, 0, families)  # unix, inet, inet6: vsock and the like are not namespaced
    if outside:
        code += _refuse(_OUTSIDE)
        address = [(_JEQ, 0, 2, 0), (_LD, 0, 0, 52), (_JEQ, 1, 0, 0), (_RET, 0, 0, _EPERM)]
        code += _with_argument(_SENDTO, 4, address)
        code += _with_argument(_PRLIMIT, 0, [(_JEQ, 1, 0, 0), (_RET, 0, 0, _EPERM)])  # its own limits only
        owners = [(_JEQ, 1, 0, 8), (_JEQ, 0, 1, 15), (_RET, 0, 0, _EPERM)]  # F_SETOWN, F_SETOWN_EX: signals to others
        code += _with_argument(_FCNTL, 1, owners)
        owners = [(_JEQ, 1, 0, 0x8901), (_JEQ, 0, 1, 0x8902), (_RET, 0, 0, _EPERM)]  # the same by ioctl
        code += _with_argument(_IOCTL, 1, owners)
    if truncation:
        cut = [(_JSET, 0, 1, _O_TRUNC), (_RET, 0, 0, _EPERM)]
        code += _with_argument(_OPEN, 1, cut) + _with_argument(_OPENAT, 2, cut)
    return code


def child_filter(*, outside: bool, forks: bool) -> Code:
    """What the server needs and a child is refused: signals where the host's processes are in reach, and new
    processes (not threads) where nothing counts them."""
    code = _refuse(_KILL_CALL) if outside else []
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
    check(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0), "prctl(SECCOMP)")


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
