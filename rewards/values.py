"""Values of expression trees: exact where rational, 80 digits elsewhere, at fixed points where variables remain.

Two formulas are equal when they agree everywhere they are looked at: rationals exactly, constants to 60 digits,
variables at four fixed points. Nothing here simplifies, so nothing here can take long: every power and factorial
is sized before it is computed.
"""

from __future__ import annotations

import functools
import hashlib
import math
from fractions import Fraction
from typing import Any

from slmgrpo.rewards.latex import Tree, symbols

DIGITS = 80
MAX_BITS = 40_000
"""Rationals up to 2006! are exact; larger ones become 80-digit floats."""
MAX_LOG = 1e9
"""Largest |ln| of a float: beyond it a value is refused, not computed."""
POINTS = 4


class Undefined(ValueError):
    """Division by zero, the logarithm of zero, a factorial of a fraction."""


class TooLarge(ValueError):
    """A power tower or factorial beyond what is worth computing."""


class _Infinity:
    """The one value that is no number; signs are kept by the caller's `neg`."""

    def __init__(self, sign: int) -> None:
        self.sign = sign


PLUS, MINUS = _Infinity(1), _Infinity(-1)
Value = Any  # Fraction, mpf, mpc or _Infinity; mpmath's number classes have no importable types


@functools.cache
def context(digits: int = DIGITS) -> Any:
    """An mpmath context of our own, so that nobody else's precision changes a verdict."""
    import mpmath

    ctx = mpmath.MPContext()
    ctx.dps = digits
    return ctx


@functools.cache
def _point(name: str, index: int) -> Fraction:
    """Where variable `name` stands at look `index`: fixed, in (0.2, 1.9), negative at odd looks."""
    seed = int.from_bytes(hashlib.sha256(f"{name}/{index}".encode()).digest()[:6], "big")
    value = Fraction(1, 5) + Fraction(17, 10) * Fraction(seed, 2**48)
    value = value.limit_denominator(9973)
    return -value if index % 2 else value


class Evaluator:
    def __init__(self, index: int = 0, digits: int = DIGITS) -> None:
        self.index = index
        self.ctx = context(digits)

    def real(self, value: Value) -> Any:
        """As a float of the context; infinities have no arithmetic here."""
        if isinstance(value, _Infinity):
            raise Undefined("infinity in a formula")
        return self.ctx.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def __call__(self, tree: Tree) -> Value:
        op = tree[0]
        if op == "num":
            return tree[1]
        if op == "sym":
            return _point(tree[1], self.index)
        if op == "const":
            return PLUS if tree[1] == "oo" else {"pi": +self.ctx.pi, "e": +self.ctx.e, "i": self.ctx.j}[tree[1]]
        if op == "fn":
            return self.function(tree[1], self(tree[2]))
        arguments = [self(part) for part in tree[1:]]
        if op == "neg" and isinstance(arguments[0], _Infinity):
            return MINUS if arguments[0] is PLUS else PLUS
        return getattr(self, f"_{op}")(*arguments)

    def arithmetic(self, a: Value, b: Value) -> tuple[Value, Value]:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            bits = max(n.bit_length() for n in (a.numerator, a.denominator, b.numerator, b.denominator))
            if bits <= MAX_BITS:
                return a, b
        return self.real(a), self.real(b)

    def _neg(self, a: Value) -> Value:
        return -a

    def _add(self, a: Value, b: Value) -> Value:
        a, b = self.arithmetic(a, b)
        return a + b

    def _sub(self, a: Value, b: Value) -> Value:
        a, b = self.arithmetic(a, b)
        return a - b

    def _mul(self, a: Value, b: Value) -> Value:
        a, b = self.arithmetic(a, b)
        return a * b

    def _div(self, a: Value, b: Value) -> Value:
        a, b = self.arithmetic(a, b)
        if b == 0:
            raise Undefined("division by zero")
        return a / b

    def _degree(self, a: Value) -> Value:
        return self.real(a) * self.ctx.pi / 180

    def log_size(self, a: Value) -> float:
        """Natural logarithm of |a|, for sizing; 0 for 0."""
        if a == 0:
            return 0.0
        if isinstance(a, Fraction):
            return abs(a.numerator.bit_length() - a.denominator.bit_length()) * math.log(2) + 1
        return float(abs(self.ctx.log(abs(a))))

    def _pow(self, a: Value, b: Value) -> Value:
        if isinstance(a, _Infinity) or isinstance(b, _Infinity):
            raise Undefined("infinity in a formula")
        if a == 0:
            if self.ctx.re(self.real(b)) <= 0:
                raise Undefined("zero to a power of zero or less") if b != 0 else Undefined("0^0")
            return Fraction(0)
        if isinstance(b, Fraction) and b.denominator == 1 and isinstance(a, Fraction):
            if abs(b.numerator) < MAX_BITS and self.log_size(a) * abs(b.numerator) < MAX_BITS * math.log(2):
                return a**b.numerator
            if a in (1, -1):
                return a if b.numerator % 2 else Fraction(1)
        a, b = self.real(a), self.real(b)
        if abs(b) > MAX_LOG or self.log_size(a) * float(abs(b)) > MAX_LOG:
            raise TooLarge("a power beyond e^1e9")
        return self.ctx.power(a, b)

    def _root(self, degree: Value, a: Value) -> Value:
        if not isinstance(degree, Fraction) or degree.denominator != 1 or not 1 <= degree <= 10_000:
            raise Undefined("root of a strange degree")
        n = degree.numerator
        if isinstance(a, Fraction):
            if n == 2 and a >= 0:
                top, bottom = math.isqrt(a.numerator), math.isqrt(a.denominator)
                if top * top == a.numerator and bottom * bottom == a.denominator:
                    return Fraction(top, bottom)
            if a < 0 and n % 2:  # the real root, as school has it
                return -self.ctx.root(self.real(-a), n)
        value = self.real(a)
        return self.ctx.root(value, n) if value != 0 else Fraction(0)

    def _fact(self, a: Value) -> Value:
        if not isinstance(a, Fraction) or a.denominator != 1 or a < 0:
            raise Undefined("factorial of something else than a whole number")
        if a > 10**7:
            raise TooLarge("a factorial beyond 10^7!")
        return Fraction(math.factorial(a.numerator)) if a <= 3000 else self.ctx.gamma(self.real(a) + 1)

    def _binom(self, n: Value, k: Value) -> Value:
        if not all(isinstance(v, Fraction) and v.denominator == 1 and 0 <= v <= 3000 for v in (n, k)):
            raise Undefined("binomial of something else than small whole numbers")
        return Fraction(math.comb(n.numerator, k.numerator))

    def _log(self, base: Value, a: Value) -> Value:
        return self._div(self.function("ln", a), self.function("ln", base))

    def function(self, name: str, a: Value) -> Value:
        ctx = self.ctx
        if name == "abs":
            return abs(a) if isinstance(a, Fraction) else abs(self.real(a))
        if name in ("floor", "ceil"):
            value = a if isinstance(a, Fraction) else ctx.re(self.real(a))
            if self.log_size(value) > 100:
                raise TooLarge(f"{name} of a huge number")
            return Fraction(int(ctx.floor(value) if name == "floor" else ctx.ceil(value)))
        value = self.real(a)
        if self.log_size(value) > 100 or abs(ctx.im(value)) > 700:
            raise TooLarge(f"{name} of a huge number") if abs(value) > 1 else Undefined(f"{name} of a tiny number")
        if name == "exp":
            return self._pow(+ctx.e, a)
        if name in ("ln", "log", "lg") and value == 0:
            raise Undefined("logarithm of zero")
        if name in ("sinh", "cosh", "tanh") and abs(value) > MAX_LOG:
            raise TooLarge(name)
        if name == "lg":
            return ctx.log(value) / ctx.log(10)
        if name in ("cot", "sec", "csc"):
            over = {"cot": ctx.tan, "sec": ctx.cos, "csc": ctx.sin}[name](value)
            return self._div(Fraction(1), over)
        return getattr(
            ctx,
            {"ln": "log", "log": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(name, name),
        )(value)


def close(a: Value, b: Value, *, decimal: bool) -> bool:
    """Whether two values are one. `decimal`: one was written with a decimal point, so six places are enough."""
    if isinstance(a, _Infinity) or isinstance(b, _Infinity):
        return a is b
    if isinstance(a, Fraction) and isinstance(b, Fraction) and (a == b or not decimal):
        return a == b
    evaluate = Evaluator()
    a, b = evaluate.real(a), evaluate.real(b)
    if a == b:
        return True
    gap, size = abs(a - b), max(abs(a), abs(b))
    if decimal:
        # Six decimal places as math-verify rounds them, and four significant digits where that would be coarse:
        # 1e-7 is not 2e-7.
        return bool(gap <= min(5e-7, 1e-4 * size))
    return bool(gap <= size * evaluate.ctx.mpf(10) ** (20 - DIGITS))


def equal(a: Tree, b: Tree, *, decimal: bool = False) -> bool:
    """Whether two trees are the same number or the same function. Raises Undefined or TooLarge."""
    names = symbols(a) | symbols(b)
    if not names:
        left, right = Evaluator()(a), Evaluator()(b)
        return close(left, right, decimal=decimal) or _vanishes(a, b, left, right)
    real_looks, agree = 0, True
    undefined = 0
    for index in range(POINTS):
        evaluate = Evaluator(index)
        try:
            left, right = evaluate(a), evaluate(b)
        except Undefined:
            undefined += 1
            continue
        same = close(left, right, decimal=decimal) or _vanishes(a, b, left, right, index)
        if _is_real(left) and _is_real(right):
            real_looks += 1
            if not same:
                return False
        else:
            agree &= same
    if undefined == POINTS:
        raise Undefined("nowhere defined")
    return agree if real_looks < 2 else True


def _is_real(value: Value) -> bool:
    return isinstance(value, Fraction | _Infinity) or not hasattr(value, "imag") or context().im(value) == 0


def _vanishes(a: Tree, b: Tree, left: Value, right: Value, index: int = 0) -> bool:
    """Rounding or a difference: two tiny values are one if they shrink as the digits grow (sin pi is 0)."""
    if isinstance(left, _Infinity) or isinstance(right, _Infinity):
        return False
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return False
    coarse = Evaluator(index)
    if abs(coarse.real(left) - coarse.real(right)) > coarse.ctx.mpf(10) ** (20 - DIGITS):
        return False
    fine = Evaluator(index, 3 * DIGITS)
    gap = abs(fine.real(fine(a)) - fine.real(fine(b)))
    return bool(gap < fine.ctx.mpf(10) ** (20 - 3 * DIGITS))
