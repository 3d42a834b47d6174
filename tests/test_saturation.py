"""Curves whose end is known, with noise: what the fits say of it, and where they must not say anything."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slmgrpo import saturation
from slmgrpo.saturation import outlook

STEPS = 40
CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "exponential": lambda t: 0.8 - 0.6 * np.exp(-t / 6),
    "sigmoid": lambda t: 0.3 + 0.5 / (1 + np.exp(-(t - 14) / 3)),
    "damped oscillator": lambda t: 0.8 - 0.6 * np.exp(-0.1 * t) * (np.cos(0.6 * t) + 0.1 / 0.6 * np.sin(0.6 * t)),
}


def noisy(curve: Callable[[np.ndarray], np.ndarray], seed: int, noise: float = 0.03) -> list[float]:
    t = np.arange(STEPS, dtype=float)
    return list(curve(t) + noise * np.random.default_rng(seed).normal(size=STEPS))


@pytest.mark.parametrize("name", CURVES)
def test_a_curve_that_has_ended_is_saturated_at_its_limit_and_its_kind_is_among_the_best(name: str) -> None:
    covered = 0
    for seed in range(6):
        found = outlook(noisy(CURVES[name], seed))
        assert found.verdict == "saturated", found.sentence
        own = next(fit for fit in found.fits if fit.name == name)
        assert own.aic - found.fits[0].aic <= saturation.AS_GOOD
        assert own.limit == pytest.approx(0.8, abs=0.05)
        covered += own.low <= 0.8 <= own.high
    assert covered >= 5


def test_a_line_has_no_limit_and_a_curve_that_is_half_way_is_never_called_saturated() -> None:
    for curve in (lambda t: 0.2 + 0.01 * t, lambda t: 0.9 - 0.7 * np.exp(-t / 40)):
        said = Counter(outlook(noisy(curve, seed)).verdict for seed in range(6))
        assert set(said) <= {"rising", "cannot tell", "saturating"}, said
    assert outlook(noisy(lambda t: 0.9 - 0.02 * t, 1, noise=0.005)).verdict in ("falling", "cannot tell")


def test_where_the_good_curves_disagree_it_cannot_tell() -> None:
    found = outlook(noisy(lambda t: 0.2 + 0.01 * t, 3))
    good = [fit for fit in found.fits if fit.aic - found.fits[0].aic <= saturation.AS_GOOD]
    assert {fit.limit is None for fit in good} == {True, False}
    assert found.verdict == "cannot tell" and "a line fits as well as" in found.sentence


def test_noise_around_a_level_is_flat_most_of_the_time() -> None:
    said = Counter(outlook(noisy(lambda t: 0.5 + 0 * t, seed)).verdict for seed in range(6))
    assert said["flat"] >= 4


@pytest.mark.parametrize("count", [0, 1, 3, saturation.ENOUGH - 1])
def test_too_few_values_are_not_fitted(count: int) -> None:
    found = outlook([0.1 * i for i in range(count)])
    assert found.verdict == "cannot tell" and found.fits == ()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=saturation.ENOUGH, max_size=30))
def test_any_curve_gets_a_finite_answer(values: list[float]) -> None:
    found = outlook(values)
    assert found.sentence and all(math.isfinite(fit.aic) for fit in found.fits)


def test_a_constant_is_flat() -> None:
    assert outlook([0.0] * 20).verdict == "flat" and outlook([1.0] * 20).verdict == "flat"
