"""Units that are known by several names, so that 5 cm and 5 m differ while 5 apples is 5.

A text that may change the number, as in "5 or more" or "5 hundredths", is no unit.
"""

# ruff: noqa: RUF001  (look-alike characters are what is read here)

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from fractions import Fraction

_NAMES = {
    "in": "inch inche in", "ft": "foot feet ft", "yd": "yard yd", "mi": "mile mi", "min": "minute min",
    "h": "hour hr h", "d": "day", "wk": "week wk", "mo": "month", "yr": "year yr", "lb": "pound lb", "oz": "ounce oz",
    "gal": "gallon gal", "qt": "quart qt", "pt": "pint pt", "cup": "cup", "ton": "ton tonne t", "acre": "acre",
    "ha": "hectare ha", "dollar": "dollar usd $", "cent": "cent", "euro": "euro eur €", "gbp": "gbp £", "yen": "yen ¥",
    "degree": "degree deg", "degC": "celsius degc", "degF": "fahrenheit degf", "rad": "radian rad", "C": "C", "F": "F",
    "cm^3": "cc", "atm": "atm atmosphere", "bar": "bar", "rpm": "rpm", "K": "K kelvin", "dB": "dB decibel",
    "rev": "revolution rev", "am": "am", "pm": "pm",
}  # fmt: skip
_METRIC = {
    "m": "meter metre", "g": "gram gramme", "s": "second sec", "L": "liter litre l", "J": "joule", "W": "watt",
    "V": "volt", "A": "ampere amp", "N": "newton", "Pa": "pascal", "Hz": "hertz", "eV": "electronvolt", "mol": "mole",
    "coulomb": "coulomb", "farad": "farad", "T": "tesla", "ohm": "ohm", "cal": "calorie", "Wh": "watthour",
    "bit": "bit", "B": "byte", "H": "henry",
}  # fmt: skip
_PREFIXES = {"k": "kilo", "c": "centi", "m": "milli", "M": "mega", "G": "giga", "T": "tera", "d": "deci",
             "n": "nano", "p": "pico", "u": "micro"}  # fmt: skip
_UNITS = {prefix + symbol: prefix + symbol for symbol in _METRIC for prefix in ("", *_PREFIXES)}
_UNITS |= {
    long + name: short + symbol
    for symbol, names in _METRIC.items()
    for name in names.split()
    for short, long in (("", ""), *_PREFIXES.items())
}
_UNITS |= {name: unit for unit, names in _NAMES.items() for name in names.split()}
_UNITS |= {"kl": "kL", "ml": "mL", "cl": "cL", "dl": "dL", "Ω": "ohm"}
_ANY_CASE = {
    folded: next(iter(units))
    for folded, group in itertools.groupby(sorted(_UNITS, key=str.casefold), key=str.casefold)
    if len(units := {_UNITS[name] for name in group}) == 1 and len(folded) > 1
}
_PLURAL = {"km", "cm", "mm", "kg", "mg", "ml", "lb", "hr", "yr", "yd", "wk", "oz", "pt", "qt"}
_COMPOUND = {"mph": "mi/h", "kmh": "km/h", "kph": "km/h", "mps": "m/s", "fps": "ft/s", "mpg": "mi/gal"}
_ONE = frozenset({("degree", "degC"), ("degree", "degF"), ("C", "degC"), ("C", "coulomb"), ("F", "degF"),
                  ("F", "farad"), ("gbp", "lb")})  # fmt: skip
"""Pairs that may be one unit, as the sign for one of them is used for the other."""
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NO_UNIT_WORDS = """
    a an one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
    eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety half halves third thirds quarter quarters
    fifth fifths tenth tenths hundredth hundredths dozens score couple couples gross kilo mega giga milli micro
    hundreds thousands millions billions trillions once
    twice thrice double triple by plus minus over divided multiplied raised power root factorial modulo mod
    or and nor not no none never isn't is are was be if when where whenever unless except but instead rather otherwise
    at least most more less fewer greater smaller larger bigger than maybe possibly perhaps probably likely about
    around approximately approx nearly almost roughly between from to up until through any either both all vs versus
    wrong incorrect false true correct answer equals equal which with without negative positive plus-minus
    squared cubed percent percentage choose base inverse reciprocal opposite infinity unknown undefined pi
    oder und nicht mehr weniger mindestens ou et pas plus moins o y u no más mas menos e non meno più piu nem ni
    eller och ikke zwei drei vier fünf deux trois quatre dos tres cuatro tausend millionen milliarden millones mil
    mille milliers mio mrd k bn
"""
_NO_UNIT = frozenset(_NO_UNIT_WORDS.split())
_COUNTER_WORDS = """
    个 個 元 人 名 位 米 厘米 千米 公里 年 月 天 日 时 小时 分 分钟 秒 岁 只 本 块 种 次 度 件 条 张 支 台
    枚 匹 冊 円 回 歳 平方米 立方米
    平方厘米 立方厘米 千克 克 개 명 번 원 살 권 마리
"""
_COUNTERS = frozenset(_COUNTER_WORDS.split())
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|[$€£¥Ω]")
_TOKEN = re.compile(r"\s*(?:(?P<over>/|\bper\b)|(?P<times>[*·])|(?P<word>[^\W\d_]+(?:['’-][^\W\d_]+)*\.?|[$€£¥Ω])"
                    r"(?:\s*\^?\s*(?P<power>-?\d))?)\s*")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Unit:
    """factors: known units with their powers; `words` where a word is none of those, `ratio` if it says per."""

    factors: tuple[tuple[str, int], ...]
    words: tuple[str, ...] = ()
    ratio: bool = False


def scaled(text: str) -> tuple[Fraction, str]:
    """The factor that words such as million give, and the unit behind them."""
    plain, factor = _plain(text), Fraction(1)
    while match := re.match(r"(hundred|thousand|million|billion|trillion|dozen)(?![\w'’-])\s*", plain, re.IGNORECASE):
        factor *= 12 if match[1].lower() == "dozen" else 10 ** _SCALES[match[1].lower()]
        plain = plain[match.end() :].removeprefix("of ")
    return factor, plain if factor != 1 else text


@functools.lru_cache(maxsize=4096)
def unit_of(text: str) -> Unit | None:
    """What a text behind a number means as its unit; None where it is no unit, as it may change the number."""
    plain = _plain(text)
    factors: dict[str, int] = {}
    words: list[str] = []
    sign, square, known, ratio, at = 1, 1, True, False, 0
    while at < len(plain):
        match = _TOKEN.match(plain, at)
        if match is None:
            return None
        at = match.end()
        if match["over"]:
            sign, ratio = -1, True
        elif match["word"]:
            word = match["word"].rstrip(".")
            if not _harmless(word):
                if word.lower() not in ("squared", "cubed") or not factors or not known:
                    return None
                factors[next(reversed(factors))] *= 2 if word.lower() == "squared" else 3
                continue
            if word.lower() in ("square", "sq", "cubic", "cu"):
                square = 3 if word.lower().startswith("cu") else 2
                continue
            words.append(word.casefold().removesuffix("s"))
            name = _known(word)
            if name is None and match["power"]:
                return None
            for one, power in _parts(name):
                if one in ("degC", "degF") and list(factors) == ["degree"]:
                    del factors["degree"]
                factors[one] = factors.get(one, 0) + sign * square * power * int(match["power"] or 1)
            known, square = known and name is not None, 1
    if known:
        for scale in "CF":
            if factors.get(scale) == factors.get("degree") == 1:
                factors = {"deg" + scale: 1}
        return Unit(tuple(sorted((name, power) for name, power in factors.items() if power)))
    short = any(len(word) < 3 and _known(word) is None and word not in ("of", "in") for word in words if word.isascii())
    return None if short or len(words) > 6 else Unit((), tuple(words), ratio)


def same_unit(one: str, other: str) -> bool:
    """Whether two units do not contradict each other; no unit and "units" go with any."""
    if one == other or not one or not other:
        return True
    a, b = unit_of(one), unit_of(other)
    if a is None or b is None:
        return False
    if a == b or _generic(a) or _generic(b):
        return True
    if a.words or b.words:
        first, second = _set(one), _set(other)
        return not (a.ratio or b.ratio) and (first <= second or second <= first)
    if len(a.factors) == len(b.factors) == 1 and a.factors[0][1] == b.factors[0][1]:
        first, second = a.factors[0][0], b.factors[0][0]
        return (first, second) in _ONE or (second, first) in _ONE
    return False


def _plain(text: str) -> str:
    text = re.sub(r"\\degree", " degree ", re.sub(r"\\(?:text|mathrm)\s*(?=\{)", " ", text)).replace("(s)", "s")
    text = re.sub(r"\(([^()\d]*)\)\s*\}?\s*$", r" \1", text)
    text = re.sub(r"\b([ap])\.\s?m\b\.?", r"\1m", text, flags=re.IGNORECASE)
    return " ".join(re.sub(r"[{}\\~]", " ", text).split())


def _harmless(word: str) -> bool:
    """Whether a word behind a number leaves the number as it is."""
    if re.search(r"[\u0370-\u1cff\u2e80-\uffff]", word):  # scripts whose words are not known here
        return word in _COUNTERS
    return (word == "K" or word.casefold() not in _NO_UNIT) and (len(word) > 1 or _known(word) is not None)


def _known(word: str) -> str | None:
    lower = word.lower()
    if lower in _COMPOUND:
        return _COMPOUND[lower]
    if word in _UNITS:
        return _UNITS[word]
    one = lower.removesuffix("s")
    return _ANY_CASE.get(lower) or (_ANY_CASE.get(one) if len(one) > 2 or one in _PLURAL else None)


def _parts(name: str | None) -> list[tuple[str, int]]:
    if name is None:
        return []
    if name == "cm^3":
        return [("cm", 3)]
    over, _, under = name.partition("/")
    return [(over, 1)] + ([(under, -1)] if under else [])


def _generic(unit: Unit) -> bool:
    return not unit.factors and set(unit.words) <= {"unit"}


def _set(text: str) -> set[str]:
    """The words of a unit, known units by their name."""
    return {_known(word) or word.casefold().removesuffix("s") for word in _WORD.findall(_plain(text))} - {"of", "the"}
