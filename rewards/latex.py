r"""LaTeX and plain formulas to small expression trees: one spelling for what many spellings mean.

Trees are tuples: ("num", Fraction), ("sym", name), ("fn", name, arg), (op, left, right). What is not understood
raises `Unread`, and the caller goes on to the full parser; nothing is ever read as a prefix of itself.
"""

# ruff: noqa: RUF001  (look-alike characters are what is mapped here)

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

Tree = tuple[Any, ...]
MAX_DEPTH = 40


class Unread(ValueError):
    """Not in the little language of this module."""


_UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "π": r"\pi ",
    "√": r"\sqrt ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "±": r"\pm ", "∓": r"\mp ",
    "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "²": "^{2}", "³": "^{3}", "⁴": "^{4}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "‘": "'", "’": "'",
    "\u200b": "", "\u200c": "", "\u200d": "", "\u2060": "", "\ufeff": "", "…": r"\ldots ",
    "，": ",", "（": "(", "）": ")", "＝": "=", "％": "%", "∅": r"\emptyset ", "∖": r"\setminus ",
}  # fmt: skip
_SPELLINGS: list[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"\\(?:left|right|bigl|bigr|Bigl|Bigr|big|Big|middle|displaystyle|textstyle|limits|phantom\{\})(?![a-zA-Z])\.?",
            "",
        ),
        (r"(?<=\d)\{,\}(?=\d)", ","),
        (r",\\!\s*", ","),
        (r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))", ","),
        (r"(?<!\\)\\(?:[,;:!> ]|quad(?![a-zA-Z])|qquad(?![a-zA-Z]))|~", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox)(?![a-zA-Z])", r"\\text"),
        (r"\\(?:mathrm|mathbf|mathit|mathsf|operatorname\*?|boldsymbol|bm)(?![a-zA-Z])", r"\\mathrm"),
        (r"\\mathrm\s*\{\s*([dei])\s*\}", r" \1 "),
        (r"\\(?:lbrace|\{)", r"\\{"),
        (r"\\(?:rbrace|\})", r"\\}"),
        (r"\\(?:lbrack)(?![a-zA-Z])", "["),
        (r"\\(?:rbrack)(?![a-zA-Z])", "]"),
        (r"\\(?:lvert|rvert|vert)(?![a-zA-Z])", "|"),
        (r"\\(?:leqslant|le)(?![a-zA-Z])", r"\\leq "),
        (r"\\(?:geqslant|ge)(?![a-zA-Z])", r"\\geq "),
        (r"\\(?:ne)(?![a-zA-Z])", r"\\neq "),
        (r"\\(?:cdot|times|ast)(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))", r"\\degree "),
        (r"\\(?:varnothing)(?![a-zA-Z])", r"\\emptyset "),
        (r"\\(?:varphi)(?![a-zA-Z])", r"\\phi "),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\(?:textcolor|color)\s*\{[^{}]*\}|\\(?:underline|therefore|boldsymbol|pmb)(?![a-zA-Z])", ""),
        (r"\\dot\s*\{(\d)\}", r"\\overline{\1}"),
        (r"(?<=\.)(\d*?)(\d)\2{2,}(?:\.\.\.|\\[lc]?dots(?![a-zA-Z]))", r"\1\\overline{\2}"),
        (r"\\(?:dots|cdots|dotsc|dotsb|dotsm|dotsi)(?![a-zA-Z])|\.\.\.+", r"\\ldots "),
        (r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z]))", "'"),
        (r"_\s*\{\s*\\(?:text|mathrm)\s*\{\s*(\w+)\s*\}\s*\}", r"_{\1}"),
        (r"_\s*\{\s*\\([a-z]+)\s*\}", r"_{\1}"),
        (r"\*\*", "^"),
    )
]

_ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*)?\{?\s*(?:\\(?:text|mathrm)\s*\{)?\s*(?:st|nd|rd|th)\s*\}?\s*\}?$")


def clean(text: str) -> str:
    """One spelling for brackets, spaces, fractions, signs and relations, without delimiters and the full stop."""
    text = text.strip()
    if not text.isascii():
        text = "".join(_UNICODE.get(char, char) for char in text)
        text = "".join(chr(ord(char) - 0xFEE0) if "！" <= char <= "～" else char for char in text)
    text = (
        re.sub(r"^(?:\$\$?|\\\(|\\\[)(.*?)(?:\$\$?|\\\)|\\\])$", r"\1", text, flags=re.DOTALL)
        if text[:1] in "$\\"
        else text
    )
    text = re.sub(r"(?<!\\)\$(?!\d)", "", re.sub(r"(?<!\\)\$\s*([,;])\s*\$", r"\1", text))
    if re.search(r"[\\,*~]|\.\.", text):
        for pattern, replacement in _SPELLINGS:
            text = pattern.sub(replacement, text)
    text = _ORDINAL.sub("", re.sub(r"\s+", " ", text).strip().rstrip("\\ "))
    return text[:-1].rstrip() if text[-1:] in ".,;" and not text.endswith("\\") else text


_TOKEN = re.compile(
    r"""\s*(?:
    (?P<repeating>\d*\.\d*\\overline\s*\{\d+\}|\d*\.\d*\(\d+\))
  | (?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\d,])|(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+(?![\d.]))?)
  | (?P<command>\\[a-zA-Z]+)
  | (?P<word>sqrt|arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|exp|ln|log|pi|infinity|inf)(?![a-zA-Z])
  | (?P<letter>[a-zA-Z](?:'+)?)
  | (?P<op>[-+*/^!()\[\]{}|_,])
  )""",
    re.VERBOSE,
)
_FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "ln", "log", "lg",
    "exp",
}  # fmt: skip
_GREEK = {
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "lambda", "mu", "nu", "xi",
    "rho", "sigma", "tau", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Omega", "ell", "hbar",
}  # fmt: skip


def _number(text: str) -> Fraction:
    _, _, exponent = text.lower().partition("e")
    if len(exponent) > 5 or len(text) > 4000:
        raise Unread("a number of absurd size")
    return Fraction(text.replace(",", "").removesuffix("."))


def _repeating(text: str) -> Fraction:
    match = re.fullmatch(r"(\d*)\.(\d*)(?:\\overline\s*\{|\()(\d+)[})]", text)
    if match is None or len(text) > 60:
        raise Unread(text)
    whole, fixed, again = match.groups()
    scale = 10 ** len(fixed)
    return (
        Fraction(int(whole or 0))
        + Fraction(int(fixed or 0), scale)
        + Fraction(int(again), scale * (10 ** len(again) - 1))
    )


class _Parser:
    """Recursive descent over the tokens of one formula. `decimal` is set where a decimal point was read."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str, bool]] = []
        self.at = 0
        self.depth = 0
        self.decimal = False
        place = 0
        while place < len(text):
            match = _TOKEN.match(text, place)
            if match is None:
                if text[place:].strip():
                    raise Unread(text[place : place + 20])
                break
            kind = match.lastgroup or ""
            value = match.group(kind)
            self.tokens.append((kind, value, match.start(kind) > place))
            place = match.end()

    def peek(self) -> str:
        return self.tokens[self.at][1] if self.at < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.at][0] if self.at < len(self.tokens) else ""

    def take(self, value: str) -> None:
        if self.peek() != value:
            raise Unread(f"expected {value}")
        self.at += 1

    def whole(self) -> Tree:
        tree = self.sum()
        if self.at < len(self.tokens):
            raise Unread(self.peek())
        return tree

    def sum(self) -> Tree:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unread("too deeply nested")
        tree = self.product()
        while self.peek() in ("+", "-"):
            op = "add" if self.peek() == "+" else "sub"
            self.at += 1
            tree = (op, tree, self.product())
        self.depth -= 1
        return tree

    def product(self) -> Tree:
        signs = 0
        while self.peek() in ("+", "-"):
            signs += self.peek() == "-"
            self.at += 1
        tree = self.factor()
        divided = False
        while True:
            token = self.peek()
            if token in ("*", "/"):
                self.at += 1
                negative = False
                while self.peek() in ("+", "-"):
                    negative ^= self.peek() == "-"
                    self.at += 1
                right = self.factor()
                divided = token == "/"
                tree = ("mul" if token == "*" else "div", tree, ("neg", right) if negative else right)
            elif self.starts_factor():
                numeral = self.kind() in ("number", "repeating") and self.tokens[self.at - 1][1] != ")"
                if divided or numeral:
                    raise Unread("1/2x and 2 3 have no one meaning")
                tree = ("mul", tree, self.factor())
            else:
                return ("neg", tree) if signs % 2 else tree

    def starts_factor(self) -> bool:
        kind, token = self.kind(), self.peek()
        if kind == "op":
            return token in ("(", "{", "[")
        return kind != "" and token not in (r"\degree", r"\rfloor", r"\rceil")

    def factor(self) -> Tree:
        tree = self.postfix(self.primary())
        if self.peek() == "^":
            self.at += 1
            tree = self.postfix(("pow", tree, self.exponent()))
            if self.peek() == "^":
                raise Unread("double exponent")
        return tree

    def postfix(self, tree: Tree) -> Tree:
        while self.peek() in ("!", r"\degree"):
            tree = ("fact", tree) if self.peek() == "!" else ("degree", tree)
            self.at += 1
        return tree

    def exponent(self) -> Tree:
        """After `^`: a group, a signed number as in x^-2, or one token."""
        if self.peek() == "-":
            self.at += 1
            return ("neg", self.primary())
        return self.primary()

    def group(self, close: str) -> Tree:
        self.at += 1
        tree = self.sum()
        self.take(close)
        return tree

    def argument(self) -> Tree:
        r"""After \frac or \sqrt: a group, or one digit or letter as in \frac13."""
        if self.peek() == "{":
            return self.group("}")
        kind, value, _ = self.tokens[self.at] if self.at < len(self.tokens) else ("", "", False)
        if kind == "number" and value.isdigit():
            if len(value) > 1:
                self.tokens[self.at] = ("number", value[1:], False)
            else:
                self.at += 1
            return ("num", Fraction(int(value[0])))
        if kind == "letter" or (kind == "command" and value[1:] in _GREEK | {"pi"}):
            return self.primary()
        raise Unread(value)

    def primary(self) -> Tree:
        if self.at >= len(self.tokens):
            raise Unread("ends early")
        kind, value, _ = self.tokens[self.at]
        if kind in ("number", "repeating"):
            return self.numeral(kind, value)
        if kind == "letter":
            self.at += 1
            if value in ("e", "i"):
                return ("const", value)
            return ("sym", value + self.subscript())
        if kind == "op":
            if value in ("(", "["):
                return self.group(")" if value == "(" else "]")
            if value == "{":
                return self.group("}")
            if value == "|":
                return ("fn", "abs", self.group("|"))
            raise Unread(value)
        return self.command(value.lstrip("\\"))

    def numeral(self, kind: str, value: str) -> Tree:
        self.at += 1
        number = _number(value) if kind == "number" else _repeating(value)
        self.decimal |= kind == "number" and ("." in value or "e-" in value.lower())
        if self.peek() == "_":
            raise Unread("a number in a base")
        if value.isdigit() and number and (part := self.mixed_part()) is not None:
            return ("num", number + part)
        return ("num", number)

    def mixed_part(self) -> Fraction | None:
        r"""The proper fraction behind a whole number: 2\frac{1}{2}, 1 1/4. An improper one has no meaning."""
        rest = [token for _, token, _ in self.tokens[self.at : self.at + 7]]
        if rest[:1] == [r"\frac"]:
            if len(rest) == 7 and rest[1] == rest[4] == "{" and rest[3] == rest[6] == "}":
                top, bottom, length = rest[2], rest[5], 7
            elif len(rest) >= 2 and len(rest[1]) == 2 and rest[1].isdigit():
                top, bottom, length = rest[1][0], rest[1][1], 2
            else:
                return None
        elif len(rest) >= 3 and rest[1] == "/" and self.tokens[self.at][0] == "number":
            top, bottom, length = rest[0], rest[2], 3
        else:
            return None
        if not (top.isdigit() and bottom.isdigit()):
            return None
        if not 0 < int(top) < int(bottom):
            raise Unread("improper mixed number")
        self.at += length
        return Fraction(int(top), int(bottom))

    def subscript(self) -> str:
        if self.peek() != "_":
            return ""
        self.at += 1
        if self.peek() != "{":
            self.at += 1
            return "_" + (self.tokens[self.at - 1][1] if self.at <= len(self.tokens) else "")
        start = self.at + 1
        while self.peek() not in ("}", ""):
            self.at += 1
        name = "".join(token for _, token, _ in self.tokens[start : self.at])
        self.take("}")
        return "_" + name

    def command(self, name: str) -> Tree:
        self.at += 1
        if name == "frac":
            top = self.argument()
            return ("div", top, self.argument())
        if name == "sqrt":
            return self.root()
        if name in ("binom", "dbinom", "tbinom"):
            top = self.argument()
            return ("binom", top, self.argument())
        if name == "pi":
            return ("const", "pi")
        if name in ("infty", "infinity", "inf"):
            return ("const", "oo")
        if name in _FUNCTIONS:
            return self.function(name)
        if name in _GREEK:
            return ("sym", name + self.subscript())
        if name in ("lfloor", "lceil"):
            tree = self.sum()
            self.take("\\r" + name[1:])
            return ("fn", name[1:], tree)
        raise Unread(name)

    def root(self) -> Tree:
        degree: Tree = ("num", Fraction(2))
        if self.peek() == "[":
            degree = self.group("]")
        if self.peek() == "(":
            return ("root", degree, self.group(")"))
        radicand = self.primary() if self.kind() == "number" else self.argument()
        return ("root", degree, radicand)

    def function(self, name: str) -> Tree:
        base: Tree | None = None
        power: Tree | None = None
        if self.peek() == "_" and name == "log":
            self.at += 1
            base = self.argument()
        if self.peek() == "^":
            self.at += 1
            power = self.exponent()
            if power == ("neg", ("num", Fraction(1))) and name in ("sin", "cos", "tan"):
                name, power = "arc" + name, None
        if self.peek() in ("(", "{"):
            argument = self.group(")" if self.peek() == "(" else "}")
            if self.peek() in ("^", "!"):
                raise Unread("f(x)^2 has no one meaning")
        else:
            argument = self.factor()
            while (
                self.starts_factor()
                and self.peek().lstrip("\\") not in _FUNCTIONS
                and self.peek() not in ("(", "{", "[")
            ):
                argument = ("mul", argument, self.factor())
        tree: Tree = ("log", base, argument) if base is not None else ("fn", name, argument)
        return tree if power is None else ("pow", tree, power)


def parse(text: str) -> tuple[Tree, bool]:
    """The tree of a cleaned formula, and whether it holds a decimal point."""
    parser = _Parser(text)
    tree = parser.whole()
    return tree, parser.decimal


def symbols(tree: Tree) -> frozenset[str]:
    if tree[0] == "sym":
        return frozenset((tree[1],))
    return frozenset().union(*(symbols(part) for part in tree[1:] if isinstance(part, tuple)))
