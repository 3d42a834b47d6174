"""The rungs of the sandbox's ladder: what each protects and does not, and the program that proves it at start.

A rung counts only where a jailed program, really run, cannot do what the rung forbids.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

Mode = Literal["strict", "best", "off"]


@dataclass(frozen=True, slots=True)
class Rung:
    number: int
    name: str
    protects: str
    does_not: str


_ALWAYS: Final = "limits of time, memory and file size, an empty environment, and tests out of the program's reach"
_NEVER: Final = "programs that contain the expected answers, and bugs of the kernel, stay possible"
RUNGS: Final = {
    rung.number: rung
    for rung in (
        Rung(
            1,
            "namespaces and cgroup",
            "the host's files, network, processes and users are out of sight (user, mount, net, ipc, uts and pid "
            "namespaces, seccomp, Landlock where the kernel has it); processes and memory are counted (cgroup); "
            + _ALWAYS,
            _NEVER,
        ),
        Rung(
            2,
            "namespaces",
            "as rung 1 without the count: programs may start threads, but no processes; " + _ALWAYS,
            _NEVER,
        ),
        Rung(
            3,
            "Landlock and seccomp",
            "no file of the host but the interpreter's can be read and none written; no connections, signals or new "
            "processes; " + _ALWAYS,
            "programs cannot write files at all, and can see whether a file of the host exists and how large it is; "
            + _NEVER,
        ),
        Rung(
            4,
            "limits and seccomp",
            "no connections, signals or new processes; " + _ALWAYS,
            "every file that you can read or write is open to the program; " + _NEVER,
        ),
        Rung(
            5,
            "off",
            _ALWAYS,
            "the program can do whatever you can: as root it can end every process and fill every disk; " + _NEVER,
        ),
    )
}
LADDER: Final[dict[Mode, tuple[int, ...]]] = {"strict": (1, 2, 3), "best": (1, 2, 3, 4), "off": (5,)}

PROBE: Final = """
import os, signal, socket, time

def succeeds(action, *arguments):
    try:
        action(*arguments)
    except OSError:
        return False
    return True

def reads(path):
    return succeeds(open, path)

def writes(path):
    return succeeds(open, path, "w")

def connects(port):
    with socket.socket() as end:
        end.settimeout(1)
        return succeeds(end.connect, ("127.0.0.1", port))

def signals(pid):
    return succeeds(os.kill, pid, 0)

def user():
    return os.getuid()

def process():
    return os.getpid(), os.getppid()

def environment():
    return len(os.environ)

def starts(count):
    children = []
    try:
        while len(children) < count:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            children.append(pid)
    except OSError:
        pass
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(children)
"""


@contextmanager
def probe_tests(rung: int, pids: int) -> Iterator[list[str]]:
    """What must hold of PROBE on a rung; a socket of this process listens meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tests = ["assert environment() == 0"]
        if rung <= 4:
            tests += [f"assert not connects({listener.getsockname()[1]})"]
            tests += [f"assert starts({pids + 8}) <= {pids if rung == 1 else 0}"]
        if rung <= 3:
            tests += ["assert not reads('/etc/passwd')", "assert not writes('/slmgrpo-probe')"]
        if rung <= 2:
            tests += ["assert user() != 0", "assert process() == (1, 0)", "assert writes('/tmp/probe')"]
        elif rung <= 4:
            tests += [f"assert not signals({os.getpid()})"]
        yield tests
