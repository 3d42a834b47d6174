from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from slmgrpo.rollout.sampling import _mix, _mix_int, _signed, draw, row_key

LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.5, 0.0, -0.5, -1.0, -3.0, 1.9, 0.1, -0.2])
ROWS = 40_000


def many(logits: torch.Tensor, **filters: Any) -> torch.Tensor:
    """Tokens of many completions that differ in member and position."""
    keys = torch.tensor([row_key(7, 3, 11, member) for member in range(ROWS // 8)]).repeat(8)
    positions = torch.arange(8).repeat_interleave(ROWS // 8)
    return draw(logits.expand(ROWS, -1), keys, positions, **filters).token_ids


def expected(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The filters by their definition, on one row, by sorting."""
    p = (logits.double() / temperature).softmax(-1)
    if min_p:
        p = torch.where(p >= min_p * p.max(), p, 0.0)
    if 0 < top_k < len(p):
        p = torch.where(p >= p.sort(descending=True).values[top_k - 1], p, 0.0)
    if top_p < 1:
        p = p / p.sum()
        best = p.sort(descending=True).values
        kept = best[best.cumsum(0) - best < top_p]
        p = torch.where(p >= kept[-1], p, 0.0)
    return (p / p.sum()).numpy()


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6},
    {"top_k": 4},
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.25},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 7, "top_p": 0.9},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocabulary", [11, 128, 700])
def test_frequencies_are_those_of_the_filtered_distribution(filters: dict[str, Any], vocabulary: int) -> None:
    logits = torch.full((vocabulary,), -4.0)
    logits[torch.arange(11) * (vocabulary // 11)] = LOGITS
    probabilities = expected(logits, **filters)
    counts = torch.bincount(many(logits, **filters), minlength=vocabulary).numpy()
    assert counts[probabilities == 0].sum() == 0
    common = probabilities * ROWS >= 5
    seen, wanted = counts[common], probabilities[common] * ROWS
    if common.sum() < (probabilities > 0).sum():
        seen, wanted = [*seen, ROWS - seen.sum()], [*wanted, ROWS - wanted.sum()]
    if len(seen) > 1:
        assert chisquare(seen, wanted).pvalue > 1e-4


def test_neighbouring_keys_and_positions_are_independent() -> None:
    """Pairs of draws at successive positions, members, prompts, steps and seeds fall on a product table."""
    logits = torch.zeros(4)
    numbers = torch.arange(8_000)
    for vary in range(5):
        parts = [[7, 3, 11, 5] for _ in numbers]
        if vary < 4:
            for number, part in enumerate(parts):
                part[vary] = number
        keys = torch.tensor([row_key(*part) for part in parts])
        positions = numbers if vary == 4 else torch.zeros_like(numbers)
        tokens = draw(logits.expand(len(numbers), -1), keys, positions).token_ids
        pairs = torch.bincount(4 * tokens[:-1:2] + tokens[1::2], minlength=16).numpy()
        assert chisquare(pairs).pvalue > 1e-4


def test_log_probs_are_those_before_the_filters() -> None:
    logits = torch.randn(50, 3000, generator=torch.Generator().manual_seed(0)) * 3
    keys, positions = torch.arange(50), torch.zeros(50, dtype=torch.long)
    drawn = draw(logits, keys, positions, temperature=0.6, top_k=20, top_p=0.9, min_p=0.01)
    plain = (logits / 0.6).log_softmax(-1).gather(1, drawn.token_ids[:, None])[:, 0]
    torch.testing.assert_close(drawn.log_probs, plain, atol=5e-6, rtol=1e-5)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([5, 120, 300, 2000]), st.permutations(range(12)))
def test_a_draw_does_not_depend_on_the_other_rows(seed: int, vocabulary: int, order: list[int]) -> None:
    logits = torch.randn(12, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2
    keys = torch.tensor([row_key(seed, 0, 1, member) for member in range(12)])
    positions = torch.arange(12)
    for filters in FILTERS:
        together = draw(logits, keys, positions, **filters)
        shuffled = draw(logits[order], keys[order], positions[order], **filters)
        assert torch.equal(together.token_ids[order], shuffled.token_ids)
        alone = [draw(logits[i : i + 1], keys[i : i + 1], positions[i : i + 1], **filters) for i in order]
        assert torch.equal(torch.cat([d.token_ids for d in alone]), shuffled.token_ids)


def test_small_differences_of_the_logits_change_fewer_than_one_draw_in_a_thousand() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 50_000, generator=generator) * 3
    noisy = logits + 1e-4 * torch.randn(logits.shape, generator=generator)
    keys, positions = torch.arange(400), torch.zeros(400, dtype=torch.long)
    some: list[dict[str, Any]] = [{}, {"top_p": 0.95}, {"top_k": 50}, {"min_p": 0.02}]
    for filters in some:
        same = draw(logits, keys, positions, **filters).token_ids == draw(noisy, keys, positions, **filters).token_ids
        assert same.float().mean() >= 0.999


def test_greedy_rows_take_the_likeliest_token_and_others_draw() -> None:
    logits = LOGITS.expand(1000, -1)
    keys, positions = torch.arange(1000), torch.zeros(1000, dtype=torch.long)
    greedy = torch.arange(1000) < 500
    tokens = draw(logits, keys, positions, greedy=greedy).token_ids
    assert set(tokens[:500].tolist()) == {0}
    assert torch.equal(tokens[500:], draw(logits, keys, positions).token_ids[500:])


def test_unlikely_tokens_are_drawn_as_often_as_they_should() -> None:
    """A tail of 40,000 tokens that share a thousandth of the probability."""
    logits = torch.cat((torch.zeros(1), torch.full((40_000,), torch.tensor(0.001 / 40_000).log().item())))
    hits = 0
    for start in range(0, 60_000, 1000):
        tokens = draw(logits.expand(1000, -1), torch.arange(start, start + 1000), torch.zeros(1000, dtype=torch.long))
        hits += int((tokens.token_ids > 0).sum())
    assert 30 <= hits <= 95


@given(st.integers(0, 2**64 - 1))
def test_the_hash_on_tensors_is_the_hash_on_integers(z: int) -> None:
    assert _mix(torch.tensor([_signed(z)])).item() == _signed(_mix_int(z))


def test_a_key_fits_a_tensor_and_takes_any_prompt_key() -> None:
    keys = {row_key(42, step, prompt, 0) for step in range(50) for prompt in (0, 1, -1, 2**63, 2**64 - 2)}
    assert len(keys) == 250
    assert torch.tensor(sorted(keys)).dtype == torch.int64
