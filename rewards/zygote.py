"""The fork server: a warm interpreter that forks one jailed child per program and kills its whole tree afterwards.

Started by `sandbox.py` as a fresh interpreter (never by forking the trainer), without site-packages and threads.
Two servers run, one for programs and one for tests; each reads requests from its own control socket:
START (child kind, CPU seconds, file descriptors) forks, END kills, reaps, empties the scratch folder and answers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import struct
import sys
from typing import Final, NoReturn

from slmgrpo.rewards import jail, judge

START: Final = struct.Struct("=ci")
RESULT: Final = struct.Struct("=iii")
END: Final = b"E"
FIRST_FD: Final = 40
WARM: Final = ["abc", "array", "bisect", "cmath", "collections.abc", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "numbers", "operator", "random", "re", "statistics", "string", "struct", "textwrap", "time", "typing"]


def start() -> None:
    """Entry point: `python -S -s -P -c ... CONFIG`; config names the rung and the inherited control sockets."""
    sys.path[:] = [path for path in sys.path if path != sys.argv[2]]
    config = json.loads(sys.argv[1])
    os.environ.clear()
    servers, waiting = [], {fd for fd, _ in config["servers"]}
    for fd, group in config["servers"]:
        waiting.remove(fd)
        pid = os.fork()
        if pid == 0:
            for other in waiting:
                os.close(other)
            _server(socket.socket(fileno=fd), config["rung"], group)
        servers.append(pid)
        os.close(fd)
    for pid in servers:
        os.waitpid(pid, 0)
    for _, group in config["servers"]:
        for folder in group:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


def _server(control: socket.socket, rung: int, group: list[str]) -> None:
    try:
        os.setsid()
        for folder in group:
            with open(f"{folder}/cgroup.procs", "w") as file:
                file.write(str(os.getpid()))
        if rung <= 2:
            _enter_namespaces()
            zygote = os.fork()
            if zygote:
                control.close()
                os.waitpid(zygote, 0)
                os._exit(0)
            jail.die_with_parent()
        server = _prepare(rung, bool(group))
        judge.write_frame(control.fileno(), json.dumps({"ok": True}).encode())
    except BaseException as error:
        judge.write_frame(control.fileno(), json.dumps({"ok": False, "why": f"{error}"}).encode())
        os._exit(1)
    _serve(control, *server)


def _enter_namespaces() -> None:
    user, group = os.getuid(), os.getgid()
    kinds = jail.CLONE_NEWNS | jail.CLONE_NEWNET | jail.CLONE_NEWIPC | jail.CLONE_NEWUTS | jail.CLONE_NEWPID
    if user != 0:
        jail.unshare(kinds | jail.CLONE_NEWUSER, "unshare(user, mount, net, ipc, uts, pid)")
        _map_ids(os.getpid(), f"{jail.NOBODY} {user} 1", f"{jail.NOBODY} {group} 1", deny_groups=True)
        return
    ready, done = os.pipe(), os.pipe()
    server = os.getpid()
    helper = os.fork()
    if helper == 0:  # stays outside: only it may map every id into the new user namespace
        os.close(ready[1])
        if os.read(ready[0], 1):
            _map_ids(server, "0 0 4294967295", "0 0 4294967295", deny_groups=False)
            os.write(done[1], b"x")
        os._exit(0)
    os.close(done[1])
    jail.unshare(kinds | jail.CLONE_NEWUSER, "unshare(user, mount, net, ipc, uts, pid)")
    os.write(ready[1], b"x")
    mapped = os.read(done[0], 1)
    os.waitpid(helper, 0)
    for fd in (*ready, done[0]):
        os.close(fd)
    if not mapped:
        raise OSError("the ids of the user namespace cannot be mapped")


def _map_ids(pid: int, users: str, groups: str, *, deny_groups: bool) -> None:
    if deny_groups:
        with open(f"/proc/{pid}/setgroups", "w") as file:
            file.write("deny")
    for name, text in (("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write(text)


def _prepare(rung: int, counted: bool) -> tuple[jail.Confinement, int | None]:
    """Confinement of the children, and this server's own pid namespace where each child gets one."""
    for name in WARM:
        __import__(name)
    compile("def f(x: int) -> list[int]:\n    return [x for _ in 'a']\n", "warm", "exec")
    own_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY) if rung <= 2 else None
    readable = [*jail.interpreter_paths(), "/dev/null", "/dev/zero", "/dev/urandom"]
    if rung <= 2:
        jail.private_root()
        jail.mount_scratch()
        readable = ["/"]
    jail.no_new_privileges()
    jail.set_limits()
    ruleset = jail.landlock_ruleset(readable, [jail.SCRATCH] if rung <= 2 else []) if rung <= 3 else None
    if rung == 3 and ruleset is None:
        raise OSError("the kernel has no Landlock")
    confinement = jail.Confinement(
        ruleset=ruleset,
        seccomp=jail.seccomp_program(namespaces=rung <= 2, forks=counted) if rung <= 4 else None,
        user=jail.NOBODY if os.getuid() == 0 and (rung <= 2 or (rung == 3 and _nobody_can_read())) else None,
        drop_capabilities=rung <= 3,
        has_scratch=rung <= 2,
    )
    gc.collect()
    gc.freeze()
    return confinement, own_namespace


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


def _serve(control: socket.socket, confinement: jail.Confinement, own_namespace: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    clean = jail.scratch_times() if own_namespace is not None else None
    while True:
        message, fds, _, _ = socket.recv_fds(control, START.size, 4)
        if len(message) != START.size:
            os._exit(0)
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
        _, status, usage = os.wait4(child, 0)
        if not ended:
            os._exit(0)
        if clean is not None and jail.scratch_times() != clean:
            clean = jail.remount_scratch()
            if confinement.ruleset is not None:
                jail.landlock_allow_scratch(confinement.ruleset)
        control.sendall(RESULT.pack(status, int(usage.ru_maxrss), int((usage.ru_utime + usage.ru_stime) * 1000)))


def _child(kind: bytes, cpu_s: int, fds: list[int], confinement: jail.Confinement) -> NoReturn:
    """In the forked child: takes its descriptors, confines itself, runs, never returns."""
    status = 1
    try:
        os.setsid()
        os.chdir(jail.SCRATCH if confinement.has_scratch else "/")
        for number, fd in enumerate(fds):
            os.dup2(fd, FIRST_FD + number)
        confinement.apply(cpu_s)
        os.closerange(3, FIRST_FD)
        os.closerange(FIRST_FD + len(fds), jail.FILES)
        if kind == b"P":
            judge.run_worker(FIRST_FD)
        elif kind == b"T":
            judge.run_judge(FIRST_FD, FIRST_FD + 1)
        else:
            os.dup2(FIRST_FD + 1, 0)
            os.dup2(FIRST_FD + 2, 1)
            status = judge.run_main(json.loads(judge.read_frame(FIRST_FD) or b'""'))
    finally:
        os._exit(status)
