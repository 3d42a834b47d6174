"""From prompts to groups with advantages: generate, grade beside generation, normalise."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from slmgrpo.data import prompt_key
from slmgrpo.errors import RunError, SlmgrpoError
from slmgrpo.recipe import Recipe
from slmgrpo.rewards.base import Reward, Verdict, gated, total
from slmgrpo.rewards.pool import Pool, Task
from slmgrpo.rollout.engine import Completion, Request, Writer
from slmgrpo.run import Clock

log = logging.getLogger("slmgrpo")

Progress = Callable[[str, int, int], None]
"""(what, done, of how many): for a person who waits."""


@dataclass(frozen=True)
class Prompted:
    """A data row with its rendered prompt and the rules that judge it."""

    row: dict[str, Any]
    prompt_ids: tuple[int, ...]
    prefill: str
    """What the template has already written of the model's turn; judged together with the completion."""
    rewards: tuple[Reward, ...]
    variants: tuple[Prompted, ...] = ()
    """One for each group member where members see different prompts (shuffled options)."""

    def of(self, member: int) -> Prompted:
        """What this member of the group sees."""
        return self.variants[member] if self.variants else self


@dataclass(frozen=True)
class Member:
    """One graded completion of a group."""

    completion: Completion
    text: str
    verdicts: dict[str, Verdict]
    reward: float | None

    @property
    def correct(self) -> bool:
        """Right by every rule that judges right or wrong."""
        judged = [v for v in self.verdicts.values() if v.status in ("correct", "wrong", "no_answer", "timeout")]
        return bool(judged) and all(v.status == "correct" for v in judged)


@dataclass(frozen=True)
class Group:
    """All members of one prompt, in member order."""

    prompted: Prompted
    members: tuple[Member, ...]


def generate_and_grade(
    prompts: Sequence[Prompted],
    *,
    engine: Writer,
    pool: Pool,
    tokenizer: Any,
    recipe: Recipe,
    step: int,
    group_size: int,
    clock: Clock,
    progress: Progress,
) -> list[Group]:
    """Write group_size completions a prompt; each is graded while the others are still being written."""
    size = group_size
    requests = [
        Request(i, p.of(members[0]).prompt_ids, members, prompt_key(p.row["id"]), recipe.sampling.max_tokens)
        for i, p in enumerate(prompts)
        for members in ([(member,) for member in range(size)] if p.variants else [tuple(range(size))])
    ]
    count = len(prompts) * size
    done: dict[int, tuple[Completion, str]] = {}
    for completion in _written(engine, requests, step):
        prompted = prompts[completion.index].of(completion.member)
        text = tokenizer.decode(_without_end(completion, engine.end_ids), skip_special_tokens=False)
        key = completion.index * size + completion.member
        done[key] = (completion, text)
        task = Task(
            key=key,
            rewards=prompted.rewards,
            prompt=str(prompted.row.get("question", "")),
            completion=prompted.prefill + text,
            completion_ids=completion.token_ids,
            columns=prompted.row,
        )
        pool.submit(task)
        progress("writing", len(done), count)
    clock.lap("generation")
    if len(done) != count:
        raise RunError(f"step {step + 1}: the {engine.name} engine returned {len(done)} of {count} completions")
    graded: dict[int, dict[str, Verdict]] = {}
    progress("grading", 0, count)
    for key, verdicts in pool.drain():
        graded[key] = verdicts
        progress("grading", len(graded), count)
    clock.lap("reward_wait")
    groups = []
    for i, prompted in enumerate(prompts):
        members = []
        for member in range(size):
            completion, text = done[i * size + member]
            verdicts = gated(graded[i * size + member], prompted.rewards)
            members.append(Member(completion, text, verdicts, total(verdicts, prompted.rewards)))
        groups.append(Group(prompted, tuple(members)))
    return groups


def _written(engine: Writer, requests: list[Request], step: int) -> Iterator[Completion]:
    """What the engine writes; whatever it dies of ends the run by name, and with advice where memory ran out."""
    try:
        yield from engine.generate(requests, step=step)
    except SlmgrpoError:
        raise
    except Exception as error:
        log.error("%s", traceback.format_exc())
        what = type(error).__name__
        reason = next(iter(str(error).strip().splitlines()), "")
        full = isinstance(error, MemoryError) or what == "OutOfMemoryError"
        advice = "; lower sampling.max_tokens or train.prompts_per_step in a new run" if full else ""
        raise RunError(
            f"step {step + 1}: the {engine.name} engine failed ({what}{': ' * bool(reason)}{reason}){advice}"
        ) from error


def _without_end(completion: Completion, end_ids: frozenset[int]) -> tuple[int, ...]:
    """Token ids without the end token that closed the completion: rules judge what was said."""
    ids = completion.token_ids
    return ids[:-1] if ids and ids[-1] in end_ids else ids
