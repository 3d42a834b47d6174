"""Which option a reply declares: cues in many languages, boxes, tags, the option's own text; lists and negations."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slmgrpo.rewards.cues import (
    CUE,
    GOES_ON,
    MARKUP,
    NATIVE,
    NATIVE_LETTER,
    NEGATED_AFTER,
    NEGATED_BEFORE,
    PLAIN,
    SENTENCE,
    TIES,
    called_right,
    label_first,
    standing,
)
from slmgrpo.rewards.equal import answer, compare
from slmgrpo.rewards.extract import box_runs, unboxed
from slmgrpo.rewards.nodes import Scalar

MAX_TAIL = 20_000
"""Only the end of a longer reply is searched: an answer comes last."""

MAX_CLAIMS = 20
"""Of each kind; the last one counts, those before it only where it declares nothing."""


@dataclass(frozen=True, slots=True)
class Declared:
    """labels: what the reply commits to, several where it lists several; empty where nothing was declared."""

    labels: frozenset[str]
    where: str


NOTHING = Declared(frozenset(), "no option is declared")


def labels_of(choices: Sequence[str] | None) -> str:
    return string.ascii_uppercase[: len(choices)] if choices else "ABCDEFGHIJ"


def plain(text: str) -> str:
    """Without markup; full-width and native letters become A, B, C."""
    return MARKUP.sub("", text.translate(PLAIN)).strip()


def _text_key(text: str) -> str:
    text = re.sub(r"\\(?:,|;|!| |text|mathrm|left|right)", "", plain(text)).casefold()
    return " ".join(re.sub(r"(?<!\d)[.,;:!?]+|[.,;:!?]+(?!\d)|^\W*(?:an?|the)\s", " ", text).split())


def declared(reply: str, choices: Sequence[str] | None) -> Declared:
    """The last option that the reply commits to. `reply` is the part behind the thinking."""
    reply = reply[-MAX_TAIL:]
    labels = labels_of(choices)
    texts = tuple(str(choice) for choice in choices or ())
    opened = reply.rfind("<answer>")
    if opened >= 0:
        inside = reply[opened + len("<answer>") :].partition("</answer>")[0]
        found = _read(inside, labels, texts)
        return Declared(found.labels, f"<answer>: {found.where}") if found.labels else NOTHING
    return _read(reply, labels, texts)


def _read(reply: str, labels: str, texts: tuple[str, ...]) -> Declared:
    claims = sorted((*_cued(reply, labels, texts), *_boxed(reply, labels, texts)), key=lambda claim: claim[0])
    for _, claim in reversed(claims):
        if claim.labels or claim is INVALID:
            return claim
    whole = plain(reply)
    lines = [line.strip() for line in whole.splitlines() if line.strip()]
    for line, beside in ((lines[-1:], lines[-2:-1]), (lines[:1], lines[1:2])):
        label = "".join(_only_label(text, labels, texts) for text in line)
        neighbour = "".join(_only_label(text, labels, texts) for text in beside)
        if label and neighbour in ("", label):
            return Declared(frozenset(label), "a line that is only the option")
    if match := by_text(whole, texts, labels, search=True):
        return Declared(frozenset(match), "the text of one option")
    return NOTHING


INVALID = Declared(frozenset(), "the letter is none of the options")
Claim = tuple[int, Declared]


def _cued(reply: str, labels: str, texts: tuple[str, ...]) -> Iterator[Claim]:
    text = reply.translate(PLAIN)
    marks = list(CUE.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)][: len(marks)]
    for match, end in list(zip(marks, ends, strict=True))[-MAX_CLAIMS:]:
        segment = plain(text[match.end() : min(end, match.end() + 400)]).lstrip(" :\n\t-=>")
        yield match.start(), _segment(segment.partition("\n")[0], labels, texts)
    stripped = MARKUP.sub(lambda m: " " * len(m.group()), text)
    for match in list(called_right(labels).finditer(stripped))[-MAX_CLAIMS:]:
        label = match.group(1) or match.group(2)
        at = match.start(1) if match.group(1) else match.start(2)
        if not _refused(stripped, at):
            yield at, Declared(frozenset(label), "an option called right")


def _boxed(reply: str, labels: str, texts: tuple[str, ...]) -> Iterator[Claim]:
    for run in box_runs(reply)[-MAX_CLAIMS:]:
        read = [_in_box(unboxed(box.content), labels, texts) for box in run[-MAX_CLAIMS:]]
        if any(read):
            where = "the box" if len(run) == 1 else "several boxes"
            yield run[-1].start, Declared(frozenset("".join(read)), where)


def _in_box(content: str, labels: str, texts: tuple[str, ...]) -> str:
    text = plain(content)
    label = _only_label(text, labels, texts) or _run(text, labels) or by_text(text, texts, labels)
    if not label and texts:
        label = _by_value(content, texts, labels)
    if not label and len(text) < 40:
        label = "".join(sorted(_segment(text, labels, texts).labels))
    return label


def _segment(segment: str, labels: str, texts: tuple[str, ...]) -> Declared:
    """What stands behind a cue, up to the end of its line."""
    segment = segment.translate(NATIVE) if NATIVE_LETTER.match(segment) else segment
    if label := _only_label(segment.rstrip(" .!"), labels, texts):
        return Declared(frozenset(label), "behind a cue")
    if match := by_text(segment, texts, labels):
        return Declared(frozenset(match), "the option's text behind a cue")
    if run := _run(segment.strip(" .!()[]"), labels):
        return Declared(frozenset(run), "several options behind a cue")
    sentence = SENTENCE.split(segment, maxsplit=1)[0] + " "
    found = [m for m in standing(labels).finditer(sentence) if _is_label(m, sentence, texts, labels)]
    found = [m for m in found if not _negated(m, sentence)]
    if found:
        first, given = found[0], found[0].group(1)
        listed = [given]
        at = first.end()
        for other in found[1:]:
            if TIES.match(_without_text(sentence[at : other.start()], texts, labels, listed[-1])):
                listed.append(other.group(1))
                at = other.end()
        if len(set(listed)) > 1 or len({m.group(1) for m in found}) == 1 or _leads(sentence[: first.start()]):
            return Declared(frozenset(listed), "behind a cue" if len(set(listed)) == 1 else "several options")
        return Declared(frozenset(m.group(1) for m in found), "several options")
    if re.match(r"[(\[]?[A-Z][)\].,:]?(?:\s|$)", segment) and segment[:1] not in labels and segment[:2] != "I ":
        return INVALID
    if match := by_text(segment, texts, labels, search=True):
        return Declared(frozenset(match), "the option's text behind a cue")
    return NOTHING


def _leads(before: str) -> bool:
    """Only filler words between the cue and its label: "for sure", "option", "clearly"."""
    return len(before.split()) <= 6 and not re.search(r"[,;]", before)


def _is_label(match: re.Match[str], sentence: str, texts: tuple[str, ...], labels: str) -> bool:
    """A and I are also words: they count only where no sentence goes on with them."""
    if match.group(1) not in "AI":
        return True
    rest = sentence[match.end() :]
    word = re.match(r" ([a-z][\w']*)", rest)
    if word is None or word.group(1) in GOES_ON:
        return True
    option = texts[labels.index(match.group(1))] if texts else ""
    return bool(option) and _text_key(rest).startswith(_text_key(option))


def _negated(match: re.Match[str], sentence: str) -> bool:
    return _refused(sentence, match.start()) or bool(NEGATED_AFTER.match(sentence[match.end() :]))


def _refused(text: str, at: int) -> bool:
    """Whether a negation in the same sentence leads up to this place."""
    before = re.split(r"[.!?;]\s", text[max(0, at - 60) : at])[-1]
    return NEGATED_BEFORE.search(before) is not None


def _without_text(between: str, texts: tuple[str, ...], labels: str, label: str) -> str:
    """The gap between two labels without the first one's own option text: (A) sugar and (B)."""
    option = _text_key(texts[labels.index(label)]) if texts else ""
    key = _text_key(between)
    return key[len(option) :] if option and key.startswith(option) else between


def _only_label(text: str, labels: str, texts: tuple[str, ...]) -> str:
    """The label if the text is nothing but a label, or a label and its own option text."""
    match = label_first(labels).match(text)
    if match is None:
        return ""
    label, rest = match.group(1).upper(), text[match.end() :].strip(" -\u2013\u2014:.)")
    if not rest:
        return label
    delimited = re.search(r"[)\].:,]\s*$", match.group()) or match.group(1).isupper()
    option = _text_key(texts[labels.index(label)]) if texts else ""
    return label if delimited and option and _text_key(rest) == option else ""


def _run(text: str, labels: str) -> str:
    """AC, A,C or A B C D: labels and nothing else, each once."""
    letters = re.sub(r"[\s,;/&+|]|and|or", "", text)
    distinct = len(set(letters)) == len(letters)
    return letters if len(letters) > 1 and distinct and set(letters) <= set(labels) else ""


def by_text(text: str, texts: tuple[str, ...], labels: str, *, search: bool = False) -> str:
    """The one option whose text this is; with `search`, whose text is in it (the longest where they overlap)."""
    key = _text_key(text)
    keys = [_text_key(option) for option in texts]
    exact = [i for i, option in enumerate(keys) if option and option == key]
    if exact or not search:
        return labels[exact[0]] if len(exact) == 1 else ""
    spans = []
    for i, option in enumerate(keys):
        if len(option) < 3 or not re.search(r"[^\W\d_]{2}", option):
            continue
        spans += [(m.start(), m.end(), i) for m in re.finditer(rf"(?<!\w){re.escape(option)}(?!\w)", key)]
    kept = [s for s in spans if not any(o != s and o[0] <= s[0] and s[1] <= o[1] and o[2] != s[2] for o in spans)]
    found = {i for start, _, i in kept if not _refused(key, start)}
    return labels[found.pop()] if len(found) == 1 else ""


def _by_value(content: str, texts: tuple[str, ...], labels: str) -> str:
    """The one option with the value of the box: 0.5 for the option 1/2."""
    if not isinstance(answer(content).node, Scalar):
        return ""
    readable = [i for i, option in enumerate(texts) if isinstance(answer(option).node, Scalar)]
    same = [i for i in readable if compare(texts[i], content).same]
    return labels[same[0]] if len(same) == 1 else ""
