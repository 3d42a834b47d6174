"""Which program a reply hands in, and what can be said of it without running it."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import symtable
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from slmgrpo.rewards.extract import Block, after_thinking, code_blocks

MAX_PROGRAM = 100_000
PYTHON = ("python", "py", "python3")
MODULES = (
    "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions", "functools",
    "heapq", "itertools", "json", "math", "operator", "os", "random", "re", "statistics", "string", "sys",
    "time", "typing",
)  # fmt: skip
"""Modules that tests may use without an import."""
_LISTED_FENCE = re.compile(r"^[ \t]+(?:`{3,}|~{3,})", re.MULTILINE)
_BYTE_ORDER = re.compile(r"^\ufeff+", re.MULTILINE)
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


def name_of(entry_point: str) -> str:
    """The name that a program has to bind: of `Solution().solve` it is Solution."""
    found = re.match(r"\s*(\w+)", entry_point)
    return found.group(1) if found else entry_point


def defines(source: str, name: str) -> bool:
    """Whether the top level of a program binds a name, or the leading name of an expression."""
    name = name_of(name)
    tree = tree_of(source)
    if tree is None:
        return f"def {name}(" in source
    return name in _bound(tree.body)


def _bound(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names that statements bind in their own scope, those below `if`, `try`, `with` and loops included."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Assign | ast.For | ast.AsyncFor):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for target in targets for n in ast.walk(target) if _stored(n))
        elif isinstance(node, ast.AnnAssign) and node.value is not None and isinstance(node.target, ast.Name):
            yield node.target.id
        for field in ("body", "orelse", "finalbody"):
            yield from _bound(getattr(node, field, ()))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _bound(part.body)


def _stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def handed_in(completion: str, prompt: str = "", entry_point: str = "") -> Program:
    """The last closed python block behind the thinking (else the last block without a language).

    Where an entry point is named and missing there, earlier blocks are tried. Blocks are never joined. A reply
    without any fence is a program if it is one as a whole.
    """
    said = after_thinking(completion, prompt)
    if said is None:
        return Program(None, "the thinking never ends")
    said = _BYTE_ORDER.sub("", said)
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
    code = chosen.code
    if tree_of(code) is None and _LISTED_FENCE.search(said):  # a block in a list is indented with its fence
        flush = textwrap.dedent(code)
        code = flush if tree_of(flush) is not None and not _bare_body(flush, entry_point) else code
    return Program(code, "the last python block" if last else "the last block with the entry point")


def _with_entry(blocks: Sequence[Block], entry_point: str) -> Block | None:
    codes = ((block, textwrap.dedent(block.code)) for block in reversed(blocks))
    return next((block for block, code in codes if entry_point and defines(code, entry_point)), None)


def _bare_body(code: str, entry_point: str) -> bool:
    """Whether code is what stands below the header that the task gives."""
    return bool(entry_point) and not defines(code, entry_point)


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
    bound = name_of(entry_point)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == bound:
            break
        given.append(ast.get_source_segment(header, node) or "")
    return "\n".join([*given, source]) if given and "from __future__" not in source else source


def trivial(source: str, entry_point: str, tests: Any) -> str:
    """Why a program is no attempt: it does nothing, ignores its input, or holds the expected answers. Else nothing."""
    tree = tree_of(source)
    if tree is None:
        return "no valid Python"
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    called = entry_point.rpartition(".")[2]
    target = next((f for f in functions if f.name == called), None)
    if entry_point and target is None and not defines(source, entry_point):
        return f"no {entry_point}"
    if target is not None:
        body = [node for node in target.body if not _is_filler(node)]
        if not body:
            return "an empty body"
        arguments = target.args
        plain = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg)
        names = {a.arg for a in plain if a is not None} - ({"self", "cls"} if called != entry_point else set())
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


# ---- names of tests --------------------------------------------------------------------------------------------------


def asks(test: str) -> bool:
    """Whether a test can fail: it asserts, raises or calls something, or is not understood here."""
    tree = tree_of(test)
    return tree is None or any(isinstance(node, ast.Assert | ast.Raise | ast.Call) for node in ast.walk(tree))


@dataclass(frozen=True, slots=True)
class Loose:
    """Names that tests read and nobody binds. modules: of MODULES, to be imported; called: only ever called, so a
    program can define them; others: no program can, since tests get nothing but values of calls from it."""

    modules: tuple[str, ...]
    called: tuple[str, ...]
    others: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def loose_names(tests: tuple[str, ...], given: tuple[str, ...]) -> Loose:
    """What tests leave open beside what `given` (setup and the task's header) binds; nothing where they do not parse.

    given: run before the tests, in the same scope.
    """
    read: set[str] = set()
    bound: set[str] = set()
    uncalled: set[str] = set()
    through: set[str] = set()
    for text in (*given, *tests):
        tree = tree_of(text)
        if tree is None or any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(tree)):
            return Loose((), (), ())
        try:
            globals_read, globals_bound = _globals(text)
        except SyntaxError:
            return Loose((), (), ())
        bound |= globals_bound
        if text in tests:
            read |= globals_read
            functions = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
            owners = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
            names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
            uncalled |= {n.id for n in names if id(n) not in functions}
            through |= {n.id for n in names if id(n) in owners}
    loose = sorted(name for name in read - bound if not hasattr(builtins, name) and not name.startswith("__"))
    modules = tuple(name for name in loose if name in MODULES and name in through)
    called = tuple(name for name in loose if name not in uncalled)
    return Loose(modules, called, tuple(name for name in loose if name not in (*modules, *called)))


def _globals(text: str) -> tuple[set[str], set[str]]:
    """Names of the outermost scope that a text reads anywhere, and that it binds."""
    read, bound = set(), set()
    tables = [symtable.symtable(text, "test", "exec")]
    while tables:
        table = tables.pop()
        outer = table.get_type() == "module"
        tables += table.get_children()
        for symbol in table.get_symbols():
            if outer or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or symbol.is_imported():
                    bound.add(symbol.get_name())
    return read, bound
