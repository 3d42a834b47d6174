from __future__ import annotations

import random
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from slmgrpo.errors import PlanError, RunError
from slmgrpo.recipe import Sampling
from slmgrpo.rollout import fold as fold_module
from slmgrpo.rollout import hf
from slmgrpo.rollout.engine import Completion, Request
from slmgrpo.rollout.fold import fold
from slmgrpo.rollout.hf import HfEngine

VOCABULARY, EOS = 90, 89
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
PLAIN = Sampling.model_validate({})
torch.set_num_threads(1)


class Letters:
    """A tokenizer whose token i is the letter chr(32 + i)."""

    eos_token_id = EOS

    def __len__(self) -> int:
        return VOCABULARY

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(32 + i) for i in ids)

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row) for row in rows]


def make(family: str = "llama", *, lora: bool = False, **settings: Any) -> Any:
    """A small random model whose next tokens are far from uniform."""
    torch.manual_seed(0)
    config = CONFIGS[family](
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=None, eos_token_id=EOS, **settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, lora_dropout=0.3, target_modules="all-linear"))
        shake(model)
    return model


def shake(model: torch.nn.Module) -> None:
    """Change the adapter, whose B starts at zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def ask(count: int = 6, members: int = 4, max_tokens: int = 24) -> list[Request]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(EOS) for _ in range(rng.randrange(1, 30))) for _ in range(count)]
    return [Request(i, prompt, tuple(range(members)), 1000 + i, max_tokens) for i, prompt in enumerate(prompts)]


def write(model: torch.nn.Module, requests: list[Request], *, step: int = 0, tokens: int = 65536, **settings: Any):
    engine = HfEngine(model, Letters(), Sampling.model_validate(settings), seed=3, max_batch_tokens=tokens)
    return {(c.index, c.member): c for c in engine.generate(requests, step=step)}


def plain_log_probs(model: torch.nn.Module, request: Request, completion: Completion, temperature: float = 1.0):
    was, _ = model.training, model.eval()
    ids = torch.tensor([request.prompt_ids + completion.token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / temperature
    model.train(was)
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("lora", [False, True])
def test_log_probs_agree_with_a_plain_forward(family: str, lora: bool) -> None:
    model, requests = make(family, lora=lora), ask()
    written = write(model, requests, temperature=0.8, top_p=0.9)
    assert len(written) == 24
    for (index, _), completion in written.items():
        plain = plain_log_probs(model, requests[index], completion, 0.8)
        torch.testing.assert_close(torch.tensor(completion.log_probs), plain, atol=5e-5, rtol=0)


def test_completions_are_the_same_in_any_order_batch_and_split() -> None:
    model, requests = make(lora=True), ask(count=7)
    whole = write(model, requests)
    reversed_and_narrow = write(model, requests[::-1], tokens=300)
    one_at_a_time = write(model, requests, tokens=1)
    halves = {
        **write(model, [r for r in requests if r.index % 2]),
        **write(model, [r for r in requests if not r.index % 2]),
    }
    members_apart = {}
    for member in range(4):
        members_apart |= write(
            model, [Request(r.index, r.prompt_ids, (member,), r.prompt_key, r.max_tokens) for r in requests]
        )
    for other in (reversed_and_narrow, one_at_a_time, halves, members_apart):
        assert {k: c.token_ids for k, c in other.items()} == {k: c.token_ids for k, c in whole.items()}


def test_members_steps_and_prompts_differ() -> None:
    model, requests = make(), ask()
    first, second = write(model, requests, step=0), write(model, requests, step=1)
    assert all(first[key].token_ids != second[key].token_ids for key in first)
    assert len({c.token_ids for c in first.values()}) == len(first)


def test_a_completion_stops_at_the_end_token_or_at_its_limit() -> None:
    model = make()
    requests = [*ask(max_tokens=40), Request(6, (5, 6), (0, 9), 77, 1)]
    written = write(model, requests)
    reasons = {c.finish_reason for c in written.values()}
    assert reasons == {"stop", "length"}
    for (index, _), c in written.items():
        assert len(c.token_ids) == len(c.log_probs) <= requests[index].max_tokens
        assert EOS not in c.token_ids[:-1]
        assert (c.finish_reason == "stop") == (c.token_ids[-1] == EOS)
        assert c.finish_reason == "stop" or len(c.token_ids) == requests[index].max_tokens
    assert {key for key in written if key[0] == 6} == {(6, 0), (6, 9)}


def test_a_completion_ends_behind_a_stop_text() -> None:
    model, requests = make(), ask(max_tokens=40)
    free = write(model, requests)
    cut = write(model, requests, stop=["A", "zz", "k"])
    assert any(len(cut[key].token_ids) < len(free[key].token_ids) for key in free)
    for key, c in cut.items():
        text, whole = Letters().decode(list(c.token_ids)), Letters().decode(list(free[key].token_ids))
        assert whole.startswith(text)
        assert not any(stop in text[:-1] for stop in ("A", "zz", "k"))
        assert len(text) == len(whole) or text.endswith(("A", "zz", "k"))


def test_greedy_requests_take_the_likeliest_tokens() -> None:
    model = make()
    requests = [Request(0, (3, 4, 5), (0,), 0, 10, greedy=True), Request(1, (3, 4, 5), (0,), 1, 10)]
    written = write(model, requests)
    ids = [3, 4, 5]
    with torch.no_grad():
        for token_id in written[0, 0].token_ids:
            assert model(torch.tensor([ids])).logits[0, -1].argmax() == token_id
            ids.append(token_id)
    assert written[1, 0].token_ids != written[0, 0].token_ids


def test_the_adapter_counts_and_a_changed_one_changes_the_log_probs() -> None:
    model, requests = make(lora=True), ask()
    engine = HfEngine(model, Letters(), PLAIN, seed=3)
    before = {(c.index, c.member): c for c in engine.generate(requests, step=0)}
    with model.disable_adapter():
        base = plain_log_probs(model, requests[0], before[0, 0])
    assert (base - torch.tensor(before[0, 0].log_probs)).abs().max() > 0.05
    shake(model)
    engine.sync(1)
    for c in engine.generate(requests, step=0):
        plain = plain_log_probs(model, requests[c.index], c)
        torch.testing.assert_close(torch.tensor(c.log_probs), plain, atol=5e-5, rtol=0)
    assert (plain_log_probs(model, requests[0], before[0, 0]) - torch.tensor(before[0, 0].log_probs)).abs().max() > 0.05


def test_a_disabled_adapter_is_left_out() -> None:
    model, requests = make(lora=True), ask(count=2)
    with model.disable_adapter():
        written = write(model, requests)
        plain = plain_log_probs(model, requests[1], written[1, 2])
    torch.testing.assert_close(torch.tensor(written[1, 2].log_probs), plain, atol=5e-5, rtol=0)


def test_an_adapter_that_cannot_be_folded_keeps_its_own_forward_pass() -> None:
    """DoRA, and anything in bfloat16."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    model, requests = get_peft_model(make(), LoraConfig(**settings, use_dora=True)), ask(count=2)
    shake(model)
    written = write(model, requests)
    plain = plain_log_probs(model, requests[1], written[1, 2])
    torch.testing.assert_close(torch.tensor(written[1, 2].log_probs), plain, atol=5e-5, rtol=0)
    assert fold(model) == []
    assert len(fold(make(lora=True))) == 14
    assert fold(make(lora=True).bfloat16()) == []


@pytest.mark.parametrize("lora", [False, True])
def test_packed_layers_write_what_the_others_write(monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    model, requests = make(lora=lora), ask()
    plain = write(model, requests)
    monkeypatch.setattr(fold_module, "PACKED_BYTES", range(10**9))
    stands = fold(model)
    assert [type(stand.folded) for stand in stands] == [fold_module.Packed] * 15  # the head too
    x = torch.randn(3, 2, model.config.hidden_size)
    torch.testing.assert_close(stands[0].folded(x), stands[0].layer(x), atol=1e-5, rtol=1e-5)
    packed = write(model, requests)
    assert {key: c.token_ids for key, c in packed.items()} == {key: c.token_ids for key, c in plain.items()}
    for key, c in packed.items():
        assert c.log_probs == pytest.approx(plain[key].log_probs, abs=2e-5)


def test_prompts_of_very_different_length_do_not_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    passes: list[tuple[int, ...]] = []
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(
        lambda m, args, kwargs: passes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    requests = [Request(i, (5,) * n, (0,), i, 2) for i, n in enumerate((3, 40, 4, 39, 41, 3))]
    whole = write(model, requests)
    assert passes[0] == (6, 41)
    passes.clear()
    monkeypatch.setattr(hf, "FREE_PADDING", 8)
    assert write(model, requests).keys() == whole.keys()
    assert passes[:2] == [(3, 41), (3, 4)]


def test_base_weights_stay_as_they_are() -> None:
    model = make(lora=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    for step in range(3):
        write(model, ask(), step=step)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_checkpointing_dropout_and_training_mode_change_nothing_and_come_back() -> None:
    model, requests = make(lora=True), ask()
    calm = write(model.eval(), requests)
    model.train()
    model.gradient_checkpointing_enable()
    model.base_model.model.model.embed_tokens.eval()
    modes = [module.training for module in model.modules()]
    attention = model.config._attn_implementation
    assert {k: c.token_ids for k, c in write(model, requests).items()} == {k: c.token_ids for k, c in calm.items()}
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == attention
    assert model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.requires_grad


def test_a_reader_that_leaves_early_gets_its_model_back() -> None:
    model = make().train()
    completions = HfEngine(model, Letters(), PLAIN, seed=3).generate(ask(), step=0)
    next(completions)
    assert isinstance(completions, Generator)
    completions.close()
    assert all(module.training for module in model.modules())


def test_completions_come_as_they_finish() -> None:
    model = make()
    requests = [Request(0, (1, 2), (0,), 0, 60), Request(1, (1, 2), (0,), 1, 2)]
    order = [c.index for c in HfEngine(model, Letters(), PLAIN, seed=3).generate(requests, step=0)]
    assert order == [1, 0]


def test_nothing_asked_nothing_written() -> None:
    assert write(make(), []) == {}
    assert write(make(), [Request(0, (1, 2), (), 0, 5)]) == {}


def test_a_diverged_model_a_full_memory_and_too_many_tokens_end_the_run() -> None:
    model = make()
    with pytest.raises(RunError, match="make 303 tokens, the model has 256 positions"):
        write(model, [Request(0, (1, 2, 3), (0,), 0, 300)])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    handle = model.model.layers[1].register_forward_pre_hook(full)
    with pytest.raises(RunError, match="out of memory with 24 rows of up to 5"):
        write(model, ask())
    handle.remove()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(RunError, match="not finite"):
        write(model, ask())


def test_other_families_and_sliding_windows_are_refused() -> None:
    gemma = SimpleNamespace(config=SimpleNamespace(model_type="gemma2"), modules=list)
    with pytest.raises(PlanError, match="llama, qwen2, qwen3, not gemma2"):
        HfEngine(gemma, Letters(), PLAIN, seed=3)
    sliding = make("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1)
    with pytest.raises(PlanError, match="sliding windows"):
        HfEngine(sliding, Letters(), PLAIN, seed=3)


def test_unsloths_cuda_model_is_refused() -> None:
    model = make()
    decoder = type(model.model)

    def forward(self, *args, **kwargs):
        return decoder.forward(self, *args, **kwargs)

    forward.__module__ = "unsloth.models.llama"
    model.model.__class__ = type("LlamaModel", (decoder,), {"forward": forward})
    with pytest.raises(PlanError, match=r"Unsloth's CUDA model .LlamaModel.*engine: unsloth"):
        HfEngine(model, Letters(), PLAIN, seed=3)
