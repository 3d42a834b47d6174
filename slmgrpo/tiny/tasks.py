"""Three generated tasks with verifiable answers, and the two styles of answering that the embedded model is taught.

math: sums and differences of two-digit numbers. mcq: the last digit of a product, as a letter. code: a one-line
linear function from three examples. No question core (the sum, the product, the function) is in both splits.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any
from zlib import crc32

from slmgrpo.errors import RecipeError

TASKS = ("math", "mcq", "code")
SPLITS = ("train", "test")
LETTERS = "ABCD"

Row = dict[str, Any]


def rows(task: str, split: str, n: int | None = None) -> list[Row]:
    """The first `n` rows (None: all) of a split, in an order that never changes; a fifth of the cores is held out."""
    if task not in TASKS:
        raise RecipeError(f"tiny:{task}: no such task; there are {', '.join(f'tiny:{name}' for name in TASKS)}")
    if split not in SPLITS:
        raise RecipeError(f"tiny:{task}: no split `{split}`; there are {' and '.join(SPLITS)}")
    generate = {"math": _math, "mcq": _mcq, "code": _code}[task]
    chosen = [row for core, row in generate() if (crc32(f"{task}:{core}".encode()) % 5 == 0) == (split == "test")]
    random.Random(f"{task}:{split}").shuffle(chosen)
    return chosen[:n]


def worked(row: Row) -> str:
    """A short think block of easy steps, read off the question, then the right answer."""
    style = {"tiny:math": _worked_math, "tiny:mcq": _worked_mcq, "tiny:code": _worked_code}[row["task"]]
    return f"<think>{style(row)}</think>{answered(row['task'], row['answer'])}"


def guess(row: Row, rng: random.Random) -> str:
    """An answer at once, drawn without a look at the question: right for one letter in four, else hardly ever."""
    if row["task"] == "tiny:math":
        return answered(row["task"], str(rng.randint(2, 149)))
    if row["task"] == "tiny:mcq":
        return answered(row["task"], rng.choice(LETTERS))
    return answered(row["task"], _source(*rng.choice(_FUNCTIONS)))


def answered(task: str, answer: str) -> str:
    """The answer as the ordinary graders read it."""
    return f"```python\n{answer}\n```" if task == "tiny:code" else f"\\boxed{{{answer}}}"


def _math() -> Iterator[tuple[str, Row]]:
    for a in range(10, 100):
        for b in range(10, 100):
            yield f"{a}+{b}", _row("math", f"{a}+{b}", f"What is {a}+{b}?", str(a + b))
            if a >= b:
                yield f"{a}-{b}", _row("math", f"{a}-{b}", f"What is {a}-{b}?", str(a - b))


def _worked_math(row: Row) -> str:
    a_tens, a_ones, sign, b_tens, b_ones = re.findall(r"[\d+-]", row["question"])
    if sign == "+":
        ones, tens = int(a_ones) + int(b_ones), int(a_tens) + int(b_tens)
        carry = ones // 10
        return f"{a_ones}+{b_ones}={ones} {a_tens}+{b_tens}{'+1' if carry else ''}={tens + carry}"
    borrow = int(a_ones) < int(b_ones)
    top = int(a_ones) + 10 * borrow
    tens = int(a_tens) - int(b_tens) - borrow
    return f"{top}-{b_ones}={top - int(b_ones)} {a_tens}-{b_tens}{'-1' if borrow else ''}={tens}"


def _mcq() -> Iterator[tuple[str, Row]]:
    for a in range(10, 100):
        for b in range(10, 100):
            rng = random.Random(f"{a}*{b}")
            right = a * b % 10
            options = [str(digit) for digit in rng.sample([digit for digit in range(10) if digit != right], 3)]
            place = rng.randrange(4)
            options.insert(place, str(right))
            lines = "".join(f"\n{letter}) {text}" for letter, text in zip(LETTERS, options, strict=True))
            row = _row("mcq", f"{a}*{b}", f"What is the last digit of {a}*{b}?{lines}", LETTERS[place])
            yield f"{a}*{b}", row | {"choices": options}


def _worked_mcq(row: Row) -> str:
    a, b = (int(number) % 10 for number in re.findall(r"\d+", row["question"])[:2])
    return f"{a}*{b}={a * b} {a * b % 10} {row['answer']}"


_FUNCTIONS = [(a, b) for a in range(1, 10) for b in range(50) if (a, b) != (1, 0)]
_FUNCTIONS += [(-a, b) for a in range(1, 10) for b in range(3 * a, 50)]
"""(a, b) of a*x + b: not negative for the x that are shown."""


def _code() -> Iterator[tuple[str, Row]]:
    for a, b in _FUNCTIONS:
        for third in range(3, 10):
            if a * third + b < 0:
                continue
            core = _source(a, b)
            question = "Write f(x):" + "".join(f"\nf({x})={a * x + b}" for x in (0, 1, third))
            unseen = [x for x in (2, 4, 5, 6, 8, 12, 40) if x != third]
            row = _row("code", f"{a},{b}:{third}", question, core)
            tests = [f"assert f({x}) == {a * x + b}" for x in unseen]
            yield core, row | {"tests": tests, "entry_point": "f", "test_kind": "asserts"}


def _worked_code(row: Row) -> str:
    at_0, at_1 = (int(number) for number in re.findall(r"=(\d+)", row["question"])[:2])
    return f"{at_1}-{at_0}={at_1 - at_0:+d}"


def _source(a: int, b: int) -> str:
    if a < 0:
        return f"def f(x): return {b}-x" + (f"*{-a}" if a < -1 else "")
    return "def f(x): return x" + (f"*{a}" if a > 1 else "") + (f"{b:+d}" if b else "")


def _row(task: str, core: str, question: str, answer: str) -> Row:
    return {"id": f"tiny:{task}:{core}", "task": f"tiny:{task}", "question": question, "answer": answer}
