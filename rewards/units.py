"""Units that are known by several names, so that 5 cm and 5 m differ while 5 apples is 5."""

from __future__ import annotations

import re

_NAMES = {
    "mm": "millimeter millimetre mm", "cm": "centimeter centimetre cm", "m": "meter metre m",
    "km": "kilometer kilometre km", "in": "inch inche in", "ft": "foot feet ft", "yd": "yard yd", "mi": "mile mi",
    "s": "second sec s", "min": "minute min", "h": "hour hr h", "d": "day", "wk": "week", "yr": "year yr",
    "mg": "milligram mg", "g": "gram g", "kg": "kilogram kg", "lb": "pound lb", "oz": "ounce oz",
    "L": "liter litre L", "mL": "milliliter millilitre mL", "dollar": "dollar", "cent": "cent",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


def unit_of(text: str) -> tuple[str, int] | None:
    """The unit and its power, or None for words that are no unit known here."""
    words = re.sub(r"\\text|\\mathrm|[{}\\~]", " ", text).replace("^", " ^ ").split()
    power = 1
    if words and words[0].lower() in _POWERS:
        power = _POWERS[words.pop(0).lower()]
    if len(words) == 3 and words[1] == "^" and words[2].isdigit():
        power, words = int(words[2]), words[:1]
    if len(words) != 1:
        return None
    word = words[0].rstrip(".")
    unit = _UNITS.get(word) or _UNITS.get(word.lower()) or _UNITS.get(word.lower().removesuffix("s"))
    return (unit, power) if unit else None
