"""How far a LoRA tensor moves under Adam when its gradients are pure noise: the measure of every displacement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Walk:
    """What noise does to one entry of a or b. variance: of its random walk; kept: factor on its start, by decay."""

    variance: float
    kept: float


def walk(rates: Sequence[float], norms: Sequence[float], *, beta1: float, beta2: float, weight_decay: float) -> Walk:
    """AdamW's random walk under gradients of independent signs, over the steps that a run really took.

    rates: learning rate of each step. norms: norm of each step's gradient after clipping; only their ratios count,
    since Adam divides by sqrt(v). With zero mean and no correlation over time

        variance = sum_s (n_s sum_{t >= s} lr_t k_t (1 - beta1) beta1^(t-s) / ((1 - beta1^t) sqrt(v_t)))^2

    where v_t is the bias-corrected mean of n^2 (decay beta2) and k_t = prod_{u > t} (1 - lr_u weight_decay). For
    constant n, no decay and many steps this is sum lr_t^2; bias correction makes short runs longer than that, and a
    gradient that shrinks or vanishes (silent groups, clipping) makes the walk shorter.
    """
    scales, second = [], 0.0
    for step, (rate, size) in enumerate(zip(rates, norms, strict=True), 1):
        second = beta2 * second + (1 - beta2) * size * size
        root = (second / (1 - beta2**step)) ** 0.5
        scales.append(rate / ((1 - beta1**step) * root) if root else 0.0)
    variance, kept, weight = 0.0, 1.0, 0.0
    for scale, rate, size in zip(reversed(scales), reversed(rates), reversed(norms), strict=True):
        weight = beta1 * weight + (1 - beta1) * scale * kept
        variance += (size * weight) ** 2
        kept *= 1 - rate * weight_decay
    return Walk(variance, kept)


@dataclass(frozen=True)
class Start:
    """A LoRA tensor before training: r, d_out, d_in, and the norms ||a||, ||b||, ||b a|| (0 for a fresh adapter)."""

    rank: int
    d_out: int
    d_in: int
    a: float
    b: float = 0.0
    ba: float = 0.0


def displacement(start: Start, noise: Walk, scale: float) -> float:
    """Expected ||dW - dW_start||_F (root mean square) when every entry of a and b walks as `noise` does.

    With a = k a0 + x, b = k b0 + y and independent entries of variance S in x and y:

        scale^2 ((1 - k^2)^2 ||b0 a0||^2 + k^2 S (d_out ||a0||^2 + d_in ||b0||^2) + S^2 r d_out d_in)

    For a fresh adapter (b0 = 0, a0 uniform in +-1/sqrt(d_in)) and small S it is, relative to a weight of standard
    deviation sigma, (alpha / sqrt(r)) sqrt(sum lr_t^2) / (sqrt(3) sigma sqrt(d_in)).
    """
    s, k = noise.variance, noise.kept
    decayed = (1 - k * k) ** 2 * start.ba**2
    walked = k * k * s * (start.d_out * start.a**2 + start.d_in * start.b**2)
    return abs(scale) * (decayed + walked + s * s * start.rank * start.d_out * start.d_in) ** 0.5


def coherence(moved: float, null: float) -> float | None:
    """Displacement / null: 1 is noise, sqrt(T) about the most that T steady steps can reach; None before any step."""
    return moved / null if null else None
