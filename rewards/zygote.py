"""The fork server: a warm interpreter that forks one jailed child per program and kills its whole tree afterwards.

Started by `sandbox.py` as a fresh interpreter (never by forking the trainer), without site-packages and threads.
Two servers run, one for programs and one for tests; each reads requests from its own control socket:
START (child kind, CPU seconds, file descriptors) forks, END kills, reaps, empties the scratch folder and answers.
"""

# pathlib would be one more import:
# ruff: noqa: PTH106, PTH120, PTH123, PTH208
from __future__ import annotations

import _socket
import contextlib
import gc
import json
import os
import resource
import signal
import struct
import sys
from typing import Final, NamedTuple, NoReturn

from slmgrpo.rewards import jail, judge, seccomp
from slmgrpo.rewards.codec import Channel

START: Final = struct.Struct("=ci")
RESULT: Final = struct.Struct("=i")
END: Final = b"E"
READY: Final = b"ready"
FIRST_FD: Final = 40
MAX_FDS: Final = 3
WARM: Final = [
    "math", "typing", "re", "collections", "itertools", "functools", "heapq", "bisect", "copy", "string", "operator",
]  # fmt: skip


class Confinement(NamedTuple):
    """What is left for each child to do to itself; all else it inherits from the server."""

    home: str
    user: int | None
    """A real change of user, which also ends all capabilities; None keeps the server's."""
    capabilities: bool
    """Some are left to be dropped."""
    filter: seccomp.Code

    def apply(self, cpu_s: int) -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        if self.user is not None:
            os.setresuid(self.user, self.user, self.user)
        elif self.capabilities:
            jail.drop_capabilities()
        os.chdir(self.home)
        if self.filter:
            seccomp.install(self.filter)


def start() -> None:
    """Entry point: `python -S -s -P -c ... CONFIG ROOT`; config holds the rung and, for each server, its control
    socket and its cgroups."""
    sys.path[:] = [path for path in sys.path if path != sys.argv[2]]
    config = json.loads(sys.argv[1])
    sys.argv[:] = [""]
    os.environ.clear()
    servers = []
    for fd, groups in config["servers"]:
        servers.append((os.dup(fd), groups))  # the lowest free number: children close what is below FIRST_FD
        os.close(fd)
    started = []
    while servers:
        fd, groups = servers.pop()
        pid = os.fork()
        if pid == 0:
            for other, _ in servers:
                os.close(other)
            _server(_socket.socket(fileno=fd), config["rung"], groups)
        started.append(pid)
        os.close(fd)
    for pid in started:
        os.waitpid(pid, 0)
    for _, groups in config["servers"]:
        for folder in groups:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _server(control: _socket.socket, rung: int, groups: list[str]) -> NoReturn:
    """One server; where there are namespaces, below a keeper that empties its scratch folder."""
    problem, keeper, prepared = b"", None, None
    try:
        os.setsid()
        for folder in groups:
            with open(f"{folder}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
        proc = os.open("/proc", os.O_RDONLY)
        if rung <= 2:
            _enter_namespaces()
            jail.die_with_parent()
            jail.private_root()
            ours, keeper = _socket.socketpair()
            if os.fork():
                control.close()
                keeper.close()
                _keep(ours)
            ours.close()
        prepared = _confine(rung, proc, counted=bool(groups))
    except BaseException as error:
        problem = str(error).encode() or b"?"
    try:
        Channel(os.dup(control.fileno())).write(problem)
        if prepared is not None:
            _serve(control, keeper, *prepared)
    finally:
        os._exit(1)


def _keep(server: _socket.socket) -> NoReturn:
    """Empties the scratch folder whenever the server asks, which may not mount anything itself."""
    try:
        while server.recv(1):
            jail.remount_scratch()
            server.sendall(b"x")
        os.wait()
    finally:
        os._exit(0)


def _enter_namespaces() -> None:
    """New user, mount, net, ipc, uts and pid namespaces; root that may not have a new user one keeps its own."""
    kinds = jail.CLONE_NEWNS | jail.CLONE_NEWNET | jail.CLONE_NEWIPC | jail.CLONE_NEWUTS | jail.CLONE_NEWPID
    step = "unshare(user, mount, net, ipc, uts, pid)"
    server, user, group = os.getpid(), os.getuid(), os.getgid()
    maps = [_own_map("uid_map"), _own_map("gid_map")]
    if user != 0 or not all(any(first <= jail.NOBODY < first + count for first, count in ids) for ids in maps):
        jail.unshare(kinds | jail.CLONE_NEWUSER, step)
        with open("/proc/self/setgroups", "w") as file:
            file.write("deny")
        _map_ids(server, f"{jail.NOBODY} {user} 1", f"{jail.NOBODY} {group} 1")
        return
    ready, done = os.pipe(), os.pipe()
    helper = os.fork()
    if helper == 0:  # stays outside, since only from there may several ids be mapped: each to itself
        os.close(ready[1])
        if os.read(ready[0], 1):
            _map_ids(server, *("\n".join(f"{first} {first} {count}" for first, count in ids) for ids in maps))
            os.write(done[1], b"x")
        os._exit(0)
    os.close(done[1])
    try:
        try:
            jail.unshare(kinds | jail.CLONE_NEWUSER, step)
        except OSError:
            jail.unshare(kinds, step)
            return
        os.write(ready[1], b"x")
        if not os.read(done[0], 1):
            raise OSError("the ids of the user namespace cannot be mapped")
    finally:
        for fd in (*ready, done[0]):
            os.close(fd)
        os.waitpid(helper, 0)


def _own_map(name: str) -> list[tuple[int, int]]:
    """The ids of this user namespace, as (first, count)."""
    with open(f"/proc/self/{name}") as file:
        rows = [line.split() for line in file]
    return [(int(first), int(count)) for first, _, count in rows]


def _map_ids(pid: int, users: str, groups: str) -> None:
    for name, text in (("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _confine(rung: int, proc: int, *, counted: bool) -> tuple[Confinement, int | None]:
    """Confines this server, which its children inherit; what is left for them, and the server's own pid namespace."""
    for name in WARM:
        __import__(name)
    judge.rehearse()
    own_namespace = os.open("self/ns/pid", os.O_RDONLY, dir_fd=proc) if rung <= 2 else None
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    user = jail.NOBODY if os.getuid() == 0 and (rung <= 2 or _nobody_can_read()) else None
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
    if rung <= 4:
        jail.no_new_privileges()
        kept = jail.CAP_SYS_ADMIN if rung <= 2 else 0
        jail.drop_capabilities(kept | (jail.CAP_SETUID | jail.CAP_KILL if user is not None else 0))
    jail.die_with_parent()  # a change of user or capabilities forgets it
    jail.set_limits()
    if not counted and rung <= 4:
        jail.limit_threads(proc, user)
    os.close(proc)
    if rung <= 2:
        jail.landlock(["/"], [os.path.dirname(jail.SCRATCH)])
    elif rung == 3 and not jail.landlock([*jail.interpreter_paths(), "/dev/null", "/dev/zero", "/dev/urandom"], []):
        raise OSError("the kernel has no Landlock")
    rules: seccomp.Code = []
    if rung <= 4:
        abi = jail.landlock_abi()
        seccomp.install(seccomp.base_filter(outside=rung > 2, truncation=rung == 3 and abi < 3))
        rules = seccomp.child_filter(outside=rung > 2, forks=not counted)
    gc.collect()
    gc.freeze()
    return Confinement(jail.SCRATCH if rung <= 2 else "/", user, rung <= 2, rules), own_namespace


def _nobody_can_read() -> bool:
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(jail.NOBODY, jail.NOBODY, jail.NOBODY)
            os.listdir(os.path.dirname(os.__file__))
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _serve(
    control: _socket.socket, keeper: _socket.socket | None, confinement: Confinement, own_namespace: int | None
) -> NoReturn:
    clean = jail.scratch_times() if keeper else None
    while True:
        message, extra, _, _ = control.recvmsg(START.size, _socket.CMSG_SPACE(4 * MAX_FDS))
        if len(message) != START.size:
            os._exit(0)
        fds = [fd for _, _, data in extra for (fd,) in struct.iter_unpack("i", data)]
        kind, cpu_s = START.unpack(message)
        if own_namespace is not None:
            jail.unshare(jail.CLONE_NEWPID, "unshare(pid)")
        child = os.fork()
        if child == 0:
            _child(kind, cpu_s, fds, confinement)
        if own_namespace is not None:
            jail.setns(own_namespace, jail.CLONE_NEWPID)
        for fd in fds:
            os.close(fd)
        ended = control.recv(1)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not ended:
            os._exit(0)
        if keeper and jail.scratch_times() != clean:
            keeper.sendall(b"x")
            if not keeper.recv(1):
                os._exit(1)
            clean = jail.scratch_times()
        control.sendall(RESULT.pack(status))


def _child(kind: bytes, cpu_s: int, fds: list[int], confinement: Confinement) -> NoReturn:
    """In the forked child: takes its descriptors, confines itself, runs, never returns."""
    status = 1
    try:
        os.setsid()
        for number, fd in enumerate(fds):
            os.dup2(fd, FIRST_FD + number)
        confinement.apply(cpu_s)
        os.closerange(3, FIRST_FD)
        os.closerange(FIRST_FD + len(fds), jail.FILES)
        first = Channel(FIRST_FD)
        report = Channel(FIRST_FD + 1) if kind == b"T" else first
        report.write(READY)
        if kind == b"P":
            judge.run_worker(first)
        elif kind == b"T":
            judge.run_judge(first, report)
        else:
            os.dup2(FIRST_FD + 1, 0)
            os.dup2(FIRST_FD + 2, 1)
            status = judge.run_main(first)
    finally:
        os._exit(status)
