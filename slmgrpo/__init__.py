"""GRPO fine-tuning of small language models from YAML recipes."""

__version__ = "0.1.0"
