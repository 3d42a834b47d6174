"""Which program a reply hands in, and what can be said of it without running it."""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slmgrpo.rewards.extract import Block, after_thinking, code_blocks

MAX_PROGRAM = 100_000
PYTHON = ("python", "py", "python3")
HOLDS_ANSWERS = "it holds the expected answers"


@dataclass(frozen=True, slots=True)
class Program:
    """source is None where the reply hands in nothing; `why` says what is missing."""

    source: str | None
    why: str


@functools.lru_cache(maxsize=1024)
def tree_of(source: str) -> ast.Module | None:
    """The syntax tree, or None where this is no Python."""
    if len(source) > MAX_PROGRAM:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defines(source: str, name: str) -> bool:
    """Whether the top level of a program binds a name."""
    tree = tree_of(source)
    if tree is None:
        return f"def {name}(" in source
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return True
    return False


def handed_in(completion: str, prompt: str = "", entry_point: str = "") -> Program:
    """The last closed python block behind the thinking (else the last block without a language).

    Where an entry point is named and missing there, earlier blocks are tried. Blocks are never joined. A reply
    without any fence is a program if it is one as a whole.
    """
    said = after_thinking(completion, prompt)
    if said is None:
        return Program(None, "the thinking never ends")
    blocks = code_blocks(said)
    if not blocks:
        whole = said.strip("\n")
        fits = tree_of(whole) is not None and (defines(whole, entry_point) if entry_point else _does_something(whole))
        return Program(whole, "the whole reply") if fits else Program(None, "no code block")
    if not blocks[-1].closed:
        return Program(None, "the last code block never ends")
    candidates = [b for b in blocks if b.language in PYTHON] or [b for b in blocks if not b.language]
    candidates = [block for block in candidates if block.code.strip()]
    if not candidates:
        return Program(None, "no python block")
    chosen = _with_entry(candidates, entry_point) or candidates[-1]
    last = chosen is candidates[-1]
    return Program(chosen.code, "the last python block" if last else "the last block with the entry point")


def _with_entry(blocks: Sequence[Block], entry_point: str) -> Block | None:
    return next((block for block in reversed(blocks) if entry_point and defines(block.code, entry_point)), None)


def _does_something(source: str) -> bool:
    tree = tree_of(source)
    return tree is not None and any(
        not isinstance(node, ast.Expr) or isinstance(node.value, ast.Call) for node in tree.body
    )


def task_prompt(prompts: Sequence[str], entry_point: str) -> str:
    """The text that is the task's own Python (HumanEval's header), or nothing where the task is prose."""
    for prompt in prompts:
        if entry_point and tree_of(prompt) is not None and defines(prompt, entry_point):
            return prompt
    return ""


def completed(source: str, header: str, entry_point: str) -> str:
    """The program with what HumanEval's header gives it: imports and helpers, or the signature of a bare body."""
    if not header or not entry_point:
        return source
    if not defines(source, entry_point):
        joined = header + source
        return joined if tree_of(joined) is not None else source
    tree = tree_of(header)
    assert tree is not None
    given: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == entry_point:
            break
        given.append(ast.get_source_segment(header, node) or "")
    return "\n".join([*given, source]) if given and "from __future__" not in source else source


def trivial(source: str, entry_point: str, tests: Any) -> str:
    """Why a program is no attempt: it does nothing, ignores its input, or holds the expected answers. Else nothing."""
    tree = tree_of(source)
    if tree is None:
        return "no valid Python"
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    target = next((f for f in functions if f.name == entry_point), None)
    if entry_point and target is None and not defines(source, entry_point):
        return f"no {entry_point}"
    if target is not None:
        body = [node for node in target.body if not _is_filler(node)]
        if not body:
            return "an empty body"
        arguments = target.args
        plain = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        names = {a.arg for a in plain if a is not None}
        used = {n.id for node in body for n in ast.walk(node) if isinstance(n, ast.Name)}
        if names and not names & used:
            return "it ignores its arguments"
    elif not entry_point and not any(isinstance(n, ast.Call) for n in ast.walk(tree)):
        return "it reads and prints nothing"
    wanted = expected_constants(tests)
    held = {repr(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant)}
    if len(wanted) >= 2 and wanted <= held:
        return HOLDS_ANSWERS
    return ""


def _is_filler(node: ast.stmt) -> bool:
    if isinstance(node, ast.Pass | ast.Raise):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Return) and (node.value is None or isinstance(node.value, ast.Constant))


def expected_constants(tests: Any) -> set[str]:
    """Telling constants that tests expect; 0, 1, True and short texts occur in honest programs too."""
    texts = [tests] if isinstance(tests, str) else [t for t in tests or () if isinstance(t, str)]
    found: set[str] = set()
    for text in texts[:200]:
        tree = tree_of(text)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
                for side in (node.left, node.comparators[0]):
                    if isinstance(side, ast.Constant) and _telling(side.value):
                        found.add(repr(side.value))
    return found


def _telling(value: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, int | float):
        return abs(value) > 16
    return isinstance(value, str) and len(value) > 3
