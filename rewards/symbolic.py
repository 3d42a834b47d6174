"""math-verify behind guards: what it may read, for how much CPU time, and gold first.

Its own limits are alarms by the wall clock, which depend on the load and work on a main thread only.
"""

from __future__ import annotations

import functools
import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MAX_CHARS = 400
"""Longer answers are compared as written and never parsed."""
MAX_NESTING = 12
"""Deeper brackets are not parsed: the parser's time doubles with every nested \\frac."""
MAX_FUNCTIONS = 6
CPU_S = 2.0
"""CPU time of one comparison, so that the load of the machine changes no verdict. Typical ones take 0.05 s."""

_SMALL_SUM = re.compile(r"\\(?:sum|prod)\s*_\s*\{\s*[a-z]\s*=\s*\d{1,2}\s*\}\s*\^\s*(?:\{\s*\d{1,2}\s*\}|\d)")
_HEAVY = re.compile(
    r"\^\s*\{[^{}]*\^\s*\{[^{}]*\^|\^\s*\{?\s*-?\d{4,}|\d{4,}\s*(?:!|\^)|[})]\s*!|!\s*!|\d{40,}|[eE]\d{4,}"
    r"|\\(?:sum|prod|int|iint|oint|lim|bigcup|bigcap|coprod)(?![a-zA-Z])|\\[dt]?binom\s*\{(?!\d{1,3}\})"
)
_ALONE_INFINITY = re.compile(r"(?:^|[,(\[<>=]|\\[lg]eq?|\\in)\s*[-+]?\\infty\s*(?=[,)\]<>\\]|$)")
_FUNCTION = re.compile(r"\\(?:arc)?(?:sin|cos|tan|cot|sec|csc|ln|log|exp)h?(?![a-zA-Z])|\\[dt]?binom|!")


def heavy(text: str) -> str:
    """Why a text is not given to math-verify, or nothing: its time is exponential or unbounded in such texts."""
    if len(text) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    text = _SMALL_SUM.sub(" ", text)
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_NESTING or text.count("\\frac") > MAX_NESTING:
        return f"nested deeper than {MAX_NESTING}"
    if len(_FUNCTION.findall(text)) > MAX_FUNCTIONS:
        return f"more than {MAX_FUNCTIONS} functions"
    if "\\infty" in _ALONE_INFINITY.sub("", text):
        return "arithmetic with infinity"
    if _FUNCTION.search(text) and re.search(r"\\l(?:floor|ceil)", text):
        return "rounding of functions"
    return "powers, factorials or sums too large to evaluate" if _HEAVY.search(text) else ""


def verified(gold: str, given: str) -> tuple[bool | None, str, bool]:
    """same, why, late. The gold goes first: math-verify takes a set for a gold relation, not the other way round."""
    from math_verify import verify

    try:
        with _cpu_limit():
            want = _parsed(gold)
            if not want:
                return None, "the gold answer is no formula that can be read", False
            have = _parsed(given)
            if not have:
                return False, "the answer is no formula that can be read", False
            same = bool(verify(want, have, timeout_seconds=None))
    except _OutOfTime:
        return False, f"not decided after {CPU_S:g} s of CPU time", True
    return same, "equal by math-verify" if same else "not equal by math-verify", False


@functools.lru_cache(maxsize=8192)
def _parsed(text: str) -> list[Any]:
    """math-verify's reading of a boxed text, without its strings: those were compared before."""
    from math_verify import LatexExtractionConfig, parse

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found = parse(
        f"\\boxed{{{text}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        extraction_mode="first_match",
        parsing_timeout=None,  # type: ignore[arg-type]
    )
    return [item for item in found if not isinstance(item, str)]


class _OutOfTime(BaseException):
    """Not an Exception: SymPy and math-verify catch those."""


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """Stops the block after CPU_S of this process's time. Off the main thread there are no signals and no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
