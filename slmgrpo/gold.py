"""Gold answers as data sets write them (`#### 1,234`, a box, `(B)`, 0-based numbers) become what rules read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from string import ascii_uppercase
from typing import Any, Literal

Extract = Literal["gsm8k", "boxed", "stated", "letter", "index"]
NUMBER = re.compile(r"([+-]?)\$?([+-]?)((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)%?\.?")


class Unreadable(Exception):
    """One row that cannot be used, as a sentence without its place."""


def gold_text(answer: Any, extract: Extract | None) -> str:
    """The gold of a row without options."""
    if extract == "index":
        return ascii_uppercase[_index(answer, len(ascii_uppercase))]
    text = _text(answer)
    if extract == "gsm8k":
        return _gsm8k(text)
    if extract == "boxed":
        return _boxed(text)
    if extract == "stated":
        return _stated(text)
    return _letter(text).upper() if extract == "letter" else text


def _stated(text: str) -> str:
    """What stands behind the last `The answer is`, to the end of its line (MetaMathQA)."""
    _, found, rest = text.rpartition("The answer is")
    answer = rest.strip(" :").split("\n")[0].strip().removesuffix(".")
    if not found or not answer:
        raise Unreadable("`answer` has no `The answer is ...`, which `extract: stated` reads")
    return answer


def gold_letter(answer: Any, extract: Extract | None, labels: Sequence[str]) -> str:
    """The gold of a row with options as a letter: A for the first, whatever the data's own labels are."""
    if extract == "index":
        return ascii_uppercase[_index(answer, len(labels))]
    label = gold_text(answer, extract) if extract != "letter" else _letter(_text(answer))
    for wanted in (label, label.upper()):
        if wanted in labels:
            return ascii_uppercase[labels.index(wanted)]
    hint = "index` if it counts from 0" if label.isdigit() else "letter` if a letter stands in it"
    raise Unreadable(f"`answer` is {_short(label)}, not one of {', '.join(labels)}; set `extract: {hint}")


def options(value: Any) -> tuple[list[str], list[str]]:
    """(texts, labels) of `choices`: texts, {text: [...], label: [...]}, a list of {text, label}, or JSON of these."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise Unreadable("`choices` is text and no JSON list; give a list of option texts") from None
    if isinstance(value, dict) and isinstance(value.get("text"), list):
        texts, labels = value["text"], value.get("label")
    elif isinstance(value, list) and value and all(isinstance(option, dict) and "text" in option for option in value):
        texts = [option["text"] for option in value]
        labels = [option.get("label") for option in value] if all("label" in option for option in value) else None
    else:
        texts, labels = value, None
    if not isinstance(texts, list):
        raise Unreadable(f"`choices` must be a list of texts or {{text, label}}, not {kind(value)}")
    bad = [text for text in texts if isinstance(text, bool) or not isinstance(text, str | int | float)]
    if bad:
        raise Unreadable(f"`choices` must be texts, one is {kind(bad[0])}")
    texts = [str(text) for text in texts]
    if not 2 <= len(texts) <= len(ascii_uppercase):
        raise Unreadable(f"`choices` has {len(texts)} options; 2 to {len(ascii_uppercase)} can be lettered")
    names = list(ascii_uppercase[: len(texts)]) if labels is None else [str(label).strip() for label in labels]
    if len(names) != len(texts) or len(set(names)) != len(names):
        raise Unreadable(f"`choices` has labels {', '.join(names)} for {len(texts)} options")
    return texts, names


def kind(value: Any) -> str:
    """What a value of the wrong type is, for a message."""
    if isinstance(value, str):
        return f"the text {_short(value)}"
    named = {list: "a list", dict: "a mapping", bool: "true or false", type(None): "nothing"}
    return named.get(type(value), f"the {type(value).__name__} {_short(str(value))}")


def _text(answer: Any) -> str:
    if isinstance(answer, str):
        return answer.strip()
    if isinstance(answer, int) and not isinstance(answer, bool):
        return str(answer)
    if not isinstance(answer, float | Decimal):
        raise Unreadable(f"`answer` must be text or a number, not {kind(answer)}")
    if not math.isfinite(answer):
        raise Unreadable(f"`answer` is {answer}, which is no number")
    return str(int(answer)) if answer == int(answer) and abs(answer) < 1e15 else str(answer)


def _index(answer: Any, count: int) -> int:
    text = _text(answer)
    if not re.fullmatch(r"\d{1,2}", text) or int(text) >= count:
        raise Unreadable(f"`answer` is {_short(text)}; extract: index needs a whole number from 0 to {count - 1}")
    return int(text)


def _gsm8k(text: str) -> str:
    _, mark, after = text.rpartition("####")
    found = NUMBER.fullmatch(after.strip().replace("\N{MINUS SIGN}", "-").replace(" ", ""))
    if not mark:
        raise Unreadable("no `####` in `answer`; extract: gsm8k reads the number behind it")
    if not found or (found[1] and found[2]):
        raise Unreadable(f"no number behind the last `####` in `answer`, but {_short(after.strip())}")
    return ("-" if "-" in found[1] + found[2] else "") + found[3].replace(",", "")


def _boxed(text: str) -> str:
    """The content of the last \\boxed whose braces close; `\\boxed 5` is 5, as TeX reads it."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)(?![A-Za-z])\s*", text))):
        rest = text[match.end() :]
        if not rest.startswith("{"):
            if bare := re.match(r"[^\s${}\\]+", rest):
                return bare[0].rstrip(".,")
            continue
        depth = 0
        for piece in re.finditer(r"\\.|[{}]", rest, re.DOTALL):
            depth += {"{": 1, "}": -1}.get(piece[0], 0)
            if depth == 0 and piece[0] == "}":
                content = rest[1 : piece.start()].strip()
                if content:
                    return content
                break
    raise Unreadable("no \\boxed{...} with closed braces and content in `answer`")


def _letter(text: str) -> str:
    """`(B)`, `B.`, `B) Paris`, `b`: a label in front that stands alone."""
    found = re.match(r"[(\[]?\s*([A-Za-z]|\d{1,2})\s*(?:[)\].:]|$)", text)
    if not found:
        raise Unreadable(f"no letter in front of `answer` {_short(text)}; extract: letter reads (B), B. or B")
    return found[1]


def _short(text: str) -> str:
    return f"`{text if len(text) <= 40 else text[:37] + '...'}`"
