"""The jail holds, the judge cannot be fooled, and whatever breaks is counted apart.

Hostile programs run on the rungs that hold them and on no other: unjailed, the first of them would end the host's
processes.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slmgrpo.errors import RunError
from slmgrpo.rewards import sandbox
from slmgrpo.rewards.sandbox import Limits, Outcome, Sandbox, run_tests, same_output

SHARED = Path(__file__).parents[1].parent / "shared"
HASTY = Limits(wall_s=3.0, call_s=0.5)
"""For programs that must fail either way."""
DOUBLE = ["assert double(2) == 4", "assert double(5) == 10", "assert double(-1) == -2"]


def rows(path: str) -> list[dict[str, Any]]:
    file = SHARED / path
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture(scope="module", params=[1, 2, 3])
def box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    made = Sandbox(rungs=(request.param,))
    try:
        made.start()
    except RunError as error:
        pytest.skip(f"this host has no rung {request.param}: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def strongest() -> Iterator[Sandbox]:
    made = Sandbox("strict")
    made.start()
    yield made
    made.close()


def judge(box: Sandbox, program: str, tests: list[str], name: str = "double", limits: Limits = HASTY, **task: Any):
    given = {"tests": tests, "entry_point": name, "prompt": "", "setup": "", "check": False, **task}
    return box.run(textwrap.dedent(program), given, limits)


def value(box: Sandbox, program: str) -> Any:
    """What `look()` of a program gives, through the judge."""
    outcome = judge(box, program, ["raise Exception(repr(look()))"], "look", Limits())
    assert outcome.why.startswith("test 1: Exception: "), outcome
    return outcome.why.removeprefix("test 1: Exception: ")


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def below(pid: int) -> set[int]:
    """All processes below one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, fresh = set(), {pid}
    while fresh := {child for child, parent in parents.items() if parent in fresh} - found:
        found |= fresh
    return found


# ---- hostile programs ----------------------------------------------------------------------------------------------

HOSTILE = {
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef double(x): os._exit(0)",
    "leaves at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 0",
    "raises SystemExit": "def double(x): raise SystemExit(0)",
    "forks and leaves": "import os\nif os.fork(): os._exit(0)\ndef double(x): return 0",
    "equals everything": "class E:\n def __eq__(s, o): return True\ndef double(x): return E()",
    "an int that equals everything": "class E(int):\n def __eq__(s, o): return True\ndef double(x): return E(1)",
    "a str in place of an int": "def double(x): return str(2 * x)",
    "an endless generator": "def double(x):\n while True: yield 1",
    "patches builtins": "import builtins\nbuiltins.print = builtins.abs = lambda *a: 0\ndef double(x): return 0",
    "patches json": 'import json\njson.dumps = lambda *a, **k: \'["passed", 3, ""]\'\ndef double(x): return 0',
    "patches our codec": """
        import sys
        for module in list(sys.modules.values()):
            if hasattr(module, "encode") and hasattr(module, "decode"):
                module.encode = lambda value: b'["passed", 3, ""]'
        def double(x): return 0
        """,
    "writes a report to every descriptor": """
        import os
        for fd in range(200):
            try: os.write(fd, (17).to_bytes(4, "big") + b'["passed", 3, ""]')
            except OSError: pass
        def double(x): return 0
        """,
    "prints a verdict": "print('ALL TESTS PASSED')\nprint('[\"passed\", 3, \"\"]')\ndef double(x): return 0",
    "an error whose text ends the process": """
        import os
        class E(AssertionError):
            def __str__(self): os._exit(0)
            __repr__ = __str__
        def double(x): raise E()
        """,
    "a name of a megabyte": "def double(x): raise type('E' * (1 << 20), (Exception,), {})('m' * (1 << 24))",
    "a value of a hundred megabytes": "def double(x): return 'x' * (100 << 20)",
    "a list in itself": "def double(x):\n a = []\n a.append(a)\n return a",
    "nested a million deep": "def double(x):\n a = []\n for _ in range(10**6): a = [a]\n return a",
    "an integer of four million digits": "def double(x): return 1 << (4 << 23)",
    "spins": "def double(x):\n while True: pass",
    "spins while loading": "while True: pass",
    "sleeps": "import time\ndef double(x): time.sleep(10**6)",
    "ignores every signal": """
        import signal
        for s in range(1, 60):
            try: signal.signal(s, signal.SIG_IGN)
            except (OSError, ValueError): pass
        def double(x):
            while True: pass
        """,
    "one long call in C": "def double(x): return len(str(7 ** 7 ** 9))",
    "a fork bomb": "import os\nwhile True:\n try: os.fork()\n except OSError: pass",
    "a thread bomb": """
        import threading, time
        def double(x):
            while True:
                try: threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
                except RuntimeError: pass
        """,
    "kills all it can": "import os, signal\nos.kill(-1, signal.SIGKILL)\ndef double(x): return 0",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)\ndef double(x): return 0",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\ndef double(x): return 0",
    "takes all memory": "def double(x):\n a = []\n while True: a.append(bytearray(1 << 26))",
    "takes memory in many processes": """
        import os
        def double(x):
            for _ in range(40):
                if os.fork() == 0: break
            a = []
            while True: a.append(bytearray(b"x" * (1 << 22)))
        """,
    "floods stdout and stderr": "import os\nwhile True:\n os.write(1, b'x' * 65536)\n os.write(2, b'x' * 65536)",
    "fills the disk": "def double(x):\n with open('big', 'wb') as f:\n  while True: f.write(b'x' * (1 << 20))",
    "makes files without end": "def double(x):\n i = 0\n while True:\n  open(f'f{i}', 'w').close()\n  i += 1",
    "locks its folder": "import os\nopen('x', 'w').close()\nos.chmod('.', 0)\ndef double(x): return 0",
    "overflows the stack": "import sys\nsys.setrecursionlimit(10**9)\ndef double(x): return double(x + 1)",
    "crashes": "import ctypes\ndef double(x): ctypes.string_at(0)",
    "reads the users": "def double(x): return open('/etc/passwd').read()",
    "reads other processes": "import os\ndef double(x): return open(f'/proc/{os.getppid()}/environ').read()",
    "traces its parent": "import ctypes, os\ndef double(x): return ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)",
    "mounts": "import ctypes\ndef double(x): return ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None)",
    "wants namespaces": "import ctypes\ndef double(x): return ctypes.CDLL(None).unshare(0x10020000)",
    "becomes root": "import os\ndef double(x): os.setuid(0)",
    "starts a shell": "import subprocess\ndef double(x): return int(subprocess.check_output(['sh', '-c', 'echo 4']))",
    "a NUL in the source": "def double(x): return 0\n\0",
    "a lone surrogate in the source": "x = '\ud800'\ndef double(x): return 0",
    "a megabyte of brackets": "(" * (1 << 20),
    "five megabytes": "x = 1\n" * (5 << 18) + "def double(x): return 0",
    "no such function": "def triple(x): return 0",
    "no Python": "I am sorry, I cannot do that.",
    "nothing": "",
}


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


# ---- the judge -------------------------------------------------------------------------------------------------------


def test_arguments_changed_in_place_are_seen(strongest: Sandbox) -> None:
    program = """
        def change(items, table, chosen, nested):
            items.sort(); items.append(9)
            table["new"] = [1]; table.pop("old")
            chosen.add(5)
            nested[0][0] = "changed"
        """
    tests = [
        "items, table, chosen, inner = [3, 1], {'old': 0, 'kept': 1}, {1}, [0]\n"
        "nested = (inner, 2)\n"
        "assert change(items, table, chosen, nested=nested) is None\n"
        "assert items == [1, 3, 9]\n"
        "assert table == {'kept': 1, 'new': [1]}\n"
        "assert chosen == {1, 5}\n"
        "assert inner == ['changed']"
    ]
    assert judge(strongest, program, tests, "change", Limits()).status == "passed"


def test_helpers_of_the_prompt_and_of_the_program_are_there(strongest: Sandbox) -> None:
    prompt = "def triple(x):\n    return 3 * x\n\ndef six(x):\n    '''Six times x.'''\n"
    program = prompt + "    return 2 * triple(x)\n\ndef twelve(x):\n    return 2 * six(x)\n"
    tests = "def check(candidate):\n    assert candidate(2) == 2 * triple(2)\n    assert twelve(1) == 12\n"
    assert judge(strongest, program, [tests], "six", Limits(), prompt=prompt, check=True).status == "passed"


def test_a_check_of_the_program_does_not_stand_in_for_the_tests(strongest: Sandbox) -> None:
    program = "def check(candidate): return True\ndef double(x): return 0"
    assert judge(strongest, program, ["x = 1"], check=True).status == "error"


def test_an_entry_point_may_be_a_method_of_a_new_object(strongest: Sandbox) -> None:
    program = "class Solution:\n    def double(self, x): return 2 * x\n"
    tests = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(x=3) == 6\n"
    assert judge(strongest, program, [tests], "Solution().double", Limits(), check=True).status == "passed"
    assert judge(strongest, "x = 1", [tests], "Solution().double", check=True).status == "failed"


def test_a_built_in_does_not_stand_in_for_the_program(strongest: Sandbox) -> None:
    assert judge(strongest, "x = 1", ["assert sum([1, 2]) == 3"], "sum").status == "failed"


def test_exceptions_arrive_as_the_built_in_ones(strongest: Sandbox) -> None:
    program = """
        class Odd(KeyError): pass
        def fails(kind):
            if kind == "own": raise Odd("key")
            if kind == "value": raise ValueError("bad")
            return 1 / 0
        """
    tests = [
        "try: fails('own')\nexcept KeyError: pass\nelse: raise AssertionError",
        "try: fails('value')\nexcept ValueError as e: assert str(e) == 'bad'\nelse: raise AssertionError",
        "try: fails('zero')\nexcept ZeroDivisionError: pass\nelse: raise AssertionError",
    ]
    assert judge(strongest, program, tests, "fails", Limits()).status == "passed"


def test_generators_and_counters_are_data(strongest: Sandbox) -> None:
    program = """
        from collections import Counter, OrderedDict
        from decimal import Decimal
        def make(kind):
            return {"gen": (i for i in range(3)), "counter": Counter("aab"), "order": OrderedDict(a=1),
                    "decimal": Decimal("1.5"), "nan": float("nan"), "big": 10 ** 5000, "set": frozenset({1})}[kind]
        """
    tests = [
        "assert list(make('gen')) == [0, 1, 2]",
        "assert make('counter') == {'a': 2, 'b': 1} and make('counter').most_common(1) == [('a', 2)]",
        "assert list(make('order').items()) == [('a', 1)]",
        "assert make('decimal') * 2 == 3",
        "assert make('nan') != make('nan')",
        "assert make('big') == 10 ** 5000",
        "assert make('set') == {1}",
    ]
    assert judge(strongest, program, tests, "make", Limits()).status == "passed"


def test_every_test_counts_even_behind_a_failed_one(strongest: Sandbox) -> None:
    outcome = judge(strongest, "def double(x): return 4", DOUBLE)
    assert (outcome.status, outcome.passed, outcome.total) == ("failed", 1, 3)
    assert outcome.why == "test 2: AssertionError"


def test_each_call_has_its_limit(strongest: Sandbox) -> None:
    program = "import time\ndef double(x):\n if x == 5: time.sleep(60)\n return 2 * x"
    outcome = judge(strongest, program, DOUBLE, limits=Limits(wall_s=30, call_s=0.5))
    assert (outcome.status, outcome.passed) == ("timeout", 1)
    assert outcome.why == "test 2: one call took more than 0.5 s"


def test_all_calls_together_have_one_too(strongest: Sandbox) -> None:
    program = "import time\ndef double(x):\n if x == 5: time.sleep(60)\n return 2 * x"
    outcome = judge(strongest, program, DOUBLE, limits=Limits(wall_s=1.0, call_s=30))
    assert (outcome.status, outcome.passed) == ("timeout", 1)


def test_tests_that_never_end_are_ended(strongest: Sandbox) -> None:
    outcome = judge(strongest, "def double(x): return 2 * x", ["while True: pass"], limits=Limits(1.0, 1.0))
    assert outcome.status == "timeout"


def test_a_missing_report_is_no_pass(strongest: Sandbox) -> None:
    outcome = judge(strongest, "def double(x): return 2 * x", ["import os\nos._exit(0)"])
    assert outcome.status == "no_report"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"tests": ["assert double(2) =="]}, "the tests cannot be set up: SyntaxError"),
        ({"setup": "import no_such_module"}, "the tests cannot be set up: ModuleNotFoundError"),
        ({"tests": ["x = " + "1 + " * (2 << 20) + "1"]}, "more than 4 MB of tests"),
    ],
)
def test_faults_of_the_tests_are_errors(strongest: Sandbox, task: dict[str, Any], why: str) -> None:
    outcome = judge(strongest, "def double(x): return 2 * x", **{"tests": DOUBLE, **task})
    assert outcome.status == "error"
    assert outcome.why.startswith(why)


def test_no_tests_are_no_pass() -> None:
    assert run_tests("x = 1", tests=[], entry_point="f", test_kind="asserts").status == "error"
    assert run_tests("x = 1", tests=["assert 1"], entry_point=None, test_kind="stdio").status == "error"


HUMANEVAL, MBPP = rows("data/code/humaneval.jsonl"), rows("data/code/mbpp_test.jsonl")
OBJECTS = {"mbpp_367"}  # its tests build trees from a class that only the program defines


@pytest.mark.skipif(not HUMANEVAL, reason="the shared data are not beside this checkout")
def test_reference_solutions_pass(strongest: Sandbox) -> None:
    refused = []
    for row in HUMANEVAL + [row for row in MBPP if row["id"] not in OBJECTS]:
        check = row["test_kind"] == "check"
        program = (row["prompt"] if check else "") + row["canonical_solution"]
        tests = [row["tests"]] if check else row["tests"]
        limits = Limits(wall_s=60, call_s=60)
        extra = {"prompt": row["prompt"], "setup": row.get("setup", ""), "check": check}
        if judge(strongest, program, tests, row["entry_point"], limits, **extra).status != "passed":
            refused.append(row["id"])
    assert refused == []


# ---- stdin problems --------------------------------------------------------------------------------------------------

SUM = [{"input": "1 2\n", "output": "3\n"}, {"input": "10 -4", "output": "6"}]
ANSWERS = {
    "input()": "a, b = map(int, input().split())\nprint(a + b)",
    "sys.stdin": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "file 0": "print(sum(map(int, open(0).read().split())))",
    "write without newline": "import sys\nsys.stdout.write(str(sum(map(int, input().split()))))",
    "main guard": "if __name__ == '__main__':\n print(sum(map(int, input().split())))",
    "exit": "import sys\nprint(sum(map(int, input().split())))\nsys.exit()",
    "thread": "import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()",
    "atexit": "import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))",
    "trailing spaces": "print(sum(map(int, input().split())), end='  \\n\\n')",
}
WRONG = {
    "no output": "x = 1",
    "one line more": "print(sum(map(int, input().split())))\nprint('extra')",
    "same line more": "print(sum(map(int, input().split())), 'extra')",
    "then an error": "print(sum(map(int, input().split())))\nraise ValueError",
    "then a bad status": "import sys\nprint(sum(map(int, input().split())))\nsys.exit(3)",
    "bytes": "import os\nos.write(1, b'\\xff\\xfe')",
    "a flood": "while True: print('x' * 1000)",
    "too much": "print('3' * (2 << 20))",
    "never ends": "print(sum(map(int, input().split())), flush=True)\nwhile True: pass",
    "reads on": "while True: input()",
    "truncates": "import os\nprint(sum(map(int, input().split())), flush=True)\nos.ftruncate(1, 1 << 40)",
}


@pytest.mark.parametrize("program", ANSWERS.values(), ids=ANSWERS)
def test_stdin_programs_are_run_as_scripts(box: Sandbox, program: str) -> None:
    assert box.run_stdio(program, SUM, Limits(), same_output).status == "passed"


@pytest.mark.parametrize("program", WRONG.values(), ids=WRONG)
def test_wrong_stdin_programs_fail(box: Sandbox, program: str) -> None:
    assert box.run_stdio(program, SUM, HASTY, same_output).status in ("failed", "timeout")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1\n2\n", "1\n2", True),
        ("1 \r\n2", "1\n2\n", True),
        ("1", "1\n2", False),
        ("1\n2\n3", "1\n2", False),
        ("2\n1", "1\n2", False),
        ("1\n\n2", "1\n2", False),
        (" 1", "1", True),
        ("YES", "Yes", False),
        ("0.333333334", "0.333333333", True),
        ("0.3334", "0.3333", False),
        ("2.50", "2.5", True),
        ("5.0", "5", False),
        ("nan", "0.5", False),
        ("inf", "1.5", False),
        ("1e400", "1.5", False),
        ("[3]", "[3, 4]", False),
        ("", "", True),
        ("\u0663", "3", False),
    ],
)
def test_outputs_are_compared_line_by_line(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed.encode(), expected) is same


# ---- rungs, and what breaks ------------------------------------------------------------------------------------------


def test_strict_and_best_find_the_same_rung_here() -> None:
    assert sandbox.probe("strict") == sandbox.probe("best")
    assert sandbox.probe("strict").number <= 3


def test_a_rung_says_what_it_does_and_does_not() -> None:
    from slmgrpo.rewards.ladder import RUNGS

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
