"""A sampler that draws from another distribution than the trainer's: what sampling_correction makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import VOCABULARY, gradient, random_model, with_adapter
from torch import Tensor

from slmgrpo.model import Policy, base_fingerprint
from slmgrpo.recipe import Loss, Sampling
from slmgrpo.rollout.engine import Request
from slmgrpo.rollout.hf import HfEngine
from slmgrpo.trainer.logprobs import TokenRow
from slmgrpo.trainer.losses import LossBatch, norms_of, policy_loss
from slmgrpo.trainer.packing import packed_log_probs

WIDE = {"loss_type": "grpo", "sampling_correction_cap": 1e9}


def small_policy(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three tokens, all completions of this length: (parameters, the policy's log-probs, a sampler's, rewards).

    The sampler is sharper and shifted. Log-probs are (completions, tokens).
    """
    noise = torch.Generator().manual_seed(tokens)
    parameters = torch.randn(1 + 3, 3, generator=noise, dtype=torch.float64).requires_grad_()
    shifted = 2 * parameters.detach() + torch.randn(4, 3, generator=noise, dtype=torch.float64)

    def log_probs(logits: Tensor) -> Tensor:
        first, second = logits[:1].log_softmax(-1)[0], logits[1:].log_softmax(-1)
        if tokens == 1:
            return first[:, None]
        return torch.stack([first[:, None].expand(3, 3), second], -1).reshape(9, 2)

    return parameters, log_probs(parameters), log_probs(shifted), torch.randn(3**tokens, generator=noise).double()


def expected_gradient(tokens: int, *, biased: bool, **settings: Any) -> Tensor:
    """Of the loss over everything that policy or sampler may write, each completion by its probability; exact."""
    parameters, ours, sampler, rewards = small_policy(tokens)
    drawn_from = sampler if biased else ours.detach()
    probability = drawn_from.sum(-1).exp()
    assert float(probability.sum()) == pytest.approx(1)
    rows = len(rewards)
    batch = LossBatch(
        mask=torch.ones(rows, tokens),
        advantages=rewards * probability * rows,  # the loss is a mean over rows and linear in the advantage
        truncated=torch.zeros(rows, dtype=torch.bool),
        sampler=drawn_from,
    )
    loss = Loss.model_validate(WIDE | settings)
    policy_loss(ours, batch, loss, norms_of([tokens] * rows, [False] * rows, loss, max_tokens=tokens)).loss.backward()
    assert parameters.grad is not None
    return parameters.grad


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (1, {"sampling_correction": "token_truncate"}),
        (1, {"sampling_correction": "token_mask"}),
        (2, {"sampling_correction": "sequence_truncate"}),
        (2, {"sampling_correction": "sequence_mask"}),
        (1, {"sampling_correction": "bypass", "epsilon": 0.999, "epsilon_high": 1e9}),
    ],
    ids=str,
)
def test_the_expected_gradient_under_a_biased_sampler_is_the_policys_own(tokens: int, settings: dict[str, Any]) -> None:
    on_policy = expected_gradient(tokens, biased=False, sampling_correction="none")
    corrected = expected_gradient(tokens, biased=True, **settings)
    uncorrected = expected_gradient(tokens, biased=True, sampling_correction="none")
    assert torch.allclose(corrected, on_policy, atol=1e-12)
    assert (uncorrected - on_policy).norm() > 0.2 * on_policy.norm()


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_truncate", "bypass", "none"])
def test_without_a_bias_a_correction_changes_nothing(correction: str) -> None:
    plain = expected_gradient(2, biased=False, sampling_correction="none")
    assert torch.allclose(expected_gradient(2, biased=False, sampling_correction=correction), plain, atol=1e-12)


def sharp_model() -> Any:
    """A model whose next tokens are far from uniform, with an adapter."""
    model = random_model("llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    return with_adapter(model)


def test_a_real_engine_at_another_temperature_is_corrected_within_noise() -> None:
    """It writes at temperature 2 and says so by its log-probs; the loss is that of temperature 1."""
    model, prompt, draws = sharp_model().eval(), (5, 6, 7), 10_000
    rewards = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)).double()
    settings = Sampling.model_validate({"temperature": 2.0})
    engine = HfEngine(model, SimpleNamespace(eos_token_id=VOCABULARY - 1), settings, seed=3)
    written = list(engine.generate([Request(0, prompt, tuple(range(draws)), 0, 1)], step=0))
    reported = torch.zeros(VOCABULARY, dtype=torch.float64)
    for c in written:
        reported[c.token_ids[0]] = c.log_probs[0]

    def learned(share: Tensor, correction: str) -> Tensor:
        """The gradient of completions of one token, each token this share of them; the loss is linear in it."""
        rows = [TokenRow(prompt, (token,)) for token in range(VOCABULARY)]
        loss = Loss.model_validate(WIDE | {"sampling_correction": correction})
        passed = packed_log_probs(model, rows, 1.0)
        cut = torch.zeros(VOCABULARY, dtype=torch.bool)
        batch = LossBatch(passed.mask, rewards * share * VOCABULARY, cut, sampler=reported[:, None])
        norms = norms_of([1] * len(rows), [False] * len(rows), loss, max_tokens=1)
        policy_loss(passed.log_probs, batch, loss, norms).loss.backward()
        return gradient(model)

    def share_of(some: list[Any]) -> Tensor:
        return torch.bincount(torch.tensor([c.token_ids[0] for c in some]), minlength=VOCABULARY) / len(some)

    with torch.no_grad():
        rows = [TokenRow(prompt, (token,)) for token in range(VOCABULARY)]
        exact_share = packed_log_probs(model, rows, 1.0).log_probs[:, 0].exp()
    exact = learned(exact_share, "none")
    halves = [learned(share_of(written[i::2]), "token_truncate") for i in (0, 1)]
    noise = float((halves[0] - halves[1]).norm() / 2)  # of their mean
    corrected = float((sum(halves) / 2 - exact).norm())
    uncorrected = float((learned(share_of(written), "none") - exact).norm())
    assert corrected < 3 * noise < 0.5 * float(exact.norm())
    assert uncorrected > 5 * noise


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-5), (torch.bfloat16, 2e-3)])
def test_engine_and_trainer_agree_before_and_after_every_update(dtype: torch.dtype, tolerance: float) -> None:
    """Mean difference in log-prob at steps 0, 1 and 5; the changed adapter differs from the base by far more."""
    model = random_model("llama")
    model = with_adapter(model).to(dtype).eval()
    engine = HfEngine(model, SimpleNamespace(eos_token_id=VOCABULARY - 1), Sampling.model_validate({}), seed=3)
    requests = [Request(i, (3 + i, 4, 5), (0, 1, 2), i, 16) for i in range(4)]
    for step in range(6):
        if step in (0, 1, 5):
            written = list(engine.generate(requests, step=step))
            rows = [TokenRow(requests[c.index].prompt_ids, c.token_ids) for c in written]
            sampler = torch.tensor([value for c in written for value in c.log_probs])
            with torch.no_grad():
                passed = packed_log_probs(model, rows, 1.0)
                with model.disable_adapter():
                    base = packed_log_probs(model, rows, 1.0)
            assert float((passed.log_probs[passed.mask] - sampler).abs().mean()) <= tolerance
            assert float((base.log_probs[base.mask] - sampler).abs().mean()) > 10 * tolerance
        change(model, step)
        engine.sync(step + 1)


def change(model: Any, seed: int) -> None:
    """The adapter after an update of its own size."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.add_((0.3 * torch.randn(p.shape, generator=noise)).to(p.dtype))


def test_base_weights_are_the_same_bits_after_a_thousand_syncs() -> None:
    model = with_adapter(random_model("llama")).float()
    policy = Policy(model, None, "", "transformers", torch.device("cpu"))
    before = base_fingerprint(policy)
    engine = HfEngine(model, SimpleNamespace(eos_token_id=VOCABULARY - 1), Sampling.model_validate({}), seed=3)
    for step in range(1000):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_" in name:
                    p.add_(1e-4)
        engine.sync(step + 1)
        if step % 50 == 0:
            list(engine.generate([Request(0, (1, 2), (0, 1), 0, 4)], step=step))
    assert base_fingerprint(policy) == before
