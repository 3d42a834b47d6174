"""Rules for the form of a reply: tags, one box, one code block. They say nothing of the answer."""

from __future__ import annotations

import re
from typing import Literal

from slmgrpo.rewards.base import quick
from slmgrpo.rewards.equal import answer as read_answer
from slmgrpo.rewards.extract import after_thinking, boxes, code_blocks, has_text, last_box, tagged_answer
from slmgrpo.rewards.latex import symbols
from slmgrpo.rewards.nodes import Scalar
from slmgrpo.rewards.programs import PYTHON

Style = Literal["think", "think_answer", "reasoning_answer"]
_TAGS = {"think": ("think",), "think_answer": ("think", "answer"), "reasoning_answer": ("reasoning", "answer")}


@quick
def tagged(completion: str, prompt: str = "", *, style: Style = "think") -> float:
    """1 if each tag of `style` opens and closes once, in order, around text, and nothing stands outside.

    think: <think>...</think> and an answer behind it. think_answer and reasoning_answer: two tagged parts and
    nothing else. An opening tag at the end of the prompt counts.
    """
    tags = _TAGS[style]
    text = _with_prefill(completion, prompt, tags[0]).strip()
    for tag in tags:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return 0.0
    pattern = r"\s*".join(rf"<{tag}>(.*)</{tag}>" for tag in tags) + ("(.*)" if len(tags) == 1 else "")
    match = re.fullmatch(pattern, text, re.DOTALL)
    return float(match is not None and all(has_text(part) for part in match.groups()))


@quick
def tag_counts(completion: str, prompt: str = "", *, style: Style = "reasoning_answer") -> float:
    """The share of the tags of `style` that occur exactly once, less 0.001 for each character behind the last one."""
    tags = _TAGS[style]
    text = _with_prefill(completion, prompt, tags[0])
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    share = sum(text.count(mark) == 1 for mark in marks) / len(marks)
    trailing = len(text.rpartition(marks[-1])[2].strip()) if len(tags) > 1 and marks[-1] in text else 0
    return max(0.0, share - 0.001 * trailing)


@quick
def reasoning_present(completion: str, prompt: str = "", *, style: Style = "reasoning_answer") -> float:
    """1 if there is text between the first tags of `style`."""
    first = _TAGS[style][0]
    _, opened, rest = _with_prefill(completion, prompt, first).partition(f"<{first}>")
    inside, closed, _ = rest.partition(f"</{first}>")
    return float(bool(opened and closed and has_text(inside)))


@quick
def answer_present(completion: str, prompt: str = "") -> float:
    """1 if something is tagged as `<answer>` or boxed behind the thinking."""
    return float(_said(completion, prompt) is not None)


def numeric_answer(completion: str, prompt: str = "") -> float:
    """1 if what is tagged as `<answer>` or boxed is one number."""
    said = _said(completion, prompt)
    node = read_answer(said).node if said is not None else None
    return float(isinstance(node, Scalar) and not symbols(node.tree) and node.tree[0] in ("num", "neg", "div"))


@quick
def boxed_once(completion: str, prompt: str = "") -> float:
    r"""1 if exactly one closed `\boxed{}` with content stands behind the thinking."""
    text = after_thinking(completion, prompt)
    if text is None or len(re.findall(r"\\f?box(?:ed)?(?![a-zA-Z])", text)) != 1:
        return 0.0
    found = boxes(text)
    return float(len(found) == 1 and has_text(found[0].content))


@quick
def one_code_block(completion: str, prompt: str = "") -> float:
    """1 if exactly one fenced block stands behind the thinking, closed, python and not empty."""
    text = after_thinking(completion, prompt)
    blocks = [] if text is None else code_blocks(text)
    if len(blocks) != 1:
        return 0.0
    (block,) = blocks
    return float(block.closed and block.language in PYTHON and has_text(block.code))


def _with_prefill(completion: str, prompt: str, first: str) -> str:
    """The completion with the opening tag that the chat template wrote at the end of the prompt.

    Without a prompt a missing opening tag gets the benefit of the doubt.
    """
    tag = f"<{first}>"
    written = prompt.rstrip().endswith(tag)
    unknown = not prompt and tag not in completion and f"</{first}>" in completion
    return tag + completion if written or unknown else completion


def _said(completion: str, prompt: str) -> str | None:
    text = after_thinking(completion, prompt)
    return None if text is None else tagged_answer(text) or last_box(text)
