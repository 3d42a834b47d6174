"""Advantages: TRL's scalings on known numbers, exact silence, and rows that could not be judged."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slmgrpo.errors import RunError
from slmgrpo.trainer.advantages import advantages, has_spread

REWARD = st.one_of(st.none(), st.floats(-10, 10, allow_nan=False), st.sampled_from([0.0, 1.0, 0.7]))


def test_group_scaling_divides_by_the_groups_deviation() -> None:
    [group] = advantages([[1.0, 0.0, 0.0, 0.0]], "group")
    assert group == pytest.approx([0.75 / 0.5001, *[-0.25 / 0.5001] * 3])


def test_batch_scaling_divides_by_the_deviation_of_all_rewards() -> None:
    first, second = advantages([[1.0, 0.0], [3.0, 2.0]], "batch")
    deviation = math.sqrt(5 / 3) + 1e-4
    assert first == pytest.approx([0.5 / deviation, -0.5 / deviation])
    assert second == pytest.approx(first)


def test_no_scaling_subtracts_the_mean_alone() -> None:
    assert advantages([[1.0, 0.0], [5.0, 2.0]], "none") == [[0.5, -0.5], [1.5, -1.5]]


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_without_spread_is_exactly_silent(scale: str) -> None:
    rewards = [[0.7] * 8, [0.1 + 0.2, 0.3] * 4, [None] * 8, [None] * 7 + [1.0], [0.0, 1.0] * 4]
    result = advantages(rewards, scale)  # type: ignore[arg-type]
    assert result[:4] == [[0.0] * 8] * 4
    assert all(value != 0 for value in result[4])


def test_rows_without_a_verdict_leave_the_statistics() -> None:
    with_none, without = advantages([[1.0, None, 0.0], [1.0, 0.0]], "group")
    assert [with_none[0], with_none[2]] == without
    assert with_none[1] == 0.0
    assert advantages([[1.0, None, 0.0]], "batch") == advantages([[1.0, None, 0.0]], "group")


def test_a_reward_that_is_no_number_stops_the_run() -> None:
    with pytest.raises(RunError, match="prompt 1"):
        advantages([[0.0, 1.0], [math.nan, 1.0]], "group")


@given(st.lists(st.lists(REWARD, min_size=2, max_size=6), min_size=1, max_size=5))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order(rewards: list[list[float | None]]) -> None:
    for scale in ("group", "batch", "none"):
        for group, result in zip(rewards, advantages(rewards, scale), strict=True):
            assert sum(result) == pytest.approx(0, abs=1e-6 * max(1, *map(abs, result)))
            assert any(result) == has_spread(group)
            pairs = [(r, a) for r, a in zip(group, result, strict=True) if r is not None]
            assert all(a <= b for (x, a) in pairs for (y, b) in pairs if x < y)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_advantages_equal_trls_formula(scale: str) -> None:
    """TRL 1.15, GRPOTrainer._generate_and_score_completions, sum_then_normalize; its nanstd has a float32 factor."""
    import torch
    from trl.trainer.utils import nanstd

    rewards = [[1.0, 0.0, None, 0.5], [0.0, 0.25, 2.0, 1.0], [None, None, 1.0, 0.0]]
    r = torch.tensor([[math.nan if x is None else x for x in group] for group in rewards], dtype=torch.float64)
    deviation = nanstd(r, dim=1)[:, None] if scale == "group" else nanstd(r)
    expected = torch.nan_to_num((r - torch.nanmean(r, dim=1, keepdim=True)) / (deviation + 1e-4), nan=0.0)
    assert torch.allclose(torch.tensor(advantages(rewards, scale), dtype=torch.float64), expected, rtol=1e-6)  # type: ignore[arg-type]
