"""The hf engine: our decode loop over a transformers model, any device, weights shared with the trainer.

A prompt is computed once for its whole group. Rows that finish leave at once and waiting groups take their places, so
that no time goes into padding. Keys and values are kept whatever the model's checkpointing setting. While a `generate`
is being read the model is in eval mode; it returns to its modes when the iterator ends or is closed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from slmgrpo.errors import PlanError, RunError
from slmgrpo.rollout import fold, kv, sampling
from slmgrpo.rollout.engine import Completion, Request
from slmgrpo.rollout.stops import StopTexts

if TYPE_CHECKING:
    from slmgrpo.recipe import Sampling

FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose logits are the head's output and whose attention the loop knows."""

FREE_PADDING = 256
"""Tokens of padding that cost less than another pass."""


@dataclass(slots=True)
class _Row:
    """One completion being written; it attends to `length` cached tokens."""

    request: Request
    member: int
    key: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish: Literal["stop", "length"] | None = None

    @property
    def length(self) -> int:
        """Tokens in the prompt and so far; all but the last are cached."""
        return len(self.request.prompt_ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class _State:
    """What a forward pass needs of each row, on the device; rebuilt when rows come or go."""

    token_ids: Tensor
    lengths: Tensor
    """Cached tokens: where the next one goes, and its position."""
    positions: Tensor
    """Of the next token within the completion."""
    keys: Tensor
    width: int
    """Columns of the longest row with its next token."""
    equal: bool

    @classmethod
    def of(cls, rows: list[_Row], device: torch.device) -> _State:
        columns = [(r.token_ids[-1], r.length - 1, len(r.token_ids), r.key) for r in rows]
        token_ids, lengths, positions, keys = torch.tensor(columns, device=device).unbind(1)
        found = {r.length for r in rows}
        return cls(token_ids, lengths, positions, keys, max(found), len(found) == 1)

    def after(self, token_ids: Tensor) -> _State:
        return _State(token_ids, self.lengths + 1, self.positions + 1, self.keys, self.width + 1, self.equal)


class _Batch:
    """Rows being written and their keys and values, live rows first."""

    def __init__(self, slots: int, longest: int, stands: list[fold.Stand], head: torch.nn.Module) -> None:
        self.slots = slots
        self.rows: list[_Row] = []
        self.cache = kv.RowKeys(slots, longest)
        self.stands = stands
        self.head = head
        self.state: _State | None = None

    def leave(self) -> None:
        """Drop the finished rows; the last live rows move into their places."""
        self.state = None
        live = sum(row.finish is None for row in self.rows)
        holes = [i for i in range(live) if self.rows[i].finish is not None]
        tails = [i for i in range(live, len(self.rows)) if self.rows[i].finish is None]
        if holes:
            self.cache.move(tails, holes)
            for hole, tail in zip(holes, tails, strict=True):
                self.rows[hole] = self.rows[tail]
        del self.rows[live:]


class HfEngine:
    """Writes completions with the very model that trains; `sync` has nothing to do.

    max_batch_tokens: tokens of keys and values held at once (rows times the longest prompt + max_tokens).
    """

    name = "hf"

    def __init__(
        self, model: Any, tokenizer: Any, settings: Sampling, seed: int, *, max_batch_tokens: int = 65536
    ) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(kv.ATTENTION, kv.attend)
        self._model = model
        self._tokenizer = tokenizer
        self._causal = model.get_base_model() if hasattr(model, "peft_config") else model
        _check(self._causal)
        self._config = self._causal.config
        self._decoder = self._causal.get_decoder()
        self._head = self._causal.get_output_embeddings()
        self._device = self._head.weight.device
        self._sampling = settings
        self._seed = seed
        self._max_batch_tokens = max_batch_tokens
        self.end_ids = end_ids(self._causal, tokenizer)
        self._stops = StopTexts(settings.stop, tokenizer) if settings.stop else None

    @property
    def context(self) -> int | None:
        return getattr(self._config, "max_position_embeddings", None)

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        """Yield every completion once, as it finishes."""
        training = [module for module in self._model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield from self._generate(requests, step)
        finally:
            for module in training:
                module.training = True

    def sync(self, step: int) -> None:
        """Nothing to do: engine and trainer share the weights."""

    def under(self, settings: Sampling, seed: int, *, max_batch_tokens: int) -> HfEngine:
        return HfEngine(self._model, self._tokenizer, settings, seed, max_batch_tokens=max_batch_tokens)

    def close(self) -> None:
        """Nothing to release: keys and values live as long as one `generate`."""

    def _generate(self, requests: list[Request], step: int) -> Iterator[Completion]:
        longest = max((len(r.prompt_ids) + r.max_tokens for r in requests), default=1)
        if self.context is not None and longest > self.context:
            raise RunError(
                f"a prompt and sampling.max_tokens make {longest} tokens, the model has {self.context} positions; "
                "lower prompt.max_tokens or sampling.max_tokens"
            )
        slots = max(1, self._max_batch_tokens // longest)
        waiting = deque(self._groups(sorted(requests, key=lambda r: -len(r.prompt_ids)), step, slots))
        stands = fold.fold(self._causal)
        head = next((stand.folded for stand in stands if stand.layer is self._head), self._head)
        batch = _Batch(min(slots, sum(map(len, waiting))), longest, stands, head)
        while waiting or batch.rows:
            free, entering = batch.slots - len(batch.rows), []
            while waiting and len(waiting[0]) <= free and _little_padding([*entering, waiting[0]]):
                free -= len(waiting[0])
                entering.append(waiting.popleft())
            try:
                with torch.no_grad():
                    finished = self._enter(batch, entering) if entering else self._advance(batch)
            except torch.OutOfMemoryError as error:
                raise RunError(
                    f"the hf engine ran out of memory with {batch.cache.rows} rows of up to {longest} tokens; lower "
                    "sampling.max_tokens or train.prompts_per_step, or use engine: vllm, then resume"
                ) from error
            for row in finished:
                assert row.finish is not None
                yield Completion(row.request.index, row.member, tuple(row.token_ids), tuple(row.log_probs), row.finish)

    def _groups(self, requests: list[Request], step: int, slots: int) -> Iterator[list[_Row]]:
        """Rows that share a prompt, at most `slots` of them together."""
        for request in requests:
            rows = [
                _Row(request, member, sampling.row_key(self._seed, step, request.prompt_key, member))
                for member in request.members
            ]
            for start in range(0, len(rows), slots):
                yield rows[start : start + slots]

    def _enter(self, batch: _Batch, groups: list[list[_Row]]) -> list[_Row]:
        """Compute the groups' prompts in one pass, draw each row's first token, let the rows in."""
        prompts = [group[0].request.prompt_ids for group in groups]
        longest = max(map(len, prompts))
        padded = torch.tensor([(*p, *[0] * (longest - len(p))) for p in prompts], device=self._device)
        last = torch.tensor([len(p) - 1 for p in prompts], device=self._device)
        cache = kv.PromptKeys()
        hidden = self._forward(batch, padded, torch.arange(longest, device=self._device)[None], cache, None)
        rows = [row for group in groups for row in group]
        prompt_of_row = torch.tensor([i for i, group in enumerate(groups) for _ in group], device=self._device)
        logits = batch.head(hidden[torch.arange(len(prompts), device=self._device), last])
        batch.cache.enter(cache, [len(p) for p in prompts], [len(group) for group in groups], len(batch.rows))
        batch.rows += rows
        keys = torch.tensor([row.key for row in rows], device=self._device)
        drawn = self._draw(logits[prompt_of_row], keys, torch.zeros_like(keys), rows)
        return self._settle(batch, rows, drawn)

    def _advance(self, batch: _Batch) -> list[_Row]:
        """One token more for every row."""
        if batch.state is None:
            batch.state = _State.of(batch.rows, self._device)
        state, width = batch.state, batch.state.width
        batch.cache.reserve(width, live=len(batch.rows))
        batch.cache.place(state.lengths, width)
        mask = None
        if not state.equal:
            mask = (torch.arange(width, device=self._device) <= state.lengths[:, None])[:, None, None]
        hidden = self._forward(batch, state.token_ids[:, None], state.lengths[:, None], batch.cache, mask)
        drawn = self._draw(batch.head(hidden[:, -1]), state.keys, state.positions, batch.rows)
        batch.state = state.after(drawn.token_ids)
        return self._settle(batch, batch.rows, drawn)

    def _forward(
        self, batch: _Batch, token_ids: Tensor, position_ids: Tensor, cache: Any, mask: Tensor | None
    ) -> Tensor:
        before = self._config._attn_implementation
        self._config._attn_implementation = kv.ATTENTION
        try:
            with fold.in_place(batch.stands):
                return self._decoder(
                    input_ids=token_ids,
                    position_ids=position_ids,
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=True,
                ).last_hidden_state
        finally:
            self._config._attn_implementation = before

    def _draw(self, logits: Tensor, keys: Tensor, positions: Tensor, rows: list[_Row]) -> sampling.Draw:
        greedy = None
        if any(row.request.greedy for row in rows):
            greedy = torch.tensor([row.request.greedy for row in rows], device=self._device)
        s = self._sampling
        return sampling.draw(
            logits,
            keys,
            positions,
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            greedy=greedy,
        )

    def _settle(self, batch: _Batch, rows: list[_Row], drawn: sampling.Draw) -> list[_Row]:
        """Write the drawn tokens down; take the rows that end with them out of the batch."""
        finished = []
        log_probs = drawn.log_probs.tolist()
        if not math.isfinite(sum(log_probs)):
            raise RunError(
                "the model's logits are not finite: the policy has diverged; resume from an earlier checkpoint with a "
                "lower optimizer.learning_rate"
            )
        for row, token_id, log_prob in zip(rows, drawn.token_ids.tolist(), log_probs, strict=True):
            row.token_ids.append(token_id)
            row.log_probs.append(log_prob)
            if token_id in self.end_ids or (self._stops is not None and self._stops.ended(row.token_ids)):
                row.finish = "stop"
            elif len(row.token_ids) >= row.request.max_tokens:
                row.finish = "length"
            else:
                continue
            finished.append(row)
        if finished or rows is not batch.rows:
            batch.leave()
        return finished


def _little_padding(groups: list[list[_Row]]) -> bool:
    """Whether a pass over these prompts is at most a quarter longer than they are; the others come in the next one."""
    lengths = [len(group[0].request.prompt_ids) for group in groups]
    return len(lengths) * max(lengths) - sum(lengths) <= max(FREE_PADDING, sum(lengths) / 4)


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Ids that end a completion: the tokenizer's and the generation config's."""
    config = getattr(model, "generation_config", None)
    found = {tokenizer.eos_token_id}
    for ids in (getattr(config, "eos_token_id", None), model.config.eos_token_id):
        found.update(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset(token_id for token_id in found if token_id is not None)


def _check(model: Any) -> None:
    """Refuse models whose forward pass the loop would get wrong."""
    patched = {type(module).__name__ for module in model.modules() if "unsloth" in type(module).forward.__module__}
    if patched:
        raise PlanError(
            f"sampling.engine: hf cannot drive Unsloth's CUDA model ({min(patched)} keeps keys and values for a fixed "
            "batch); use `engine: unsloth`, or `model.backend: transformers`"
        )
    if why := unfit(model.config):
        raise PlanError(f"sampling.engine: hf {why}; use `engine: vllm`")


def unfit(config: Any) -> str | None:
    """Why the loop cannot drive models of this config, behind "hf"; None where it can."""
    if config.model_type not in FAMILIES:
        return f"knows the families {', '.join(FAMILIES)}, not {config.model_type}"
    if set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        return f"does not do sliding windows, and this {config.model_type} has layers with one"
    return None
