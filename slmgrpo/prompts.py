"""A row becomes what the model sees, by its real chat template, and its text comes apart into reasoning and answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from slmgrpo.errors import RecipeError
from slmgrpo.recipe import Model, Prompt

PLACE = re.compile(r"\{\{(\w+)\}\}|\{([A-Za-z_]\w*)\}")
OPENED = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
"""What a template that opens or skips the reasoning itself leaves at the end of the prompt."""
GOLD = ("answer", "solution", "canonical_solution", "tests")
"""Columns that no prompt shows."""
DERIVED = {"first_test": "tests"}
"""Places in `prompt.user` that are no columns: one test shows a function's name and arguments, the rest stay hidden."""
FIXED_DATE = date(2024, 7, 26)
"""Today, for templates that write it: a run's prompts must not change overnight (Llama 3.2's own default)."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """One prompt as the model sees it.

    prefill: the end of `text` that is in the model's turn already (the template's `<think>`, the recipe's prefill);
    rules judge prefill + completion.
    """

    text: str
    ids: tuple[int, ...]
    prefill: str
    system_in_user: bool = False
    """The template has no system role, so the system text stands before the first user text."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A completion's reasoning and answer. closed: no `<think>` was left open; behind an open one is no answer."""

    think: str
    answer: str
    closed: bool


def render(row: Mapping[str, Any], prompt: Prompt, tokenizer: Any) -> Rendered:
    """The prompt of one row, as text and token ids. The template alone writes the begin-of-text token."""
    return render_all([row], prompt, tokenizer)[0]


def render_all(rows: Sequence[Mapping[str, Any]], prompt: Prompt, tokenizer: Any) -> list[Rendered]:
    """`render` for many rows, tokenised together."""
    written = [_write(row, prompt, tokenizer) for row in rows]
    if not written:
        return []
    ids = tokenizer([text for text, _, _ in written], add_special_tokens=False)["input_ids"]
    return [
        Rendered(text, tuple(own), prefill, system_in_user)
        for (text, prefill, system_in_user), own in zip(written, ids, strict=True)
    ]


def columns(prompt: Prompt) -> set[str]:
    """Columns of the data that the recipe's prompt reads."""
    return {DERIVED.get(place[2], place[2]) for place in PLACE.finditer(prompt.user) if place[2]}


def parts(text: str, prefill: str = "") -> Parts:
    """Take a completion apart: reasoning stands in think tags, the answer behind the last closed one."""
    whole = prefill + text
    before, closed, after = whole.rpartition("</think>")
    answer, opened, rest = after.partition("<think>")
    think = before.replace("<think>", "\n").replace("</think>", "\n") if closed else ""
    if not opened:
        return Parts(think.strip(), answer.strip(), True)
    return Parts("\n".join(filter(None, (think.strip(), rest.strip()))), answer.strip(), False)


def set_chat_template(tokenizer: Any, model: Model, base: Path | None = None) -> None:
    """Give the tokenizer the recipe's chat template (Jinja, or a path from the recipe's folder), or check its own."""
    text = model.chat_template
    if text is None:
        if not getattr(tokenizer, "chat_template", None):
            raise RecipeError(
                f"model.id: {model.id} has no chat template; set model.chat_template to Jinja text or to a file of it "
                "(a base model can take that of its instruct sibling)"
            )
        return
    if "{" not in text:
        found = [path for path in ((base or Path.cwd()) / text, Path.cwd() / text) if path.is_file()]
        if not found:
            raise RecipeError(
                f"model.chat_template: no file {text}; give a path from the recipe's folder, or Jinja text"
            )
        text = found[0].read_text(encoding="utf-8")
    starts_with_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    if starts_with_bos and "bos_token" not in text and tokenizer.bos_token not in text:
        text = "{{ bos_token }}" + text
    tokenizer.chat_template = text


def question(row: Mapping[str, Any]) -> str:
    """The question, with lettered options below it where the row has choices and the text does not list them itself."""
    text = row["question"]
    choices = row.get("choices")
    if not choices:
        return text
    listed = all(
        re.search(rf"(?m)^\W*{letter}\W*[).:]\W*{re.escape(option.strip())}\s*$", text)
        for letter, option in zip(ascii_uppercase, choices, strict=False)
    )
    return text if listed else f"{text}\n\n{lettered(choices)}"


def lettered(choices: Sequence[str]) -> str:
    """`A. ...` and so on, a line each."""
    return "\n".join(f"{letter}. {option}" for letter, option in zip(ascii_uppercase, choices, strict=False))


def _fill(template: str, row: Mapping[str, Any]) -> str:
    own_options = "{choices}" in template and row.get("choices")

    def put(place: re.Match[str]) -> str:
        literal, name = place.groups()
        if literal:
            return f"{{{literal}}}"
        column = DERIVED.get(name, name)
        if column in GOLD and name not in DERIVED:
            raise RecipeError(f"prompt.user: {{{name}}} would show the model what it is graded by; {_or_literal(name)}")
        if row.get(column) in (None, "", [], {}):
            known = ", ".join(key for key in row if key not in GOLD)
            raise RecipeError(f"prompt.user: {row['id']} has no `{column}`, it has {known}; {_or_literal(name)}")
        if name == "question":
            return row[name] if own_options else question(row)
        return {"choices": lettered, "first_test": _first}.get(name, str)(row[column])

    return PLACE.sub(put, template)


def _or_literal(name: str) -> str:
    return f"for the text {{{name}}} itself write {{{{{name}}}}}"


def _first(tests: Sequence[Any]) -> str:
    test = tests[0]
    return test if isinstance(test, str) else "\n".join(f"{key}:\n{value}" for key, value in test.items())


def _write(row: Mapping[str, Any], prompt: Prompt, tokenizer: Any) -> tuple[str, str, bool]:
    """(text, prefill, system_in_user) of one row."""
    turns = [
        {"role": role, "content": content}
        for example in prompt.examples
        for role, content in (("user", example.user), ("assistant", example.assistant))
    ]
    user = _fill(prompt.user, row)
    turns.append({"role": "user", "content": user})
    text, system_in_user = None, False
    if prompt.system:
        text = _apply(tokenizer, [{"role": "system", "content": prompt.system}, *turns], prompt)
        if isinstance(text, Exception) or not _shows(text, prompt.system):
            system_in_user = True
            turns[0] = turns[0] | {"content": f"{prompt.system}\n\n{turns[0]['content']}"}
    if system_in_user or text is None:
        text = _apply(tokenizer, turns, prompt)
    if isinstance(text, Exception):
        raise RecipeError(f"the model's chat template fails on this prompt: {text}; set model.chat_template")
    if not _shows(text, user):
        raise RecipeError("the model's chat template leaves the question out; set model.chat_template")
    for number, example in enumerate(prompt.examples):
        if not _shows(text, example.assistant):
            raise RecipeError(
                f"prompt.examples.{number}.assistant: the model's chat template cuts a part of it (those of thinking "
                "models drop earlier reasoning); write the example without think tags"
            )
    opened = OPENED.search(text)
    if opened and prompt.prefill.lstrip().startswith("<think>"):
        raise RecipeError("prompt.prefill: the model's chat template writes <think> itself; take it out of prefill")
    return text + prompt.prefill, (opened[0] if opened else "") + prompt.prefill, system_in_user


def _apply(tokenizer: Any, turns: list[dict[str, str]], prompt: Prompt) -> str | Exception:
    """The turns by the tokenizer's template with the model's turn opened, or what the template raised."""
    from jinja2 import TemplateError

    template = tokenizer.get_chat_template()
    settings: dict[str, Any] = {"strftime_now": FIXED_DATE.strftime}
    if prompt.enable_thinking is not None:
        if "enable_thinking" not in template:
            raise RecipeError("prompt.enable_thinking: the model's chat template does not know it; take it out")
        settings["enable_thinking"] = prompt.enable_thinking
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **settings)
    except TemplateError as error:
        return error


def _shows(text: str, part: str) -> bool:
    return " ".join(part.split()) in " ".join(text.split())
