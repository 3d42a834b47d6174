"""Plain data between a program and its tests: exact types, limited length, and a reader that trusts nobody.

Runs inside the jail too (`zygote.py`), so: standard library only, and few imports.
JSON carries None, bool, int, float, str and list as they are; everything else is a one-key object, tag -> content.
A subclass of a plain type is not plain: an `int` that is equal to everything must not reach a test.
"""

from __future__ import annotations

import _socket  # `socket` brings enums, selectors and arrays: pages that every later fork would copy
import collections
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

MAX_BYTES: Final = 4 << 20
MAX_ITEMS: Final = 10_000
MAX_DEPTH: Final = 100
MAX_NAME: Final = 200


class NotPlain(Exception):
    """A value that is not plain data, or a message that is too long or malformed."""


SCALARS: Final = frozenset({int, str, float, bool, type(None)})
_BIG: Final = 1 << 4096  # written in hexadecimal: decimal digits take quadratic time
_ITEMS: Final[dict[type, str]] = {tuple: "t", set: "s", frozenset: "fs", collections.deque: "dq"}
_PAIRS: Final[dict[type, str]] = {
    dict: "d", collections.defaultdict: "d", collections.Counter: "dC", collections.OrderedDict: "dO",
}  # fmt: skip
_OTHERS: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("b", bytes.hex), bytearray: ("ba", bytearray.hex), type(...): ("e", lambda _: 0),
    complex: ("c", lambda z: [z.real, z.imag]), range: ("r", lambda r: [r.start, r.stop, r.step]),
}  # fmt: skip
_ITERATORS: Final = frozenset({
    "generator", "map", "filter", "zip", "enumerate", "reversed", "dict_keys", "dict_values", "dict_items",
    "list_iterator", "tuple_iterator", "range_iterator", "set_iterator", "list_reverseiterator", "str_iterator",
    "str_ascii_iterator", "dict_keyiterator", "dict_valueiterator", "dict_itemiterator", "callable_iterator",
})  # fmt: skip
# imported only where a value needs them
_STDLIB: Final[dict[tuple[str, str], tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]] = {
    ("decimal", "Decimal"): (str, lambda kind, text: kind(text)),
    ("fractions", "Fraction"): (lambda f: [f.numerator, f.denominator], lambda kind, parts: kind(*parts)),
    ("datetime", "date"): (lambda d: d.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    ("datetime", "time"): (lambda d: d.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    ("datetime", "datetime"): (lambda d: d.isoformat(), lambda kind, text: kind.fromisoformat(text)),
    ("datetime", "timedelta"): (lambda d: [d.days, d.seconds, d.microseconds], lambda kind, parts: kind(*parts)),
}


def _from_stdlib(content: list[Any]) -> Any:
    module, name, value = content
    return _STDLIB[module, name][1](getattr(__import__(module), name), value)


_READERS: Final[dict[str, Callable[[Any], Any]]] = {
    "t": tuple, "s": set, "fs": frozenset, "dq": collections.deque, "d": dict,
    "dC": lambda pairs: collections.Counter(dict(pairs)), "dO": collections.OrderedDict,
    "b": bytes.fromhex, "ba": bytearray.fromhex, "c": lambda parts: complex(*parts), "r": lambda parts: range(*parts),
    "i": lambda text: int(text, 16), "it": iter, "e": lambda _: ..., "x": _from_stdlib,
}  # fmt: skip


def _simple(value: Any, depth: int) -> Any:
    """The value in terms of JSON."""
    kind = type(value)
    if kind is int:
        return value if -_BIG < value < _BIG else {"i": hex(value)}
    if kind in SCALARS:
        return value
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")
    if kind is list:
        return [_simple(item, depth + 1) for item in value]
    if kind in _ITEMS:
        return {_ITEMS[kind]: [_simple(item, depth + 1) for item in value]}
    if kind in _PAIRS:
        return {_PAIRS[kind]: [[_simple(k, depth + 1), _simple(v, depth + 1)] for k, v in value.items()]}
    if kind in _OTHERS:
        tag, convert = _OTHERS[kind]
        return {tag: convert(value)}
    module, name = kind.__module__, kind.__name__
    if module == "builtins" and name in _ITERATORS:
        return {"it": [_simple(item, depth + 1) for item in _first_items(value)]}
    if (module, name) in _STDLIB and getattr(sys.modules[module], name) is kind:
        return {"x": [module, name, _STDLIB[module, name][0](value)]}
    raise NotPlain(f"{name[:MAX_NAME]} is not plain data")


def _first_items(values: Any) -> Iterator[Any]:
    for count, item in enumerate(values):
        if count >= MAX_ITEMS:
            raise NotPlain(f"an iterator of more than {MAX_ITEMS} items")
        yield item


def _tagged(pairs: list[tuple[str, Any]]) -> Any:
    if len(pairs) != 1 or pairs[0][0] not in _READERS:
        raise NotPlain("malformed message")
    tag, content = pairs[0]
    return _READERS[tag](content)


_parse: Final = json.JSONDecoder(object_pairs_hook=_tagged).decode
_write: Final = json.JSONEncoder(separators=(",", ":")).encode


def encode(value: Any) -> bytes:
    """Plain data as bytes; NotPlain for anything else."""
    try:
        data = _write(_simple(value, 0)).encode()
    except (RecursionError, ValueError, TypeError, RuntimeError) as error:
        raise NotPlain(f"not plain data: {type(error).__name__}") from None
    if len(data) > MAX_BYTES:
        raise NotPlain(f"more than {MAX_BYTES >> 20} MB of data")
    return data


def decode(data: bytes) -> Any:
    """The plain data in a message, whoever wrote it; NotPlain if there is none."""
    try:
        return _parse(data.decode())
    except NotPlain:
        raise
    except (RecursionError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, MemoryError) as error:
        raise NotPlain(f"malformed message: {type(error).__name__}") from None


class Channel:
    """Messages over one end of a socket pair; the kernel keeps the time, so that a call costs two system calls."""

    def __init__(self, fd: int) -> None:
        self.socket = _socket.socket(fileno=fd)
        self.socket.settimeout(None)
        self._rest = b""
        self._limits: dict[int, float] = {}

    def _limit(self, option: int, seconds: float) -> None:
        if self._limits.get(option, 0.0) != seconds:
            whole = int(seconds)
            micro = max(1, int((seconds - whole) * 1e6)) if seconds else 0
            self.socket.setsockopt(_socket.SOL_SOCKET, option, struct.pack("ll", whole, micro))
            self._limits[option] = seconds

    def write(self, data: bytes, timeout_s: float = 0.0) -> None:
        """TimeoutError where the other end does not read in time (0: waits), ConnectionError where it is gone."""
        self._limit(_socket.SO_SNDTIMEO, timeout_s)
        try:
            self.socket.sendall(len(data).to_bytes(4, "big") + data)
        except BlockingIOError:
            raise TimeoutError from None

    def read(self, timeout_s: float = 0.0) -> bytes | None:
        """One message, None at the end of the stream; TimeoutError after `timeout_s` (0: waits)."""
        self._limit(_socket.SO_RCVTIMEO, timeout_s)
        buffer, needed, started = self._rest, 4, 0.0
        while True:
            if len(buffer) >= 4:
                needed = 4 + int.from_bytes(buffer[:4], "big")
                if needed > MAX_BYTES + 4:
                    raise NotPlain(f"a message of more than {MAX_BYTES >> 20} MB")
                if len(buffer) >= needed:
                    self._rest = buffer[needed:]
                    return buffer[4:needed]
            if buffer and timeout_s:  # in pieces: each has the kernel's limit, all together have ours
                started = started or time.monotonic()
                if time.monotonic() - started > timeout_s:
                    raise TimeoutError
            try:
                chunk = self.socket.recv(max(1 << 12, min(1 << 20, needed - len(buffer))))
            except BlockingIOError:
                raise TimeoutError from None
            except ConnectionError:
                return None
            if not chunk:
                return None
            buffer += chunk

    def close(self) -> None:
        self.socket.close()
