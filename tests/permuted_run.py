"""Trains a recipe with each group's advantages permuted: same completions and sizes of advantages, nothing to learn.

python tests/permuted_run.py RECIPE OUT [KEY=VALUE ...]
slmgrpo dynamics OUT        # its coherence is what noise really gives on this model and data
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

from slmgrpo.callbacks import Silent
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir


def permuted_run(recipe: str, out: Path, overrides: Sequence[str]) -> RunDir:
    """The run directory, as of any run."""
    from slmgrpo.train import train
    from slmgrpo.trainer import loop

    loaded = load(recipe, overrides)
    order, real = random.Random(loaded.recipe.seed), loop.advantages

    def permuted(*arguments):
        return [order.sample(group, len(group)) for group in real(*arguments)]

    loop.advantages = permuted
    try:
        return train(loaded.recipe, plan(loaded), base=loaded.base, out=out, resume=None, observer=Silent()).run
    finally:
        loop.advantages = real


if __name__ == "__main__":
    print(permuted_run(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]).path)
