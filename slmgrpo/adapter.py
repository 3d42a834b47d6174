"""A saved adapter on a model: every tensor has its place, every place its tensor, or one message says what is odd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slmgrpo.errors import RecipeError


def add_adapter(model: Any, folder: Path, name: str, advice: str) -> Any:
    """The model with a saved adapter on it, not to be trained. advice: what to do where it does not fit."""
    from peft import PeftConfig, PeftModel

    config = PeftConfig.from_pretrained(str(folder))
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


def fill_adapter(model: Any, folder: Path, name: str, advice: str) -> None:
    """Put saved weights into an adapter of the model: every tensor must have its place, and every place its tensor."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict
    from safetensors.torch import load_file

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
