"""The split judge: tests in one process call a program in another and get plain data back, nothing else.

Runs inside the jail (`zygote.py` forks it), standard library only. The worker has the program and never sees a test;
the judge has the tests and never sees an object of the program: only None, bool, int, float, complex, str, bytes and
the containers below, of exactly these types, in messages of limited length.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, Final

MAX_BYTES: Final = 4 << 20
MAX_ITEMS: Final = 10_000
MAX_DEPTH: Final = 100
MAX_TEXT: Final = 200


class NotPlain(Exception):
    """A value that is not plain data, or data that is too large or malformed."""


class Gone(BaseException):
    """The program ended, or took longer than one call may: no later test can run."""

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


# ---- codec -------------------------------------------------------------------------------------------------------

_NATIVE: Final = frozenset({int, str, float, bool, type(None)})
_SMALL_INT: Final = 1 << 4096
_SEQUENCES: Final[dict[type, str]] = {
    tuple: "t", set: "s", frozenset: "fs", collections.deque: "dq", collections.Counter: "dC",
    collections.OrderedDict: "dO", collections.defaultdict: "d", dict: "d",
}  # fmt: skip
_TEXTS: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("b", bytes.hex), bytearray: ("ba", bytearray.hex),
    complex: ("c", lambda z: [z.real, z.imag]), range: ("r", lambda r: [r.start, r.stop, r.step]),
    decimal.Decimal: ("D", str), fractions.Fraction: ("F", lambda f: [f.numerator, f.denominator]),
    datetime.date: ("dt", datetime.date.isoformat), datetime.datetime: ("dtt", datetime.datetime.isoformat),
    datetime.time: ("tm", datetime.time.isoformat),
    datetime.timedelta: ("td", lambda d: [d.days, d.seconds, d.microseconds]),
}  # fmt: skip


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "t": tuple, "s": set, "fs": frozenset, "dq": collections.deque, "d": dict,
    "dC": lambda x: collections.Counter(dict(x)),
    "dO": lambda x: collections.OrderedDict(x),
    "b": bytes.fromhex, "ba": bytearray.fromhex, "c": lambda x: complex(*x), "r": lambda x: range(*x),
    "D": decimal.Decimal, "F": lambda x: fractions.Fraction(*x), "i": lambda x: int(x, 16),
    "dt": datetime.date.fromisoformat, "dtt": datetime.datetime.fromisoformat, "tm": datetime.time.fromisoformat,
    "td": lambda x: datetime.timedelta(*x), "it": iter, "e": lambda _: ...,
}  # fmt: skip


def _plain(value: Any, depth: int = 0) -> Any:
    """The value in terms of JSON: lists and scalars as they are, all else as a one-key object tag -> content."""
    kind = type(value)
    if kind is int:
        return value if -_SMALL_INT < value < _SMALL_INT else {"i": hex(value)}
    if kind in _NATIVE:
        return value
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")
    if kind is list:
        if _NATIVE.issuperset(map(type, value)) and int not in map(type, value):
            return value
        return [_plain(item, depth + 1) for item in value]
    tag = _SEQUENCES.get(kind)
    if tag is not None:
        if tag[0] == "d" and tag != "dq":
            return {tag: [[_plain(k, depth + 1), _plain(v, depth + 1)] for k, v in value.items()]}
        return {tag: [_plain(item, depth + 1) for item in value]}
    if kind in _TEXTS:
        name, convert = _TEXTS[kind]
        return {name: convert(value)}
    if value is ...:
        return {"e": 0}
    if kind.__module__ == "builtins" and kind.__name__ in _ITERATORS:
        return {"it": [_plain(item, depth + 1) for item in _take(value)]}
    raise NotPlain(f"returned {kind.__name__[:MAX_TEXT]}, which is not plain data")


_ITERATORS: Final = frozenset({
    "generator", "map", "filter", "zip", "enumerate", "reversed", "dict_keys", "dict_values", "dict_items",
    "list_iterator", "tuple_iterator", "range_iterator", "set_iterator", "list_reverseiterator", "str_ascii_iterator",
    "str_iterator", "dict_keyiterator", "dict_valueiterator", "dict_itemiterator", "callable_iterator",
})  # fmt: skip


def _take(values: Any) -> Iterator[Any]:
    for count, item in enumerate(values):
        if count >= MAX_ITEMS:
            raise NotPlain(f"an iterator of more than {MAX_ITEMS} items")
        yield item


def _tagged(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) != 1 or pairs[0][0] not in _DECODERS:
        raise NotPlain("malformed message")
    tag, content = pairs[0]
    return _DECODERS[tag](content)


def encode(value: Any) -> bytes:
    """Plain data as bytes; raises NotPlain for anything else, subclasses of plain types included."""
    try:
        data = json.dumps(_plain(value)).encode()
    except (RecursionError, ValueError, TypeError, RuntimeError) as error:
        raise NotPlain(f"not plain data: {type(error).__name__}") from None
    if len(data) > MAX_BYTES:
        raise NotPlain(f"more than {MAX_BYTES >> 20} MB of data")
    return data


def decode(data: bytes) -> Any:
    """The plain data in a message, whoever wrote it; raises NotPlain if it is not one."""
    if len(data) > MAX_BYTES:
        raise NotPlain(f"more than {MAX_BYTES >> 20} MB of data")
    try:
        return json.loads(data, object_pairs_hook=_tagged)
    except NotPlain:
        raise
    except (RecursionError, ValueError, TypeError, ArithmeticError, AttributeError, MemoryError) as error:
        raise NotPlain(f"malformed message: {type(error).__name__}") from None


def write_frame(fd: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(4, "big") + data)
    while view:
        view = view[os.write(fd, view) :]


def read_frame(fd: int, deadline: float | None = None) -> bytes | None:
    """One message, or None at the end of the stream; TimeoutError at the deadline (time.monotonic)."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    buffer = bytearray()
    needed = 4
    while len(buffer) < needed:
        if deadline is not None and not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        try:
            chunk = os.read(fd, min(1 << 16, needed - len(buffer)))
        except ConnectionError:
            return None
        if not chunk:
            return None
        buffer += chunk
        if needed == 4 and len(buffer) == 4:
            needed += int.from_bytes(buffer, "big")
            if needed > MAX_BYTES + 4:
                raise NotPlain(f"a message of more than {MAX_BYTES >> 20} MB")
    return bytes(buffer[4:])


# ---- worker: the program's side ----------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    return module


def _text(value: object) -> str:
    return value[:MAX_TEXT] if type(value) is str else ""


def _failure(error: BaseException) -> list[Any]:
    """An exception as names: its own and the nearest built-in one, which the judge raises in the tests."""
    names = [base.__name__ for base in type(error).__mro__ if getattr(builtins, base.__name__, None) is base]
    message = _text(error.args[0]) if type(error.args) is tuple and error.args else ""
    return ["raised", _text(type(error).__name__), names[0] if names else "Exception", message]


def run_worker(channel: int) -> None:
    """Loads the program that the first message holds and answers calls until the stream ends."""
    first = read_frame(channel)
    if first is None:
        return
    program = json.loads(first)
    module = _module("solution")
    try:
        exec(compile(program, "solution.py", "exec", dont_inherit=True), module.__dict__)
    except BaseException as error:
        write_frame(channel, encode(_failure(error)))
        return
    write_frame(channel, encode(["loaded"]))
    scope = module.__dict__
    while (message := read_frame(channel)) is not None:
        call = decode(message)
        name, arguments, keywords = call
        try:
            result = scope[name](*arguments, **keywords)
            changed = None if encode(call) == message else [arguments, keywords]
            reply = encode(["returned", result, changed])
        except BaseException as error:
            reply = encode(_failure(error))
        write_frame(channel, reply)


def run_main(program: str) -> int:
    """Runs a program that reads stdin and writes stdout, as a script; its exit status."""
    module = _module("__main__")
    try:
        exec(compile(program, "main.py", "exec", dont_inherit=True), module.__dict__)
        status = 0
    except SystemExit as error:
        status = 0 if error.code in (None, 0) else 1
    except BaseException:
        status = 1
    if "threading" in sys.modules:
        for thread in sys.modules["threading"].enumerate():
            if thread is not sys.modules["threading"].main_thread() and not thread.daemon:
                thread.join()
    sys.stdout.flush()
    return status


# ---- judge: the tests' side --------------------------------------------------------------------------------------


_MAPPINGS: Final = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)


def _update(old: Any, new: Any) -> Any:
    """Makes an argument equal to what the program left of it, keeping the objects that the tests hold."""
    if type(old) is not type(new):
        return new
    if type(old) is list:
        kept = [_update(o, n) for o, n in zip(old, new, strict=False)]
        old[:] = kept + new[len(kept) :]
    elif type(old) in _MAPPINGS:
        merged = [(key, _update(old[key], value) if key in old else value) for key, value in new.items()]
        old.clear()
        old.update(merged)
    elif type(old) in (set, collections.deque, bytearray):
        old.clear()
        (old.update if type(old) is set else old.extend)(new)
    elif type(old) is tuple and len(old) == len(new):
        for o, n in zip(old, new, strict=True):
            _update(o, n)
    else:
        return new
    return old


class Line:
    """The judge's end of the channel to the program."""

    def __init__(self, channel: int, call_s: float) -> None:
        self.channel, self.call_s = channel, call_s

    def receive(self) -> Any:
        try:
            data = read_frame(self.channel, time.monotonic() + self.call_s)
        except TimeoutError:
            raise Gone(f"one call took more than {self.call_s:g} s", late=True) from None
        except NotPlain as error:
            raise Gone(str(error)) from None
        if data is None:
            raise Gone("the program ended before it answered")
        message = decode(data)
        if type(message) is not list or not message:
            raise NotPlain("malformed message")
        return message

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        try:
            write_frame(self.channel, encode([name, list(arguments), keywords]))
        except ConnectionError:
            raise Gone("the program ended before it was called") from None
        message = self.receive()
        if message[0] == "returned" and len(message) == 3:
            if message[2] is not None:
                _update([list(arguments), keywords], message[2])
            return message[1]
        raise _exception(message)


def _exception(message: list[Any]) -> Exception:
    if len(message) == 4 and message[0] == "raised" and all(type(part) is str for part in message):
        kind = getattr(builtins, message[2], None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind is not StopIteration:
            try:
                return kind(f"{message[1][:MAX_TEXT]}: {message[3][:MAX_TEXT]}")
            except TypeError:
                pass
        return RuntimeError(f"the program raised {message[1][:MAX_TEXT]}: {message[3][:MAX_TEXT]}")
    return NotPlain("malformed message")


class Scope(dict[str, Any]):
    """The names of the tests; one that nobody defined is taken for a function of the program."""

    def __init__(self, line: Line, names: dict[str, Any]) -> None:
        super().__init__(names)
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
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:MAX_TEXT]}" if text else type(error).__name__


def run_judge(channel: int, report: int) -> None:
    """Reads the tests from `report`, runs them against the program at the other end of `channel`, and writes there
    [status, passed, total, why]."""
    first = read_frame(report)
    if first is None:
        return
    task = json.loads(first)
    write_frame(report, json.dumps(_judge(task, Line(channel, task["call_s"]))).encode())


def _judge(task: dict[str, Any], line: Line) -> list[Any]:
    total = len(task["tests"])
    scope = Scope(line, _module("tests").__dict__)
    with contextlib.suppress(BaseException):  # a prompt that is prose, or does more than define helpers
        exec(compile(task["prompt"], "prompt", "exec", dont_inherit=True), scope)
    try:
        exec(compile(task["setup"], "setup", "exec", dont_inherit=True), scope)
        codes = [compile(test, "test", "exec", dont_inherit=True) for test in task["tests"]]
    except BaseException as error:
        return ["error", 0, total, f"the tests cannot be set up: {_describe(error)}"]
    if task["entry_point"]:
        scope[task["entry_point"]] = scope.stub(task["entry_point"])
    try:
        message = line.receive()
        if message != ["loaded"]:
            return ["failed", 0, total, f"the program does not load: {_exception(message)}"]
    except Gone as gone:
        return ["timeout" if gone.late else "failed", 0, total, f"while loading: {gone}"]
    except NotPlain as error:
        return ["failed", 0, total, str(error)]
    passed, why, late = 0, "", False
    for number, code in enumerate(codes, 1):
        try:
            exec(code, scope)
            if task["check"]:
                if "check" not in scope:
                    return ["error", 0, total, "the tests define no function `check`"]
                scope["check"](scope[task["entry_point"]])
            passed += 1
        except Gone as gone:
            why, late = why or f"test {number}: {gone}", gone.late
            break
        except BaseException as error:
            why = why or f"test {number}: {_describe(error)}"
    return ["passed" if passed == total else "timeout" if late else "failed", passed, total, why]
