"""Every loss against TRL's own, and what makes it independent of micro-batches, ranks and dropped rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl_oracle import MAX_TOKENS, Answer, Rows, ask_trl, make_trainer

from slmgrpo.recipe import Loss
from slmgrpo.trainer.losses import (
    LossBatch,
    add_stats,
    entropy_threshold,
    high_entropy_mask,
    loss_mask,
    mean_stats,
    norms_of,
    policy_loss,
    why_silent_rows_run,
)

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
AXES: dict[str, tuple[Any, ...]] = {
    "importance_sampling_level": ("token", "sequence"),
    "beta": (0.0, 0.05),
    "mask_truncated_completions": (False, True),
    "sampling_correction": ("none", "bypass", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "off_policy_mask_threshold": (None, 0.05),
    "clips": ((0.2, None, None), (0.2, 0.28, None), (0.1, 0.3, 1.4)),
    "entropy": ((0.0, 1.0), (0.01, 1.0), (0.0, 0.4), (0.01, 0.4)),
    "first_update": (True, False),
}
LENGTHS = [0, 6, 3, 1, 6, 2, 5, 4]


@pytest.fixture(scope="module")
def trainer() -> Any:
    return make_trainer()


def rows_of(seed: int, *, lengths: list[int] = LENGTHS, first_update: bool = False, silent: Iterable[int] = ()) -> Rows:
    """Random rows: log-probs around -1, the old, sampler's and reference policies near the present one."""
    noise = torch.Generator().manual_seed(seed)
    shape = (len(lengths), MAX_TOKENS)
    mask = (torch.arange(MAX_TOKENS)[None] < torch.tensor(lengths)[:, None]).double()
    log_probs = (-torch.rand(shape, generator=noise, dtype=torch.float64) * 2 - 0.05) * mask

    def near(scale: float) -> Tensor:
        return (log_probs + scale * torch.randn(shape, generator=noise, dtype=torch.float64)) * mask

    advantages = torch.randn(len(lengths), generator=noise, dtype=torch.float64)
    advantages[list(silent)] = 0.0
    old = near(0.3)
    sampler = near(0.7)
    sampler[3, 0] = torch.nan  # the engine could not say
    return Rows(
        log_probs=log_probs,
        entropies=torch.rand(shape, generator=noise, dtype=torch.float64) * 2,
        lengths=lengths,
        truncated=[length == MAX_TOKENS for length in lengths],
        advantages=advantages,
        old=None if first_update else old,
        sampler=sampler,
        reference=near(0.5),
    )


def settings_of(loss_type: str, case: dict[str, Any]) -> Loss:
    epsilon, epsilon_high, delta = case["clips"]
    entropy_coef, top_entropy_quantile = case["entropy"]
    direct = {name: case[name] for name in AXES if name not in ("clips", "entropy", "first_update")}
    return Loss.model_validate(
        {
            "loss_type": loss_type,
            "epsilon": epsilon,
            "epsilon_high": epsilon_high,
            "delta": delta,
            "entropy_coef": entropy_coef,
            "top_entropy_quantile": top_entropy_quantile,
            **direct,
        }
    )


def grid(loss_type: str, share: float) -> Iterator[tuple[Loss, bool]]:
    """Every combination of the axes, or a random share of them that is always the same."""
    draw = random.Random(f"grid {loss_type}")
    for values in itertools.product(*AXES.values()):
        if draw.random() < share:
            case = dict(zip(AXES, values, strict=True))
            yield settings_of(loss_type, case), case["first_update"]


def ours(rows: Rows, settings: Loss, parts: list[list[int]] | None = None) -> Answer:
    """Our loss of the step, its rows in these micro-batches (None: all in one), and the gradient."""
    everything = list(range(len(rows.lengths)))
    log_probs = rows.log_probs.clone().requires_grad_()
    entropies = rows.entropies.clone().requires_grad_()
    whole = batch_of(rows, everything)
    trained = loss_mask(whole, settings)
    high = None
    if settings.top_entropy_quantile < 1:
        threshold = entropy_threshold(rows.entropies[trained.bool()], settings.top_entropy_quantile)
        high = high_entropy_mask(rows.entropies, trained, threshold)
    entropy_tokens = None if high is None else int(high.sum())
    norms = norms_of(rows.lengths, rows.truncated, settings, max_tokens=MAX_TOKENS, entropy_tokens=entropy_tokens)
    total = torch.zeros((), dtype=torch.float64)
    for part in parts or [everything]:
        batch = replace(batch_of(rows, part), high_entropy=None if high is None else high[part])
        total = total + policy_loss(log_probs[part], batch, settings, norms, entropies=entropies[part]).loss
    total.backward()
    assert log_probs.grad is not None
    zero = torch.zeros_like(rows.entropies)
    return Answer(total.item(), log_probs.grad, zero if entropies.grad is None else entropies.grad)


def batch_of(rows: Rows, part: list[int]) -> LossBatch:
    return LossBatch(
        mask=rows.mask[part],
        advantages=rows.advantages[part],
        truncated=torch.tensor(rows.truncated)[part],
        old=None if rows.old is None else rows.old[part],
        sampler=rows.sampler[part],
        reference=rows.reference[part],
    )


def assert_equal(mine: Answer, theirs: Answer, context: object, tolerance: float = 1e-9) -> None:
    assert mine.loss == pytest.approx(theirs.loss, rel=tolerance, abs=tolerance), context
    for a, b in ((mine.log_probs_grad, theirs.log_probs_grad), (mine.entropies_grad, theirs.entropies_grad)):
        difference = (a - b).norm() / b.norm().clamp(min=1e-12)
        assert difference <= tolerance, (context, difference)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_at_the_log_probs_are_trls(trainer: Any, loss_type: str) -> None:
    for seed, (loss, first_update) in enumerate(grid(loss_type, share=0.08)):
        rows = rows_of(seed, first_update=first_update)
        assert_equal(ours(rows, loss), ask_trl(trainer, rows, loss), loss)


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_gradients_at_the_log_probs_are_trls_on_the_full_grid(trainer: Any, loss_type: str) -> None:
    for seed, (loss, first_update) in enumerate(grid(loss_type, share=1.0)):
        rows = rows_of(seed, first_update=first_update)
        assert_equal(ours(rows, loss), ask_trl(trainer, rows, loss), loss)


@pytest.mark.parametrize("loss_type", [name for name in LOSS_TYPES if name != "bnpo"])
def test_gradients_are_trls_at_accumulation_four(trainer: Any, loss_type: str) -> None:
    for seed, (loss, first_update) in enumerate(grid(loss_type, share=0.1)):
        if loss.entropy_coef != 0 or loss.top_entropy_quantile < 1:
            continue  # TRL takes these per micro-batch
        rows = rows_of(seed, first_update=first_update)
        theirs = ask_trl(trainer, rows, loss, accumulation=4)
        assert_equal(ours(rows, loss), theirs, loss)
        assert_equal(ours(rows, loss, parts=[[6, 0, 3], [1, 2], [7, 5, 4]]), theirs, loss)


def test_float32_stays_within_the_promised_tolerance(trainer: Any) -> None:
    for loss_type in LOSS_TYPES:
        loss = Loss.model_validate({"loss_type": loss_type, "beta": 0.05})
        exact = rows_of(1)
        tensors = {name: value.float() for name, value in vars(exact).items() if isinstance(value, Tensor)}
        rows = replace(exact, **tensors)
        assert_equal(ours(rows, loss), ask_trl(trainer, rows, loss), loss, tolerance=1e-5)


def test_a_step_without_any_signal_has_no_gradient(trainer: Any) -> None:
    for loss_type in LOSS_TYPES:
        loss = Loss.model_validate({"loss_type": loss_type})
        rows = rows_of(2, silent=range(8))
        mine = ours(rows, loss)
        assert_equal(mine, ask_trl(trainer, rows, loss), loss)
        assert not mine.log_probs_grad.any()


CASES = st.fixed_dictionaries(
    {"loss_type": st.sampled_from(LOSS_TYPES)} | {name: st.sampled_from(values) for name, values in AXES.items()}
)


@settings(max_examples=150, deadline=None)
@given(
    case=CASES,
    lengths=st.lists(st.integers(0, MAX_TOKENS), min_size=4, max_size=8),
    labels=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    seed=st.integers(0, 1000),
)
def test_gradients_do_not_depend_on_micro_batches(
    case: dict[str, Any], lengths: list[int], labels: list[int], seed: int
) -> None:
    loss = settings_of(case["loss_type"], case)
    rows = rows_of(seed, lengths=lengths, first_update=case["first_update"])
    parts = [[row for row in range(len(lengths)) if labels[row] == label] for label in range(4)]
    assert_equal(ours(rows, loss, [part for part in parts if part]), ours(rows, loss), loss, tolerance=1e-11)


@settings(max_examples=100, deadline=None)
@given(case=CASES, silent=st.sets(st.integers(0, 7), max_size=8), seed=st.integers(0, 1000))
def test_dropping_silent_rows_is_exact_wherever_it_is_allowed(
    case: dict[str, Any], silent: set[int], seed: int
) -> None:
    loss = settings_of(case["loss_type"], case | {"beta": 0.0, "entropy": (0.0, 1.0)})
    assert why_silent_rows_run(loss, lora_dropout=0.0) is None
    rows = rows_of(seed, first_update=case["first_update"], silent=silent)
    run = [row for row in range(8) if row not in silent]
    if run:
        assert_equal(ours(rows, loss, [run]), ours(rows, loss), loss, tolerance=1e-11)


@pytest.mark.parametrize(
    ("changed", "dropout", "reason"),
    [
        ({"beta": 0.1}, 0.0, "beta > 0"),
        ({"entropy_coef": 0.01}, 0.0, "entropy_coef != 0"),
        ({"top_entropy_quantile": 0.5}, 0.0, "top_entropy_quantile < 1"),
        ({}, 0.1, "lora.dropout > 0"),
    ],
)
def test_silent_rows_run_where_they_change_the_gradient(changed: dict[str, float], dropout: float, reason: str) -> None:
    assert why_silent_rows_run(Loss.model_validate(changed), dropout) == reason


def test_padding_may_hold_anything_finite() -> None:
    for loss_type in LOSS_TYPES:
        loss = Loss.model_validate({"loss_type": loss_type, "beta": 0.05})
        rows = rows_of(5)
        junk = torch.where(rows.mask == 0, 3.0, 0.0)
        assert rows.old is not None
        dirty = replace(rows, old=rows.old + junk, sampler=rows.sampler - junk, reference=rows.reference + junk)
        assert_equal(ours(dirty, loss), ours(rows, loss), loss)


def test_stats_add_up_over_micro_batches_and_count_dropped_rows() -> None:
    loss = Loss.model_validate({"loss_type": "grpo", "beta": 0.05})
    rows = rows_of(3, silent=[2, 4])
    norms = norms_of(rows.lengths, rows.truncated, loss, max_tokens=MAX_TOKENS)

    def stats(parts: list[list[int]]) -> dict[str, float]:
        total: dict[str, Tensor] = {}
        for part in parts:
            result = policy_loss(
                rows.log_probs[part], batch_of(rows, part), loss, norms, entropies=rows.entropies[part]
            )
            add_stats(total, result.stats)
        return mean_stats(total, norms)

    whole, split = stats([list(range(8))]), stats([[5, 1], [0, 2, 3, 4], [6, 7]])
    assert split == pytest.approx(whole)
    assert set(whole) == {
        *("clip_low", "clip_high", "entropy_trained", "kl", "kl_k1", "kl_k2", "ratio", "ratio_max"),
        *("sampler_gap", "sampler_gap_max", "sampler_kl_k1", "sampler_kl_k2", "sampler_kl_k3", "sampling_weight"),
    }
    run = stats([[row for row in range(8) if row not in (2, 4)]])
    assert run["clip_high"] == pytest.approx(whole["clip_high"])
    assert 0 < whole["clip_low"] < 1


def test_stats_of_the_first_update_say_on_policy() -> None:
    rows = replace(rows_of(4, first_update=True), sampler=rows_of(4).log_probs)
    loss = Loss.model_validate({})
    norms = norms_of(rows.lengths, rows.truncated, loss, max_tokens=MAX_TOKENS)
    stats = mean_stats(policy_loss(rows.log_probs, batch_of(rows, list(range(8))), loss, norms).stats, norms)
    assert stats == pytest.approx(
        {"ratio": 1, "ratio_max": 1, "clip_low": 0, "clip_high": 0, "sampler_gap": 0, "sampler_gap_max": 0}
        | {"sampling_weight": 1, "sampler_kl_k1": 0, "sampler_kl_k2": 0, "sampler_kl_k3": 0}
    )
