"""The split judge: tests in one process call a program in another and get plain data back, nothing else.

Runs inside the jail (`zygote.py` forks it): standard library only. The worker has the program and never sees a test;
the judge has the tests and never sees an object of the program, only data of the types in `codec.py`. So what the
program prints, patches, raises, exits with or writes to its channel can be no more than a wrong answer.
"""

from __future__ import annotations

import _socket
import atexit
import builtins
import collections
import contextlib
import json
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from slmgrpo.rewards.codec import MAX_NAME, SCALARS, Channel, NotPlain, decode, encode


class Gone(BaseException):
    """The program ended, or a call took too long: no later test can run. Tests cannot catch it by Exception."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


TEXT: Final = ("utf-8", "surrogatepass")
"""How a program travels: whatever a model wrote."""
LOADED: Final = encode(["loaded"])


# ---- the program's side ------------------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    return module


def _failure(error: BaseException) -> list[Any]:
    """An exception as three texts: its name, the nearest built-in exception's, its first argument."""
    if type(error) is NotPlain:
        return ["not plain", error.args[0]]
    known = [base.__name__ for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base]
    message = error.args[0] if type(error.args) is tuple and error.args else ""
    texts = [type(error).__name__, known[0] if known else "Exception", message]
    return ["raised", *(text[:MAX_NAME] if type(text) is str else "" for text in texts)]


def run_worker(channel: Channel) -> None:
    """Loads the program that the first message holds and answers calls until the stream ends."""
    first = channel.read()
    if first is None:
        return
    scope = _module("solution").__dict__
    try:
        exec(compile(first.decode(*TEXT), "solution.py", "exec", dont_inherit=True), scope)
        reply = LOADED
    except BaseException as error:
        reply = encode(_failure(error))
    channel.write(reply)
    while (message := channel.read()) is not None:
        call = name, arguments, keywords = decode(message)
        try:
            if name.isidentifier() and name not in scope:  # not the built-in one of that name
                raise NameError(f"the program defines no {name}")
            function = scope[name] if name in scope else eval(name, scope)  # `Solution().solve`
            result = function(*arguments, **keywords)
            if (not keywords and SCALARS.issuperset(map(type, arguments))) or encode(call) == message:
                reply = encode(["returned", result, None])
            else:
                reply = encode(["returned", result, [arguments, keywords]])
        except BaseException as error:
            reply = encode(_failure(error))
        channel.write(reply)


def run_main(channel: Channel) -> int:
    """Runs the program that the first message holds as a script, from stdin to stdout; its exit status."""
    program = (channel.read() or b"").decode(*TEXT)
    status = 0
    try:
        exec(compile(program, "main.py", "exec", dont_inherit=True), _module("__main__").__dict__)
    except SystemExit as error:
        status = 0 if error.code is None or error.code == 0 else 1
    except BaseException:
        status = 1
    threading: Any = sys.modules.get("threading")
    if threading is not None:  # as at the end of a script: programs with deep recursion run in a thread
        for thread in threading.enumerate():
            if not (thread.daemon or thread is threading.main_thread()):
                thread.join()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None:
            stream.flush()
    return status


# ---- the tests' side ---------------------------------------------------------------------------------------------

_MAPPINGS: Final = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)


def _refill(old: Any, new: Any) -> None:
    old.clear()
    getattr(old, "update" if hasattr(old, "update") else "extend")(new)


def _update(old: Any, new: Any) -> Any:
    """Makes an argument equal to what the program left of it, keeping the objects that the tests hold."""
    if type(old) is list and type(new) is list:
        kept = [_update(o, n) for o, n in zip(old, new, strict=False)]
        old[:] = kept + new[len(kept) :]
    elif type(old) in _MAPPINGS and isinstance(new, dict):
        merged = [(key, _update(old[key], value) if key in old else value) for key, value in new.items()]
        _refill(old, dict(merged))
    elif type(old) in (set, collections.deque, bytearray) and type(new) is type(old):
        _refill(old, new)
    elif type(old) is tuple and type(new) is tuple and len(old) == len(new):
        for o, n in zip(old, new, strict=True):
            _update(o, n)
    else:
        return new
    return old


def _exception(message: Any) -> Exception:
    if type(message) is list and all(type(part) is str for part in message):
        if len(message) == 2 and message[0] == "not plain":
            return NotPlain(message[1][:MAX_NAME])
        if len(message) == 4 and message[0] == "raised":
            name, base, text = (part[:MAX_NAME] for part in message[1:])
            kind = getattr(builtins, base, None)
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
                with contextlib.suppress(TypeError):
                    return kind(text if name == base else f"{name}: {text}")
            return RuntimeError(f"the program raised {name}: {text}")
    return NotPlain("malformed message")


class Line:
    """The judge's end of the channel to the program, with a limit for each call and one for all."""

    def __init__(self, channel: Channel, call_s: float, deadline: float) -> None:
        self.channel, self.call_s, self.deadline = channel, call_s, deadline

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise Gone("the program's time is up", late=True)
        return min(self.call_s, left)

    def receive(self) -> Any:
        try:
            data = self.channel.read(self._left())
        except TimeoutError:
            raise Gone(f"one call took more than {self.call_s:g} s", late=True) from None
        if data is None:
            raise Gone("the program ended before it answered")
        return decode(data)

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        data = encode((name, list(arguments), keywords))
        try:
            self.channel.write(data, self._left())
        except TimeoutError:
            raise Gone("the program does not read its arguments", late=True) from None
        except ConnectionError:
            raise Gone("the program ended before it was called") from None
        message = self.receive()
        if type(message) is list and len(message) == 3 and message[0] == "returned":
            if message[2] is not None:
                _update([list(arguments), keywords], message[2])
            return message[1]
        raise _exception(message)


class Scope(dict[str, Any]):
    """The names of the tests; one that nobody defined is taken for a function of the program."""

    def __init__(self, line: Line) -> None:
        super().__init__(_module("tests").__dict__)
        self.line = line

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return self.stub(name)

    def stub(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            return self.line.call(name, arguments, keywords)

        call.__name__ = call.__qualname__ = name
        return call


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:MAX_NAME]}" if lines else type(error).__name__


def run_judge(channel: Channel, report: Channel) -> None:
    """Reads tests from `report`, runs them against the program behind `channel`, reports [status, passed, why]."""
    first = report.read()
    if first is not None:
        task = json.loads(first)
        report.write(json.dumps(_judge(task, Line(channel, task["call_s"], task["deadline"]))).encode())


def _judge(task: dict[str, Any], line: Line) -> tuple[str, int, str]:
    scope = Scope(line)
    if "def " in task["prompt"]:
        with contextlib.suppress(BaseException):  # prose, or more than helpers
            exec(compile(task["prompt"], "prompt", "exec", dont_inherit=True), scope)
    try:
        exec(compile(task["setup"], "setup", "exec", dont_inherit=True), scope)
        codes = [compile(test, "test", "exec", dont_inherit=True) for test in task["tests"]]
    except BaseException as error:
        return "error", 0, f"the tests cannot be set up: {_describe(error)}"
    if task["entry_point"]:
        scope[task["entry_point"]] = scope.stub(task["entry_point"])
    passed, why, late = 0, "", False
    try:
        message = line.receive()
        if message != ["loaded"]:
            return "failed", 0, f"the program does not load: {_describe(_exception(message))}"
        for number, code in enumerate(codes, 1):
            try:
                exec(code, scope)
                if task["check"]:
                    if "check" not in scope:
                        return "error", 0, "the tests define no function `check`"
                    scope["check"](scope[task["entry_point"]])
                passed += 1
            except Gone as gone:
                raise Gone(f"test {number}: {gone}", late=gone.late) from None
            except BaseException as error:
                why = why or f"test {number}: {_describe(error)}"
    except NotPlain as error:
        why = f"the program does not load: {_describe(error)}"
    except Gone as gone:
        why, late = why or str(gone), gone.late
    return "passed" if passed == len(codes) else "timeout" if late else "failed", passed, why


def rehearse() -> None:
    """Runs both sides in the server itself: what it touches first, its children need not."""
    program = "def f(x, y=1):\n    return [x, (y, {'a': 0.5})]\n"
    task = {"tests": ["assert f([2], y='a') == [[2], ('a', {'a': 0.5})]"], "prompt": "Write f.", "setup": ""}
    task |= {"entry_point": "f", "check": False, "call_s": 10.0, "deadline": time.monotonic() + 60}
    for _ in range(20):  # the interpreter specialises code that ran eight times
        ours, worker = (Channel(end.detach()) for end in _socket.socketpair())
        ours.write(program.encode())
        ours.write(encode(("f", [[2]], {"y": "a"})))
        ours.socket.shutdown(_socket.SHUT_WR)
        run_worker(worker)
        theirs, report = (Channel(end.detach()) for end in _socket.socketpair())
        replay, judge = (Channel(end.detach()) for end in _socket.socketpair())
        for _ in range(2):
            replay.write(ours.read() or b"")
        theirs.write(json.dumps(task).encode())
        run_judge(judge, report)
        for channel in (ours, worker, theirs, report, replay, judge):
            channel.close()
