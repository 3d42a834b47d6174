"""The plain pass against log-softmax written out, and that no tensor of tokens x vocabulary exists on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_models import VOCABULARY, LargestTensor, gradient, random_model, with_adapter
from torch import Tensor

from slmgrpo.errors import PlanError
from slmgrpo.trainer import logprobs
from slmgrpo.trainer.logprobs import TokenRow, check_head, log_probs

ROWS = [
    TokenRow((5, 6, 7), (8, 9, 10, 11, 12)),
    TokenRow((5,), (13,)),
    TokenRow((5, 6), ()),
    TokenRow((1, 2, 3, 4, 5, 6), (7, 8, 9)),
]


def written_out(model: Any, rows: list[TokenRow], temperature: float) -> tuple[list[Tensor], list[Tensor]]:
    """Per row, log-probs and entropies from the model's own logits, one row at a time."""
    scores, entropies = [], []
    for row in rows:
        ids = torch.tensor([row.prompt_ids + row.completion_ids])
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : ids.shape[1] - 1] / temperature
        log_softmax = logits.log_softmax(-1)
        scores.append(log_softmax.gather(-1, torch.tensor(row.completion_ids, dtype=torch.long)[:, None])[:, 0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
    return scores, entropies


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "granite"])
@pytest.mark.parametrize("adapter", [False, True])
def test_log_probs_entropies_and_gradients_are_those_of_log_softmax(
    family: str, adapter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 2 * VOCABULARY)  # chunks of two tokens
    model = random_model(family, **({"logits_scaling": 3.0} if family == "granite" else {}))
    model = with_adapter(model) if adapter else model
    check_head(model)
    noise = torch.Generator().manual_seed(1)
    weights = torch.randn(2, len(ROWS), 5, generator=noise, dtype=torch.float64)

    result = log_probs(model, ROWS, 0.7, entropy=True, entropy_grad=True)
    assert result.entropies is not None
    (result.log_probs * weights[0] + result.entropies * weights[1]).sum().backward()
    mine = gradient(model)

    scores, entropies = written_out(model, ROWS, 0.7)
    loss = torch.zeros((), dtype=torch.float64)
    for i, (score, value) in enumerate(zip(scores, entropies, strict=True)):
        n = len(score)
        assert torch.allclose(result.log_probs[i, :n], score, atol=1e-12)
        assert torch.allclose(result.entropies[i, :n], value, atol=1e-12)
        assert not result.log_probs[i, n:].any() and not result.entropies[i, n:].any()
        assert result.mask[i].tolist() == [True] * n + [False] * (5 - n)
        loss = loss + (score * weights[0, i, :n]).sum() + (value * weights[1, i, :n]).sum()
    loss.backward()
    theirs = gradient(model)
    assert (mine - theirs).norm() <= 1e-8 * theirs.norm()  # norms and rotations are float32 in transformers


def test_entropies_carry_no_gradient_unless_asked() -> None:
    model = with_adapter(random_model("llama"))
    result = log_probs(model, ROWS, 1.0, entropy=True)
    assert result.entropies is not None and not result.entropies.requires_grad
    assert result.log_probs.requires_grad
    with torch.no_grad():
        silent = log_probs(model, ROWS, 1.0)
    assert silent.entropies is None and not silent.log_probs.requires_grad
    assert torch.allclose(silent.log_probs, result.log_probs, atol=1e-12)


def test_a_row_scores_the_same_alone_and_beside_longer_ones() -> None:
    model = random_model("qwen3")
    together = log_probs(model, ROWS, 1.0).log_probs
    alone = log_probs(model, ROWS[1:2], 1.0).log_probs
    assert torch.allclose(alone[0, 0], together[1, 0], atol=1e-12)


def test_a_batch_of_empty_completions_has_one_masked_column() -> None:
    result = log_probs(random_model("llama"), [TokenRow((1, 2), ())], 1.0, entropy=True)
    assert result.mask.tolist() == [[False]]
    assert result.log_probs.tolist() == [[0.0]]


def test_half_precision_models_are_scored_in_float32() -> None:
    model = with_adapter(random_model("llama").bfloat16()).bfloat16()
    result = log_probs(model, ROWS, 1.0)
    assert result.log_probs.dtype == torch.float32
    result.log_probs.sum().backward()
    assert gradient(model).isfinite().all()


def test_no_tensor_of_tokens_by_vocabulary_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 4096
    monkeypatch.setattr(logprobs, "LOGITS_PER_CHUNK", 8 * vocabulary)
    model = with_adapter(random_model("llama", vocab_size=vocabulary))
    rows = [TokenRow((1, 2), tuple(range(40))) for _ in range(4)]
    with LargestTensor() as largest:
        log_probs(model, rows, 1.0, entropy=True).log_probs.sum().backward()
    assert largest.numel == max(8 * vocabulary, model.get_input_embeddings().weight.numel()) < 160 * vocabulary


def test_a_head_that_is_not_known_is_refused() -> None:
    from transformers import LlamaForCausalLM

    class Shifted(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output: Any = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model = random_model("llama")
    model.__class__ = Shifted
    with pytest.raises(PlanError, match="set trainer=trl"):
        check_head(model)


@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("hyperclovax", {"logits_scaling": 3.0}),  # multiplies by what Granite divides by
        ("falcon_h1", {"lm_head_multiplier": 3.0, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
    ],
)
def test_a_family_that_scales_its_logits_in_another_way_is_refused(family: str, changed: dict[str, Any]) -> None:
    model = random_model(family, **changed).float()
    with pytest.raises(PlanError, match="set trainer=trl"):
        check_head(model)
