"""Loads a base once and turns it into each of its targets: adapter on at a scale, or off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slmgrpo import prompts
from slmgrpo.adapter import add_adapter
from slmgrpo.errors import PlanError, RecipeError
from slmgrpo.eval.targets import Base, Target
from slmgrpo.model import load_plain, quiet

ADVICE = "name the right one with --base"
"""Where an adapter does not fit."""


class Bench:
    """One base model with the adapters of several targets, by transformers and PEFT on any device."""

    def __init__(self, base: Base, targets: Sequence[Target]) -> None:
        with quiet():
            import peft.tuners.lora.layer  # noqa: F401  the engine needs it; its bitsandbytes speaks up when imported

            self.model, self.tokenizer = load_base(base)
            self._names: dict[Path, str] = {}
            for target in targets:
                if target.adapter is not None and target.adapter not in self._names:
                    name = f"adapter_{len(self._names)}"
                    self.model = add_adapter(self.model, target.adapter, name, ADVICE)
                    self._names[target.adapter] = name
        self.dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        self.context: int | None = getattr(self.model.config, "max_position_embeddings", None)
        self.model.eval()

    @contextmanager
    def turned_into(self, target: Target) -> Iterator[Any]:
        """The model as this target while the block runs. At scale 0 it writes exactly what the base writes."""
        if target.adapter is None:
            if not self._names:
                yield self.model
                return
            with self.model.disable_adapter():
                yield self.model
            return
        from peft.tuners.lora import LoraLayer

        name = self._names[target.adapter]
        self.model.set_adapter(name)
        lora = [module for module in self.model.modules() if isinstance(module, LoraLayer)]
        layers = [(layer, layer.scaling[name]) for layer in lora if name in layer.scaling]
        try:
            for layer, scaling in layers:
                layer.scaling[name] = scaling * target.scale
            yield self.model
        finally:
            for layer, scaling in layers:
                layer.scaling[name] = scaling


def load_base(base: Base) -> tuple[Any, Any]:
    """(model, tokenizer) with the base's merged adapters folded in and its chat template set."""
    import torch

    model = base.model
    if model.load_in_4bit and not torch.cuda.is_available():
        raise PlanError(f"{model.id}: the run trained on 4-bit weights, which need CUDA to be evaluated")
    try:
        loaded, tokenizer = load_plain(model)
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise RecipeError(
            f"{model.id}: cannot be loaded ({first}); give a folder, or a hub id where the hub can be reached"
        ) from None
    prompts.set_chat_template(tokenizer, model, base.folder)
    for number, adapter in enumerate(base.merged):
        loaded = add_adapter(loaded, adapter, f"merged_{number}", ADVICE).merge_and_unload()
    return loaded, tokenizer
