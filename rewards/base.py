"""The reward contract: verdicts, rules found by import path, and `Reward`, a rule with settings, gate and weight.

A rule scores one completion. Its positional parameters are data (`prompt`, `completion`, `completion_ids`
or a column of the data set); its keyword-only parameters are settings from the recipe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["correct", "wrong", "no_answer", "ungradeable", "timeout", "error", "gated", "scored"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule says of one completion.

    value: 1.0 right, 0.0 wrong, anything between for partial credit, None "cannot judge".
    status: why the value is what it is; `scored` for rules that are no right-or-wrong question.
    read: the answer as the rule read it; why: one short sentence for people.
    """

    value: float | None
    status: Status = "scored"
    read: str | None = None
    why: str = ""
