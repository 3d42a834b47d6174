"""`slmgrpo diagnose RUN`: names what a run's curves show, with evidence, confidence and the usual remedy.

Reads metrics.jsonl and held-out scores alone, so it works while a run goes on. The limits below were set on the runs of
recipes/studies/failures with seed 1; the README's table has other seeds. They are rules of thumb from a tiny model.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

from slmgrpo import saturation
from slmgrpo.curves import SURE, Change, Curves, accuracy, change, fall, read
from slmgrpo.run import open_run

Name = Literal[
    "staleness",
    "reward hacking",
    "format-only learning",
    "entropy collapse",
    "instability",
    "length drift",
    "degenerate advantages",
    "saturated",
    "learning",
]
Confidence = Literal["high", "medium", "low"]

ENOUGH = 8
"""Rollouts below which a trend is chance."""
EFFECT = 0.2
"""A change of the reward that counts, in units of its spread within groups at the start."""
POINTS = 0.05
"""A change of accuracy that counts."""
SOLVED = 0.8
"""Accuracy above which low entropy and silent groups mean success."""
STALE = 0.05
"""KL to the sampler, nats a token (k3), at the last update on a rollout."""
COLLAPSED = 0.1
"""Entropy at the end over that at the start."""
DRIFTED = 1.3
"""Ratio of mean lengths, either way."""
SILENT = 0.9
"""Share of groups without a signal."""

NOISE = 1.5
"""Coherence up to which an adapter may have moved by noise (runs with permuted advantages reach 1.34); a run of
SmolLM2-135M that went from 8 to 64 % ended at 1.09."""

REMEDIES: dict[Name, str] = {
    "staleness": "fewer train.updates_per_rollout or a smaller optimizer.learning_rate; "
    "loss.off_policy_mask_threshold, a tighter loss.epsilon",
    "reward hacking": "`slmgrpo reward lint` and `reward attack` show what a wrong answer can earn; raise correctness' "
    "weight, gate the others with `when:`, make the grader as strict as the held-out one; go back to an early "
    "checkpoint",
    "format-only learning": "easier questions, a cold_start or a larger model: right answers must occur; gate the form "
    "rule with `when:`, or give it less weight once it is learnt",
    "entropy collapse": "go back to a checkpoint before the fall; a smaller optimizer.learning_rate, "
    "loss.epsilon_high=0.28, sampling.temperature=1.0, a loss.entropy_coef of 0 or above",
    "instability": "go back to a checkpoint before the fall; a third of optimizer.learning_rate, warmup_ratio=0.1, "
    "max_grad_norm=0.1, loss.beta=0.005",
    "length drift": "look at the longest samples; gate or drop the rules that pay for length, length.overlong near the "
    "limit, loss_type=dr_grpo or dapo in place of grpo, a larger sampling.max_tokens where answers are cut off",
    "degenerate advantages": "nothing pays apart: easier or harder questions to the middle, a larger "
    "sampling.group_size, sampling.temperature=1.0; all wrong: look at `read` in samples.jsonl, then a cold_start",
    "saturated": "stop here, or go on with harder questions; check the gain with `slmgrpo eval`",
    "learning": "go on; check the gain with `slmgrpo eval`",
}
SEVERITY: tuple[Name, ...] = tuple(REMEDIES)


@dataclass(frozen=True)
class Finding:
    """One named pattern. evidence: sentences with numbers of the run."""

    name: Name
    confidence: Confidence
    evidence: tuple[str, ...]
    remedy: str


@dataclass(frozen=True)
class Diagnosis:
    """findings: the chief one first, empty where nothing is clear; notes: what limits the reading."""

    run: str
    state: str
    steps: int
    rollouts: int
    findings: tuple[Finding, ...]
    outlook: saturation.Outlook
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self, width: int = 80) -> str:
        """For a terminal of `width` columns."""

        def wrapped(text: str, indent: str) -> str:
            return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent.replace("-", " "))

        head = f"{self.run}: {self.state}, step {self.steps}, {self.rollouts} rollouts"
        parts = [head if len(head) <= width else head.replace(": ", ":\n  ", 1)]
        for finding in self.findings:
            parts += ["", f"{finding.name} ({finding.confidence} confidence)"]
            parts += [wrapped(sentence, "  - ") for sentence in finding.evidence]
            parts.append(wrapped(f"usual remedy: {finding.remedy}", "  "))
        if not self.findings:
            parts += ["", "no clear pattern: nothing rises, falls or stands still by more than chance"]
        parts += ["", wrapped(f"reward: {self.outlook.sentence}", "")]
        for fit in self.outlook.fits:
            end = f"a step [{_n(fit.low)}, {_n(fit.high)}]" if fit.limit is None else f"limit {_n(fit.limit)}"
            interval = "" if fit.limit is None else f" [{_n(fit.low)}, {_n(fit.high)}]"
            parts.append(f"  {fit.name:<18} AIC {fit.aic - self.outlook.fits[0].aic:+8.1f}   {end}{interval}")
        return "\n".join([*parts, *(wrapped(f"note: {note}", "") for note in self.notes)])


def diagnose(path: Path) -> Diagnosis:
    """Read a run directory and name what its curves show; RecipeError where it has no steps yet."""
    curves = read(path)
    judged = len(curves.signal("reward"))
    notes = [] if judged >= ENOUGH else [f"too few steps for trends: {judged} rollouts, {ENOUGH} are needed"]
    if not curves.heldout:
        notes.append("no held-out scores: a grader that is fooled in training cannot be told from learning")
    elif len(curves.heldout) == 1:
        notes.append("one held-out score so far: whether gains in training carry over is open")
    if moved := _coherence(path):
        notes.append(moved)
    findings = sorted(find(curves), key=lambda f: (_RANK[f.confidence], SEVERITY.index(f.name)))
    curve = curves.signal("reward")
    return Diagnosis(
        str(path),
        curves.state,
        curves.steps,
        len(curves.rollouts),
        tuple(findings),
        saturation.outlook(curve),
        tuple(notes),
    )


_RANK: dict[Confidence, int] = {"high": 0, "medium": 1, "low": 2}


def _coherence(path: Path) -> str | None:
    """How far the adapter moved beside its null (dynamics/null.py), where the run measured it."""
    run = open_run(path)
    if not any(run.dynamics.glob("step_*.parquet")):
        return None
    from slmgrpo.dynamics import probe, table

    step = probe.steps(run)[-1]
    moved = table.coherence_of(probe.read(run, step))
    if math.isnan(moved):
        return None
    said, so = "hardly more than", "; so its length does not tell whether it learned, `slmgrpo dynamics shift` may"
    if moved >= NOISE:
        said, so = f"{moved:.1f} times as far as", ""
    return f"by step {step} the adapter moved {said} gradients of pure noise would move it (coherence {moved:.2f}){so}"


# findings: each looks at the curves alone


def find(curves: Curves) -> list[Finding]:
    """All patterns that the curves show; of two of one name the first."""
    found = [_staleness(curves), _degenerate(curves)]
    if len(curves.signal("reward")) >= ENOUGH:
        found += [_unearned(curves), _entropy_collapse(curves), _instability(curves), _length_drift(curves)]
        found += [_gain(curves)]
    return list({finding.name: finding for finding in reversed(found) if finding is not None}.values())


def _staleness(curves: Curves) -> Finding | None:
    """Updates far from the policy that wrote the completions: high KL to the sampler at the last of them."""
    drift = [line["sampler_kl_k3"] for line in curves.policy if line.get("sampler_kl_k3") is not None]
    if not drift or max(drift) < STALE:
        return None
    far = sum(value >= STALE for value in drift)
    right = curves.of(accuracy)
    fell = fall(right)
    clipped = [line["clip_low"] + line["clip_high"] for line in curves.policy if "clip_low" in line]
    evidence = [
        f"KL to the sampler {_n(STALE)} or more at the last update of {far} of {len(drift)} rollouts with a signal "
        f"(median {_n(median(drift))}, at most {_n(max(drift))}); 0 is on-policy",
        f"{curves.updates} updates on each rollout",
    ]
    if clipped:
        evidence.append(f"up to {max(clipped):.0%} of tokens clipped")
    if fell is not None:
        evidence.append(f"accuracy fell from {fell.start:.2f} to {fell.end:.2f}")
    if median(drift) < STALE:
        return _finding("staleness", "low", evidence)
    return _finding("staleness", "high" if fell is not None or median(drift) >= 4 * STALE else "medium", evidence)


def _degenerate(curves: Curves) -> Finding | None:
    """Groups whose members are all paid alike give no gradient (2402.03300: the advantage is centred in the group)."""
    silent = curves.signal("silent")
    part = max(3, len(silent) // 4)
    right = curves.of(accuracy)
    if not silent or fmean(silent[-part:]) < SILENT or (right and fmean(right[-part:]) >= SOLVED):
        return None
    always = fmean(silent[:part]) >= SILENT
    bins = [sum(counts) for counts in zip(*(line.get("pass_histogram", [0]) for line in curves.rollouts), strict=False)]
    evidence = [f"{fmean(silent[-part:]):.0%} of groups give no signal in the last {part} rollouts"]
    evidence.append("so from the start" if always else f"{fmean(silent[:part]):.0%} in the first {part}")
    if sum(bins):
        evidence.append(f"of all groups {bins[0] / sum(bins):.0%} all wrong, {bins[-1] / sum(bins):.0%} all right")
    return _finding("degenerate advantages", "high" if always else "medium", evidence)


def _unearned(curves: Curves) -> Finding | None:
    """The reward rises and right answers do not: by which rules, and whether right answers are lost."""
    rewards, right = change(curves.signal("reward")), change(curves.of(accuracy))
    spread = fmean(curves.signal("reward_std")[:3]) or 1e-9
    lines = [f"reward {_n(rewards.start)} to {_n(rewards.end)}", f"accuracy {right.start:.2f} to {right.end:.2f}"]
    if (lag := _lags_behind(curves, right)) is not None:
        return _finding("reward hacking", "high", [*lines, lag])
    if not rewards.up(EFFECT * spread) or right.up(POINTS):
        return None
    shares = _who_pays(curves)
    payer = max(shares, key=lambda name: shares[name], default=None)
    if payer is None or shares[payer] <= 0:
        return None
    lines.append(f"most of the rise comes from {payer} ({_n(shares[payer])})")
    if right.down(POINTS):
        return _finding("reward hacking", "high", [*lines, "right answers are given up for it"])
    kind = payer.partition(".")[0]
    if kind == "format":
        return _finding("format-only learning", "high", lines)
    if kind == "length":
        length = change(curves.signal("length"))
        return _finding("length drift", "high", [*lines, f"length {length.start:.1f} to {length.end:.1f} tokens"])
    lines.append(f"where {payer} is a rule on form, this is format-only learning")
    return _finding("reward hacking", "medium", lines)


def _lags_behind(curves: Curves, right: Change) -> str | None:
    """Where accuracy by the training rules rises and held-out accuracy does not follow by half."""
    if len(curves.heldout) < 2 or not right.up(3 * POINTS):
        return None
    (_, before, n), (_, after, m) = curves.heldout[0], curves.heldout[-1]
    p, q = before / n, after / m
    error = math.sqrt((p * (1 - p) + 1 / n) / n + (q * (1 - q) + 1 / m) / m)
    if q - p + 1.96 * error >= right.by / 2:
        return None
    return f"held-out accuracy {p:.2f} to {q:.2f} while training claims {right.by:+.2f}: its grader is fooled"


def _who_pays(curves: Curves) -> dict[str, float]:
    """Rise of each rule that is no right-or-wrong question, times its weight."""
    found = {}
    for name in curves.rollouts[-1].get("rules", {}):
        judged = any(
            {"correct", "wrong", "no_answer"} & line["statuses"].get(name, {}).keys() for line in curves.rollouts
        )
        if not judged:
            values = curves.of(lambda line, name=name: line["rules"].get(name))
            found[name] = curves.weights.get(name, 1.0) * change(values).by
    return found


def _entropy_collapse(curves: Curves) -> Finding | None:
    """The policy has become certain while it is still wrong (Cui et al., 2505.22617)."""
    entropy, right = curves.signal("entropy"), change(curves.of(accuracy))
    if len(entropy) < ENOUGH or right.end >= SOLVED:
        return None
    moved, unique = change(entropy), change(curves.signal("unique"))
    if moved.end > COLLAPSED * moved.start or not moved.z < -SURE:
        return None
    evidence = [
        f"entropy {_n(moved.start)} to {_n(moved.end)} nats a token while accuracy is {right.end:.2f}",
        f"distinct completions of a group {unique.start:.0%} to {unique.end:.0%}",
    ]
    paid = change(curves.signal("reward"))
    rose = paid.z > SURE and paid.by > 0  # certain of what pays: that is the cause, and another finding names it
    return _finding("entropy collapse", "medium" if rose else "high", evidence)


def _instability(curves: Curves) -> Finding | None:
    """The reward falls from its best and stays down, or updates are not finite."""
    rewards = curves.signal("reward")
    floor = min(min(rewards), 0.0)
    fell = fall([value - floor for value in rewards])
    broken = curves.broken
    if fell is None and not broken:
        return None
    evidence = []
    if fell is not None:
        evidence.append(f"reward fell from {_n(fell.start + floor)} to {_n(fell.end + floor)}")
    if broken:
        evidence.append(f"{broken} updates were not finite")
    norms = [line["grad_norm"] for line in curves.policy if line.get("grad_norm")]
    if norms:
        evidence.append(f"gradient norm at most {_n(max(norms))}, median {_n(median(norms))}")
    entropy = curves.signal("entropy")
    if entropy:
        evidence.append(f"entropy {_n(entropy[0])} to {_n(entropy[-1])} nats a token")
    rates = [line["learning_rate"] for line in curves.policy if line.get("learning_rate")]
    if rates:
        evidence.append(f"learning rate {max(rates):.2g}")
    sure = fell is not None and fell.end < 0.5 * fell.start
    return _finding("instability", "high" if sure or broken > 1 else "medium", evidence)


def _length_drift(curves: Curves) -> Finding | None:
    """Completions grow, shrink or are cut off, and accuracy does not gain by it."""
    length, cut, right = (
        change(curves.signal("length")),
        change(curves.signal("truncated")),
        change(curves.of(accuracy)),
    )
    ratio = length.end / max(length.start, 1e-9)
    moved = not 1 / DRIFTED < ratio < DRIFTED and abs(length.z) >= SURE
    if right.up(POINTS) or not (moved or cut.up(0.2)):
        return None
    evidence = [
        f"length {length.start:.1f} to {length.end:.1f} tokens, {cut.start:.0%} to {cut.end:.0%} cut off",
        f"accuracy {right.start:.2f} to {right.end:.2f}",
    ]
    return _finding("length drift", "medium", evidence)


def _gain(curves: Curves) -> Finding | None:
    """Right answers rise: learning, or saturated where they have come to their end; also a run that began there."""
    values = curves.of(accuracy)
    right = change(values)
    if _lags_behind(curves, right) is not None:
        return None
    evidence = [f"accuracy {right.start:.2f} to {right.end:.2f}"]
    if len(curves.heldout) > 1:
        (first, before, n), (last, after, m) = curves.heldout[0], curves.heldout[-1]
        evidence.append(f"held-out accuracy {before / n:.2f} (step {first}) to {after / m:.2f} (step {last})")
    part = max(3, len(values) // 4)
    full = min(values[-part:]) >= 0.95
    if not right.up(POINTS) and not full:
        return None
    view = saturation.outlook(values)
    evidence.append(f"accuracy: {view.sentence}")
    if full or view.verdict == "saturated":
        silent = curves.signal("silent")
        evidence.append(f"{fmean(silent[-part:]):.0%} of groups give no signal any more")
        return _finding("saturated", "high" if full else "medium", evidence)
    return _finding("learning", "high" if right.by >= 2 * POINTS else "medium", evidence)


def _finding(name: Name, confidence: Confidence, evidence: Sequence[str]) -> Finding:
    return Finding(name, confidence, tuple(evidence), REMEDIES[name])


def _n(value: float) -> str:
    return f"{value:.3g}"
