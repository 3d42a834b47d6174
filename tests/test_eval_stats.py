"""The statistics against brute force and simulation."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slmgrpo.eval import stats


def test_zero_of_thirty_is_not_certainly_zero() -> None:
    wilson, exact = stats.rate(0, 30), stats.rate(0, 30, "exact")
    assert (wilson.low, round(wilson.high, 3)) == (0.0, 0.114)
    assert (exact.low, round(exact.high, 3)) == (0.0, 0.116)
    assert stats.rate(0, 0) == stats.Rate(0, 0, 0.0, 1.0)


def test_the_exact_interval_is_where_the_binomial_tails_are_two_and_a_half_percent() -> None:
    def upper_tail(p: float) -> float:
        return sum(math.comb(20, k) * p**k * (1 - p) ** (20 - k) for k in range(8))

    assert upper_tail(stats.rate(7, 20, "exact").high) == pytest.approx(0.025, abs=1e-6)


@pytest.mark.parametrize(("method", "lowest", "highest"), [("wilson", 0.93, 0.97), ("exact", 0.95, 0.995)])
@pytest.mark.parametrize(("p", "n"), [(0.5, 30), (0.2, 100), (0.9, 200)])
def test_intervals_of_a_single_rate_cover_the_truth(method, lowest: float, highest: float, p: float, n: int) -> None:
    covered = 0.0
    for hits in range(n + 1):  # every outcome, weighted by its probability: no sampling needed
        found = stats.rate(hits, n, method)
        covered += (found.low <= p <= found.high) * math.comb(n, hits) * p**hits * (1 - p) ** (n - hits)
    assert lowest <= covered <= highest


@pytest.fixture
def fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "RESAMPLES", 1000)


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize(("rate", "together"), [(0.3, 1.0), (0.5, 0.5), (0.9, 2.0), (0.5, 30.0), (0.1, 2.0)])
def test_intervals_over_problems_cover_the_truth(rate: float, together: float) -> None:
    """100 problems of 8 samples; `together` small: a problem's samples agree with each other."""
    rng = np.random.default_rng(7)
    trials, covered = 500, 0
    for _ in range(trials):
        chances = rng.beta(rate * together, (1 - rate) * together, 100)
        found = stats.mean((rng.binomial(8, chances) / 8).tolist())
        covered += found.low <= rate <= found.high
    # 500 trials of a true 95 % fall within 93 to 97 % in 96 of 100 cases; the seed is fixed.
    assert 0.93 <= covered / trials <= 0.97


@pytest.mark.usefixtures("fewer_resamples")
def test_intervals_of_a_ratio_cover_the_truth() -> None:
    """Accuracy among finished: how many finished differs from problem to problem."""
    rng = np.random.default_rng(3)
    trials, covered = 400, 0
    for _ in range(trials):
        finished = rng.binomial(8, rng.uniform(0.2, 1.0, 100))
        right = rng.binomial(finished, 0.4)
        found = stats.ratio(right.tolist(), finished.tolist())
        covered += found.low <= 0.4 <= found.high
    assert 0.93 <= covered / trials <= 0.97


def test_without_spread_an_interval_is_still_wide() -> None:
    nothing, everything = stats.mean([0.0] * 30), stats.mean([1.0] * 30)
    assert nothing.high == pytest.approx(stats.rate(0, 30).high)
    assert everything.low == pytest.approx(stats.rate(30, 30).low)
    half = stats.mean([0.5] * 30)
    assert half.low < 0.4 < 0.6 < half.high
    assert stats.mean([12.0] * 30, share=False) == stats.Estimate(12.0, 12.0, 12.0, 0.0, 30)


def test_no_problems_have_no_mean() -> None:
    assert math.isnan(stats.ratio([], []).value)


def test_the_same_data_give_the_same_interval() -> None:
    values = [0.1, 0.5, 0.25, 1.0, 0.0]
    assert stats.mean(values) == stats.mean(values)


def test_the_clustered_error_is_the_one_over_all_pairs_of_samples_of_a_problem() -> None:
    rng = random.Random(0)
    problems = [[float(rng.random() < 0.4) for _ in range(rng.randint(1, 5))] for _ in range(40)]
    samples = [(i, value) for i, problem in enumerate(problems) for value in problem]
    average = sum(value for _, value in samples) / len(samples)
    pairs = sum((x - average) * (y - average) for i, x in samples for j, y in samples if i == j)
    found = stats.clustered_stderr([sum(p) for p in problems], [float(len(p)) for p in problems])
    assert found == pytest.approx(math.sqrt(pairs) / len(samples))


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(drawn: tuple[int, int, int]) -> None:
    n, correct, k = drawn
    samples = [True] * correct + [False] * (n - correct)
    subsets = list(itertools.combinations(samples, k))
    assert stats.pass_at_k(correct, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_is_unbiased() -> None:
    rng = np.random.default_rng(0)
    found = [stats.pass_at_k(int(rng.binomial(10, 0.2)), 10, 4) for _ in range(5_000)]
    assert np.mean(found) == pytest.approx(1 - 0.8**4, abs=0.02)


@pytest.mark.parametrize(("correct", "n", "k"), [(0, 4, 5), (0, 4, 0), (5, 4, 1)])
def test_pass_at_k_needs_k_samples(correct: int, n: int, k: int) -> None:
    with pytest.raises(ValueError, match="k must lie between 1 and n"):
        stats.pass_at_k(correct, n, k)


def test_a_vote_counts_equal_answers_together_and_no_answer_not_at_all() -> None:
    right = {"a": True, "b": False}
    assert stats.vote(["a", "b", "b", None, None, None], right) == 0.0
    assert stats.vote(["a", "a", "b", None], right) == 1.0
    assert stats.vote(["a", "b"], right) == 0.5
    assert stats.vote([None, None], right) == 0.0


def test_the_best_of_n_is_the_highest_score_and_equal_ones_share() -> None:
    assert stats.best_of([0.1, 0.9, None], [True, False, True]) == 0.0
    assert stats.best_of([0.9, 0.9], [True, False]) == 0.5
    assert stats.best_of([None, None], [True, False]) == 0.5


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_is_twice_the_smaller_binomial_tail(wins: int, losses: int) -> None:
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
    assert stats.mcnemar(wins, losses) == pytest.approx(min(1.0, 2 * tail))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=14))
def test_sign_flips_of_single_samples_are_mcnemar(pairs: list[tuple[bool, bool]]) -> None:
    changes = [float(b) - float(a) for a, b in pairs]
    wins, losses = changes.count(1.0), changes.count(-1.0)
    assert stats.sign_flips(changes) == pytest.approx(stats.mcnemar(wins, losses))


@given(st.lists(st.integers(-4, 4), max_size=9))
def test_sign_flips_are_the_share_of_sign_patterns_that_go_as_far(quarters: list[int]) -> None:
    changes = [quarter / 4 for quarter in quarters]
    patterns = itertools.product((-1, 1), repeat=len(changes))
    sums = [abs(sum(sign * change for sign, change in zip(p, changes, strict=True))) for p in patterns]
    far = sum(found >= abs(sum(changes)) for found in sums)
    assert stats.sign_flips(changes) == pytest.approx(far / len(sums))


def test_sign_flips_of_many_problems_are_exact_too() -> None:
    changes = [1.0] * 600 + [-1.0] * 450 + [0.0] * 100
    assert stats.sign_flips(changes) == pytest.approx(stats.mcnemar(600, 450))


@pytest.mark.usefixtures("fewer_resamples")
@pytest.mark.parametrize("samples", [1, 8])
def test_the_paired_test_keeps_its_level_when_nothing_changed(samples: int) -> None:
    rng = np.random.default_rng(11)
    trials, slips, outside = 400, 0, 0
    for _ in range(trials):
        chances = rng.beta(1, 1, 40)
        a, b = (rng.binomial(samples, chances) / samples for _ in range(2))
        found = stats.paired(a.tolist(), b.tolist())
        slips += found.p < 0.05
        outside += not found.low <= 0 <= found.high
    assert slips / trials <= 0.075  # at most two deviations above the level of 5 %
    assert outside / trials <= 0.08


def test_the_paired_test_sees_a_change_that_unpaired_intervals_hide() -> None:
    a = [1.0] * 50 + [0.0] * 50
    b = [1.0] * 50 + [1.0] * 8 + [0.0] * 42
    found = stats.paired(a, b)
    assert (found.wins, found.losses, found.ties) == (8, 0, 92)
    assert found.p == pytest.approx(2 / 2**8)
    assert 0 < found.low < found.value < found.high
    assert stats.mean(a).high > stats.mean(b).low


def test_no_difference_at_all_is_not_certainly_none() -> None:
    found = stats.paired([0.0, 1.0] * 15, [0.0, 1.0] * 15)
    assert found.p == 1.0
    assert found.low == -found.high
    assert found.high == pytest.approx(stats.rate(0, 30).high)


def test_holm_multiplies_the_smallest_by_all_and_never_falls() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.6, 0.9]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_holm_keeps_the_level_of_the_family() -> None:
    rng = random.Random(5)
    slips = sum(min(stats.holm([rng.random() for _ in range(6)])) < 0.05 for _ in range(2000))
    assert slips / 2000 == pytest.approx(0.05, abs=0.012)


def test_runs_of_several_seeds_vary_by_students_t() -> None:
    found = stats.over_seeds([0.5, 0.6, 0.7])
    assert found.value == pytest.approx(0.6)
    assert found.high - found.value == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert stats.over_seeds([0.5]).high == math.inf
