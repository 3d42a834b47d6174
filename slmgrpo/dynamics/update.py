"""How far a LoRA tensor moved and along which directions, from r x r Grams; dW itself is never formed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """The update of one weight, dW = scale * b @ a (Hu et al. 2021, 2106.09685). a: (r, d_in), b: (d_out, r)."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        """(d_out, d_in), that of dW."""
        return self.b.shape[0], self.a.shape[1]


def combined(parts: Sequence[tuple[float, Factors]]) -> Factors:
    """The weighted sum of updates of one weight, again as factors; its rank is the sum of their ranks."""
    a = torch.cat([part.a.double() for _, part in parts])
    b = torch.cat([weight * part.scale * part.b.double() for weight, part in parts], dim=1)
    return Factors(a, b, 1.0)


def inner(x: Factors, y: Factors) -> float:
    """<dW_x, dW_y> (Frobenius) = sum of (b_x^T b_y) * (a_x a_y^T), elementwise."""
    left = x.b.double().T @ y.b.double()
    right = x.a.double() @ y.a.double().T
    return x.scale * y.scale * float((left * right).sum())


def norm(x: Factors) -> float:
    """||dW||_F."""
    return max(inner(x, x), 0.0) ** 0.5


def cosine(x: Factors, y: Factors) -> float:
    """<dW_x, dW_y> / (||dW_x|| ||dW_y||); nan where one of them is zero."""
    lengths = norm(x) * norm(y)
    return inner(x, y) / lengths if lengths else float("nan")


def spectrum(x: Factors) -> Tensor:
    """The r singular values of dW, largest first (float64, CPU).

    They are the roots of the eigenvalues of R (b^T b) R with R = (a a^T)^(1/2). Those below 1e-8 of the largest are
    rounding.
    """
    a, b = x.a.double(), x.b.double()
    values, vectors = torch.linalg.eigh((a @ a.T).cpu())
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    squared = torch.linalg.eigvalsh(root @ (b.T @ b).cpu() @ root).flip(0)
    return abs(x.scale) * squared.clamp(min=0).sqrt()


def effective_rank(singular_values: Tensor) -> float:
    """exp of the entropy of s / sum(s) (Roy & Vetterli 2007): r equal values: r; one: 1; no update: 0."""
    total = float(singular_values.sum())
    if not total:
        return 0.0
    shares = singular_values[singular_values > 0] / total
    return float((-(shares * shares.log()).sum()).exp())


def directions(x: Factors, count: int) -> tuple[Tensor, Tensor]:
    """(left (d_out, count), right (d_in, count)): the singular vectors of dW with the largest values, float64."""
    left, left_r = torch.linalg.qr(x.b.double())
    right, right_r = torch.linalg.qr(x.a.double().T)
    u, _, v = torch.linalg.svd(left_r @ right_r.T)
    return left @ u[:, :count], right @ v[:count].T


def principal_cosines(x: Tensor, y: Tensor) -> Tensor:
    """Cosines of the principal angles between the spans of two orthonormal bases (d, k), largest first.

    Bjorck & Golub 1973. Two random k-dimensional spaces have a mean squared cosine of k / d.
    """
    return torch.linalg.svdvals(x.T @ y).clamp(max=1.0)


def top_directions(weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(left (d_out, count), right (d_in, count)): the singular vectors of a weight with the largest values, float64.

    From the eigenvectors of the smaller of W W^T and W^T W, which is exact where the top values stand apart from zero.
    """
    w = weight.double()
    tall = w.shape[0] > w.shape[1]
    w = w.T if tall else w
    short = torch.linalg.eigh(w @ w.T)[1][:, -count:].flip(1)
    long = torch.linalg.qr(w.T @ short)[0]
    return (long, short) if tall else (short, long)


@dataclass(frozen=True)
class Principal:
    """Shares of ||dW||^2 that lie in the top-k singular directions of the base weight.

    left: output side, k / d_out by chance. right: input side, k / d_in by chance. both: the block between them.
    """

    left: float
    right: float
    both: float


def principal_shares(x: Factors, left: Tensor, right: Tensor) -> Principal:
    """left (d_out, k), right (d_in, k): top singular vectors of the base weight, orthonormal ("The Path Not Taken",
    2511.08567, finds RL's updates off them).
    """
    whole = norm(x) ** 2
    if not whole:
        return Principal(float("nan"), float("nan"), float("nan"))
    a, b = x.a.double(), x.b.double()
    inside_b, inside_a = left.double().T @ b, a @ right.double()
    seen = (Factors(a, inside_b, x.scale), Factors(inside_a, b, x.scale), Factors(inside_a, inside_b, x.scale))
    return Principal(*(norm(part) ** 2 / whole for part in seen))
