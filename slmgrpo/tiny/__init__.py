"""The embedded model: a causal LM of 0.9 million parameters and three tasks that it can learn on a CPU."""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Folder with the weights and the tokenizer, in transformers' format."""
    return Path(__file__).parent / "model"
