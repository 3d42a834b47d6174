"""Completions of problems as an engine writes them: greedy, drawn, cut at shorter budgets, within memory."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slmgrpo.data import prompt_key
from slmgrpo.errors import RunError
from slmgrpo.rewards.base import Reward
from slmgrpo.rollout.engine import Completion, Engine, Request, Writer

EVAL_KEY = 2**31 - 1
"""The step that keys the sampling noise: the same for every model and checkpoint, so that they compare."""
BATCH_TOKENS = 65536
"""Tokens of keys and values held at once, as long as memory does not run out."""

Key = tuple[str, int, bool]
"""(id of the problem, member, greedy) of a completion."""


@dataclass(frozen=True)
class Problem:
    """A row with its rendered prompt. also: rules that are reported and decide nothing."""

    row: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    prefill: str
    rules: tuple[Reward, ...]
    also: tuple[Reward, ...] = ()

    @property
    def id(self) -> str:
        return self.row["id"]

    @property
    def deciding(self) -> tuple[Reward, ...]:
        """The rules on correctness; where there is none, all."""
        return tuple(rule for rule in self.rules if rule.is_correctness) or self.rules


@dataclass(frozen=True)
class Written:
    """One completion of problem `id`. text: without the end token. budget: None for the longest.

    log_prob: sum over the sampled tokens, by the engine; NaN where it is not known.
    """

    id: str
    member: int
    greedy: bool
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    budget: int | None = None
    log_prob: float = math.nan

    @property
    def key(self) -> Key:
        return self.id, self.member, self.greedy

    def cut(self, budget: int, tokenizer: Any) -> Written | None:
        """What it would have been with fewer tokens; None where it had ended by then.

        Exact for greedy and drawn completions alike: a token's noise depends on its position, not on what follows.
        """
        if len(self.token_ids) <= budget:
            return None
        ids = self.token_ids[:budget]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return Written(self.id, self.member, self.greedy, ids, text, "length", budget)


@dataclass(frozen=True)
class Ask:
    """What is wanted of each problem: so many drawn completions, a greedy one, at most so many tokens."""

    samples: int
    greedy: bool
    max_tokens: int

    def keys(self, problem: Problem) -> list[Key]:
        drawn = [(problem.id, member, False) for member in range(self.samples)]
        return ([(problem.id, 0, True)] if self.greedy else []) + drawn


def complete(
    problems: Sequence[Problem], ask: Ask, *, engine: Writer, tokenizer: Any, done: Collection[Key] = ()
) -> Iterator[Written]:
    """Every completion that is not done yet, as it finishes; longest prompts first."""
    requests = list(_requests(problems, ask, done))
    missing = sum(len(request.members) for request in requests)
    for completion in engine.generate(requests, step=EVAL_KEY):  # of nothing too: vLLM starts on all ranks together
        missing -= 1
        yield _written(completion, problems[completion.index // 2], engine, tokenizer)
    if missing:
        raise RunError(f"the {engine.name} engine left {missing} completions out; run the same command again")


def complete_within_memory(
    problems: Sequence[Problem],
    ask: Ask,
    *,
    make_engine: Callable[[int], Engine],
    tokenizer: Any,
    note: Callable[[str], None],
    done: Collection[Key] = (),
    batch_tokens: int = BATCH_TOKENS,
) -> Iterator[Written]:
    """`complete` with engines by `make_engine(batch_tokens)`: where memory runs out the next one gets half as many."""
    finished = set(done)
    while True:
        engine = make_engine(batch_tokens)
        try:
            for one in complete(problems, ask, engine=engine, tokenizer=tokenizer, done=finished):
                finished.add(one.key)
                yield one
            return
        except Exception as error:
            if not _out_of_memory(error):
                raise
        finally:
            engine.close()
        left = list(_requests(problems, ask, finished))
        if not left:
            return
        longest = max(len(request.prompt_ids) + request.max_tokens for request in left)
        held = min(batch_tokens, longest * sum(len(request.members) for request in left))
        if held < 2 * longest:
            raise RunError(
                f"out of memory with one completion of {longest} tokens at a time; use a shorter --budgets or a "
                "smaller model"
            )
        batch_tokens = held // 2
        note(f"out of memory: going on with {batch_tokens // longest} completions at a time")
        _free_memory()


def _requests(problems: Sequence[Problem], ask: Ask, done: Collection[Key]) -> Iterator[Request]:
    """Odd indices are greedy ones."""
    for i in sorted(range(len(problems)), key=lambda i: -len(problems[i].prompt_ids)):
        problem = problems[i]
        missing = [key for key in ask.keys(problem) if key not in done]
        for greedy in (True, False):
            members = tuple(member for _, member, is_greedy in missing if is_greedy == greedy)
            if members:
                key = prompt_key(problem.id)
                yield Request(2 * i + greedy, problem.prompt_ids, members, key, ask.max_tokens, greedy=greedy)


def _written(completion: Completion, problem: Problem, engine: Writer, tokenizer: Any) -> Written:
    ids = completion.token_ids
    said = ids[:-1] if ids and ids[-1] in engine.end_ids else ids
    text = tokenizer.decode(said, skip_special_tokens=False)
    return Written(
        problem.id,
        completion.member,
        bool(completion.index % 2),
        ids,
        text,
        completion.finish_reason,
        log_prob=math.fsum(completion.log_probs),
    )


def _out_of_memory(error: Exception) -> bool:
    import torch

    causes = (error, error.__cause__)  # an engine may have said it in its own words
    return any(isinstance(e, torch.OutOfMemoryError) or "can't allocate memory" in str(e) for e in causes)


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
