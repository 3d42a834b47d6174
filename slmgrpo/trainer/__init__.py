"""The GRPO loop, its losses and its log-prob passes."""
