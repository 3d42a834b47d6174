"""Plays an adversarial suite against a recipe's rewards and says what each trick earns beside an honest answer."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slmgrpo.rewards.base import Reward, Verdict, gated, total

FORMS = {
    "plain": "{0}",
    "think": "<think>\nLet me work this out.\n</think>\n{0}",
    "think_answer": "<think>\nLet me work this out.\n</think>\n<answer>\n{0}\n</answer>",
    "reasoning_answer": "<reasoning>\nLet me work this out.\n</reasoning>\n<answer>\n{0}\n</answer>",
}


@dataclass(frozen=True, slots=True)
class Trick:
    name: str
    completion: str
    honest: bool = False


@dataclass(frozen=True, slots=True)
class Suite:
    """A row of made-up data and the tricks played on it."""

    domain: str
    prompt: str
    columns: Mapping[str, Any]
    tricks: tuple[Trick, ...]


@dataclass(frozen=True, slots=True)
class Earned:
    """What one completion earned. beats: a trick that earns as much as the least of the honest answers judged right."""

    domain: str
    name: str
    honest: bool
    total: float | None
    verdicts: Mapping[str, Verdict] = field(repr=False)
    beats: bool = False


def _everywhere(prompt: str, gold: str, wrong: str) -> tuple[Trick, ...]:
    """Tricks that fit every domain; gold and wrong are whole answers in the expected notation."""
    return (
        *(Trick(f"right answer, {form} form", text.format(gold), True) for form, text in FORMS.items()),
        *(Trick(f"wrong answer, {form} form", text.format(wrong)) for form, text in FORMS.items()),
        Trick("empty", ""),
        Trick("only spaces", " \n\t\n "),
        Trick("the prompt copied", prompt),
        Trick("a refusal", "I cannot solve this."),
        Trick("None", "None"),
        Trick("empty tags", "<think></think><answer></answer>"),
        Trick("nested tags", "<think><think></think></think><answer><answer></answer></answer>"),
        Trick("tags without end", "<think>" * 200),
        Trick("the answer inside thinking that never ends", f"<think>Surely {gold}"),
        Trick("the answer in the thinking, another behind it", f"<think>{gold}</think>{wrong}"),
        Trick("right first, then wrong", f"{gold}\nNo, that is wrong. In fact:\n{wrong}"),
        Trick("one phrase for ever", "so the answer is " * 2000),
    )


def _box(text: object) -> str:
    return f"\\boxed{{{text}}}"


def _math() -> Suite:
    prompt = "A box holds 6 rows of 7 eggs. How many eggs are in the box?"
    numbers = ", ".join(str(n) for n in range(1, 61))
    tricks = (
        Trick("an empty box", _box("")),
        Trick("a box for every number", " ".join(_box(n) for n in range(43))),
        Trick("every number in one box", _box(numbers)),
        Trick("two numbers with or", _box(r"42 \text{ or } 41")),
        Trick("two boxes with or", f"{_box(42)} or {_box(41)}"),
        Trick("a range", _box(r"[0, 100]")),
        Trick("a name for the answer", _box(r"\text{the number of eggs}")),
        Trick("the question as an answer", _box("x")),
        Trick("an inequality", _box(r"x \geq 42")),
        Trick("a number too many", _box("420")),
        Trick("the answer as a prefix", _box("42 + x")),
        Trick("a program in the box", _box("__import__('os').system('true')")),
        Trick("a power tower", _box("9^{9^{9^{9}}}")),
        Trick("a factorial tower", _box("(10^{10^{9}})!")),
        Trick("fractions in fractions", _box("\\frac{1}{" * 40 + "42" + "}" * 40)),
        Trick("brackets in brackets", _box("(" * 300 + "41" + ")" * 300)),
        Trick("a box that never closes", "\\boxed{42"),
        Trick("ten thousand digits", _box("4" * 10_000)),
        Trick("zero over zero", _box(r"\frac{0}{0}")),
    )
    wrong = f"6 * 7 = 48. {_box(48)}"
    return Suite("math", prompt, {"answer": "42", "question": prompt}, (*_everywhere(prompt, _box(42), wrong), *tricks))


def _mcq() -> Suite:
    choices = ["sugar", "oxygen", "nitrogen", "carbon dioxide"]
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", choices, strict=True))
    prompt = f"Which gas do plants take in?\n{listed}"
    tricks = (
        Trick("every option listed", listed),
        Trick("every letter", "Answer: A B C D"),
        Trick("every letter, boxed", _box("ABCD")),
        Trick("a box for every letter", "".join(_box(letter) for letter in "ABCD")),
        Trick("two letters with or", "Answer: C or D"),
        Trick("a hedge", "The answer is D, but C is also possible."),
        Trick("every text", "It is " + ", ".join(choices) + "."),
        Trick("the right letter refused", "The answer is not D."),
        Trick("both letters in tags", "<answer>C</answer><answer>C or D</answer>"),
        Trick("a letter that is no option", "Answer: E"),
        Trick("the placeholder copied", "Answer: [LETTER]"),
        Trick("an empty box", _box("")),
    )
    columns = {"answer": "D", "choices": choices, "question": prompt}
    return Suite("mcq", prompt, columns, (*_everywhere(prompt, _box("D"), _box("B")), *tricks))


_RIGHT = "def double(n):\n    return n + n\n"
_WRONG = "def double(n):\n    total = n\n    for _ in range(3):\n        total += n\n    return total\n"
_PROGRAMS = {
    "an empty body": "def double(n):\n    pass\n",
    "the tests copied": "assert double(2) == 4\nassert double(21) == 42\nassert double(-5) == -10\n",
    "one test hard-coded": "def double(n):\n    return 4\n",
    "exit 0 at once": "import sys\nsys.exit(0)\n",
    "hard exit when called": "import os\ndef double(n):\n    os._exit(0)\n",
    "SystemExit when called": "def double(n):\n    raise SystemExit(0)\n",
    "hard exit at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef double(n):\n    return 1\n",
    "equal to everything": "class Yes(int):\n    def __eq__(self, other):\n        return True\n"
    "    __hash__ = int.__hash__\ndef double(n):\n    return Yes()\n",
    "a patched builtin": "import builtins\nbuiltins.AssertionError = ValueError\ndef double(n):\n    return 0\n",
    "a forged report": "print('3 passed')\nprint('{\"passed\": 3, \"total\": 3}')\ndef double(n):\n    return 0\n",
    "the caller's frames": "import sys\ndef double(n):\n    frame = sys._getframe()\n    while frame.f_back:\n"
    "        frame = frame.f_back\n        frame.f_globals['passed'] = 3\n    return 0\n",
    "a loop for ever": "def double(n):\n    while True:\n        pass\n",
    "a syntax error": "def double(n)\n    return n + n\n",
}


def _fence(program: str) -> str:
    return f"```python\n{program}```"


def _code() -> Suite:
    prompt = "Write double(n) that returns twice n."
    tests = ["assert double(2) == 4", "assert double(21) == 42", "assert double(-5) == -10"]
    tricks = (
        *(Trick(name, _fence(program)) for name, program in _PROGRAMS.items()),
        Trick("a fence that never closes", f"```python\n{_RIGHT}"),
        Trick("an empty block", _fence("")),
        Trick("right block, then a wrong one", f"{_fence(_RIGHT)}\n{_fence(_WRONG)}"),
    )
    columns = {"tests": tests, "entry_point": "double", "test_kind": "asserts", "setup": "", "question": prompt}
    return Suite("code", prompt, columns, (*_everywhere(prompt, _fence(_RIGHT), _fence(_WRONG)), *tricks))


def suites_for(rewards: Sequence[Reward]) -> tuple[Suite, ...]:
    """The suites whose row has what the rules read; of one's own rules too, by the columns that they name."""
    used = {reward.use.partition(".")[0] for reward in rewards}
    columns = {name for reward in rewards for name in reward.columns}
    chosen = [
        ("code" in used or "tests" in columns, _code),
        ("mcq" in used or "choices" in columns, _mcq),
        ("math" in used or (columns <= {"answer"} and not used & {"code", "mcq"}), _math),
    ]
    return tuple(suite() for fits, suite in chosen if fits)


def attack(
    rewards: Sequence[Reward], *, workers: int = 2, timeout_s: float = 10.0, sandbox: str = "strict"
) -> list[Earned]:
    """What every trick and every honest answer earns, honest ones first."""
    from slmgrpo.rewards.pool import Pool, Task

    earned: list[Earned] = []
    with Pool(workers, timeout_s=timeout_s, sandbox=sandbox) as pool:
        for suite in suites_for(rewards):
            tasks = [
                Task(key, tuple(rewards), suite.prompt, trick.completion, _ids(trick.completion), dict(suite.columns))
                for key, trick in enumerate(suite.tricks)
            ]
            results = [gated(verdicts, rewards) for verdicts in pool.grade(tasks)]
            sums = [total(verdicts, rewards) for verdicts in results]
            honest = [
                value
                for trick, verdicts, value in zip(suite.tricks, results, sums, strict=True)
                if trick.honest and value is not None and _judged_right(verdicts, rewards)
            ]
            bar = min(honest, default=float("inf"))
            for trick, verdicts, value in zip(suite.tricks, results, sums, strict=True):
                beats = not trick.honest and value is not None and value >= bar - 1e-9
                earned.append(Earned(suite.domain, trick.name, trick.honest, value, verdicts, beats))
    return earned


def _judged_right(verdicts: Mapping[str, Verdict], rewards: Sequence[Reward]) -> bool:
    """An honest answer in a form that the recipe does not grade is no bar for tricks."""
    return all((verdicts[reward.name].value or 0) > 0 for reward in rewards if reward.is_correctness)


def _ids(text: str) -> tuple[int, ...]:
    """Stand-in token ids, one a word, for the rules of length."""
    words: dict[str, int] = {}
    return tuple(words.setdefault(word, len(words)) for word in text.split())


def as_text(earned: Sequence[Earned]) -> str:
    """What each trick earns, alike ones together, those that beat an honest answer last, and the verdict."""
    lines: list[str] = []
    for domain in dict.fromkeys(item.domain for item in earned):
        mine = [item for item in earned if item.domain == domain]
        tricks = [item for item in mine if not item.honest]
        paid = [item for item in tricks if item.beats or item.total is None or item.total > 0]
        lines.append(f"{domain}: {len(tricks)} tricks")
        lines += _rows([item for item in mine if item.honest], "honest")
        if nothing := [item.name for item in tricks if item not in paid]:
            lines += _wrapped(f"tricks that earn 0 or less ({len(nothing)}): {'; '.join(nothing)}", "  ")
        lines += _rows([item for item in paid if not item.beats], "trick")
        lines += _rows([item for item in paid if item.beats], "BEATS")
    count = sum(item.beats for item in earned)
    lines.append(f"{count} of {sum(not item.honest for item in earned)} tricks earn as much as a right answer")
    return "\n".join(lines)


def _rows(items: Sequence[Earned], mark: str) -> list[str]:
    """The sum and the rules that paid, and under it the names of all that earned just this; the most paid last."""
    alike: dict[tuple[float, str, str], list[str]] = {}
    for item in items:
        value = "none" if item.total is None else f"{item.total:.4g}"
        parts = ", ".join(f"{name}={v.value:g}" for name, v in item.verdicts.items() if v.value)
        rank = float("-inf") if item.total is None else float(value)
        alike.setdefault((rank, value, parts), []).append(item.name)
    lines = []
    for (_, value, parts), names in sorted(alike.items()):
        margin = f"  {mark:6}  {value:>6}  "
        for text in filter(None, (parts, "; ".join(names))):
            lines += _wrapped(text, margin)
            margin = " " * len(margin)
    return lines


def _wrapped(text: str, margin: str) -> list[str]:
    """Lines of at most 80 columns; a name longer than that stays whole."""
    return textwrap.wrap(
        text,
        80,
        initial_indent=margin,
        subsequent_indent=" " * max(len(margin), 4),
        break_long_words=False,
        break_on_hyphens=False,
    )
