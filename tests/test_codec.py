"""Plain data survive the way from a program to its tests unchanged; anything else is refused, whoever wrote it."""

from __future__ import annotations

import collections
import contextlib
import datetime
import decimal
import fractions
import os
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slmgrpo.rewards.codec import MAX_BYTES, Channel, NotPlain, decode, encode

hashable = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters()) | st.binary() | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
plain = st.recursive(
    hashable | st.complex_numbers(allow_nan=False) | st.just(...) | st.builds(range, st.integers(-9, 9), st.just(9)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.lists(st.tuples(st.text(max_size=3), inner), max_size=3).map(collections.OrderedDict)
        | st.lists(st.text(max_size=2), max_size=5).map(collections.Counter)
    ),
    max_leaves=20,
)


def shape(value: Any) -> Any:
    """The types of a value all the way down."""
    if isinstance(value, dict):
        return type(value), [(shape(k), shape(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [shape(item) for item in value]
    return type(value)


@given(plain)
def test_plain_data_come_back_with_their_types(value: Any) -> None:
    again = decode(encode(value))
    assert again == value
    assert shape(again) == shape(value)


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace")))
def test_reading_any_bytes_gives_data_or_refuses(data: bytes) -> None:
    with contextlib.suppress(NotPlain):
        decode(data)


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(1 << 70_000),
        float("inf"),
        -0.0,
        "\ud800",
        bytearray(b"x"),
        decimal.Decimal("1.50"),
        fractions.Fraction(-2, 3),
        datetime.date(2024, 2, 29),
        datetime.datetime(2024, 2, 29, 12, 1),
        datetime.timedelta(days=-1, microseconds=5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_special_values_come_back(value: Any) -> None:
    again = decode(encode([value]))[0]
    assert type(again) is type(value)
    assert repr(again) == repr(value) if not isinstance(value, int) else again == value


class Int(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


def cyclic() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Int(3), "Int is not plain data"),
        ([1, [Int(3)]], "Int is not plain data"),
        ({Int(3): 1}, "Int is not plain data"),
        (type("L", (list,), {})(), "L is not plain data"),
        (type("Decimal", (decimal.Decimal,), {"__module__": "decimal"})(), "Decimal is not plain data"),
        (object(), "object is not plain data"),
        (int, "type is not plain data"),
        (len, "builtin_function_or_method is not plain data"),
        (cyclic(), "nested too deep"),
        (iter(int, 1), "an iterator of more than 10000 items"),
        ("x" * MAX_BYTES, "more than 4 MB of data"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 99 else type(value).__name__,
)
def test_everything_else_is_refused(value: Any, why: str) -> None:
    with pytest.raises(NotPlain, match=why):
        encode(value)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"[1,",
        b'{"t":[1],"s":[2]}',
        b'{"__class__":[1]}',
        b'{"s":[[]]}',
        b'{"d":[[[],1]]}',
        b'{"i":"xyz"}',
        b'{"x":["os","system","true"]}',
        b'{"x":["decimal","Decimal","one"]}',
        b'{"F":[1,0]}',
        b'{"r":["a"]}',
        b"\xff\xfe",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"t":' * 100_000,
    ],
    ids=lambda message: repr(message[:30]),
)
def test_forged_messages_are_refused(message: bytes) -> None:
    with pytest.raises(NotPlain):
        decode(message)


def test_messages_keep_their_borders() -> None:
    near, far = (Channel(end.detach()) for end in socket.socketpair())
    for data in (b"", b"one", b"x" * 70_000):
        near.write(data)
    near.close()
    assert [far.read(), far.read(1.0), far.read(), far.read()] == [b"", b"one", b"x" * 70_000, None]
    far.close()


def test_a_length_that_is_too_large_is_refused_unread() -> None:
    near, far = socket.socketpair()
    near.sendall((1 << 31).to_bytes(4, "big"))
    with pytest.raises(NotPlain, match="a message of more than 4 MB"):
        Channel(far.detach()).read()


def test_silence_ends_at_its_limit() -> None:
    near, far = socket.socketpair()
    channel = Channel(os.dup(far.fileno()))
    with pytest.raises(TimeoutError):
        channel.read(0.05)
    near.sendall(b"\0\0")
    with pytest.raises(TimeoutError):
        channel.read(0.05)
    with pytest.raises(TimeoutError):
        channel.write(b"x" * (3 << 20), 0.05)
    near.close()
    assert channel.read(0.05) is None
