"""Activation shift on tiny random models: the three treatments, noise of equal norms, massive tokens."""

from __future__ import annotations

import pytest
import torch
from random_models import random_model

from slmgrpo.dynamics import shift, update
from slmgrpo.dynamics.probe import factors, lora_layers

PROMPTS = [list(range(3, 15)), list(range(20, 28))]


class Tokenizer:
    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


def adapted():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(random_model("llama").float(), settings, adapter_name="tuned").eval()


def test_one_heavy_token_hides_what_happens_to_the_others_in_the_papers_form_only() -> None:
    base = torch.ones(1, 10, 4)
    base[:, 0] = 1000.0
    tuned = base.clone()
    tuned[:, 1:] *= 1.1
    paper, no_first, median = shift.shifts(base, tuned)[:, 0].tolist()
    assert paper < 0.001
    assert (no_first, median) == pytest.approx((0.1, 0.1), rel=1e-4)
    shares = shift.squared_shares(base)
    assert float(shares.sum()) == pytest.approx(1)
    assert float(shares[0, 0]) > 0.99


def test_a_shift_is_that_of_the_blocks_own_outputs() -> None:
    model = adapted()
    found = shift.measure(model, Tokenizer(), PROMPTS, adapter="tuned", seeds=2)
    assert found.tuned is not None
    assert found.tuned.shape == found.noise.shape == found.spread.shape == (3, 2)
    blocks = shift.blocks_of(model)
    assert len(blocks) == 2
    model.set_adapter("tuned")
    expected = []
    for ids in PROMPTS:
        outputs = {}
        for name in ("base", "tuned"):
            with model.disable_adapter() if name == "base" else torch.no_grad(), torch.no_grad():
                states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
            outputs[name] = states[1][0]  # behind block 0; the last one would stand behind the final norm
        expected.append((outputs["tuned"] - outputs["base"]).norm() / outputs["base"].norm())
    assert float(found.tuned[0, 0]) == pytest.approx(float(torch.stack(expected).mean()), rel=1e-4)


def test_noise_has_the_norm_of_each_tensor_and_another_direction() -> None:
    model = adapted()
    shift.measure(model, Tokenizer(), PROMPTS, adapter="tuned", seeds=1)
    for layer in lora_layers(model).values():
        tuned, noise = factors(layer, "tuned"), factors(layer, shift.NOISE)
        assert update.norm(noise) == pytest.approx(update.norm(tuned), rel=1e-5)
        assert abs(update.cosine(noise, tuned)) < 0.3


def test_a_plain_model_gets_noise_of_one_percent_in_every_block_and_none_in_the_head() -> None:
    model = random_model("llama").float().eval()
    weights = {name: float(p.detach().norm()) for name, p in model.named_parameters() if p.ndim == 2}
    found = shift.measure(model, Tokenizer(), PROMPTS, adapter=None, seeds=2, rank=2)
    assert found.tuned is None
    assert float(found.noise.min()) > 0 and float(found.noise.max()) < 0.2
    layers = lora_layers(model)
    assert len(layers) == 14
    for name, layer in layers.items():
        assert update.norm(factors(layer, shift.NOISE)) == pytest.approx(0.01 * weights[f"{name}.weight"], rel=1e-4)


def test_massive_tokens_are_named_with_their_blocks() -> None:
    shares = torch.full((4, 5), 0.2)
    shares[1:3, 0] = torch.tensor([0.9, 0.7])
    (found,) = shift._massive(0, shares, [7, 8, 9, 10, 11], Tokenizer())
    assert (found.position, found.token, found.first, found.last) == (0, "<7>", 1, 2)
    assert found.share == pytest.approx(0.9)
    whole = shift.Shift(None, torch.ones(3, 4), torch.zeros(3, 4), shares.max(dim=1).values, [found], 1)
    lines = [*("  ".join(row) for row in shift.table(whole)), *shift.notes(whole, "noise")]
    assert len(lines) == 1 + 4 + 2 + 3 + 1
    assert lines[-1] == "massive: token 0 ('<7>') in 1 of 1 prompts, blocks 1-2, up to 90.0 % of ||H||^2"
