"""Where the answer is in a completion: after the thinking, in the last box, in the last code block."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

_FILLERS = "\u2800\u3164\u115f\u1160\uffa0"
_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_NUMBER = re.compile(r"[-+]?\d[\d.,/]*(?<![.,/])")
_DELIMITERS = re.compile(r"\\[()\[\]]|\$|[*\s.]|\\(?:quad|qquad|[,;! ])|&|\\\\")
_JOINER = re.compile(r"(?:[,;]|,?\s*(?:\\text\{\s*)?(?:and|or)(?:\s*\})?|)")
_NAMED = re.compile(r"(?:[a-zA-Z](?:_\{?\w\}?)?=)?")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*$", re.MULTILINE)


def after_thinking(completion: str, prompt: str = "") -> str | None:
    """The part that answers: behind the last `</think>`, before any later `<think>`. None inside an open block."""
    _, closed, answer = completion.rpartition(THINK_CLOSE)
    if not closed and prompt.rstrip().endswith(THINK_OPEN):
        return None
    before, opened, _ = answer.partition(THINK_OPEN)
    if not opened:
        return answer
    return before if closed or before.strip() else None


def has_text(text: str) -> bool:
    """Whether something in the text can be seen: not spaces, zero-width characters, fillers or bare accents."""
    if text.isascii() and text.isprintable():
        return not text.isspace() and text != ""
    return any(
        char.isprintable() and not char.isspace() and char not in _FILLERS and unicodedata.category(char)[0] != "M"
        for char in text
    )


def _braces(text: str) -> dict[int, int]:
    """Opening brace -> closing brace, in one pass; escaped braces do not count."""
    open_at: list[int] = []
    pairs: dict[int, int] = {}
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            open_at.append(match.start())
        elif match.group() == "}" and open_at:
            pairs[open_at.pop()] = match.start()
    return pairs


@dataclass(frozen=True, slots=True)
class Box:
    start: int
    end: int
    content: str


def boxes(text: str) -> list[Box]:
    r"""All closed, outermost `\boxed{...}` and `\fbox{...}` (or `\boxed 5` around a bare number), in order."""
    if "box" not in text:
        return []
    pairs = _braces(text)
    found: list[Box] = []
    at = 0
    while match := _BOX.search(text, at):
        at = match.end()
        if at in pairs:
            found.append(Box(match.start(), pairs[at] + 1, text[at + 1 : pairs[at]]))
            at = pairs[at] + 1
        elif number := _BARE_NUMBER.match(text, at):
            found.append(Box(match.start(), number.end(), number.group()))
            at = number.end()
    return found


def unboxed(content: str) -> str:
    """Box content without the boxes inside it."""
    if "box" not in content:
        return content.strip()
    pairs = _braces(content)
    drop: set[int] = set()
    for match in _BOX.finditer(content):
        if match.end() in pairs:
            drop.update(range(match.start(), match.end() + 1), (pairs[match.end()],))
    return "".join(char for i, char in enumerate(content) if i not in drop).strip()


def box_runs(text: str) -> list[list[Box]]:
    """Boxes with content, in runs of those that only `and`, `or`, a comma or nothing stands between."""
    runs: list[list[Box]] = []
    for box in boxes(text):
        if not has_text(box.content.strip(" \t\n~$")):
            continue
        if runs and _joined(text[runs[-1][-1].end : box.start]):
            runs[-1].append(box)
        else:
            runs.append([box])
    return runs


def _joined(between: str) -> bool:
    if len(between) > 200:
        return False
    bare = _DELIMITERS.sub("", between)
    joiner = _JOINER.match(bare)
    return joiner is not None and _NAMED.fullmatch(bare[joiner.end() :]) is not None


def last_box(text: str) -> str | None:
    r"""Content of the last box, or of the last run of boxes as a list.

    `\boxed{5}. Wait: \boxed{6}` is 6; `\boxed{1} and \boxed{-2}` is the list 1, -2. Empty boxes do not count.
    """
    runs = box_runs(text)
    if not runs:
        return None
    return ", ".join(dict.fromkeys(unboxed(box.content) for box in runs[-1]))


def tagged_answer(text: str) -> str | None:
    """Content of the last `<answer>`, None where there is none or it is empty."""
    _, opened, rest = text.rpartition("<answer>")
    inside = rest.partition("</answer>")[0].strip()
    return inside if opened and has_text(inside) else None


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced code block. `closed` is False where the completion ends before its fence."""

    language: str
    code: str
    closed: bool


def code_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    fence, language, start = "", "", 0
    for match in _FENCE.finditer(text):
        if not fence:
            fence, language, start = match.group(1), match.group(2).lower(), match.end() + 1
        elif match.group(1).startswith(fence) and not match.group(2):
            blocks.append(Block(language, text[start : match.start()], True))
            fence = ""
    if fence:
        blocks.append(Block(language, text[start:], False))
    return blocks
