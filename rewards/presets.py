"""The reward sets of the paper (Table 6) as lists of uses, for recipes and for `reward lint`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PresetUse:
    """One entry of a recipe's reward list."""

    use: str
    weight: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    when: str | None = None
    required: bool | None = None


_STYLE = {"style": "reasoning_answer"}
_PAPER_CODE = (
    PresetUse("code.not_trivial", 1.0),
    PresetUse("format.tag_counts", 0.5, _STYLE),
    PresetUse("code.parses", 0.5),
    PresetUse("format.reasoning_present", 0.1, _STYLE),
)

PRESETS: Mapping[str, Sequence[PresetUse]] = {
    "paper_gsm8k": (
        PresetUse("math.correct", 2.0, {"extract": "tag"}),
        PresetUse("format.tag_counts", 0.5, _STYLE),
        PresetUse("format.numeric_answer", 0.5),
        PresetUse("format.tagged", 0.5, _STYLE),
        PresetUse("format.reasoning_present", 0.1, _STYLE),
        PresetUse("format.answer_present", 0.1),
    ),
    "paper_arc": (
        PresetUse("mcq.correct", 2.0),
        PresetUse("mcq.valid_option", 0.5),
        PresetUse("format.tag_counts", 0.5, _STYLE),
        PresetUse("format.tagged", 0.5, _STYLE),
    ),
    "paper_code": (PresetUse("code.passes_tests", 1.0), *_PAPER_CODE),
    "paper_code_revised": (PresetUse("code.passes_tests", 2.0), *_PAPER_CODE),
}
"""`reward lint` fails both code sets: a wrong program in good form earns 2.1, a bare right one 1.0 (revised: 2.0)."""
