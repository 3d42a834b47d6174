"""A saved adapter on a model: every tensor has its place, every place its tensor, or one message says what is odd."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError


def add_adapter(model: Any, folder: Path, name: str, advice: str) -> Any:
    """The model with a saved adapter on it, not to be trained. advice: what to do where it does not fit."""
    from peft import PeftModel

    config = settings_of(folder)
    config.inference_mode = True
    try:
        if isinstance(model, PeftModel):
            model.add_adapter(name, config)
        else:
            model = PeftModel(model, config, name)
    except ValueError as error:
        raise RecipeError(
            f"{folder}: the adapter does not fit its base ({str(error).splitlines()[0]}); {advice}"
        ) from None
    fill_adapter(model, folder, name, advice)
    return model


def settings_of(folder: Path) -> Any:
    """PEFT's settings of a saved adapter, both of whose files are there."""
    from peft import PeftConfig

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise RecipeError(f"{folder}: the adapter has no {name}; load it with PEFT and save it with safetensors")
    return PeftConfig.from_pretrained(str(folder))


def check_scale(model: Any, folder: Path, name: str) -> None:
    """Refuse a saved LoRA adapter whose update the model would scale otherwise: no shape tells."""
    saved, live = settings_of(folder), model.peft_config[name]
    wanted, got = (c.lora_alpha / (math.sqrt(c.r) if c.use_rslora else c.r) for c in (saved, live))
    if saved.alpha_pattern != live.alpha_pattern:
        raise RecipeError(f"{folder}: the adapter does not fit: it scales some layers apart; set merge_adapter=true")
    if not math.isclose(wanted, got):
        raise RecipeError(
            f"{folder}: the adapter does not fit: its update is scaled by {wanted:g}, the model's by {got:g}; set "
            f"lora.rank={saved.r} and lora.alpha={wanted * saved.r:.17g}"
        )


def fill_adapter(model: Any, folder: Path, name: str, advice: str) -> None:
    """Put saved weights into an adapter of the model: every tensor must have its place, and every place its tensor."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

    settings_of(folder)
    weights = load_file(str(folder / "adapter_model.safetensors"))
    expected = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    faults = [f"{key}: the model has no place for it" for key in sorted(weights.keys() - expected.keys())]
    faults += [
        f"{key}: the model has a place for it that stays empty" for key in sorted(expected.keys() - weights.keys())
    ]
    both = weights.keys() & expected.keys()
    faults += [f"{k}: the model has another shape there" for k in both if weights[k].shape != expected[k].shape]
    if faults:
        raise RecipeError(f"{folder}: the adapter does not fit its base: {faults[0]}; {advice}")
    set_peft_model_state_dict(model, weights, adapter_name=name)
