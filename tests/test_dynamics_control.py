"""A real run with permuted advantages moves by its null, a real one clearly further: minutes, so run by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from permuted_run import permuted_run

from slmgrpo.callbacks import Silent
from slmgrpo.dynamics import probe, table
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.train import train

SEEDS = (42, 43, 44)


@pytest.mark.slow
def test_permuted_advantages_move_the_tensors_by_their_null_and_real_ones_clearly_further(tmp_path: Path) -> None:
    squares, lows = [], []
    for seed in SEEDS:
        overrides = [f"seed={seed}", "data.heldout=[]"]
        control = permuted_run("quickstart", tmp_path / f"permuted_{seed}", overrides)
        squares.append(table.coherence_of(probe.read(control, 40)) ** 2)
        loaded = load("quickstart", overrides)
        out = tmp_path / f"real_{seed}"
        run = train(loaded.recipe, plan(loaded), base=loaded.base, out=out, resume=None, observer=Silent()).run
        lows.append(table.grouped(probe.read(run, 40), "module")[-1].low)
    # The null is a root mean square: single short runs scatter around it (0.90 to 1.32 here).
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(1.0, abs=0.25)
    assert min(lows) > 1.5 * math.sqrt(max(squares))
