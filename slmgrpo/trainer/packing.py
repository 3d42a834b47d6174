"""Log-probs of a step's rows as one packed row: each prompt once, its completions behind it, nothing padded.

Linear layers see every token once. Attention is a function in transformers' registry, per segment on a CPU and by
FlexAttention's block table on CUDA (flex.py): a prompt attends to itself, a completion to its prompt and itself, and no
tokens x tokens mask exists. Unsloth's CUDA model takes the same row in its own way (unsloth_pass.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slmgrpo.errors import RunError
from slmgrpo.trainer import flex, unsloth_pass
from slmgrpo.trainer.logprobs import (
    LogProbs,
    TokenRow,
    causal_model_of,
    completion_log_probs,
    decoder_of,
    device_of,
    log_probs,
)

ATTENTION = "slmgrpo_shared_prefix"
"""Our name in transformers' registry; called without a layout the function is transformers' own sdpa."""

PARITY = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Mean difference in log-prob allowed between packed and plain, by precision; a wrong layout gives 0.1 and more."""


@dataclass(frozen=True)
class Segment:
    """A prompt and the completions behind it, as slices of the packed row."""

    prompt: slice
    completions: tuple[slice, ...]


@dataclass(frozen=True)
class Layout:
    """R rows as one packed row of T tokens."""

    ids: Tensor
    """(T,)"""
    positions: Tensor
    """(T,), each completion goes on where its prompt ends."""
    predictors: Tensor
    """(N,), the places in the packed row that predict the completion tokens, row after row."""
    segments: tuple[Segment, ...]
    longest: int
    """Tokens of the longest prompt with its completion."""
    _masks: dict[Any, Any] = field(default_factory=dict, repr=False)
    """What the layers share: made by the first that asks."""

    def causal(self, like: Tensor) -> Tensor:
        """(longest, longest), 0 up to the diagonal and -inf beyond: every segment's mask is a slice of it."""
        if like.dtype not in self._masks:
            shape = (self.longest, self.longest)
            self._masks[like.dtype] = torch.full(shape, float("-inf"), dtype=like.dtype, device=like.device).triu(1)
        return self._masks[like.dtype]

    def blocks(self, device: torch.device) -> Any:
        """FlexAttention's block mask."""
        if device not in self._masks:
            self._masks[device] = flex.block_mask(self.segments, len(self.ids), device)
        return self._masks[device]


def layout_of(rows: Sequence[TokenRow], *, multiple: int = 1) -> Layout:
    """Lay rows out by prompt, in order of first appearance; members of a group with another prompt stand alone.

    multiple: the row is filled up to a multiple of it, by a prompt of zeros that nothing is read from.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(row.prompt_ids, []).append(index)
    ids: list[int] = []
    positions: list[Tensor] = []
    segments: list[Segment] = []
    predictors = [torch.empty(0, dtype=torch.long)] * len(rows)
    for prompt, indices in members.items():
        lengths = [len(rows[index].completion_ids) for index in indices]
        prompt_end = len(ids) + len(prompt)
        completions = tuple(slice(*ends) for ends in pairwise(accumulate(lengths, initial=prompt_end)))
        segments.append(Segment(slice(len(ids), prompt_end), completions))
        positions += [torch.arange(len(prompt)), *(len(prompt) + torch.arange(length) for length in lengths)]
        for index, own in zip(indices, completions, strict=True):
            places = torch.arange(own.start - 1, own.stop - 1)
            places[:1] = prompt_end - 1  # a completion's first token is predicted by the prompt's last
            predictors[index] = places
        ids += [*prompt, *(token for index in indices for token in rows[index].completion_ids)]
    if filled := -len(ids) % multiple:
        segments.append(Segment(slice(len(ids), len(ids) + filled), ()))
        positions.append(torch.arange(filled))
        ids += [0] * filled
    return Layout(
        ids=torch.tensor(ids),
        positions=torch.cat(positions),
        predictors=torch.cat(predictors),
        segments=tuple(segments),
        longest=max(len(row.prompt_ids) + len(row.completion_ids) for row in rows),
    )


def packed_log_probs(
    model: Any, rows: Sequence[TokenRow], temperature: float, *, entropy: bool = False, entropy_grad: bool = False
) -> LogProbs:
    """What `logprobs.log_probs` returns, rows in the same order, for less work. `can_pack` says for which models."""
    decoder, device = decoder_of(model), device_of(model)
    if unsloth_pass.is_unsloth(decoder):
        layout = layout_of(rows)
        hidden = unsloth_pass.hidden_states(
            model,
            layout.ids[None].to(device),
            position_ids=layout.positions[None].to(device),
            prefix_seg_info=unsloth_pass.shared_prompts(layout.segments, device),
        )[0]
    else:
        layout = layout_of(rows, multiple=flex.BLOCK if device.type == "cuda" else 1)
        hidden = _hidden_states(decoder, layout, device)
    hidden = hidden[layout.predictors.to(device)]
    return completion_log_probs(model, hidden, rows, temperature, entropy=entropy, entropy_grad=entropy_grad)


def _hidden_states(decoder: Any, layout: Layout, device: torch.device) -> Tensor:
    """(T, H) of a transformers model."""
    _register()
    with _attention(decoder.config):
        hidden = decoder(
            input_ids=layout.ids[None].to(device),
            position_ids=layout.positions[None].to(device),
            attention_mask=torch.empty(1, 1, 0, 0, device=device),  # 4-D: transformers then builds no T x T mask
            use_cache=False,
            shared_prefix=layout,
        ).last_hidden_state[0]
    if hidden.requires_grad and decoder.is_gradient_checkpointing:
        hidden.register_hook(lambda _grad: _attention_during_backward(decoder.config))
    return hidden


def shared_prefix_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    shared_prefix: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed row, in transformers' calling convention: (1, heads, T, dim) to (1, T, heads, dim)."""
    if shared_prefix is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    window = kwargs.get("sliding_window")
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or (window is not None and window < shared_prefix.longest):
        what = ", ".join(unknown) or f"a window of {window} tokens"
        raise RunError(f"{type(module).__name__} attends with {what}, which packed rows cannot do; see can_pack")

    if query.device.type == "cuda" and not dropout:  # FlexAttention has none
        mask = shared_prefix.blocks(query.device)
        return flex.attend(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None

    def attend(q: slice, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        gqa = query.shape[1] != key.shape[1]
        return scaled_dot_product_attention(
            query[:, :, q], k, v, dropout_p=dropout, scale=scaling, enable_gqa=gqa, **mask
        )

    outputs: list[Tensor] = []
    for segment in shared_prefix.segments:
        prompt_k, prompt_v = key[:, :, segment.prompt], value[:, :, segment.prompt]
        outputs.append(attend(segment.prompt, prompt_k, prompt_v, is_causal=True))
        start = prompt_k.shape[2]
        for own in segment.completions:
            if own.start == own.stop:
                continue
            k = torch.cat([prompt_k, key[:, :, own]], dim=2)
            v = torch.cat([prompt_v, value[:, :, own]], dim=2)
            end = k.shape[2]
            outputs.append(attend(own, k, v, attn_mask=shared_prefix.causal(query)[start:end, :end]))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def can_pack(model: Any, *, longest_row: int) -> str | None:
    """Why this model's rows, of at most so many tokens, cannot be packed safely; None where they can."""
    inner, decoder = causal_model_of(model), decoder_of(model)
    config, name = decoder.config, type(inner).__name__
    by_unsloth = unsloth_pass.is_unsloth(decoder)
    if by_unsloth and (reason := unsloth_pass.why_not_shared(decoder)):
        return reason
    if inner._is_stateful:
        return f"{name} has recurrent layers, whose state would run from one completion into the next"
    if not by_unsloth and not inner._supports_attention_backend:
        return f"{name} does not take its attention from transformers' registry"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        return f"{name} has layers of type {', '.join(sorted(kinds - {'full_attention', 'sliding_attention'}))}"
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or getattr(config, "layer_types", None) is None
    if slides and window is not None and window < longest_row:
        return f"{name} attends to {window} tokens, fewer than a row of {longest_row}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{name} caps its attention scores"
    if any(hasattr(module, "sinks") for module in decoder.modules()):
        return f"{name} has attention sinks"
    return None


def precision_of(model: Any) -> float:
    """Nats a token that two right ways to the same log-probs may differ by, in this model's precision."""
    return PARITY[decoder_of(model).dtype]


def sampler_gap(
    model: Any, rows: Sequence[TokenRow], sampler: Sequence[Sequence[float]], temperature: float
) -> float | None:
    """Mean difference a token between sampler and plain pass, without dropout; None where the sampler says nothing."""
    scores = _scored(log_probs, model, rows, temperature)
    pairs = [
        (float(score), known)
        for own, reported in zip(scores.log_probs, sampler, strict=True)
        for score, known in zip(own, reported, strict=False)
        if not math.isnan(known)
    ]
    return fmean(abs(score - known) for score, known in pairs) if pairs else None


def differs_when_packed(
    model: Any, rows: Sequence[TokenRow], temperature: float, *, allowed: float | None = None
) -> str | None:
    """Compare packed and plain log-probs of a few rows without dropout; a message where they differ too much."""
    plain = _scored(log_probs, model, rows, temperature)
    try:
        packed = _scored(packed_log_probs, model, rows, temperature)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # on CUDA a kernel is compiled for it, which not every machine can
        if device_of(model).type != "cuda":
            raise
        return f"the packed pass failed ({type(error).__name__}: {str(error).strip().splitlines()[0]})"
    gap = float((packed.log_probs - plain.log_probs).abs().sum() / plain.mask.sum().clamp(min=1))
    allowed = allowed or precision_of(model)
    if gap <= allowed:  # not so for NaN
        return None
    return f"packed and plain log-probs differ by {gap:.2g} a token on average, more than {allowed}"


def _scored(path: Callable[..., LogProbs], model: Any, rows: Sequence[TokenRow], temperature: float) -> LogProbs:
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return path(model, rows, temperature)
    finally:
        model.train(was_training)


def shares(rows: Sequence[TokenRow], ranks: int, *, packed: bool) -> list[list[int]]:
    """Indices of the rows that each rank runs, in order: rows of one prompt together, tokens evened out.

    The longest go first, each to the rank with the fewest tokens so far (Graham 1969: within 4/3 of the best).
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(row.prompt_ids, []).append(index)
    sized = [(pass_tokens([rows[index] for index in group], packed=packed), group) for group in members.values()]
    tokens, parts = [0] * ranks, [[] for _ in range(ranks)]
    for size, group in sorted(sized, key=lambda pair: -pair[0]):
        least = tokens.index(min(tokens))
        tokens[least] += size
        parts[least] += group
    return [sorted(part) for part in parts]


def micro_batches(rows: Sequence[TokenRow], token_limit: int, *, packed: bool) -> list[list[int]]:
    """Indices of rows per forward pass, in order, a prompt's rows together where that is at most `token_limit` tokens.

    Tokens are those of the pass: prompt once and no padding when packed, else rows times the longest. A prompt with
    more than the limit is split, so that the limit bounds memory: its tokens then run once in each part. Only a single
    row can be above it.
    """

    def fit(indices: Sequence[int]) -> bool:
        return pass_tokens([rows[index] for index in indices], packed=packed) <= token_limit

    members: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(row.prompt_ids, []).append(index)
    batches: list[list[int]] = []
    for group in members.values():
        if batches and fit(joined := [*batches[-1], *group]):
            batches[-1] = joined
            continue
        batches.append([])
        for index in group:
            if batches[-1] and not fit([*batches[-1], index]):
                batches.append([])
            batches[-1].append(index)
    return batches


def pass_tokens(rows: Sequence[TokenRow], *, packed: bool) -> int:
    """Tokens that go through the trunk for these rows."""
    if not packed:
        return len(rows) * max(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
    prompts = {row.prompt_ids for row in rows}
    return sum(map(len, prompts)) + sum(len(row.completion_ids) for row in rows)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, shared_prefix_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@contextmanager
def _attention(config: Any) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before


def _attention_during_backward(config: Any) -> None:
    """Checkpointed layers run again in the backward pass and look the attention up again: set until it ends."""
    before = config._attn_implementation
    if before == ATTENTION:
        return
    config._attn_implementation = ATTENTION

    def restore() -> None:
        config._attn_implementation = before

    torch.autograd.Variable._execution_engine.queue_callback(restore)
