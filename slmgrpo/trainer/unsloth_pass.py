"""Forward passes of Unsloth's CUDA model: hidden states by its own forward, shared prompts as its kernel takes them.

Its fast attention asks neither transformers' registry nor a 4-D mask. A shared prompt goes in as `prefix_seg_info`,
with position ids and without mask or cache. Read from unsloth 2026.10's source; not yet run on a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from slmgrpo.errors import RunError

if TYPE_CHECKING:
    import torch

    from slmgrpo.trainer.packing import Segment

SWITCH = "UNSLOTH_RETURN_HIDDEN_STATES"
"""While it is 1 the model's forward returns hidden states where the logits would be."""


def is_unsloth(decoder: Any) -> bool:
    """Whether Unsloth's kernels have replaced the forward of some layer, which they do on CUDA alone."""
    return any(type(module).forward.__module__.startswith("unsloth") for module in decoder.modules())


def why_not_shared(decoder: Any) -> str | None:
    """Why this model of Unsloth's cannot take shared prompts; None where its attention hands them to its kernel."""
    name = type(decoder).__name__
    attention = [m for m in decoder.modules() if type(m).__name__.endswith("Attention")]
    modules = {type(m).forward.__module__ for m in attention}
    if not modules or not all(hasattr(sys.modules.get(m), "resolve_prefix_seg_info") for m in modules):
        return f"Unsloth's attention of {name} does not take shared prompts"
    if getattr(decoder.config, "attention_dropout", 0):
        return f"{name} has attention dropout, which Unsloth's kernel for shared prompts leaves out"
    if any(getattr(decoder.config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        return f"{name} is a mixture of experts, through which Unsloth does not pass shared prompts on"
    return None


def hidden_states(model: Any, ids: Tensor, **passed: Any) -> Tensor:
    """(B, T, H) in front of the head, for ids (B, T); passed: position_ids and prefix_seg_info of a packed row."""
    with _switched_on():
        hidden = model(input_ids=ids, use_cache=False, **passed).logits
    width = model.get_input_embeddings().weight.shape[1]
    if hidden.shape[-1] != width:
        raise RunError(
            f"Unsloth's {type(model).__name__} returned {hidden.shape[-1]} numbers a token under {SWITCH}=1, not the "
            f"{width} of a hidden state; train it with model.backend=transformers"
        )
    return hidden


def shared_prompts(segments: Sequence[Segment], device: torch.device) -> Any:
    """Unsloth's description of a packed row: by group the prompt's length and those of its completions."""
    from unsloth.utils.prefix_grouper_kernel import build_seg_info_multigroup

    groups = [
        (segment.prompt.stop - segment.prompt.start, [own.stop - own.start for own in segment.completions])
        for segment in segments
    ]
    described, _ = build_seg_info_multigroup(groups, device)
    return described


@contextmanager
def _switched_on() -> Iterator[None]:
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SWITCH]
        else:
            os.environ[SWITCH] = before
