"""FlexAttention over a packed row: one kernel a layer on CUDA, by a table of blocks that is made from the segments.

The kernel skips blocks of 128 x 128 tokens in which nothing is attended to, and asks `mask_mod` inside the others. The
usual builder of its table goes over all tokens x tokens; here it follows from where prompts and completions begin.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from slmgrpo.trainer.packing import Segment

BLOCK = 128
"""Tokens of a block; a packed row is padded to a multiple of it, which the backward kernel needs."""


def attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float | None) -> Tensor:
    """Attention of one packed row: (1, heads, T, dim) to the same; compiled on CUDA, on the CPU forward only."""
    from torch.nn.attention.flex_attention import flex_attention

    run = _compiled() if query.device.type == "cuda" else flex_attention
    out = run(query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    assert isinstance(out, Tensor)
    return out


def block_mask(segments: Sequence[Segment], tokens: int, device: torch.device) -> BlockMask:
    """Prompt causal, each completion over its prompt and itself, for a packed row of so many tokens."""
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = blocks(segments, tokens)
    arguments = [part.to(device) for table in (partial, full) for part in _listed(table)]
    mod = mask_mod(segments, tokens, device)
    return BlockMask.from_kv_blocks(*arguments, BLOCK_SIZE=BLOCK, mask_mod=mod, seq_lengths=(tokens, tokens))


def mask_mod(segments: Sequence[Segment], tokens: int, device: torch.device) -> Callable[..., Tensor]:
    """Whether token q attends to token kv, as FlexAttention asks it."""
    segment_of, own_of = torch.zeros(tokens, dtype=torch.int32), torch.full((tokens,), -1, dtype=torch.int32)
    for number, segment in enumerate(segments):
        segment_of[segment.prompt] = number
        for member, own in enumerate(segment.completions):
            segment_of[own], own_of[own] = number, member
    segment_of, own_of = segment_of.to(device), own_of.to(device)

    def attends(_batch: Tensor, _head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        visible = (own_of[kv] == -1) | (own_of[kv] == own_of[q])
        return (segment_of[q] == segment_of[kv]) & (kv <= q) & visible

    return attends


def blocks(segments: Sequence[Segment], tokens: int) -> tuple[Tensor, Tensor]:
    """Which blocks are attended to in part (the kernel asks `mask_mod`), and which as a whole; both (n, n) bool.

    A block that several rectangles fill together counts as partial, which is as right and a little slower.
    """
    count = -(-tokens // BLOCK)
    some, whole = torch.zeros(2, count, count, dtype=torch.bool)
    for rows, columns, causal in _rectangles(segments):
        touched = some[_over(rows), _over(columns)]
        touched |= torch.ones_like(touched).tril() if causal else torch.ones_like(touched)
        filled = whole[_within(rows), _within(columns)]
        filled |= torch.ones_like(filled).tril(-1) if causal else torch.ones_like(filled)
    return some & ~whole, whole


def _rectangles(segments: Sequence[Segment]) -> Iterator[tuple[slice, slice, bool]]:
    """(rows, columns, whether only up to the diagonal), none of them empty."""
    for segment in segments:
        yield segment.prompt, segment.prompt, True
        for own in segment.completions:
            if own.start < own.stop:
                yield own, segment.prompt, False
                yield own, own, True


def _over(span: slice) -> slice:
    return slice(span.start // BLOCK, -(-span.stop // BLOCK))


def _within(span: slice) -> slice:
    first = -(-span.start // BLOCK)
    return slice(first, max(first, span.stop // BLOCK))


def _listed(table: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row of blocks has, and their numbers first in its list: FlexAttention's form of a table."""
    numbers = table.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return table.sum(-1, dtype=torch.int32)[None, None], numbers.to(torch.int32)[None, None]


@functools.cache
def _compiled() -> Callable[..., Any]:
    """fullgraph: where it cannot be compiled it must fail, for the eager form makes all tokens x tokens."""
    from torch.nn.attention.flex_attention import flex_attention

    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)  # by default the ninth shape that needs a kernel fails
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
