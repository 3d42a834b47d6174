"""Rules that score completions, the sandbox that runs code, and the pool that runs both beside generation."""
