r"""What shape an answer has: number with unit, list, set, tuple or interval, matrix, equation, inequality, words.

`read` takes a cleaned text and returns a node, or None where the shape is not known here.
"""

# ruff: noqa: RUF001  (look-alike characters are what is mapped here)

from __future__ import annotations

import re
from fractions import Fraction

from slmgrpo.rewards.latex import Tree, clean, parse, symbols
from slmgrpo.rewards.nodes import Based, Colons, Equation, Items, Matrix, Node, Odd, Scalar, Span, Words
from slmgrpo.rewards.units import same_unit, scaled, unit_of

_TEXT = re.compile(r"\\(?:text|mathrm)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[A-Za-z][A-Za-z'’.\- ]*")
_COLONS = re.compile(r"\d+(?:\s*:\s*\d+)+")
_BASED = re.compile(r"([0-9A-Fa-f]+)\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*([a-zA-Z]+|\d+)\s*\}?\s*\}|(\d+))")
_MATRIX = re.compile(r"\\begin\{([pbB]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_RELATION = re.compile(r"\\leq|\\geq|\\lt(?![a-zA-Z])|\\gt(?![a-zA-Z])|<|>")
_NAME = re.compile(r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\s*(?:\w|\{\w+\}))?'*(?:\s*\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\))?")
_NAMED_TEXT = re.compile(r"(?:\\text\s*\{[^{}]*\}|[A-Z]{2,3}|\\angle\s*\w+)")
_JOIN = re.compile(r"(?:,\s*)?(?:\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|(?<![a-zA-Z\\])or(?![a-zA-Z])|\\lor(?![a-zA-Z])")
_UNIT = re.compile(
    r"""(?P<number>.*?(?:[\d})\]!]|\\pi))\s*(?P<unit>
    (?:\\degree\s*)?(?:\\(?:text|mathrm)\s*\{[^{}]*\}\s*(?:\^\s*(?:\{\s*-?\d\s*\}|-?\d))?\s*[/*.]?\s*)+
  | \\degree\s*(?:[CFK])?
  | \s?(?=[^\W\d_])[A-Za-z'’.\- ]*[^\W\d_a-zA-Z][^\W\d_]*(?:[ '’.\-]+[^\W\d_]+)*
  | (?:(?<=\s)|(?<=\d))(?!(?:sqrt|pi|exp|sin|cos|tan|log|ln|and|or|cot|sec|csc)(?![a-zA-Z]))[a-zA-Z]{3,}[a-zA-Z /.^0-9]*
  | \s(?:mm|cm|m|km|in|ft|mi|s|h|hr|g|kg|lb|oz|L|mL|mph)(?:\s*\^\s*(?:\{\s*\d\s*\}|\d))?
    )""",
    re.VERBOSE | re.DOTALL,
)
_MONEY = re.compile(r"^(-?)\s*(?:\\\$|\$|€|£|¥|\\text\s*\{\s*\\?\$\s*\})\s*|\s*(?:\\\$|€|£)$")
_PERCENT = re.compile(r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|percent(?:age)?)\s*$")
_CURRENCY = {"$": "dollar", "€": "euro", "£": "gbp", "¥": "yen"}
_INNER_UNIT = re.compile(r"(?<=[\d}])\s*(\\text\s*\{[^{}\d]*\}(?:\^\{?\d\}?)?)(?=\s*[-+])")
_TRIGONOMETRY = re.compile(r"(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_EXACT = re.compile(
    r"\\ldots(?![a-zA-Z])|\\(?:angle|triangle)(?![a-zA-Z])"
    r"|\\(?:overrightarrow|overleftarrow|vec|widehat|hat)\s*\{\s*[A-Z]\s*[A-Z]"
)
"""What is compared as written: it has no value, or letters in it that are no factors."""
_NUMERAL_WORDS = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8",
                  "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip


def words_key(text: str) -> str:
    """For answers in words: no markup, case, article, outer brackets or punctuation; with digits only case is free."""
    text = _TEXT.sub(r" \1 ", text)
    if re.search(r"\d", text):
        text = re.sub(r"(?<!\d)\.|\.(?!\d)", "", text)
        return text_key(re.sub(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}", lambda match: match.group().casefold(), text))
    words = re.sub(r"[\\${}()\[\]\"'.,;:!?*~-]+", " ", text).casefold().split()
    return " ".join(words[1:] if words[:1] in (["a"], ["an"], ["the"]) and len(words[-1]) > 2 else words)


def text_key(text: str) -> str:
    """For answers as written: no braces around one character, no text markup, no spaces but between digits."""
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _TEXT.sub(r"\1", text))
    return re.sub(r"(?<=[\^_])\{(\w)\}", r"\1", re.sub(r"\s+", " ", text))


def split_top(text: str, separators: str) -> list[str]:
    """Split where brackets are closed; the comma inside 10,080 does not split."""
    parts, depth, start, i = [], 0, 0, 0
    while i < len(text):
        char = text[i]
        if char == "\\" and text[i + 1 : i + 2] not in ("{", "}"):
            i += 2
            continue
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif depth == 0 and char in separators and not (char == "," and _inside_number(text, i)):
            parts.append(text[start:i])
            start = i + 1
        i += 1
    return [part.strip() for part in (*parts, text[start:])]


def _inside_number(text: str, i: int) -> bool:
    before = re.search(r"(?<![\d.])\d{1,3}(?:,\d{3})*$", text[max(0, i - 40) : i])
    return before is not None and re.match(r",\d{3}(?!\d)", text[i:]) is not None


def _matching(text: str) -> bool:
    """Whether the bracket that opens the text closes at its very end."""
    depth = 0
    for match in re.finditer(r"\\[{}]|[()\[\]{}]", text):
        depth += 1 if match.group()[-1] in "([{" else -1
        if depth == 0:
            return match.end() == len(text)
    return False


def _scalar(text: str) -> Scalar | None:
    percent = _PERCENT.search(text)
    if percent:
        text = text[: percent.start()]
    money = _MONEY.search(text)
    text = _MONEY.sub(r"\1", text)
    if inner := _INNER_UNIT.findall(text):
        text = _INNER_UNIT.sub("", text)
        last = _with_unit(text)
        if not _one_unit([*inner, last["unit"] if last else ""]):
            return None
    if re.fullmatch(r"-?\d{1,3}(?: \d{3})+", text):
        text = text.replace(" ", "")
    unit, factor = "", Fraction(1)
    if match := _with_unit(text):
        factor, unit = scaled(match["unit"])
        if _TRIGONOMETRY.search(match["number"]) and unit_of(unit) == unit_of("degree"):
            text, unit = match["number"] + "\\degree ", ""  # the degrees are the angle's: \cos 60^\circ is a half
        elif unit_of(unit) is None:
            return None
        else:
            text = match["number"]
    try:
        tree, decimal = parse(text)
    except ValueError:  # Unread, or a numeral that Python refuses
        return None
    if _steps(tree) and symbols(tree):
        return None  # steps are not told apart by looking at a few points
    if money is not None and ("\\" in money.group() or not unit):
        unit = _with_money(money.group(), unit)
    if factor != 1:
        tree = ("mul", tree, ("num", factor))
    return Scalar(tree, decimal, percent is not None, unit.strip())


def _one_unit(units: list[str]) -> bool:
    """Whether the terms of a sum carry one unit: 5 cm + 3 cm is 8 cm, 5 ft + 3 in is not 8."""
    read = [unit_of(unit) for unit in units]
    return all(unit is not None and "time" not in unit.words for unit in read) and all(
        same_unit(units[0], unit) for unit in units
    )


def _with_unit(text: str) -> re.Match[str] | None:
    """The number and the text behind it, where that text may be a unit."""
    if re.fullmatch(r"[-+\d.,/\s]*", text):
        return None
    match = _UNIT.fullmatch(text)
    return match if match and _numeric(match["number"]) else None


def _with_money(sign: str, unit: str) -> str:
    name = next(name for char, name in _CURRENCY.items() if char in sign)
    return unit if unit_of(unit) == unit_of(name) else f"{name} {unit}"


def _steps(tree: Tree) -> bool:
    return tree[:2] in (("fn", "floor"), ("fn", "ceil")) or any(_steps(p) for p in tree[1:] if isinstance(p, tuple))


def _numeric(text: str) -> bool:
    """Whether what stands before a unit is a number: no letters besides commands, pi and e."""
    return (
        re.search(r"(?<![a-zA-Z\\])(?!(?:pi|e|sqrt)(?![a-zA-Z]))[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "\\\\", text)) is None
    )


def read(text: str, *, depth: int = 0) -> Node | None:
    if not text or depth > 4:
        return None
    whole = _TEXT.fullmatch(text)
    if whole and re.search(r"\d", whole.group(1)):
        return read(clean(whole.group(1)), depth=depth + 1) or Words(words_key(text))
    if _is_words(text):
        return Words(words_key(text))
    if _COLONS.fullmatch(text):
        return Colons(
            tuple(int(part[:9]) for part in text.split(":")), re.fullmatch(r"\d{1,2}:\d\d(:\d\d)?", text) is not None
        )
    if based := _BASED.fullmatch(text):
        base = based.group(2) or based.group(3)
        return Based(based.group(1).upper(), _NUMERAL_WORDS.get(base.lower(), base))
    if matrix := _MATRIX.fullmatch(text):
        return _matrix(matrix.group(2))
    for reader in (_union, _relation, _list, _equation, _bracketed, _plus_minus):
        node = reader(text, depth)
        if node is not NOT_THIS:
            return node if not isinstance(node, _NotThis) else None
    scalar = None if _EXACT.search(text) else _scalar(text)
    if scalar is not None:
        return scalar
    if _is_odd(text):
        return Odd()
    # A number with more behind it than a unit, as in "2 or more": math-verify would read the number.
    return Words(_exact_key(text)) if _EXACT.search(text) or "\\text" in text or _with_unit(text) else None


def _exact_key(text: str) -> str:
    angle = re.fullmatch(r"(?:m\s*)?\\angle\s*\{?\s*([A-Z])\s*([A-Z])\s*([A-Z])\s*\}?", text)
    if angle:  # the vertex stands between its legs, whose order is free
        return "\\angle" + min("".join(angle.groups()), "".join(angle.groups()[::-1]))
    return text_key(text) if _EXACT.search(text) else words_key(text)


def _is_odd(text: str) -> bool:
    """A tuple, matrix or number in a base that a plain number is added to."""
    if re.search(r"(?<![\w}])[0-9]+_\{?\d+\}?\s*[-+*/]|[-+*/]\s*[0-9]+_\{?\d", text):
        return True
    if re.search(r"\\end\{[pbBvV]?matrix\}\s*[-+]\s*\d+$", text):
        return True
    depth, start = 0, 0
    for match in re.finditer(r"[()\[\]]", text):
        if match.group() in "([":
            start = match.start() if depth == 0 else start
            depth += 1
        elif depth > 0:
            depth -= 1
            free = re.search(r"[\w}]\s*$", text[:start]) is None
            inside = text[start + 1 : match.start()]
            if depth == 0 and free and re.match(r"\s*[-+]\s*[\d\\]", text[match.end() :]):
                return len(split_top(inside, ",;")) > 1
    return False


class _NotThis:
    """A reader's answer where the text does not have its shape (None: it has, but cannot be read)."""


NOT_THIS = _NotThis()
Try = Node | None | _NotThis


def _is_words(text: str) -> bool:
    bare = _TEXT.sub(" ", text)
    if bare.strip(" ()") == "" and bare != text:
        return True
    if bare.strip().casefold() in ("no", "yes"):
        return True
    return len(text) >= 3 and _WORDS.fullmatch(text) is not None and _scalar_word(text) is None


def _scalar_word(text: str) -> Scalar | None:
    """A run of letters that is a formula: xy, pi, abc. Longer runs are words."""
    if re.fullmatch(r"(?:pi|inf|infinity)|[a-zA-Z]{1,2}|[abcxyz]{3}|[a-z](?:\s+[a-z])*", text):
        return _scalar(text)
    return None


def _matrix(body: str) -> Matrix | None:
    rows = []
    for row in re.split(r"\\\\(?:\[[^\]]*\])?", body.strip()):
        cells = [read(clean(cell), depth=3) for cell in row.split("&")]
        if row.strip():
            rows.append(cells)
    if not rows or any(cell is None for row in rows for cell in row):
        return None
    return Matrix(tuple(tuple(cell for cell in row if cell is not None) for row in rows))


def _union(text: str, depth: int) -> Try:
    text = re.sub(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*", "", text)
    parts = [part.strip() for part in re.split(r"\\cup(?![a-zA-Z])", text)]
    inequality = _OR.search(text) is not None and _RELATION.search(text) is not None
    if inequality:
        spans = [_relation(part.strip(" ,"), depth) for part in _OR.split(text)]
        if not all(isinstance(span, Span) for span in spans):
            return None
        return Span(tuple(i for span in spans if isinstance(span, Span) for i in span.intervals), _span_name(spans))
    if len(parts) == 1:
        return NOT_THIS
    nodes = [_bracketed(part, depth) for part in parts]
    if all(isinstance(node, Items) and len(node.items) == 2 and node.brackets != "{}" for node in nodes):
        return Span(tuple(node for node in nodes if isinstance(node, Items)))
    return None


def _span_name(spans: list[Try]) -> str:
    names = {span.name for span in spans if isinstance(span, Span)}
    return names.pop() if len(names) == 1 else ""


def _relation(text: str, depth: int) -> Try:
    signs = [match.group() for match in _RELATION.finditer(text)]
    if not signs:
        return NOT_THIS
    parts = [part.strip() for part in _RELATION.split(text)]
    if len(signs) > 2 or "=" in text or "," in text:
        return None
    up = ["\\leq" if sign == "\\leq" else "<" for sign in signs if sign in ("\\leq", "<", "\\lt")]
    if len(up) not in (0, len(signs)):
        return None
    closed = [sign in ("\\leq", "\\geq") for sign in signs]
    if not up:
        parts, closed = parts[::-1], closed[::-1]
    infinite = ("const", "oo")
    if len(parts) == 2:
        low_name, high_name = _NAME.fullmatch(parts[0]), _NAME.fullmatch(parts[1])
        if (low_name is None) == (high_name is None):
            return None
        parts = [*parts, ""] if high_name else ["", *parts]
        closed = [*closed, False] if high_name else [False, *closed]
    if _NAME.fullmatch(parts[1]) is None:
        return None
    low = Scalar(("neg", infinite), False) if parts[0] == "" else _scalar(parts[0])
    high = Scalar(infinite, False) if parts[2] == "" else _scalar(parts[2])
    if low is None or high is None:
        return None
    brackets = ("[" if closed[0] else "(") + ("]" if closed[1] else ")")
    return Span((Items(brackets, (low, high)),), parts[1])


def _list(text: str, depth: int) -> Try:
    joined = _JOIN.sub(",", text)
    parts = [part for part in split_top(joined, ",;") if part]
    if len(parts) < 2:
        return NOT_THIS
    nodes = [read(part, depth=depth + 1) for part in parts]
    if any(node is None for node in nodes):
        return None
    flat: list[Node] = []
    for node in nodes:
        flat.extend(
            node.items if isinstance(node, Items) and node.brackets == "" else [node] if node is not None else []
        )
    return Items("", tuple(_same_name_dropped(flat)))


def _same_name_dropped(nodes: list[Node]) -> list[Node]:
    """x = 1, x = -2 and x = 1, -2 are the values 1, -2."""
    names = {node.name for node in nodes if isinstance(node, Equation)}
    if (
        len(names) == 1
        and isinstance(nodes[0], Equation)
        and nodes[0].name
        and not isinstance(nodes[0].right, Equation)
    ):
        return [node.right if isinstance(node, Equation) else node for node in nodes]
    return nodes


def _equation(text: str, depth: int) -> Try:
    if r"\approx" in text:
        before, _, after = (part.strip() for part in text.partition(r"\approx"))
        return read(after if not before or _NAME.fullmatch(before) else before, depth=depth + 1)
    if r"\in" in text and (match := re.match(r"[a-zA-Z]\s*\\in(?![a-zA-Z])\s*(.+)", text, re.DOTALL)):
        return read(match.group(1), depth=depth + 1)
    sides = [side.strip() for side in re.split(r"(?<![<>!:])=", text)]
    if len(sides) == 1:
        return NOT_THIS
    named = _NAME.fullmatch(sides[0]) or _NAMED_TEXT.fullmatch(sides[0])
    if len(sides) > 2 and not named:
        return None
    right = read(sides[-1], depth=depth + 1)
    if right is None or not all(sides):
        return None
    left: Tree | None = None
    try:
        left = parse(sides[0])[0]
    except ValueError:
        if not named:
            return None
    return Equation(left, right, text_key(sides[0]) if named else "")


def _bracketed(text: str, depth: int) -> Try:
    if text.startswith("\\{") and text.endswith("\\}") and _matching(text):
        inside, brackets = text[2:-2].strip(), "{}"
    elif text[:1] in ("(", "[") and text[-1:] in (")", "]") and _matching(text):
        inside, brackets = text[1:-1].strip(), text[0] + text[-1]
    else:
        return NOT_THIS
    if brackets != "{}":
        if re.fullmatch(r"\d{1,3},\d{3}", inside):
            inside = inside.replace(",", ";")  # (12,102) is a pair; 12,102 is a number
        if len(split_top(inside, ",;")) < 2:
            return NOT_THIS
    if brackets == "{}" and ("|" in inside or ":" in inside):
        return None
    node = read(inside, depth=depth + 1)
    if node is None:
        return None
    items = node.items if isinstance(node, Items) and node.brackets == "" else (node,)
    if len(items) == 2 and brackets != "{}":  # no interval is closed at infinity
        brackets = ("(" if _infinite(items[0]) else brackets[0]) + (")" if _infinite(items[1]) else brackets[1])
    return Items(brackets, items)


def _infinite(node: Node) -> bool:
    return isinstance(node, Scalar) and node.tree in (("const", "oo"), ("neg", ("const", "oo")))


def _plus_minus(text: str, depth: int) -> Try:
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return NOT_THIS
    upper = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", text))
    lower = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", text))
    nodes = [_scalar(upper), _scalar(lower)]
    if any(node is None for node in nodes):
        return None
    return Items("", tuple(node for node in nodes if node is not None))
