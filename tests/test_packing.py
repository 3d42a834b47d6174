"""Packed rows against the plain pass: log-probs, entropies and gradients, whatever the order and the prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import LargestTensor, gradient, random_model, with_adapter

from slmgrpo.errors import RunError
from slmgrpo.trainer.logprobs import TokenRow, decoder_of, log_probs
from slmgrpo.trainer.packing import (
    ATTENTION,
    can_pack,
    differs_when_packed,
    layout_of,
    micro_batches,
    packed_log_probs,
    pass_tokens,
    shares,
)

GROUP = [TokenRow((5, 6, 7, 8), tuple(range(10, 10 + n))) for n in (6, 1, 0, 9)]
OTHER = [TokenRow((9, 8), (7, 6, 5)), TokenRow((9, 8), (4,)), TokenRow((9, 8, 1), (7, 6, 5))]
ROWS = [GROUP[0], OTHER[0], *GROUP[1:], *OTHER[1:]]
FAMILIES = ["llama", "qwen2", "qwen3"]


def weighted_gradient(model: Any, rows: list[TokenRow], passes: Any, **options: Any) -> tuple[Any, Any]:
    """A pass's result and the gradient of a sum whose weights belong to each row's content, not to its place."""
    result = passes(model, rows, 0.8, **options)
    weights = torch.zeros_like(result.log_probs)
    for i, row in enumerate(rows):
        noise = torch.Generator().manual_seed(hash((row.prompt_ids, row.completion_ids)) % 2**31)
        weights[i, : len(row.completion_ids)] = torch.randn(len(row.completion_ids), generator=noise)
    loss = (result.log_probs * weights).sum()
    if result.entropies is not None and result.entropies.requires_grad:
        loss = loss + (result.entropies * weights).sum()
    loss.backward()
    return result, gradient(model)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).detach().norm() / b.detach().norm())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_packed_rows_score_and_learn_as_padded_ones(
    family: str, adapter: bool, checkpointing: bool, dtype: torch.dtype
) -> None:
    model = random_model(family)
    model = (with_adapter(model) if adapter else model).to(dtype)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    packed, packed_grad = weighted_gradient(model, ROWS, packed_log_probs, entropy=True, entropy_grad=True)
    plain, plain_grad = weighted_gradient(model, ROWS, log_probs, entropy=True, entropy_grad=True)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    assert torch.equal(packed.mask, plain.mask)
    assert relative(packed.log_probs, plain.log_probs) <= tolerance
    assert relative(packed.entropies, plain.entropies) <= tolerance
    assert relative(packed_grad.double(), plain_grad.double()) <= tolerance


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_models_attention_is_what_it_was_after_forward_and_backward(checkpointing: bool) -> None:
    model = with_adapter(random_model("llama"))
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    config = decoder_of(model).config
    first, second = packed_log_probs(model, GROUP, 1.0), packed_log_probs(model, OTHER, 1.0)
    assert config._attn_implementation == "sdpa"
    (first.log_probs.sum() + second.log_probs.sum()).backward()
    assert config._attn_implementation == "sdpa"
    together = gradient(model)
    log_probs(model, GROUP + OTHER, 1.0).log_probs.sum().backward()
    assert relative(together, gradient(model)) < 1e-6


def test_the_attention_is_restored_when_the_pass_fails() -> None:
    model = random_model("llama")
    with pytest.raises(IndexError):
        packed_log_probs(model, [TokenRow((1, 10_000), (2,))], 1.0)
    assert decoder_of(model).config._attn_implementation == "sdpa"


def test_a_model_left_on_our_attention_still_pads_and_masks_as_sdpa() -> None:
    model = random_model("qwen3")
    packed_log_probs(model, GROUP, 1.0)
    ids, mask = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    before = model(input_ids=ids, attention_mask=mask).logits
    model.config._attn_implementation = ATTENTION
    assert torch.allclose(model(input_ids=ids, attention_mask=mask).logits, before, atol=1e-12)


ROW = st.builds(
    TokenRow,
    st.sampled_from([(1,), (1, 2), (1, 2, 3), (4, 5, 6, 7, 8)]),
    st.lists(st.integers(0, 60), max_size=7).map(tuple),
)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=8), order=st.randoms(use_true_random=False), limit=st.integers(1, 60))
def test_gradients_depend_neither_on_packing_order_nor_on_micro_batches(
    rows: list[TokenRow], order: Any, limit: int
) -> None:
    model = with_adapter(random_model("llama"))
    _, whole = weighted_gradient(model, rows, packed_log_probs)
    shuffled = order.sample(rows, len(rows))
    parts = [
        weighted_gradient(model, [shuffled[i] for i in batch], packed_log_probs)[1]
        for batch in micro_batches(shuffled, limit, packed=True)
    ]
    assert (sum(parts) - whole).norm() <= 1e-6 * whole.norm() + 1e-12


def test_layout_holds_every_prompt_once_and_goes_on_at_its_positions() -> None:
    layout = layout_of([TokenRow((1, 2), (3, 4)), TokenRow((5,), (6,)), TokenRow((1, 2), (7,)), TokenRow((5,), ())])
    assert layout.ids.tolist() == [1, 2, 3, 4, 7, 5, 6]
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 0, 1]
    assert layout.predictors.tolist() == [1, 2, 5, 1]
    assert layout.longest == 4


def test_no_tensor_of_tokens_by_tokens_exists() -> None:
    model = with_adapter(random_model("llama"))
    rows = [TokenRow(tuple(range(g, g + 20)), tuple(range(20))) for g in range(8) for _ in range(8)]
    tokens = pass_tokens(rows, packed=True)
    assert tokens == 8 * 20 + 64 * 20
    with LargestTensor() as largest:
        packed_log_probs(model, rows, 1.0).log_probs.sum().backward()
    assert largest.numel < tokens**2 / 10


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 40)), max_size=30), st.integers(1, 8))
def test_ranks_share_rows_in_whole_groups_with_tokens_evened_out(drawn: list[tuple[int, int]], ranks: int) -> None:
    rows = [TokenRow((prompt,) * prompt, (7,) * length) for prompt, length in drawn]
    parts = shares(rows, ranks, packed=True)
    assert sorted(index for part in parts for index in part) == list(range(len(rows)))
    assert all(part == sorted(part) for part in parts)
    prompts = [{rows[index].prompt_ids for index in part} for part in parts]
    assert sum(map(len, prompts)) == len({row.prompt_ids for row in rows})
    tokens = [pass_tokens([rows[index] for index in part], packed=True) for part in parts]
    groups = [
        pass_tokens([r for r in rows if r.prompt_ids == prompt], packed=True) for part in prompts for prompt in part
    ]
    assert max(tokens) - min(tokens) <= max(groups, default=0)


def test_micro_batches_keep_a_prompts_rows_together_and_split_those_of_a_prompt_above_the_limit() -> None:
    rows = [*GROUP, *OTHER]
    assert micro_batches(rows, 10_000, packed=True) == [[0, 1, 2, 3, 4, 5, 6]]
    assert micro_batches(rows, 26, packed=True) == [[0, 1, 2, 3, 4, 5], [6]]
    assert micro_batches(rows, 12, packed=True) == [[0, 1, 2], [3], [4, 5, 6]]
    assert micro_batches(rows, 1, packed=True) == [[0], [1], [2], [3], [4], [5], [6]]
    assert micro_batches(rows, 52, packed=False) == [[0, 1, 2, 3], [4, 5, 6]]
    assert micro_batches([], 10, packed=True) == []


@pytest.mark.parametrize("family", [*FAMILIES, "smollm3", "granite", "olmo2", "phi3"])
def test_full_attention_models_pack(family: str) -> None:
    model = with_adapter(random_model(family, pad_token_id=0))
    assert can_pack(model, longest_row=100) is None
    assert differs_when_packed(model, ROWS, 1.0) is None


@pytest.mark.parametrize(
    ("family", "changed", "reason"),
    [
        ("mistral", {"sliding_window": 8}, "attends to 8 tokens, fewer than a row of 100"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "attends to 8 tokens"),
        ("gemma2", {"sliding_window": 512}, "caps its attention scores"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 512}, "attention sinks"),
        ("mamba", {}, "recurrent layers"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("bloom", {"n_head": 4, "n_layer": 2}, "does not take its attention"),
    ],
)
def test_models_that_cannot_be_packed_say_why(family: str, changed: dict[str, Any], reason: str) -> None:
    model = random_model(family, **changed)
    said = can_pack(model, longest_row=100)
    assert said is not None and reason in said


def test_a_window_longer_than_every_row_packs_and_a_shorter_one_is_never_ignored() -> None:
    wide, narrow = random_model("mistral", sliding_window=64), random_model("mistral", sliding_window=8)
    assert can_pack(wide, longest_row=64) is None
    assert differs_when_packed(wide, ROWS, 1.0) is None
    with pytest.raises(RunError, match="window of 8 tokens"):
        packed_log_probs(narrow, ROWS, 1.0)


def test_a_packed_pass_that_differs_is_noticed() -> None:
    """A model whose attention looks at how far two tokens lie apart in the row, not at their positions."""
    model = random_model("llama").train()
    assert differs_when_packed(model, ROWS, 1.0) is None
    assert model.training
    rotary = model.model.rotary_emb
    rotary.register_forward_pre_hook(
        lambda _module, args, kwargs: (args, kwargs | {"position_ids": torch.arange(args[0].shape[1])[None]}),
        with_kwargs=True,
    )
    model.model.layers[0].self_attn.q_proj.weight.data *= 50
    said = differs_when_packed(model, ROWS, 1.0)
    assert said is not None and "a token on average" in said
