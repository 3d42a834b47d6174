"""Whether a curve has come to its end: line, exponential, sigmoid and damped oscillator, weighed by AIC.

A high R^2 says little, since any bent monotone curve fits any other (METHODS: "compare AIC vs sigmoid and linear").
So the four are compared, and where the good ones disagree about the future the answer is "cannot tell".
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

Verdict = Literal["flat", "rising", "falling", "saturating", "saturated", "cannot tell"]
ENOUGH = 10
"""Values below which four parameters mean nothing."""
AS_GOOD = 4.0
"""AIC behind the best one up to which a curve still has some support (Burnham and Anderson, 2002, sec. 2.6)."""
REACHED = 0.05
"""Share of the whole change that may be missing from a limit that counts as reached."""


@dataclass(frozen=True)
class Fit:
    """One curve at its least squares. aic: corrected for few values (AICc), smaller is better."""

    name: str
    aic: float
    end: float
    """The curve at the last value."""
    start: float
    """The curve at the first value."""
    limit: float | None
    """Where it ends (None: a line ends nowhere)."""
    low: float
    """Lower end of the 95 % interval of the limit, or of a line's slope a step; from the linearised covariance."""
    high: float


@dataclass(frozen=True)
class Outlook:
    """What the curves agree on; fits: best first. Intervals are weighed by exp(-AIC / 2) over the good curves."""

    verdict: Verdict
    sentence: str
    fits: tuple[Fit, ...]


def outlook(values: Sequence[float]) -> Outlook:
    """Where a curve, one value a step, is going; noise is taken as independent, so intervals are on the narrow side."""
    if len(values) < ENOUGH:
        return Outlook("cannot tell", f"too few values for fits: {len(values)}, at least {ENOUGH} are needed", ())
    found = fits(values)
    best = found[0]
    good = [fit for fit in found if fit.aic - best.aic <= AS_GOOD]
    line = next(fit for fit in found if fit.name == "line")
    bent = [fit for fit in good if fit.limit is not None]
    spread = max(values) - min(values)
    if line in good and line.low <= 0 <= line.high and abs(line.end - line.start) < 0.25 * max(spread, 1e-12):
        return Outlook("flat", f"flat at {_number(line.end)}: no curve is better than a level line", tuple(found))
    if not bent:
        way: Verdict = "rising" if line.low + line.high > 0 else "falling"
        slope = f"{_number(line.low)} to {_number(line.high)} a step"
        return Outlook(way, f"still {way} in a line, {slope}; no limit in sight", tuple(found))
    names = " and ".join(fit.name for fit in bent)
    if line in good:
        return Outlook("cannot tell", f"cannot tell: a line fits as well as {names}", tuple(found))
    support = [math.exp((best.aic - fit.aic) / 2) for fit in bent]
    low = sum(weight * fit.low for weight, fit in zip(support, bent, strict=True)) / sum(support)
    high = sum(weight * fit.high for weight, fit in zip(support, bent, strict=True)) / sum(support)
    apart = max(fit.low for fit in bent) > min(fit.high for fit in bent)
    change = abs(best.end - best.start)
    if not math.isfinite(high - low) or (high - low) > max(change, 1e-12) or apart:
        text = f"cannot tell: the limit by {names} is in [{_number(low)}, {_number(high)}], as wide as the whole change"
        if apart:
            ends = ", ".join(f"{_number(fit.limit or 0.0)} by {fit.name}" for fit in bent)
            text = f"cannot tell: {names} fit alike and end apart ({ends})"
        return Outlook("cannot tell", text, tuple(found))
    assert best.limit is not None
    near = low <= best.end <= high and high - low <= change / 2
    reached = near or abs(best.limit - best.end) <= REACHED * abs(best.limit - best.start)
    text = f"limit {_number(best.limit)} [{_number(low)}, {_number(high)}] by {names}"
    if reached:
        return Outlook("saturated", f"at its {text}", tuple(found))
    return Outlook("saturating", f"now {_number(best.end)}, on its way to the {text}", tuple(found))


def fits(values: Sequence[float]) -> list[Fit]:
    """The four curves of at least ENOUGH values, the smallest AIC first; one that cannot be fitted is left out."""
    import numpy as np

    y = np.asarray(values, dtype=float)
    t = np.arange(len(y), dtype=float)
    span, low, high = float(t[-1]), float(y.min()), float(y.max())
    room = max(high - low, 1e-6)
    bounds = (low - 2 * room, high + 2 * room)
    first, last = float(y[:3].mean()), float(y[-3:].mean())
    found = []
    curves: list[tuple[str, Callable[..., Any], list[list[float]], list[tuple[float, float]], int | None]] = [
        ("line", _line, [[first, (last - first) / span]], [(-math.inf, math.inf)] * 2, None),
        (
            "exponential",
            _exponential,
            [[last, first, span * share] for share in (0.1, 0.3, 1.0)],
            [bounds, bounds, (0.3, 20 * span)],
            0,
        ),
        (
            "sigmoid",
            _sigmoid,
            [[last, first, span * middle, span * 0.1] for middle in (0.2, 0.5, 0.8)],
            [bounds, bounds, (-span, 2 * span), (0.3, 5 * span)],
            0,
        ),
        (
            "damped oscillator",
            _oscillator,
            [[last, first, 0.3, 2 * math.pi * cycles / span] for cycles in (1, 3)],
            [bounds, bounds, (0.02, 0.95), (math.pi / span / 2, math.pi / 2)],
            0,
        ),
    ]
    for name, curve, starts, limits, limit_at in curves:
        fitted = _least_squares(curve, t, y, starts, limits)
        if fitted is not None:
            found.append(_fit(name, curve, t, y, *fitted, limit_at))
    return sorted(found, key=lambda fit: fit.aic)


def _least_squares(
    curve: Callable[..., Any],
    t: np.ndarray,
    y: np.ndarray,
    starts: list[list[float]],
    limits: list[tuple[float, float]],
) -> tuple[np.ndarray, np.ndarray] | None:
    """Parameters and covariance of the best of several starts."""
    import numpy as np
    from scipy.optimize import OptimizeWarning, curve_fit

    lower, upper = np.array(limits).T
    best, least = None, math.inf
    for start in starts:
        inside = np.clip(start, lower + 1e-9, upper - 1e-9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)  # no covariance: the interval is infinite, which is right
            try:
                parameters, covariance = curve_fit(curve, t, y, p0=inside, bounds=(lower, upper), maxfev=500)
            except RuntimeError:
                continue  # no convergence from here
        rest = float(((curve(t, *parameters) - y) ** 2).sum())
        if rest < least:
            best, least = (parameters, covariance), rest
    return best


def _fit(
    name: str,
    curve: Callable[..., Any],
    t: np.ndarray,
    y: np.ndarray,
    parameters: np.ndarray,
    covariance: np.ndarray,
    limit_at: int | None,
) -> Fit:
    from scipy.stats import t as student

    n, k = len(y), len(parameters) + 1  # and the noise
    mean_square = float(((curve(t, *parameters) - y) ** 2).mean())
    floor = (1e-4 * max(float(abs(y).max()), 1e-6)) ** 2  # an exact curve has no infinite support
    aic = n * math.log(max(mean_square, floor)) + 2 * k + 2 * k * (k + 1) / (n - k - 1)
    which = 1 if limit_at is None else limit_at
    middle = float(parameters[which])
    half = float(student.ppf(0.975, n - len(parameters)) * math.sqrt(max(float(covariance[which, which]), 0.0)))
    limit = None if limit_at is None else middle
    start, end = float(curve(t[:1], *parameters)[0]), float(curve(t[-1:], *parameters)[0])
    return Fit(name, aic, end, start, limit, middle - half, middle + half)


def _line(t: Any, start: float, slope: float) -> Any:
    return start + slope * t


def _exponential(t: Any, limit: float, start: float, tau: float) -> Any:
    """r + (r0 - r) e^(-t / tau): the overdamped case of 2606.30789."""
    import numpy as np

    return limit + (start - limit) * np.exp(-t / tau)


def _sigmoid(t: Any, limit: float, start: float, middle: float, width: float) -> Any:
    """r0 + (r - r0) / (1 + e^(-(t - m) / s))."""
    from scipy.special import expit

    return start + (limit - start) * expit((t - middle) / width)


def _oscillator(t: Any, limit: float, start: float, damping: float, frequency: float) -> Any:
    """Step response at rest of m r'' + c r' + k (r - limit) = 0, underdamped; our reading of 2606.30789.

    frequency: undamped, radians a step; damping: relative, below 1.
    """
    import numpy as np

    ringing = frequency * math.sqrt(1 - damping**2)
    swing = np.cos(ringing * t) + damping / math.sqrt(1 - damping**2) * np.sin(ringing * t)
    return limit + (start - limit) * np.exp(-damping * frequency * t) * swing


def _number(value: float) -> str:
    return f"{value:.3g}"
