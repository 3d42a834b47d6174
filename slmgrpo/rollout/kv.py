"""Keys and values of the rows being written: left-aligned, one length a row, rows enter and leave in place.

Layout per layer: (rows, tokens, heads, head size), so that a new token is one contiguous write, a prompt is one copy,
and attention reads a transposed view without copying. A row's tokens lie at columns 0..length-1: no padding on the
left, positions count from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

ATTENTION = "slmgrpo_decode"
"""The name under which `attend` is registered with transformers."""


class PromptKeys:
    """Stands in for transformers' cache in a prompt pass and keeps what each layer computed."""

    def __init__(self) -> None:
        self.layers: list[tuple[Tensor, Tensor]] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        assert layer == len(self.layers)
        self.layers.append((keys.transpose(1, 2), values.transpose(1, 2)))
        return keys, values


class RowKeys:
    """Stands in for transformers' cache while tokens are written, one per row and forward pass."""

    def __init__(self, rows: int, longest: int) -> None:
        self.rows = rows
        self.longest = longest
        self.layers: list[tuple[Tensor, Tensor]] = []
        self._at: tuple[Tensor, Tensor] | None = None
        self._live = 0
        self._width = 0

    def enter(self, prompts: PromptKeys, lengths: list[int], members: list[int], first: int) -> None:
        """Let each prompt's members in, from row `first` on."""
        if not self.layers:
            self.layers = [(k[:0, :0], v[:0, :0]) for k, v in prompts.layers]
        self.reserve(max(lengths), live=first)
        for own, new in zip(self.layers, prompts.layers, strict=True):
            for mine, theirs in zip(own, new, strict=True):
                row = first
                for prompt, (length, count) in enumerate(zip(lengths, members, strict=True)):
                    mine[row : row + count, :length] = theirs[prompt, :length]
                    # A masked column still meets a factor 0, which a stray NaN would survive.
                    mine[row : row + count, length:] = 0
                    row += count

    def reserve(self, columns: int, *, live: int) -> None:
        """Make room for so many tokens a row; grows by a half, by 64 at least, never beyond the longest row."""
        have = self.layers[0][0].shape[1]
        if columns <= have:
            return
        columns = min(max(columns + 64, have + have // 2), self.longest)

        def widened(x: Tensor) -> Tensor:
            wide = x.new_empty(self.rows, columns, *x.shape[2:])
            wide[:live, :have] = x[:live]
            wide[:live, have:] = 0
            return wide

        for layer, (keys, values) in enumerate(self.layers):
            self.layers[layer] = (widened(keys), widened(values))

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy whole rows over rows that left."""
        device = self.layers[0][0].device
        of, to = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for pair in self.layers:
            for x in pair:
                x[to] = x[of]

    def place(self, lengths: Tensor, width: int) -> None:
        """Say where the next token of each live row goes and how many columns attention reads."""
        self._live, self._width = lengths.shape[0], width
        self._at = (torch.arange(self._live, device=lengths.device), lengths)

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        all_keys, all_values = self.layers[layer]
        all_keys.index_put_(self._at, keys.squeeze(2))
        all_values.index_put_(self._at, values.squeeze(2))
        read = (slice(0, self._live), slice(0, self._width))
        return all_keys[read].transpose(1, 2), all_values[read].transpose(1, 2)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention for transformers' interface: causal over whole prompts, or one new token a row under a row mask.

    In the second case the query heads that share a key head are laid out as query positions, so that keys and values
    are never repeated in memory.
    """
    rows, heads, tokens, size = query.shape
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if tokens > 1:
        out = sdpa(query, key, value, is_causal=True, scale=scaling, enable_gqa=heads != key.shape[1])
        return out.transpose(1, 2), None
    folded = query.reshape(rows, key.shape[1], -1, size)
    return sdpa(folded, key, value, attn_mask=attention_mask, scale=scaling).reshape(rows, 1, heads, size), None
