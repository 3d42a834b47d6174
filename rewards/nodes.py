"""The shapes that answers have, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from slmgrpo.rewards.latex import Tree


@dataclass(frozen=True, slots=True)
class Scalar:
    tree: Tree
    decimal: bool
    percent: bool = False
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    key: str


@dataclass(frozen=True, slots=True)
class Colons:
    """7:32 or 3:2, as whole numbers."""

    parts: tuple[int, ...]
    time: bool


@dataclass(frozen=True, slots=True)
class Based:
    digits: str
    base: str


@dataclass(frozen=True, slots=True)
class Items:
    """Several values. brackets: "" for a bare list, "{}" for a set, else the pair as in "(]"."""

    brackets: str
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A union of intervals, sorted as written; `name` is the variable where it was an inequality."""

    intervals: tuple[Items, ...]
    name: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True)
class Equation:
    """left = right; `name` is the left side's text where it only names the value, as in x = 5 or f(x) = 2x."""

    left: Tree | None
    right: Node
    name: str


@dataclass(frozen=True, slots=True)
class Odd:
    """An ill-typed formula, such as a tuple plus a number: it equals nothing that can be read."""


Node = Odd | Scalar | Words | Colons | Based | Items | Span | Matrix | Equation
