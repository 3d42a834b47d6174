"""Which option a reply declares: cues in many languages, boxes, tags, the option's own text; lists and negations."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slmgrpo.rewards.cues import (
    CUE,
    DENIED,
    GOES_ON,
    MARKUP,
    NATIVE,
    NATIVE_LETTER,
    NEGATED_AFTER,
    NEGATED_BEFORE,
    OTHERWISE,
    PLAIN,
    QUESTION,
    SENTENCE,
    SUPPOSED,
    TAKEN_BACK,
    TIES,
    UNIT,
    called_right,
    conditions,
    corrections,
    hedges,
    label_first,
    pointed_at,
    standing,
)
from slmgrpo.rewards.equal import answer, compare
from slmgrpo.rewards.extract import box_runs, unboxed
from slmgrpo.rewards.nodes import Scalar

MAX_TAIL = 20_000
"""Only the end of a longer reply is searched: an answer comes last."""

MAX_CLAIMS = 20
"""Of each kind; the last one counts, those before it only where it declares nothing."""

MAX_SPANS = 200
"""Mentions of options that are compared with each other; the last ones."""


@dataclass(frozen=True, slots=True)
class Declared:
    """labels: what the reply commits to, several where it lists several; empty where nothing was declared."""

    labels: frozenset[str]
    where: str


NOTHING = Declared(frozenset(), "no option is declared")


def labels_of(choices: Sequence[object] | None) -> str:
    """A, B, C..., at most 26: an option beyond Z has no letter and cannot be judged."""
    return string.ascii_uppercase[: len(choices)] if choices else "ABCDEFGHIJ"


def texts_of(choices: Sequence[object] | None) -> tuple[str, ...]:
    return tuple(str(choice) for choice in (choices or ())[: len(string.ascii_uppercase)])


def plain(text: str) -> str:
    """Without markup; full-width and native letters become A, B, C."""
    return MARKUP.sub("", text.translate(PLAIN)).strip()


def _text_key(text: str) -> str:
    text = re.sub(r"\\(?:,|;|!| |text|mathrm|left|right)", "", plain(text)).casefold()
    return " ".join(re.sub(r"(?<!\d)[.,;:!?]+|[.,;:!?]+(?!\d)|^\W*(?:an?|the)\s", " ", text).split())


def declared(reply: str, choices: Sequence[object] | None) -> Declared:
    """The last option that the reply commits to. `reply` is the part behind the thinking."""
    reply = reply[-MAX_TAIL:]
    labels, texts = labels_of(choices), texts_of(choices)
    opened = reply.rfind("<answer>")
    if opened >= 0:
        inside = reply[opened + len("<answer>") :].partition("</answer>")[0]
        found = _read(inside, labels, texts)
        return Declared(found.labels, f"<answer>: {found.where}") if found.labels else NOTHING
    return _read(reply, labels, texts)


INVALID = Declared(frozenset(), "the letter is none of the options")
TAKEN = Declared(frozenset(), "the declared option is taken back")
ASKED = Declared(frozenset(), "the option is only asked about")


@dataclass(frozen=True, slots=True)
class Claim:
    """says: one declaration, at a place in the reply. rest: the text behind it. denied: labels that it rules out.

    second: it says what holds otherwise, so the claim before it holds too.
    """

    at: int
    says: Declared
    rest: str = ""
    denied: frozenset[str] = frozenset()
    second: bool = False


def _read(reply: str, labels: str, texts: tuple[str, ...]) -> Declared:
    text = re.sub(r"\n{3,}", "\n\n", re.sub(r"[^\S\n]{2,}", " ", reply.translate(PLAIN)))
    stripped = MARKUP.sub(lambda m: " " * len(m.group()), text)
    claims = [
        *_cued(text, labels, texts),
        *_found(called_right(labels), stripped, "an option called right"),
        *_boxed(text, labels, texts),
    ]
    if said := _last(sorted(claims, key=lambda claim: claim.at), labels, texts):
        return said
    lines = [line.strip() for line in plain(reply).splitlines() if line.strip()]
    for line, beside, rest in ((lines[-1:], lines[-2:-1], []), (lines[:1], lines[1:2], lines[1:])):
        label = "".join(_bare(text, labels, texts) for text in line)
        neighbour = "".join(_bare(text, labels, texts) for text in beside)
        if label and neighbour in ("", label):
            alone = Declared(frozenset(label), "a line that is only the option")
            return _settled(Claim(0, alone, "\n" + "\n".join(rest)), labels, texts)
    if said := _last(list(_found(pointed_at(labels), stripped, "an option that is pointed at")), labels, texts):
        return said
    if not claims and (match := by_text(plain(reply), texts, labels, search=True)):
        return Declared(frozenset(match), "the text of one option")
    return NOTHING


def _last(claims: list[Claim], labels: str, texts: tuple[str, ...]) -> Declared | None:
    """What the last claim says that declares anything, unless a later one denies it."""
    denied: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()
    for claim in reversed(claims):
        if claim.says.labels:
            if claim.says.labels <= denied:
                return TAKEN
            if claim.second:
                joined |= claim.says.labels
                continue
            said = _settled(claim, labels, texts)
            return Declared(said.labels | joined, "several options") if joined - said.labels else said
        if claim.says is INVALID:
            return INVALID
        denied |= claim.denied
    return Declared(joined, "behind a cue") if joined else None


def _settled(claim: Claim, labels: str, texts: tuple[str, ...]) -> Declared:
    """What is left of a claim after the text behind it: questions, corrections, second thoughts, another's text."""
    given, rest = claim.says.labels, claim.rest
    if len(given) == 1 and texts:
        rest, other = _own_text(rest, texts, labels, *given)
        if other:
            return Declared(given | {other}, "a letter with the text of another option")
    if QUESTION.match(rest):
        return ASKED
    hits = [m for m in corrections(labels).finditer(rest) if not _aside(rest, m.start(m.lastindex or 0))]
    if hits:
        new = frozenset(hits[-1][hits[-1].lastindex or 0])
        if new <= given and len(given) == 1:
            return claim.says
        return Declared(new, "a correction") if not QUESTION.match(rest[hits[-1].end() :]) else ASKED
    if TAKEN_BACK.match(rest) or (claim.rest[:1] != "\n" and NEGATED_AFTER.match(claim.rest)):
        return TAKEN
    hits = [m for m in hedges(labels).finditer(rest) if not _aside(rest, m.start(m.lastindex or 0), m.start())]
    hits += conditions(labels).finditer(rest)
    more = given.union(m[m.lastindex or 0] for m in hits)
    return Declared(more, "several options") if more - given else claim.says


def _own_text(rest: str, texts: tuple[str, ...], labels: str, label: str) -> tuple[str, str]:
    """What stands behind the option's own text, and the other option whose text alone stands there instead."""
    start = re.match(r"[ \t)\].:,(\u2013\u2014-]*", rest)
    begin = start.end() if start else 0
    after, own = rest[begin:], plain(texts[labels.index(label)]).strip(" .")
    if own and after[: len(own)].casefold() == own.casefold() and not after[len(own) : len(own) + 1].isalnum():
        return after[len(own) :], ""
    phrase = re.split(r"[.!;](?=\s|$)|[)\]\n]", after, maxsplit=1)[0] if begin else ""
    other = by_text(phrase, texts, labels) if len(phrase.strip()) > 1 else ""
    return rest, other if other != label and _text_key(phrase) != _text_key(own) else ""


def _aside(text: str, at: int, start: int | None = None) -> bool:
    """Whether the label at `at`, in a phrase from `start`, is negated, supposed or said by someone else."""
    begin = at if start is None else start
    before = re.split(r"[.!?;\n]\s*", text[max(0, begin - 90) : begin])[-1]
    if SUPPOSED.search(before) or _said_by_others(before):
        return True
    return _refused(text, at) or NEGATED_AFTER.match(text[at + 1 : at + 60]) is not None


def _said_by_others(before: str) -> bool:
    """Some would think it is D."""
    start = re.split(r"(?:\bit\b|\bthat\b|\bthe\b)", before)
    return any(SUPPOSED.search(" ".join(start[:i])) for i in range(1, len(start)))


def _found(pattern: re.Pattern[str], text: str, where: str) -> Iterator[Claim]:
    for match in list(pattern.finditer(text))[-MAX_CLAIMS:]:
        at = match.start(match.lastindex or 0)
        before = re.split(r"[.!?;]\s|\n", text[max(0, match.start() - 90) : match.start()])[-1]
        label = frozenset(match[match.lastindex or 0])
        if DENIED.search(before):
            yield Claim(at, NOTHING, denied=label)
        elif not _refused(text, at) and not SUPPOSED.search(before):
            asked = re.match(r"[^.!?\n]{0,25}[?]", text[match.end() :])
            yield Claim(at, ASKED if asked else Declared(label, where), text[match.end() :])


def _cued(text: str, labels: str, texts: tuple[str, ...]) -> Iterator[Claim]:
    marks = list(CUE.finditer(text))
    ends = [*(mark.start() for mark in marks[1:]), len(text)][: len(marks)]
    for match, end in list(zip(marks, ends, strict=True))[-MAX_CLAIMS:]:
        segment = plain(text[match.end() : min(end, match.end() + 400)]).lstrip(" :\n\t-=>").partition("\n")[0]
        says, at, denied = _segment(segment, labels, texts)
        before = MARKUP.sub(" ", text[max(0, match.start() - 90) : match.start()])
        before = re.split(r"[.!?;\n]\s", before)[-1]
        if DENIED.search(before):
            yield Claim(match.start(), NOTHING, denied=says.labels)
        elif SUPPOSED.search(before):
            yield Claim(match.start(), NOTHING)
        else:
            rest = plain(text[match.end() :]).lstrip(" :\n\t-=>")[at:]
            yield Claim(match.start(), says, rest, denied, OTHERWISE.search(before) is not None)


def _boxed(text: str, labels: str, texts: tuple[str, ...]) -> Iterator[Claim]:
    for run in box_runs(text)[-MAX_CLAIMS:]:
        read = [_in_box(unboxed(box.content), labels, texts) for box in run[-MAX_CLAIMS:]]
        if any(read):
            where = "the box" if len(run) == 1 else "several boxes"
            yield Claim(run[-1].start, Declared(frozenset("".join(read)), where), MARKUP.sub("", text[run[-1].end :]))


def _in_box(content: str, labels: str, texts: tuple[str, ...]) -> str:
    text = plain(content)
    label = _only_label(text, labels, texts) or _run(text, labels) or by_text(text, texts, labels)
    if not label and texts:
        label = _by_value(content, texts, labels)
    if not label and len(text) < 40:
        says, at, _ = _segment(text, labels, texts)
        label = "".join(sorted(_settled(Claim(0, says, text[at:]), labels, texts).labels))
    return label


def _segment(segment: str, labels: str, texts: tuple[str, ...]) -> tuple[Declared, int, frozenset[str]]:
    """What stands behind a cue, up to the end of its line; where its label ends; the labels that it denies."""
    none: frozenset[str] = frozenset()
    segment = segment.translate(NATIVE) if NATIVE_LETTER.match(segment) else segment
    segment = re.sub(r"^\(?[a-z](?=[),.;:](?:\s|$))", lambda m: m.group().upper(), segment, count=1)
    whole = len(segment)
    if label := _only_label(segment.strip(" .!'"), labels, texts):
        return Declared(frozenset(label), "behind a cue"), whole, none
    if match := by_text(segment, texts, labels):
        return Declared(frozenset(match), "the option's text behind a cue"), whole, none
    if run := _run(segment.strip(" .!()[]"), labels):
        return Declared(frozenset(run), "several options behind a cue"), whole, none
    sentence = SENTENCE.split(segment, maxsplit=1)[0] + " "
    found = [m for m in standing(labels).finditer(sentence) if _is_label(m, sentence, texts, labels)]
    denied = frozenset(m.group(1) for m in found if _negated(m, sentence))
    found = [m for m in found if not _negated(m, sentence)]
    if found:
        first, given = found[0], found[0].group(1)
        listed = [given]
        at = first.end()
        for other in found[1:]:
            between = _without_text(sentence[at : other.start()], texts, labels, listed[-1])
            if TIES.match(between) and not _goes_on(between, sentence[other.end() :]):
                listed.append(other.group(1))
                at = other.end()
        before = re.sub(r"[\s(\[,-]+(?:option|choice|letter|i\.e\.,?)?[\s(\[,-]*$", "", sentence[: first.start()])
        named = by_text(before, texts, labels)
        if named and named != given:
            return Declared(frozenset((named, *listed)), "a letter with the text of another option"), at, denied
        if len(set(listed)) > 1 or len({m.group(1) for m in found}) == 1 or _leads(sentence[: first.start()]):
            where = "behind a cue" if len(set(listed)) == 1 else "several options"
            return Declared(frozenset(listed), where), at, denied
        return Declared(frozenset(m.group(1) for m in found), "several options"), at, denied
    if re.match(r"[(\[]?[A-Z][)\].,:]?(?:\s|$)", segment) and segment[:1] not in labels and segment[:2] != "I ":
        return INVALID, whole, denied
    if match := by_text(segment, texts, labels, search=True):
        return Declared(frozenset(match), "the option's text behind a cue"), len(sentence), denied
    return NOTHING, whole, denied


def _goes_on(between: str, after: str) -> bool:
    """Only a comma, and a new clause with the next label as its subject: C, A is a solid."""
    verb = r"\s+(?:is|are|was|does|has|would|can|could|will|must|being)\s+"
    clause = rf"{verb}(?!also|equally|possible|plausible|correct|right)"
    return not between.strip(" ,;") and re.match(clause, after) is not None


def _bare(line: str, labels: str, texts: tuple[str, ...]) -> str:
    """The label of a line that has nothing else: C!, 'C', : C."""
    return _only_label(line.strip(" .!:'"), labels, texts)


def _leads(before: str) -> bool:
    """Only filler words between the cue and its label: "for sure", "option", "clearly"."""
    return len(before.split()) <= 6 and not re.search(r"[,;]", before)


def _is_label(match: re.Match[str], sentence: str, texts: tuple[str, ...], labels: str) -> bool:
    """Not a unit: 20 C. A and I are also words: they count only where no sentence goes on with them."""
    if UNIT.search(sentence[max(0, match.start() - 16) : match.start()]):
        return False
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
    spans = sorted(spans)[-MAX_SPANS:]
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
