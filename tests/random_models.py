"""Tiny random models of any family for tests, and what is measured on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def random_model(family: str, **changed: Any) -> Any:
    """A tiny random causal model of a family, in float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SHAPE | changed))
    return AutoModelForCausalLM.from_config(config).double()


def with_adapter(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    return adapted.double()


def gradient(model: Any) -> Tensor:
    parts = [p.grad.flatten() for p in model.parameters() if p.requires_grad and p.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


class LargestTensor(TorchDispatchMode):
    """The largest floating tensor that any operation made, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.numel())
        return result
