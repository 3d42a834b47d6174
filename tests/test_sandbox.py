"""The jail holds, leaves nothing behind, and whatever breaks is counted apart.

Hostile programs run on the rungs that hold them and on no other: unjailed, the first of them would end the host's
processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
from hostile import HOSTILE
from jailed import DOUBLE, HASTY, below, descriptors, judge, rows, runs, value

from slmgrpo.errors import RunError
from slmgrpo.rewards import sandbox
from slmgrpo.rewards.ladder import RUNGS
from slmgrpo.rewards.sandbox import Limits, Outcome, Sandbox, run_tests, same_output


@pytest.mark.parametrize("program", HOSTILE.values(), ids=HOSTILE)
def test_hostile_programs_fail_and_leave_nothing(box: Sandbox, program: str) -> None:
    assert box._process is not None
    before = below(box._process.pid)
    held = descriptors()
    outcome = judge(box, program, DOUBLE)
    assert outcome.status in ("failed", "timeout", "no_report"), outcome
    assert (outcome.passed, outcome.total) != (3, 3)
    assert below(box._process.pid) == before
    assert descriptors() == held
    assert judge(box, "def double(x): return 2 * x", DOUBLE, limits=Limits()) == Outcome(
        "passed", 3, 3, "", outcome.rung
    )


ATTACKS = rows("cases/code_attacks.jsonl")


@pytest.mark.skipif(not ATTACKS, reason="the shared cases are not beside this checkout")
@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: f"{case['id']}-{case['category']}")
def test_shared_attacks_have_their_verdicts(strongest: Sandbox, case: dict[str, Any]) -> None:
    given, expected = case["prompt_tests"], case["expected"]
    limits = HASTY if expected == "fail" else Limits()
    if "tests" in given:
        outcome = judge(strongest, case["program"], given["tests"], given["entry_point"], limits)
    else:
        outcome = strongest.run_stdio(case["program"], given["stdin_tests"], limits, same_output)
    assert outcome.status != "error"
    if expected != "either":
        assert (outcome.status == "passed") == (expected == "pass"), outcome


# ---- what a program can see and reach --------------------------------------------------------------------------------


def test_canary_files_stay_as_they_were(box: Sandbox, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("untouched")
    before = canary.stat()
    paths = [str(canary), "/slmgrpo-canary", "/var/tmp/slmgrpo-canary", str(Path.home() / "slmgrpo-canary")]
    program = f"""
        import os
        def double(x):
            for path in {paths}:
                for action in (
                    lambda: open(path, "a").write("x"), lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
                    lambda: os.truncate(path, 0), lambda: os.chmod(path, 0), lambda: os.utime(path, (0, 0)),
                    lambda: os.chown(path, os.getuid(), os.getgid()), lambda: os.setxattr(path, "user.x", b"x"),
                    lambda: os.link(path, path + "2"), lambda: os.rename(path, path + "2"), lambda: os.remove(path),
                ):
                    try: action()
                    except OSError: pass
            return 2 * x
        """
    assert judge(box, program, DOUBLE, limits=Limits()).status == "passed"
    assert canary.read_text() == "untouched"
    assert (canary.stat().st_mode, canary.stat().st_ctime_ns) == (before.st_mode, before.st_ctime_ns)
    assert list(tmp_path.iterdir()) == [canary]
    assert not any(Path(path).exists() for path in paths[1:])


def test_processes_of_the_host_are_not_touched(box: Sandbox) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    program = f"""
        import fcntl, os, resource, signal, socket
        def owned():
            near, far = socket.socketpair()
            fcntl.fcntl(near, fcntl.F_SETOWN, {victim.pid})
            fcntl.fcntl(near, 10, signal.SIGKILL)  # F_SETSIG
            fcntl.fcntl(near, fcntl.F_SETFL, os.O_ASYNC)
            far.send(b"x")
        def look():
            done = []
            for number, action in enumerate([
                lambda: os.kill({victim.pid}, signal.SIGKILL),
                lambda: os.killpg({victim.pid}, signal.SIGSTOP),
                lambda: resource.prlimit({victim.pid}, resource.RLIMIT_CPU, (1, 1)),
                lambda: os.sched_setaffinity({victim.pid}, {{0}}),
                lambda: os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19),
                lambda: os.sched_setscheduler({victim.pid}, os.SCHED_IDLE, os.sched_param(0)),
                lambda: signal.pidfd_send_signal(os.pidfd_open({victim.pid}), signal.SIGKILL),
                lambda: open("/proc/{victim.pid}/mem", "r+b"),
                lambda: owned(),
            ]):
                try: action()
                except OSError: continue
                done.append(number)
            return done
        """
    limits, nice = Path(f"/proc/{victim.pid}/limits").read_text(), os.getpriority(os.PRIO_PROCESS, victim.pid)
    try:
        seen = value(box, program)
        assert victim.poll() is None
        assert Path(f"/proc/{victim.pid}/limits").read_text() == limits
        assert os.getpriority(os.PRIO_PROCESS, victim.pid) == nice
        assert os.sched_getaffinity(victim.pid) == os.sched_getaffinity(0)
        assert os.sched_getscheduler(victim.pid) == os.SCHED_OTHER
        assert Path(f"/proc/{victim.pid}/stat").read_text().rpartition(")")[2].split()[0] in "SR"
        assert seen == "[]"
    finally:
        victim.kill()
        victim.wait()


def test_a_listener_on_the_host_is_not_reached(box: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = f"""
            import socket
            def look():
                reached = []
                for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                    end = socket.socket(socket.AF_INET, kind)
                    end.settimeout(1)
                    try:
                        end.connect(("127.0.0.1", {listener.getsockname()[1]}))
                        end.send(b"x")
                        reached.append(kind)
                    except OSError:
                        pass
                return [int(kind) for kind in reached if kind == socket.SOCK_STREAM]
            """
        assert value(box, program) == "[]"


def test_the_environment_is_empty(box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert value(box, "import os\ndef look(): return dict(os.environ)") == "{}"


def test_a_program_holds_four_descriptors(box: Sandbox) -> None:
    program = "import os\ndef look():\n return [n for n in range(1000) if not fails(n)]\n"
    program += "def fails(n):\n try: os.fstat(n)\n except OSError: return True\n"
    assert value(box, program) == "[0, 1, 2, 40]"


def test_descriptors_with_high_numbers_do_not_leak() -> None:
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
    made = Sandbox()
    made.start()
    for fd in held:
        os.close(fd)
    test_a_program_holds_four_descriptors(made)
    made.close()


def test_a_program_is_alone_with_a_light_interpreter(box: Sandbox) -> None:
    heavy = {"torch", "numpy", "threading", "socket", "slmgrpo.errors"}
    program = f"import sys\ndef look(): return sorted({heavy} & set(sys.modules))"
    assert value(box, program) == "[]"


def test_the_worker_never_sees_a_test(box: Sandbox) -> None:
    program = """
        import gc, sys
        def look():
            secret = "".join(reversed("elppaecniuq"))
            frame, seen = sys._getframe(1), []
            while frame:
                seen += [str(frame.f_locals), str(frame.f_globals)]
                frame = frame.f_back
            seen += [str(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
            return any(secret in text for text in seen)
        """
    outcome = judge(box, program, ["wanted = 'quinceapple'\nassert look() is False"], "look", Limits())
    assert outcome.status == "passed", outcome


def test_scratch_files_are_gone_for_the_next_program(box: Sandbox) -> None:
    if box.start().number == 3:
        pytest.skip("rung 3 has no scratch folder")
    fill = "def double(x):\n with open('/tmp/full', 'wb') as f: f.write(b'x' * (15 << 20))\n return 2 * x"
    look = fill.replace("double(x)", "look()").replace("full", "a").replace("2 * x", "__import__('os').listdir('/tmp')")
    assert judge(box, fill, DOUBLE, limits=Limits()).status == "passed"
    assert value(box, look) == "['a']"
    assert value(box, look) == "['a']"


def test_randomness_and_hashes_repeat(box: Sandbox) -> None:
    program = "def look(): return [hash('a'), list({'q', 'w', 'e', 'r', 't', 'y'})]"
    assert value(box, program) == value(box, program)


# ---- rungs, and what breaks ------------------------------------------------------------------------------------------


def test_strict_and_best_find_the_same_rung_here() -> None:
    assert sandbox.probe("strict") == sandbox.probe("best")
    assert sandbox.probe("strict").number <= 3


def test_a_rung_says_what_it_does_and_does_not() -> None:
    assert [rung.number for rung in RUNGS.values()] == [1, 2, 3, 4, 5]
    assert all(rung.name and rung.protects and rung.does_not for rung in RUNGS.values())


def test_without_an_interpreter_the_sandbox_refuses() -> None:
    with pytest.raises(RunError) as caught:
        Sandbox(python="/no/such/python").start()
    text = str(caught.value)
    assert text.startswith("sandbox: no jail that is strong enough can be built here\n  rung 1")
    assert "No such file or directory: '/no/such/python'" in text
    assert "use `grading.sandbox: best`" in text


def test_an_interpreter_that_is_no_python_is_refused() -> None:
    with pytest.raises(RunError, match="the fork server ended while it started"):
        Sandbox(python="/bin/true").start()


@pytest.mark.parametrize("when", ["between programs", "while one runs"])
def test_a_killed_server_is_an_error_and_is_replaced(when: str) -> None:
    made = Sandbox()
    made.start()
    assert made._process is not None
    victims = below(made._process.pid)
    killer = None
    if when == "between programs":
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):  # the one before took it along
                os.kill(pid, signal.SIGKILL)
    else:
        code = f"import os, time; time.sleep(0.5); [os.kill(p, 9) for p in {sorted(victims)}]"
        killer = subprocess.Popen([sys.executable, "-c", code])
    outcome = judge(made, "import time\ndef double(x): time.sleep(2)", DOUBLE, limits=Limits())
    assert outcome.status == "error", outcome
    assert judge(made, "def double(x): return 2 * x", DOUBLE, limits=Limits()).status == "passed"
    if killer:
        killer.wait()
    made.close()


def test_a_host_without_descriptors_is_an_error() -> None:
    code = """
        import os, resource
        from slmgrpo.rewards.sandbox import probe, run_tests
        probe("best")
        held = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True: held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError: pass
        for kind, tests in (("asserts", ["assert f() == 1"]), ("stdio", [{"input": "", "output": ""}])):
            print(run_tests("def f(): return 1", tests=tests, entry_point="f", test_kind=kind, sandbox="best").status)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["error", "error"]


def test_servers_end_with_their_owner() -> None:
    code = """
        import os, signal
        from slmgrpo.rewards.sandbox import Sandbox
        box = Sandbox("strict"); box.start()
        print(box._process.pid, flush=True)
        signal.pause()
        """
    owner = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    family = {server, *below(server)}
    assert len(family) >= 3
    owner.kill()
    owner.wait()
    patience = time.monotonic() + 10
    while left := {pid for pid in family if runs(pid)}:
        assert time.monotonic() < patience, f"still there: {left}"
        time.sleep(0.05)


def test_a_forked_copy_has_servers_of_its_own() -> None:
    given: dict[str, Any] = {"tests": DOUBLE, "entry_point": "double", "test_kind": "asserts"}
    assert run_tests("def double(x): return 2 * x", **given).status == "passed"
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(run_tests("def double(x): return 2 * x", **given).status != "passed")
            sandbox.close()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert run_tests("def double(x): return 0", **given).status == "failed"


@pytest.mark.slow
def test_a_thousand_hostile_runs_leak_nothing(box: Sandbox) -> None:
    """Processes, descriptors, memory of ours and of the servers, and control groups."""

    def memory(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])

    assert box._process is not None
    quick = [program for name, program in HOSTILE.items() if name not in ("five megabytes", "a megabyte of brackets")]
    limits = Limits(wall_s=1.0, call_s=0.2)
    for program in quick[:20]:
        judge(box, program, DOUBLE, limits=limits)
    family, held = below(box._process.pid), descriptors()
    pages = {pid: memory(pid) for pid in [os.getpid(), *family]}
    for number in range(1000):
        outcome = judge(box, quick[number % len(quick)], DOUBLE, limits=limits)
        assert outcome.status in ("failed", "timeout", "no_report"), outcome
    assert below(box._process.pid) == family
    assert descriptors() == held
    assert all(memory(pid) - before < 1024 for pid, before in pages.items())
    assert judge(box, "def double(x): return 2 * x", DOUBLE, limits=Limits()).status == "passed"
