"""Who writes the completions: one contract (engine.py), one file an engine."""
