"""What packed rows are on CUDA, as far as a CPU can tell: FlexAttention's table and mask, and Unsloth's description.

The kernels themselves are compiled on a GPU only; eager FlexAttention has no backward pass on a CPU, so gradients are
compared through a dense mask made of the same `mask_mod`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import gradient, random_model, with_adapter
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slmgrpo.errors import RunError
from slmgrpo.trainer import flex, unsloth_pass
from slmgrpo.trainer.logprobs import TokenRow, log_probs
from slmgrpo.trainer.packing import Layout, can_pack, layout_of, packed_log_probs, shared_prefix_attention

CPU = torch.device("cpu")
ROW = st.builds(
    TokenRow,
    st.sampled_from([(1,), tuple(range(40)), tuple(range(128)), tuple(range(200))]),
    st.integers(0, 300).map(lambda n: tuple(range(n))),
)
ROWS = st.lists(ROW, min_size=1, max_size=6)


def attended(rows: Sequence[TokenRow], layout: Layout) -> Tensor:
    """(T, T), written down token by token: prompt causal, a completion over its prompt and itself."""
    kept = torch.zeros(len(layout.ids), len(layout.ids), dtype=torch.bool)
    for segment in layout.segments:
        for part in (segment.prompt, *segment.completions):
            for place in range(part.start, part.stop):
                kept[place, segment.prompt.start : min(place + 1, segment.prompt.stop)] = True
                kept[place, part.start : place + 1] = True
    return kept


def dense(layout: Layout) -> Tensor:
    """(T, T) of `mask_mod`, asked for every pair."""
    places = torch.arange(len(layout.ids))
    asked = flex.mask_mod(layout.segments, len(layout.ids), CPU)
    return asked(torch.tensor(0), torch.tensor(0), places[:, None], places[None])


def heads(layout: Layout, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, n, len(layout.ids), 8, dtype=dtype) for n in (4, 2, 2)]


@settings(max_examples=20, deadline=None)
@given(rows=ROWS)
def test_the_mask_keeps_prompt_and_own_completion_and_nothing_else(rows: list[TokenRow]) -> None:
    layout = layout_of(rows, multiple=flex.BLOCK)
    assert torch.equal(dense(layout), attended(rows, layout))


@settings(max_examples=50, deadline=None)
@given(rows=ROWS)
def test_the_table_of_blocks_is_what_the_mask_says_block_by_block(rows: list[TokenRow]) -> None:
    layout = layout_of(rows, multiple=flex.BLOCK)
    size = len(layout.ids) // flex.BLOCK
    kept = dense(layout).reshape(size, flex.BLOCK, size, flex.BLOCK).transpose(1, 2)
    partial, full = flex.blocks(layout.segments, len(layout.ids))
    assert not (partial & full).any()
    assert torch.equal(partial | full, kept.any(-1).any(-1))  # no block in vain, none forgotten
    assert (kept.all(-1).all(-1) | ~full).all()


def test_long_completions_have_whole_blocks_which_ask_no_mask() -> None:
    layout = layout_of([TokenRow(tuple(range(512)), tuple(range(640)))] * 2, multiple=flex.BLOCK)
    partial, full = flex.blocks(layout.segments, len(layout.ids))
    assert int(full.sum()) == 6 + 2 * (5 * 4 + 10)
    assert int(partial.sum()) == 4 + 2 * 5


@pytest.mark.parametrize("multiple", [1, flex.BLOCK])
def test_eager_flex_attention_gives_what_the_segments_give(multiple: int) -> None:
    rows = [TokenRow(tuple(range(70)), tuple(range(n))) for n in (90, 1, 0, 130)] + [TokenRow((1, 2), (3,))]
    layout = layout_of(rows, multiple=multiple)
    query, key, value = heads(layout)
    by_segment, _ = shared_prefix_attention(
        torch.nn.Module(), query, key, value, None, scaling=0.3, shared_prefix=layout
    )
    by_blocks = flex.attend(query, key, value, layout.blocks(CPU), 0.3).transpose(1, 2)
    assert torch.allclose(by_blocks, by_segment, atol=1e-12)
    assert layout.blocks(CPU) is layout.blocks(CPU)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="a compiler for the CPU form of the kernel is missing")
def test_compiled_flex_attention_agrees_and_is_compiled_once_for_all_layouts() -> None:
    """The very function that CUDA gets; on a CPU it has no backward pass either."""
    counts = torch._dynamo.utils.counters["stats"]
    graphs = []
    for lengths, groups in (((100, 50, 20), 2), ((100, 51, 20), 3), ((200, 50), 4), ((30,) * 8, 1), ((300, 300, 1), 2)):
        rows = [TokenRow(tuple(range(g, g + 150)), tuple(range(n))) for g in range(groups) for n in lengths]
        layout = layout_of(rows, multiple=flex.BLOCK)
        query, key, value = heads(layout, torch.float32)
        with torch.no_grad():
            out = flex._compiled()(query, key, value, block_mask=layout.blocks(CPU), scale=0.3, enable_gqa=True)
        by_segment, _ = shared_prefix_attention(
            torch.nn.Module(), query, key, value, None, scaling=0.3, shared_prefix=layout
        )
        assert torch.allclose(out.transpose(1, 2), by_segment, atol=1e-5)
        graphs.append(counts["unique_graphs"])
    assert graphs[1:] == [graphs[1]] * 4


def test_gradients_through_the_mask_are_those_of_the_segments() -> None:
    rows = [TokenRow(tuple(range(50)), tuple(range(n))) for n in (60, 0, 33)] + [TokenRow((1, 2), (3,))]
    layout = layout_of(rows, multiple=flex.BLOCK)
    weights = torch.randn(1, len(layout.ids), 4, 8, dtype=torch.float64)
    gradients = []
    for masked in (False, True):
        parts = [part.requires_grad_() for part in heads(layout)]
        if masked:
            out = scaled_dot_product_attention(*parts, attn_mask=dense(layout), enable_gqa=True).transpose(1, 2)
        else:
            query, key, value = parts
            out, _ = shared_prefix_attention(torch.nn.Module(), query, key, value, None, shared_prefix=layout)
        gradients.append(torch.autograd.grad((out * weights).sum(), parts))
    for segment, mask in zip(*gradients, strict=True):
        assert torch.allclose(segment, mask, atol=1e-12)


def test_a_row_filled_up_scores_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    rows = [TokenRow((5, 6, 7), tuple(range(n))) for n in (9, 0, 4)]
    before = packed_log_probs(model, rows, 1.0)
    monkeypatch.setattr(
        "slmgrpo.trainer.packing.layout_of", lambda rows, multiple: layout_of(rows, multiple=flex.BLOCK)
    )
    assert torch.allclose(packed_log_probs(model, rows, 1.0).log_probs, before.log_probs, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 5e-2)])
def test_on_a_gpu_packed_rows_score_and_learn_as_padded_ones(
    dtype: torch.dtype, tolerance: float, checkpointing: bool
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    model = with_adapter(random_model("qwen3", head_dim=64, hidden_size=256)).to("cuda", dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    rows = [TokenRow(tuple(range(50)), tuple(range(n))) for n in (60, 1, 0, 33)] + [TokenRow((1, 2), (3,) * 200)]
    gradients, scores = [], []
    for passes in (packed_log_probs, log_probs):
        scores.append(passes(model, rows, 1.0).log_probs)
        scores[-1].sum().backward()
        gradients.append(gradient(model).float())
    assert (scores[0] - scores[1]).norm() <= tolerance * scores[1].norm()
    assert (gradients[0] - gradients[1]).norm() <= tolerance * gradients[1].norm()


# Unsloth, as installed


def installed(path: str) -> Path:
    """A file of Unsloth, which as a package cannot be imported in full without CUDA."""
    package = find_spec("unsloth")
    if package is None or package.origin is None:
        pytest.skip("unsloth is not installed")
    return Path(package.origin).parent / path


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Unsloth's own module for shared prompts, which needs torch alone."""
    name = "unsloth.utils.prefix_grouper_kernel"
    spec = spec_from_file_location(name, installed("utils/prefix_grouper_kernel.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_unsloths_kernel_reads_our_row_as_the_segments_do(kernel: Any) -> None:
    rows = [TokenRow(tuple(range(30)), tuple(range(n))) for n in (50, 1, 0, 77)] + [TokenRow((1, 2), (3,))]
    layout = layout_of(rows)
    query, key, value = heads(layout)
    ours, _ = shared_prefix_attention(torch.nn.Module(), query, key, value, None, shared_prefix=layout)
    described = unsloth_pass.shared_prompts(layout.segments, CPU)
    theirs = kernel.flex_shared_prefix_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), described, compiled=False
    )
    assert torch.allclose(theirs, ours, atol=1e-12)


def test_what_unsloth_reads_of_a_packed_row_is_what_is_passed() -> None:
    dispatch, llama = installed("utils/attention_dispatch.py").read_text(), installed("models/llama.py").read_text()
    assert 'kwargs.get("prefix_seg_info"' in dispatch  # by this name, among the keyword arguments,
    assert "past_key_value is not None or attention_mask is not None" in dispatch  # and without cache and mask
    assert "resolve_prefix_seg_info(kwargs, past_key_value, attention_mask)" in llama
    assert '"prefix_seg_info" in kwargs' in llama  # a row longer than max_seq_length is then not cut
    assert f'os.environ.get("{unsloth_pass.SWITCH}", "0") == "1"' in llama
    assert "logits = hidden_states," in llama
    for family in ("llama", "mistral", "qwen3"):
        assert "resolve_prefix_seg_info" in installed(f"models/{family}.py").read_text(), family
    assert "LlamaAttention_fast_forward" in installed("models/qwen2.py").read_text()


def patched(model: Any, monkeypatch: pytest.MonkeyPatch, *, shares: bool = True) -> list[dict[str, Any]]:
    """The model with forwards as Unsloth leaves them on CUDA, as far as names and results go; what it was called with.

    Its attention is our own, told by the description that Unsloth's would get.
    """
    module = ModuleType("unsloth.models.stand_in")
    if shares:
        module.resolve_prefix_seg_info = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def forward(self: Any, *arguments: Any, **named: Any) -> Any:
        return own(self, *arguments, **named)

    forward.__module__ = module.__name__
    stand_in = type(attention.__name__, (attention,), {"forward": forward})
    for layer in model.model.layers:
        layer.self_attn.__class__ = stand_in
    calls: list[dict[str, Any]] = []

    def whole(input_ids: Tensor, **named: Any) -> Any:
        calls.append({"input_ids": input_ids, "switch": os.environ.get("UNSLOTH_RETURN_HIDDEN_STATES")} | named)
        described = named.pop("prefix_seg_info", None)
        mask = None if described is None else mask_of(described)
        hidden = model.model(input_ids=input_ids, attention_mask=mask, **named).last_hidden_state
        return SimpleNamespace(logits=hidden if calls[-1]["switch"] == "1" else model.lm_head(hidden))

    monkeypatch.setattr(model, "forward", whole)
    return calls


def mask_of(described: Any) -> Tensor:
    """(1, 1, T, T) from the fields that Unsloth's kernel reads."""
    group, first, own = described.group_of_kv, described.is_prefix, described.suffix_of_kv
    causal = torch.ones(described.T_pad, described.T_pad, dtype=torch.bool).tril()
    kept = (group[:, None] == group) & causal & (first[None] | ((own[:, None] == own) & ~first[:, None]))
    return kept[None, None, : described.T, : described.T]


def test_unsloths_model_is_called_by_its_own_forward_with_the_head_left_to_us(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("llama")
    rows = [TokenRow((5, 6, 7), tuple(range(n))) for n in (9, 0, 4)] + [TokenRow((8,), (1, 2))]
    expected = packed_log_probs(model, rows, 0.7).log_probs
    calls = patched(model, monkeypatch)
    assert can_pack(model, longest_row=100) is None
    assert torch.allclose(log_probs(model, rows, 0.7).log_probs, expected, atol=1e-10)
    assert torch.allclose(packed_log_probs(model, rows, 0.7).log_probs, expected, atol=1e-10)
    plain, packed = calls
    assert set(plain) == {"input_ids", "use_cache", "switch"}
    assert set(packed) == {"input_ids", "position_ids", "prefix_seg_info", "use_cache", "switch"}
    assert all(call["switch"] == "1" and call["use_cache"] is False for call in calls)
    assert packed["input_ids"].shape == (1, 3 + 9 + 4 + 1 + 2)


def test_a_model_that_ignores_the_switch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    patched(model, monkeypatch)
    monkeypatch.setattr(unsloth_pass, "SWITCH", "ANOTHER")
    with pytest.raises(RunError, match="61 numbers a token under ANOTHER=1, not the 32 of a hidden state"):
        log_probs(model, [TokenRow((1,), (2,))], 1.0)


@pytest.mark.parametrize(
    ("shares", "changed", "reason"),
    [
        (False, {}, "does not take shared prompts"),
        (True, {"attention_dropout": 0.1}, "attention dropout"),
        (True, {"num_experts": 4}, "mixture of experts"),
    ],
)
def test_unsloths_models_that_cannot_share_prompts_say_why(
    shares: bool, changed: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model("llama")
    patched(model, monkeypatch, shares=shares)
    for name, value in changed.items():
        setattr(model.config, name, value)
    assert reason in (can_pack(model, longest_row=100) or "")


def test_the_switch_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with unsloth_pass._switched_on():
        assert os.environ[unsloth_pass.SWITCH] == "1"
    assert unsloth_pass.SWITCH not in os.environ
    monkeypatch.setenv(unsloth_pass.SWITCH, "0")
    with unsloth_pass._switched_on():
        pass
    assert os.environ[unsloth_pass.SWITCH] == "0"
