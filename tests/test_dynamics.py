"""Update measures against the formed dW, and the null against noise put through torch's own AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slmgrpo.dynamics import null, update
from slmgrpo.dynamics.update import Factors


def formed(x: Factors) -> Tensor:
    return x.scale * (x.b @ x.a).double()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Factors, Factors]:
    """Two updates of one weight, of ranks and sizes that may differ; some of them zero."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    d_out, d_in = draw(st.integers(1, 12)), draw(st.integers(1, 12))

    def one() -> Factors:
        rank = draw(st.integers(1, min(d_out, d_in)))
        size = draw(st.sampled_from([0.0, 1e-4, 1.0, 30.0]))
        a = torch.randn(rank, d_in, generator=generator, dtype=torch.float64)
        b = size * torch.randn(d_out, rank, generator=generator, dtype=torch.float64)
        return Factors(a, b, draw(st.sampled_from([0.5, 1.0, 4.0])))

    return one(), one()


@given(pairs(), st.floats(-2, 2))
@settings(max_examples=60, deadline=None)
def test_grams_give_what_the_formed_update_gives(pair: tuple[Factors, Factors], weight: float) -> None:
    x, y = pair
    dx, dy = formed(x), formed(y)
    size = float(dx.norm() * dy.norm()) or 1.0
    assert update.norm(x) == pytest.approx(float(dx.norm()), rel=1e-9)
    assert update.inner(x, y) == pytest.approx(float((dx * dy).sum()), abs=1e-9 * size)
    values = torch.linalg.svdvals(dx)[: x.a.shape[0]]
    found = update.spectrum(x)
    assert torch.allclose(found, values, atol=1e-7 * float(values[0]) + 1e-300)
    assert 0 <= update.effective_rank(found) <= x.a.shape[0] + 1e-9
    both = update.combined([(1.0, x), (weight, y)])
    assert torch.allclose(formed(both), dx + weight * dy, atol=1e-9 * (float(dx.norm() + dy.norm()) + 1e-300))


@given(pairs())
@settings(max_examples=40, deadline=None)
def test_subspaces_are_those_of_the_formed_update(pair: tuple[Factors, Factors]) -> None:
    x, _ = pair
    dx = formed(x)
    if not dx.any():
        return
    u, values, vt = torch.linalg.svd(dx)
    left, right = update.directions(x, 1)
    if len(values) == 1 or values[0] > 1.01 * values[1]:
        assert abs(float(left[:, 0] @ u[:, 0])) == pytest.approx(1, abs=1e-6)
        assert abs(float(right[:, 0] @ vt[0])) == pytest.approx(1, abs=1e-6)
    basis_out, basis_in = torch.eye(dx.shape[0])[:, :2], torch.eye(dx.shape[1])[:, :2]
    shares = update.principal_shares(x, basis_out, basis_in)
    whole = float(dx.norm() ** 2)
    assert shares.left == pytest.approx(float(dx[:2].norm() ** 2) / whole, abs=1e-9)
    assert shares.right == pytest.approx(float(dx[:, :2].norm() ** 2) / whole, abs=1e-9)
    assert shares.both == pytest.approx(float(dx[:2, :2].norm() ** 2) / whole, abs=1e-9)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (16, 16)])
def test_top_directions_are_those_of_the_svd(shape: tuple[int, int]) -> None:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, vt = torch.linalg.svd(weight)
    left, right = update.top_directions(weight, 4)
    assert update.principal_cosines(left, u[:, :4]).tolist() == pytest.approx([1] * 4, abs=1e-9)
    assert update.principal_cosines(right, vt[:4].T).tolist() == pytest.approx([1] * 4, abs=1e-9)
    inside = Factors(vt[:3], u[:, :3], 2.0)
    assert update.principal_shares(inside, left, right).both == pytest.approx(1)


def test_effective_rank_counts_equal_values_and_sees_one_that_dominates() -> None:
    assert update.effective_rank(torch.ones(8)) == pytest.approx(8)
    assert update.effective_rank(torch.tensor([1.0, 0.0, 0.0])) == pytest.approx(1)
    assert 1 < update.effective_rank(torch.tensor([1.0, 0.1, 0.1])) < 2


def test_random_spaces_meet_as_often_as_chance_says() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.linalg.qr(torch.randn(400, 16, generator=generator))[0] for _ in range(2))
    assert float((update.principal_cosines(x, y) ** 2).mean()) == pytest.approx(16 / 400, rel=0.25)
    assert float(update.principal_cosines(x, x).min()) == pytest.approx(1, abs=1e-5)


def cosine_after_warmup(step: int, steps: int) -> float:
    warm = steps // 10
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def train_on_noise(
    *,
    d_out: int = 192,
    d_in: int = 96,
    rank: int = 8,
    alpha: float = 16,
    rate: float = 1e-3,
    steps: int = 150,
    beta2: float = 0.99,
    decay: float = 0.0,
    clip: float = 0.1,
    schedule: bool = False,
    started: bool = False,
    drift: float = 0.0,
    silent: int = 0,
    shrinking: bool = False,
    seed: int = 0,
) -> tuple[float, float]:
    """(displacement, null) of a LoRA tensor that torch's AdamW moves by random gradients of its weight.

    drift: a constant part beside the noise; silent: every so many steps without gradient; shrinking: noise that falls
    to a hundredth.
    """
    generator = torch.Generator().manual_seed(seed)
    a = ((torch.rand(rank, d_in, generator=generator) * 2 - 1) / d_in**0.5).requires_grad_()
    b = (torch.randn(d_out, rank, generator=generator) * (0.05 if started else 0)).requires_grad_()
    before = Factors(a.detach().clone(), b.detach().clone(), alpha / rank)
    start = null.Start(rank, d_out, d_in, *(float(x.detach().norm()) for x in (a, b, b @ a)))
    optimizer = torch.optim.AdamW([a, b], lr=rate, betas=(0.9, beta2), weight_decay=decay)
    constant = drift * torch.randn(d_out, d_in, generator=generator)
    rates, norms = [], []
    for step in range(steps):
        now = rate * (cosine_after_warmup(step, steps) if schedule else 1.0)
        optimizer.param_groups[0]["lr"] = now
        g = torch.randn(d_out, d_in, generator=generator) + constant
        if shrinking:
            g = g * 0.01 ** (step / steps)
        if silent and step % silent:
            g = torch.zeros_like(g)
        with torch.no_grad():
            b.grad, a.grad = before.scale * g @ a.T, before.scale * b.T @ g
        before_clip = float(torch.nn.utils.clip_grad_norm_([a, b], clip))
        optimizer.step()
        rates.append(now)
        norms.append(min(before_clip, clip))
    noise = null.walk(rates, norms, beta1=0.9, beta2=beta2, weight_decay=decay)
    moved = update.combined([(1.0, Factors(a.detach(), b.detach(), before.scale)), (-1.0, before)])
    return update.norm(moved), null.displacement(start, noise, before.scale)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"steps": 15},
        {"steps": 400, "rate": 1e-4},
        {"schedule": True, "decay": 0.1},
        {"decay": 1.0},
        {"rank": 4, "alpha": 64},
        {"d_in": 288},
        {"d_out": 64},
        {"beta2": 0.999},
        {"clip": 1e9},
        {"clip": 1e9, "shrinking": True},
        {"silent": 4},
        {"rate": 2e-2, "steps": 60},
        {"started": True, "decay": 1.0},
    ],
    ids=str,
)
def test_pure_noise_moves_a_tensor_by_its_null(change: dict[str, float]) -> None:
    moved, expected = train_on_noise(**change)  # pyright: ignore[reportArgumentType]
    assert moved / expected == pytest.approx(1.0, abs=0.1)


def test_a_constant_gradient_moves_it_many_times_as_far() -> None:
    moved, expected = train_on_noise(drift=1.0, rate=1e-5)
    assert 3 < moved / expected < 150**0.5


def test_the_null_of_a_long_run_is_the_papers_form() -> None:
    rank, alpha, d_in, d_out, sigma = 16, 64, 2048, 2048, 0.02
    rates = [1e-5 * cosine_after_warmup(step, 1000) for step in range(1000)]
    noise = null.walk(rates, [1.0] * 1000, beta1=0.9, beta2=0.99, weight_decay=0.0)
    a = (rank / 3) ** 0.5  # uniform in +-1/sqrt(d_in)
    found = null.displacement(null.Start(rank, d_out, d_in, a), noise, alpha / rank) / (sigma * (d_in * d_out) ** 0.5)
    root = sum(rate * rate for rate in rates) ** 0.5
    assert found == pytest.approx(alpha / rank**0.5 * root / (3**0.5 * sigma * d_in**0.5), rel=0.02)


def test_no_step_and_no_gradient_move_nothing() -> None:
    start = null.Start(4, 8, 8, 1.0)
    for rates, norms in (([], []), ([1e-3] * 5, [0.0] * 5)):
        noise = null.walk(rates, norms, beta1=0.9, beta2=0.99, weight_decay=0.0)
        assert (noise.variance, noise.kept) == (0.0, 1.0)
        assert null.coherence(0.0, null.displacement(start, noise, 2.0)) is None
