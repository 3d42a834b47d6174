"""Writing completions: what is asked of the engine, going on after an interruption, memory that runs out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from slmgrpo.errors import RunError
from slmgrpo.eval.complete import EVAL_KEY, Ask, Problem, complete, complete_within_memory
from slmgrpo.eval.models import Bench
from slmgrpo.eval.targets import parse
from slmgrpo.recipe import Sampling
from slmgrpo.rollout import kv
from slmgrpo.rollout.engine import Completion, Request
from slmgrpo.rollout.hf import HfEngine


class Echo:
    """Answers with the prompt and the member's number; out of memory where it holds above `limit` tokens."""

    name = "echo"
    end_ids = frozenset({0})
    context = None

    def __init__(self, tokens: int = 10**9, limit: int = 10**9, leave_out: int = 0, first: int = 2) -> None:
        self.tokens, self.limit, self.leave_out, self.first = tokens, limit, leave_out, first
        self.asked: list[Request] = []

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        assert step == EVAL_KEY
        self.asked += requests
        rows = [(request, member) for request in requests for member in request.members]
        for count, (request, member) in enumerate(rows[: len(rows) - self.leave_out]):
            if (
                count >= self.first
                and min(self.tokens, len(rows) * (len(request.prompt_ids) + request.max_tokens)) > self.limit
            ):
                raise torch.OutOfMemoryError("CUDA out of memory")
            ids = (*request.prompt_ids, 100 * request.greedy + member, 0)
            yield Completion(request.index, member, ids, (0.0,) * len(ids), "stop")

    def sync(self, step: int) -> None: ...

    def under(self, settings: Sampling, seed: int, *, max_batch_tokens: int) -> Echo:
        return self

    def close(self) -> None: ...


class Numbers:
    def decode(self, ids: Any, skip_special_tokens: bool) -> str:
        return " ".join(map(str, ids))


def problems(count: int) -> list[Problem]:
    return [Problem({"id": f"p{i}", "question": "?"}, (7,) * (i + 1), "", ()) for i in range(count)]


def test_drawn_and_greedy_completions_come_once_each_without_their_end_token() -> None:
    engine = Echo()
    found = list(complete(problems(2), Ask(2, True, 5), engine=engine, tokenizer=Numbers()))
    assert {one.key: one.text for one in found} == {
        ("p0", 0, True): "7 100",
        ("p0", 0, False): "7 0",
        ("p0", 1, False): "7 1",
        ("p1", 0, True): "7 7 100",
        ("p1", 0, False): "7 7 0",
        ("p1", 1, False): "7 7 1",
    }
    assert [len(request.prompt_ids) for request in engine.asked] == [2, 2, 1, 1]


def test_what_is_done_is_not_asked_for_again() -> None:
    engine = Echo()
    done = {("p0", 0, False), ("p0", 1, False), ("p1", 1, False)}
    found = list(complete(problems(2), Ask(2, False, 5), engine=engine, tokenizer=Numbers(), done=done))
    assert [one.key for one in found] == [("p1", 0, False)]
    assert list(complete(problems(1), Ask(2, False, 5), engine=engine, tokenizer=Numbers(), done=done)) == []


def test_an_engine_that_leaves_completions_out_is_an_error() -> None:
    with pytest.raises(RunError, match="left 1 completions out"):
        list(complete(problems(2), Ask(1, False, 5), engine=Echo(leave_out=1), tokenizer=Numbers()))


def test_out_of_memory_halves_the_batch_says_so_and_goes_on() -> None:
    notes: list[str] = []
    made: list[int] = []

    def make(tokens: int) -> Echo:
        made.append(tokens)
        return Echo(tokens, limit=30)

    found = list(
        complete_within_memory(
            problems(4), Ask(4, False, 6), make_engine=make, tokenizer=Numbers(), note=notes.append, batch_tokens=100
        )
    )
    assert sorted(one.key for one in found) == sorted((f"p{i}", m, False) for i in range(4) for m in range(4))
    assert made == [100, 50, 25]
    assert notes[0] == "out of memory: going on with 5 completions at a time"


def test_the_hf_engine_goes_on_with_half_where_its_cache_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(parse("tiny").base, [])
    bounded = kv.RowKeys.reserve

    def reserve(self: kv.RowKeys, columns: int, *, live: int) -> None:
        if self.rows > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        bounded(self, columns, live=live)

    def run() -> dict[Any, tuple[int, ...]]:
        asked = [Problem({"id": f"p{i}", "question": "?"}, (1, 5, 6, 7 + i), "", ()) for i in range(6)]
        found = complete_within_memory(
            asked,
            Ask(2, False, 8),
            make_engine=lambda n: HfEngine(bench.model, bench.tokenizer, Sampling(), 0, max_batch_tokens=n),
            tokenizer=bench.tokenizer,
            note=notes.append,
        )
        return {one.key: one.token_ids for one in found}

    notes: list[str] = []
    whole = run()
    monkeypatch.setattr(kv.RowKeys, "reserve", reserve)
    assert run() == whole
    assert [note.split(": ")[1] for note in notes] == [f"going on with {n} completions at a time" for n in (6, 3)]


def test_out_of_memory_with_a_single_completion_is_the_end() -> None:
    with pytest.raises(RunError, match="one completion of 7 tokens at a time"):
        list(
            complete_within_memory(
                problems(1),
                Ask(4, False, 6),
                make_engine=lambda tokens: Echo(tokens, limit=0, first=0),
                tokenizer=Numbers(),
                note=lambda text: None,
            )
        )


def test_other_errors_of_the_engine_are_not_swallowed() -> None:
    class Faulty(Echo):
        def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
            raise RuntimeError("a bug")
            yield

    with pytest.raises(RuntimeError, match="a bug"):
        list(
            complete_within_memory(
                problems(1),
                Ask(1, False, 6),
                make_engine=lambda tokens: Faulty(),
                tokenizer=Numbers(),
                note=lambda text: None,
            )
        )
