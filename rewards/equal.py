"""Whether an answer equals the gold: as written, as numbers, by shape, and last by math-verify behind guards."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from fractions import Fraction

from slmgrpo.rewards.latex import Tree, clean, symbols
from slmgrpo.rewards.nodes import Based, Colons, Equation, Items, Matrix, Node, Odd, Scalar, Span, Words
from slmgrpo.rewards.structure import read, text_key, words_key
from slmgrpo.rewards.symbolic import MAX_CHARS, heavy, verified
from slmgrpo.rewards.units import same_unit
from slmgrpo.rewards.values import POINTS, Evaluator, TooLarge, Undefined, close, equal

MAX_ITEMS = 40
LOOSE = ("", "{}")
"""Brackets that leave the order open."""


_INTEGER = re.compile(r"[-+]?[0-9]{1,30}")
_SENTENCE = re.compile(
    r"^\s*(?:\\text\s*\{\s*)?(?:so\s+|thus\s+)?the\s+(?:final\s+)?answer\s+is\s*:?\s*(?:\}|(?=[^{}]*$))(?=.)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Equality:
    """same: True, False, or None where the gold cannot be read and the answer is not its copy.

    late: math-verify was stopped; the answer counts as different.
    """

    same: bool | None
    why: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read once. node: its shape; None where only math-verify may know."""

    raw: str
    text: str
    key: str
    words: str
    node: Node | None


@functools.lru_cache(maxsize=8192)
def answer(text: str) -> Answer:
    if len(text) > MAX_CHARS:
        return Answer(text, text, text_key(text), "", None)
    text = _SENTENCE.sub("", text)
    cleaned = clean(text)
    raw = re.sub(r"(?<!\\)\$", "", text).rstrip(". ")
    return Answer(raw, cleaned, text_key(cleaned), words_key(cleaned), read(cleaned))


def is_plain(gold: str, given: str) -> bool:
    """Whether `compare` is a matter of microseconds: the same text, or two whole numbers."""
    return gold == given != "" or (_INTEGER.fullmatch(gold) is not None and _INTEGER.fullmatch(given) is not None)


@functools.lru_cache(maxsize=65536)
def compare(gold: str, given: str) -> Equality:
    """The one question of the math rules. Pure: the same texts give the same answer in any process."""
    if _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(given):
        same = int(gold) == int(given)
        return Equality(same, "the same whole number" if same else "another whole number")
    want, have = answer(gold), answer(given)
    if not want.key:
        return Equality(None, "the gold answer is empty")
    if not have.key:
        return Equality(False, "the answer is empty")
    if want.key == have.key:
        return Equality(True, "as written")
    texts = "\\text" in want.text and want.node is None
    if texts or isinstance(want.node, Words) or isinstance(have.node, Words):
        if (want.words and want.words == have.words) or (want.node == have.node and want.node):
            return Equality(True, "same words")
        if isinstance(want.node, Words):
            return Equality(False, "not the gold's words")
    if (want.node is None and isinstance(have.node, Words | Odd)) or (
        want.node is not None and have.node is None and "\\text" in have.text
    ):  # math-verify reads over text, and would take "2 or more" for 2
        return Equality(False, "the answer has no one value")
    if want.node is not None and have.node is not None and not isinstance(want.node, Odd):
        try:
            same = _same(want.node, have.node)
        except (Undefined, TooLarge) as error:
            return Equality(False, str(error))
        except (ArithmeticError, RecursionError, MemoryError) as error:
            return Equality(False, f"cannot be evaluated ({type(error).__name__})")
        if same or not (_open(want.node) and _open(have.node)):
            return Equality(same, "equal value" if same else "another value")
    if reason := heavy(have.raw):
        return Equality(False, reason)
    if reason := heavy(want.raw):
        return Equality(None, f"the gold answer is {reason}")
    return Equality(*verified(want.raw, have.raw))


def _open(node: Node) -> bool:
    """Equations have more ways to be one than are tried here."""
    return isinstance(node, Equation) and not node.name


def _same(want: Node, have: Node) -> bool:
    match want, have:
        case Scalar() as a, Scalar() as b:
            return _same_scalar(a, b)
        case (Based(), Based()) | (Words(), Words()):
            return want == have
        case Based() as a, Scalar() as b:
            return _same_digits(a, b)
        case Scalar() as a, Based() as b:  # 10_2 is neither ten nor the two that was asked for
            return _same_digits(b, a) and (
                b.base == "10" or (len(b.digits) == 1 and b.base.isdigit() and int(b.digits) < int(b.base))
            )
        case Colons() as a, Colons() as b:
            return a.parts == b.parts or (not a.time and _same_ratio(a.parts, b.parts))
        case Colons() as a, Scalar() as b:
            return not a.time and len(a.parts) == 2 and a.parts[1] != 0 and _same_scalar(_quotient(a), b)
        case Equation() as a, Equation() as b:
            return _same_equation(a, b)
        case Equation() as a, b:
            return a.name != "" and _same(a.right, b)
        case a, Equation() as b:
            return (b.name != "" or _holds(b)) and _same(a, b.right)
        case Span() as a, Span() as b:
            return _same_spans(a, b)
        case Span() as a, Items() as b:
            return len(a.intervals) == 1 and _same_items(a.intervals[0], b)
        case Items() as a, Span() as b:
            return len(b.intervals) == 1 and _same_items(a, b.intervals[0])
        case Items() as a, Items() as b:
            return _same_items(a, b)
        case Matrix() as a, Matrix() as b:
            return _same_matrix(a, b)
        case Matrix() as a, Items(brackets="()") as b:
            return _is_column(a) and _same_items(Items("()", tuple(_cells(a))), b)
        case Items(brackets="()") as a, Matrix() as b:
            return _is_column(b) and _same_items(a, Items("()", tuple(_cells(b))))
        case Items() as a, b:
            return len(a.items) == 1 and a.brackets in LOOSE and _same(a.items[0], b)
        case a, Items() as b:
            return len(b.items) == 1 and b.brackets in LOOSE and _same(a, b.items[0])
    return False


def _quotient(colons: Colons) -> Scalar:
    return Scalar(("num", Fraction(colons.parts[0], colons.parts[1])), False)


def _is_column(matrix: Matrix) -> bool:
    """A vector, which is also written as a tuple; a row is not."""
    return len(matrix.rows) > 1 and all(len(row) == 1 for row in matrix.rows)


def _same_matrix(want: Matrix, have: Matrix) -> bool:
    if [len(row) for row in want.rows] != [len(row) for row in have.rows]:
        return False
    return all(_same(a, b) for a, b in zip(_cells(want), _cells(have), strict=True))


def _cells(matrix: Matrix) -> list[Node]:
    return [cell for row in matrix.rows for cell in row]


def _same_scalar(want: Scalar, have: Scalar) -> bool:
    if not same_unit(want.unit, have.unit):
        return False
    decimal = want.decimal or have.decimal
    if _same_tree(want.tree, have.tree, decimal):
        return True
    if want.percent and not have.percent:
        return _same_tree(("div", want.tree, ("num", Fraction(100))), have.tree, decimal)
    if have.percent and not want.percent:
        return _same_tree(want.tree, ("div", have.tree, ("num", Fraction(100))), decimal)
    return False


def _same_tree(a: Tree, b: Tree, decimal: bool) -> bool:
    if a == b:
        return True
    try:
        return equal(a, b, decimal=decimal)
    except TooLarge:
        if a[0] != b[0] or a[0] not in ("pow", "fact"):
            return False
        return all(_same_tree(x, y, decimal) for x, y in zip(a[1:], b[1:], strict=True))


def _same_digits(based: Based, plain: Scalar) -> bool:
    """A missing base is taken from the question: 2516 is 2516_8. The value of 2516_8 in base ten is not its digits."""
    return based.digits.isdigit() and plain.tree == ("num", Fraction(int(based.digits)))


def _same_ratio(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and any(a) and any(b) and all(x * b[0] == y * a[0] for x, y in zip(a, b, strict=True))


def _same_items(want: Items, have: Items) -> bool:
    if len(want.items) > MAX_ITEMS or len(have.items) > MAX_ITEMS:
        return False
    if want.brackets in LOOSE and have.brackets in LOOSE:
        return _same_set(want.items, have.items)
    if len(want.items) != len(have.items) or "{}" in (want.brackets, have.brackets):
        return False
    if want.brackets != have.brackets and "" not in (want.brackets, have.brackets):
        vectors = {want.brackets, have.brackets} == {"()", "[]"} and len(want.items) > 2
        if not vectors:
            return False
    return all(_same(a, b) for a, b in zip(want.items, have.items, strict=True))


def _same_set(want: tuple[Node, ...], have: tuple[Node, ...]) -> bool:
    """Each of one is matched by its own of the other; repeats within one side count once."""
    want, have = _distinct(want), _distinct(have)
    left = list(have)
    for node in want:
        found = next((other for other in left if _same(node, other)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _distinct(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    kept: list[Node] = []
    for node in nodes:
        if not any(_same(node, other) for other in kept):
            kept.append(node)
    return tuple(kept)


def _same_spans(want: Span, have: Span) -> bool:
    if want.name != have.name and want.name and have.name:
        return False
    return len(want.intervals) == len(have.intervals) and _same_set(want.intervals, have.intervals)


def _holds(equation: Equation) -> bool:
    """Whether both sides are one constant, as in 8 - 4 = 4; then the right side is the answer."""
    right = equation.right
    return (
        isinstance(right, Scalar)
        and equation.left is not None
        and not symbols(equation.left)
        and _same_tree(equation.left, right.tree, right.decimal)
    )


def _same_equation(want: Equation, have: Equation) -> bool:
    if want.name and have.name:
        graphs = all(name == "y" or "(" in name for name in (want.name, have.name))
        if want.name == have.name or "\\text" in want.name + have.name or graphs:
            return _same(want.right, have.right)
    if (
        want.left is None
        or have.left is None
        or not isinstance(want.right, Scalar)
        or not isinstance(have.right, Scalar)
    ):
        return False
    first: Tree = ("sub", want.left, want.right.tree)
    second: Tree = ("sub", have.left, have.right.tree)
    if symbols(first) != symbols(second) or not symbols(first):
        return False
    return _proportional(first, second)


def _proportional(a: Tree, b: Tree) -> bool:
    """Whether a = 0 and b = 0 are one equation up to a constant factor."""
    ratios = []
    for index in range(POINTS):
        evaluate = Evaluator(index)
        left, right = evaluate(a), evaluate(b)
        if left == 0 or right == 0:
            if left != right:
                return False
            continue
        ratios.append(evaluate(("div", ("div", a, b), ("num", Fraction(1)))))
    return len(ratios) > 1 and all(close(ratios[0], ratio, decimal=False) for ratio in ratios[1:])
