"""Log-probs of completions by a plain padded pass, and a head that never holds the batch's logits.

The head is chunked over tokens. A token's log-prob depends on its own hidden state alone, so its gradient there is one
vector times the number that the loss sends back: the vector is taken while the chunk's logits exist, and the backward
pass needs neither the logits nor another product with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from slmgrpo.errors import PlanError
from slmgrpo.trainer import unsloth_pass

LOGITS_PER_CHUNK = 2**23
"""Logits that exist at once: 32 MB in float32, 170 tokens of SmolLM2's vocabulary, 55 of Qwen2.5's."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One completion and the prompt that the model saw before it (at least one token)."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True)
class LogProbs:
    """Of R rows, T tokens of the longest completion (at least 1), padded on the right with 0."""

    log_probs: Tensor
    """(R, T), under the unfiltered logits / temperature, float32 or better."""
    mask: Tensor
    """(R, T), true on the completion's tokens."""
    entropies: Tensor | None
    """(R, T), of the same distribution, in nats."""


def log_probs(
    model: Any, rows: Sequence[TokenRow], temperature: float, *, entropy: bool = False, entropy_grad: bool = False
) -> LogProbs:
    """Log-probs of every completion token, with a gradient where grad mode is on.

    model: a causal model of transformers, plain or under a PEFT adapter. entropy_grad: the entropies carry a gradient
    too, for one more product with the head (needed when entropy_coef != 0).
    """
    device = device_of(model)
    ids = pad_sequence([torch.tensor(row.prompt_ids + row.completion_ids) for row in rows], batch_first=True)
    # no attention mask: what pads a row on the right is behind every token that counts
    hidden = _hidden_states(model, ids.to(device)).flatten(0, 1)
    starts = [i * ids.shape[1] + len(row.prompt_ids) - 1 for i, row in enumerate(rows)]
    hidden = hidden[predictors_of(starts, rows).to(device)]
    return completion_log_probs(model, hidden, rows, temperature, entropy=entropy, entropy_grad=entropy_grad)


def _hidden_states(model: Any, ids: Tensor) -> Tensor:
    """(B, T, H) in front of the head, for right-padded ids (B, T)."""
    decoder = decoder_of(model)
    if unsloth_pass.is_unsloth(decoder):
        return unsloth_pass.hidden_states(model, ids)
    return decoder(input_ids=ids, use_cache=False).last_hidden_state


def predictors_of(starts: Sequence[int], rows: Sequence[TokenRow]) -> Tensor:
    """(N,), the positions that predict the completion tokens: starts[r], starts[r] + 1, ... row after row."""
    spans = [start + torch.arange(len(row.completion_ids)) for start, row in zip(starts, rows, strict=True)]
    return torch.cat(spans)


def completion_log_probs(
    model: Any, hidden: Tensor, rows: Sequence[TokenRow], temperature: float, *, entropy: bool, entropy_grad: bool
) -> LogProbs:
    """From the hidden states (N, H) that predict the completion tokens, row after row."""
    lengths = torch.tensor([len(row.completion_ids) for row in rows])
    mask = (torch.arange(max(1, int(lengths.max())))[None] < lengths[:, None]).to(hidden.device)
    targets = torch.tensor([token for row in rows for token in row.completion_ids], dtype=torch.long)
    scores, entropies = token_log_probs(
        Head.of(model), hidden, targets.to(hidden.device), temperature, entropy=entropy, entropy_grad=entropy_grad
    )

    def padded(values: Tensor) -> Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    return LogProbs(padded(scores), mask, None if entropies is None else padded(entropies))


@dataclass(frozen=True)
class Head:
    """Hidden states to logits as the model's own forward does it."""

    projection: torch.nn.Module
    vocabulary: int
    scale: float
    soft_cap: float | None

    @classmethod
    def of(cls, model: Any) -> Head:
        inner = causal_model_of(model)
        config = inner.config.get_text_config()
        return cls(
            projection=inner.get_output_embeddings(),
            vocabulary=config.vocab_size,
            scale=getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0),  # Cohere; Granite
            soft_cap=getattr(config, "final_logit_softcapping", None),  # Gemma
        )

    @property
    def is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.projection.parameters())

    def __call__(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """(N, V) logits / temperature from (N, H), float32 or better."""
        logits = self.projection(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits if temperature == 1 else logits / temperature


def token_log_probs(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, *, entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (N,) of targets (N,) from hidden states (N, H), and entropies (N,) if asked for."""
    want = _Want(temperature, entropy, entropy_grad)
    size = max(1, LOGITS_PER_CHUNK // head.vocabulary)
    chunks = zip(hidden.split(size), targets.split(size), strict=True)
    if not torch.is_grad_enabled():
        parts = [_score(head, h, y, want) for h, y in chunks]
    elif head.is_trained:
        parts = [checkpoint(_score, head, h, y, want, use_reentrant=False) for h, y in chunks]
    else:
        parts = [_Score.apply(h, y, head, want) for h, y in chunks]
    scores, entropies = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(entropies) if entropy else None


@dataclass(frozen=True)
class _Want:
    temperature: float
    entropy: bool
    entropy_grad: bool


def _score(head: Head, hidden: Tensor, targets: Tensor, want: _Want) -> tuple[Tensor, Tensor | None]:
    logits = head(hidden, want.temperature)
    log_z = logits.logsumexp(-1)
    scores = logits.gather(-1, targets[:, None])[:, 0] - log_z
    if not want.entropy:
        return scores, None
    with torch.set_grad_enabled(want.entropy_grad and torch.is_grad_enabled()):
        entropies = log_z - ((logits - log_z[:, None]).exp() * logits).sum(-1)
    return scores, entropies


class _Score(torch.autograd.Function):
    """`_score` with its derivative in the hidden state taken at once, for a head that is not trained."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, targets: Tensor, head: Head, want: _Want) -> tuple[Tensor, Tensor | None]:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = head(leaf, want.temperature)
        values, index = logits.detach(), targets[:, None]
        p = values.softmax(-1)
        largest = values.max(-1, keepdim=True)
        log_z = largest.values - p.gather(-1, largest.indices).log()  # logsumexp, without another pass of exp
        scores = (values.gather(-1, index) - log_z)[:, 0]
        entropies, entropy_slope = None, None
        if want.entropy:
            entropies = log_z[:, 0] - (p[:, None] @ values[:, :, None])[:, 0, 0]
        if want.entropy_grad and entropies is not None:
            slope = p * (log_z - values - entropies[:, None])  # d entropy / d logits
            (entropy_slope,) = torch.autograd.grad(logits, leaf, slope, retain_graph=True)
        slope = p.neg_().scatter_add_(-1, index, torch.ones_like(log_z))  # d log-prob / d logits
        (score_slope,) = torch.autograd.grad(logits, leaf, slope)
        ctx.save_for_backward(score_slope, *([] if entropy_slope is None else [entropy_slope]))
        if entropies is not None and entropy_slope is None:
            ctx.mark_non_differentiable(entropies)
        return scores, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        slopes = ctx.saved_tensors
        total = grads[0][:, None] * slopes[0]
        if len(slopes) == 2:
            total = total + grads[1][:, None] * slopes[1]
        return total.to(slopes[0].dtype), None, None, None


def causal_model_of(model: Any) -> Any:
    """The transformers model, without PEFT's wrapper (its adapter lives inside and stays active)."""
    return model.get_base_model() if hasattr(model, "peft_config") else model


def decoder_of(model: Any) -> Any:
    """The part of the model that ends in hidden states, without the head."""
    return causal_model_of(model).get_decoder()


def device_of(model: Any) -> torch.device:
    return decoder_of(model).get_input_embeddings().weight.device


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model whose logits are not what `Head` makes of its hidden states, on two tokens; once before training.

    Unsloth's CUDA model is not looked at: its forward may return hidden states where the logits would be.
    """
    decoder = decoder_of(model)
    if unsloth_pass.is_unsloth(decoder):
        return
    seen: list[Tensor] = []
    hook = decoder.register_forward_hook(lambda _module, _inputs, output: seen.append(output.last_hidden_state))
    try:
        logits = causal_model_of(model)(
            input_ids=torch.tensor([[0, 1]], device=device_of(model)), use_cache=False
        ).logits
    finally:
        hook.remove()
    gap = (Head.of(model)(seen[0][0]) - logits[0]).abs().max() / logits.abs().max().clamp(min=1)
    if not gap < 0.02:
        raise PlanError(
            f"model.id: {type(causal_model_of(model)).__name__} makes its logits in a way that trainer=slmgrpo does "
            f"not know (relative difference {float(gap):.2g}); set trainer=trl"
        )
