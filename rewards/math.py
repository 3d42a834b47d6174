"""Rules for answers in mathematics: the right answer, a number close to it, right steps of arithmetic."""

# ruff: noqa: RUF001  (look-alike characters are what is mapped here)

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from slmgrpo.rewards.base import Bounds, Verdict, bounded, correctness
from slmgrpo.rewards.equal import answer as read_answer
from slmgrpo.rewards.equal import compare, is_plain
from slmgrpo.rewards.extract import after_thinking, last_box, tagged_answer
from slmgrpo.rewards.latex import clean, parse, symbols
from slmgrpo.rewards.nodes import Scalar
from slmgrpo.rewards.values import Evaluator, TooLarge, Undefined

Extract = Literal["box", "tag", "lenient"]
MAX_STEPS, MAX_STEPS_TEXT = 100, 20_000
_SIGNS = str.maketrans({"−": "-", "–": "-", "×": "*", "÷": "/", "·": "*"})
_NUMBER = r"\$?\d[\d,]*(?:\.\d+)?"
_TIMES = re.compile(r"\\times|\\cdot|(?<=\d)\s*x\s*(?=\$?\d)")
_OPERATOR = re.compile(r"(?<=[\d)\s])(?:[-+*/]|\\times|\\cdot|x)(?=[\s\d($])")
_ARITHMETIC = rf"[-(]*{_NUMBER}(?:[\s)]*(?:[-+*/x]|\\times|\\cdot)[\s(]*{_NUMBER})*\)*"
_AT_END = re.compile(rf"(?<![\w.,^]){_ARITHMETIC}\s*$")
_AT_START = re.compile(rf"\s*{_ARITHMETIC}(?![\w^]|\s*[-+*/]\s*[a-zA-Z(])")
_LENIENT = (
    re.compile(r"(?:final answer|answer)\s*(?:is|:|=)?[\s:*]*(?:is)?[\s:*]*(\$[^$\n]+\$|[^\n]+)", re.IGNORECASE),
    re.compile(r"####\s*([^\n]+)"),
    re.compile(r"\*\*([^*\n]+)\*\*"),
)


@correctness
def correct(completion: str, answer: str, prompt: str = "", *, extract: Extract = "box") -> Verdict:
    r"""1 if the last `\boxed{}` behind the thinking equals `answer`; `extract: tag` takes the last `<answer>` instead.

    `extract: lenient`, for eval, also takes what is announced without a box, as in "Answer: 5".
    """
    read = _read(completion, prompt, extract)
    return read if isinstance(read, Verdict) else _compared(_gold(answer), read)


def _correct_quickly(completion: str, answer: str, prompt: str = "", *, extract: str = "box") -> Any:
    """`correct` where it is plain: nothing to read, the gold as written, whole numbers."""
    read = _read(completion, prompt, extract)
    if isinstance(read, Verdict):
        return read
    gold = _gold(answer)
    return _compared(gold, read) if is_plain(gold, read) else NotImplemented


vars(correct).update(quick=_correct_quickly)


def _gold(answer: object) -> str:
    """The gold's text; empty, so ungradeable, for a missing value and for what holds several texts."""
    if isinstance(answer, str):
        return answer.strip()
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    missing = answer is None or answer != answer  # NaN stands for a missing value in tables
    return "" if missing or isinstance(answer, list | tuple | dict | set) else str(answer).strip()


def _compared(gold: str, read: str) -> Verdict:
    equality = compare(gold, read)
    shown = read if len(read) <= 200 else read[:197] + "..."
    if equality.same is None:
        return Verdict(None, "ungradeable", shown, equality.why)
    if equality.same:
        return Verdict(1.0, "correct", shown, equality.why)
    return Verdict(0.0, "timeout" if equality.late else "wrong", shown, equality.why)


def _read(completion: str, prompt: str, extract: str) -> str | Verdict:
    """The answer's text, or the verdict where there is none."""
    said = after_thinking(completion, prompt)
    if said is None:
        return Verdict(0.0, "no_answer", why="the thinking never ends")
    read = tagged_answer(said) if extract == "tag" else last_box(said)
    if extract == "tag" and read is not None:
        read = last_box(read) or read
    if read is None and extract == "lenient":
        read = tagged_answer(said) or _stated(said)
    if read is None:
        return Verdict(0.0, "no_answer", why=f"no {'<answer>' if extract == 'tag' else 'box'} with an answer")
    return read


def _stated(text: str) -> str | None:
    """The last answer that is announced without a box."""
    for pattern in _LENIENT:
        found = pattern.findall(text)
        if found:
            return found[-1].strip().strip("*$ \t").rstrip(".")
    return None


@correctness
def numeric_close(completion: str, answer: str, prompt: str = "", *, relative: float = 0.01) -> Verdict:
    """1 if the boxed number is within `relative` of `answer`; for measured or rounded golds."""
    said = after_thinking(completion, prompt)
    read = None if said is None else last_box(said)
    if read is None:
        return Verdict(0.0, "no_answer", why="no box with an answer")
    want, have = _value(_gold(answer)), _value(read)
    if want is None:
        return Verdict(None, "ungradeable", read[:200], "the gold answer is no number")
    if have is None:
        return Verdict(0.0, "wrong", read[:200], "the answer is no number")
    right = abs(want - have) <= relative * abs(want)
    return Verdict(float(right), "correct" if right else "wrong", read[:200], f"{have:g} against {want:g}")


@bounded(lambda settings: Bounds(0.0, float(settings.get("most", 0.5))))
def steps_checked(completion: str, *, most: float = 0.5) -> Verdict:
    """`most` times the share of right `a op b = c` steps before the first wrong one; repeats count once."""
    steps = list(dict.fromkeys(_steps(completion[:MAX_STEPS_TEXT])))[:MAX_STEPS]
    right = 0
    for left, given in steps:
        if not _holds(left, given):
            break
        right += 1
    share = right / len(steps) if steps else 0.0
    return Verdict(most * share, why=f"{right} of {len(steps)} steps right before the first wrong one")


def _steps(text: str) -> Iterator[tuple[str, str]]:
    for line in text.translate(_SIGNS).splitlines():
        sides = re.split(r"\\?=", line.replace("<<", " ; ").replace(">>", " ; "))
        for before, after in itertools.pairwise(sides):
            left, right = _AT_END.search(before[-120:]), _AT_START.match(after[:120])
            if left and right and (_OPERATOR.search(left.group()) or _OPERATOR.search(right.group())):
                yield left.group().strip(), right.group().strip()


def _holds(left: str, right: str) -> bool:
    """Whether a step is right, to the places that its result is written with."""
    try:
        (a, _), (b, _) = (parse(clean(_TIMES.sub("*", side.replace("$", "")))) for side in (left, right))
        evaluate = Evaluator()
        gap = abs(evaluate.real(evaluate(("sub", a, b))))
    except (Undefined, TooLarge, ArithmeticError, ValueError):
        return False
    places = len(right.partition(".")[2].rstrip(" $%")) if not _OPERATOR.search(right) else 0
    return bool(gap <= (0.5 * 10.0**-places + 1e-9 if places else 1e-9))


def _value(text: str) -> float | None:
    node = read_answer(text).node
    if not isinstance(node, Scalar) or symbols(node.tree):
        return None
    try:
        evaluate = Evaluator()
        number = float(evaluate.real(evaluate(node.tree))) / (100 if node.percent else 1)
    except (Undefined, TooLarge, ArithmeticError, TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
