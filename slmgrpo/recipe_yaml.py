"""YAML text to a tree that knows its lines: one plain dialect in which every trap is an error that says what to write.

Plain scalars follow YAML 1.2's core: `1e-5` is a number, `no` and `off` are text, `010` and `1:30` are text, `true`
is a bool. Anchors, aliases, merge keys, tags and second documents are refused, so no file can blow up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 200_000
MAX_DEPTH = 20
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}


@dataclass(frozen=True, slots=True)
class Where:
    """A line of a file, or a `--set` of the command line (then line is None)."""

    file: str
    line: int | None = None

    def __str__(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Spot:
    """A value and where it stands. value: dict[str, Spot], list[Spot] or a scalar; plain: a scalar without quotes."""

    value: Any
    where: Where
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Problem:
    where: Where | None
    key: str
    text: str


class Unreadable(Exception):
    """Text that gives no tree; carries its problems."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = list(problems)


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not come yet."""

    value: dict[str, Spot] | list[Spot]
    where: Where
    key: str | None = None
    key_where: Where | None = None
    repeated: bool = False
    """The entry being read repeats a key: the first one stays."""


@dataclass(slots=True)
class _Builder:
    file: str
    stack: list[_Open] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    root: Spot | None = None

    def path(self) -> str:
        parts: list[str] = []
        for frame in self.stack:
            part = frame.key if isinstance(frame.value, dict) else str(len(frame.value))
            if part is not None:
                parts.append(part)
        return ".".join(parts)

    def refuse(self, where: Where, text: str) -> None:
        self.problems.append(Problem(where, self.path(), text))

    def add(self, value: Any, where: Where, *, plain: bool = False) -> None:
        if not self.stack:
            self.root = Spot(value, where, plain)
            return
        frame = self.stack[-1]
        if isinstance(frame.value, list):
            frame.value.append(Spot(value, where, plain))
            return
        if frame.key is None:
            self.set_key(frame, value, where)
            return
        if not frame.repeated:
            frame.value[frame.key] = Spot(value, frame.key_where or where, plain)
        frame.key, frame.repeated = None, False

    def set_key(self, frame: _Open, value: Any, where: Where) -> None:
        assert isinstance(frame.value, dict)
        frame.key, frame.key_where = str(value), where
        if frame.key == "<<":
            self.refuse(where, "merge keys (<<) are not read; use `extends:` for a parent")
        first = frame.value.get(frame.key)
        if first is not None:
            frame.repeated = True
            self.refuse(where, f"repeated key, first on line {first.where.line}; keep one")


def read_text(path: Path, file: str) -> str:
    """The text of a recipe file, or Unreadable saying why there is none."""

    def fail(text: str) -> Unreadable:
        return Unreadable(Problem(Where(file), "", text))

    try:
        if path.is_dir():
            raise fail("is a folder, not a recipe file")
        if not path.exists():
            raise fail("no such file")
        if not path.is_file():
            raise fail("is not a regular file")
        with path.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise fail(f"cannot be read: {reason}") from error
    if len(raw) > MAX_BYTES:
        raise fail(f"is longer than {MAX_BYTES // 1000} kB, too long for a recipe")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise Unreadable(Problem(Where(file, line), "", "is not UTF-8 text; save the file as UTF-8")) from error


def parse(text: str, file: str, *, line: int | None = 1) -> tuple[Spot, list[Problem]]:
    """The tree of one YAML document and what is wrong inside it; Unreadable where no tree can be had.

    line: None when the text is not a file (a value of `--set`).
    """
    builder = _Builder(file)
    try:
        for event in _events(text):
            _take(builder, event, Where(file, None if line is None else event.start_mark.line + 1))
    except yaml.reader.ReaderError as error:
        at = Where(file, None if line is None else text.count("\n", 0, error.position) + 1)
        raise Unreadable(Problem(at, "", f"unreadable character U+{ord(text[error.position]):04X}")) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = Where(file, None if line is None or mark is None else mark.line + 1)
        raise Unreadable(*builder.problems, Problem(at, "", _explain(error))) from error
    if builder.root is None:
        raise Unreadable(Problem(Where(file), "", "is empty"))
    return builder.root, builder.problems


def _events(text: str) -> Iterator[yaml.Event]:
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_event():
            yield loader.get_event()
    finally:
        loader.dispose()


def _take(builder: _Builder, event: yaml.Event, where: Where) -> None:
    match event:
        case yaml.DocumentStartEvent() if builder.root is not None:
            raise Unreadable(*builder.problems, Problem(where, "", "a second document (---); a recipe is one document"))
        case yaml.AliasEvent():
            builder.refuse(where, f"aliases (*{event.anchor}) are not read; write the value out")
            builder.add(None, where)
            return
        case yaml.NodeEvent():
            if event.anchor is not None:
                builder.refuse(where, f"anchors (&{event.anchor}) are not read; write the value out where it is used")
            tag = getattr(event, "tag", None)
            if tag is not None:
                builder.refuse(where, f"tags ({_short_tag(tag)}) are not read; quote text, write numbers plainly")
    match event:
        case yaml.ScalarEvent():
            plain = event.style is None or event.style == ""
            is_key = bool(builder.stack) and isinstance(builder.stack[-1].value, dict) and builder.stack[-1].key is None
            value = event.value if is_key or not plain else _scalar(builder, event.value, where)
            builder.add(value, where, plain=plain)
        case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
            top = builder.stack[-1] if builder.stack else None
            if top is not None and isinstance(top.value, dict) and top.key is None:
                raise Unreadable(*builder.problems, Problem(where, builder.path(), "a key must be plain text"))
            if len(builder.stack) >= MAX_DEPTH:
                raise Unreadable(*builder.problems, Problem(where, "", f"nested deeper than {MAX_DEPTH} levels"))
            builder.stack.append(_Open({} if isinstance(event, yaml.MappingStartEvent) else [], where))
        case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
            frame = builder.stack.pop()
            builder.add(frame.value, frame.where)


def _scalar(builder: _Builder, text: str, where: Where) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        if len(text) > 300:
            builder.refuse(where, f"a number of {len(text)} digits")
            return 0
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1) if text[-1] in "fFnN" else text)
    return text


def _short_tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")


def _explain(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's complaint in words that say what to do, for the slips that people make."""
    problem = error.problem or str(error)
    if "'\\t'" in problem:
        return "a tab where YAML wants spaces; indent with spaces"
    if problem.startswith("mapping values are not allowed"):
        return "a second `:` in one line; put text with `: ` in quotes"
    if problem.startswith("could not find expected ':'"):
        return "a line without `:` after its key"
    if problem.startswith(("found character '%'", "found character '@'")) or "'`'" in problem:
        return f"{problem}; put the text in quotes"
    if problem.startswith("expected <block end>"):
        return "indentation does not fit the lines above"
    if problem.startswith("while scanning") or "unexpected end of stream" in problem:
        return f"a quote or bracket is not closed ({problem})"
    return problem
