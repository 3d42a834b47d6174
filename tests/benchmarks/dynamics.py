"""What the dynamics probe costs on SmolLM2-135M, beside the training steps of the same run; the last line is JSON.

A real run of recipes/smollm2_135m_arithmetic.yaml (its prompts, group size, rank and length); every call of the probe
is timed, and the bytes of its tensors are counted.
    python tests/benchmarks/dynamics.py [--quick] [--out RUN]     # then `slmgrpo dynamics RUN`
overhead: seconds of a probe / (seconds of a step * steps between probes at the default cadence). memory: the most bytes
of its own tensors that a probe holds at once / the adapter's bytes. --quick: two steps in place of ten.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import weakref
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slmgrpo.callbacks import Silent
from slmgrpo.plan import plan
from slmgrpo.recipe import Dynamics
from slmgrpo.recipe_load import load


class Held(TorchDispatchMode):
    """Bytes in tensors that operations made and that still live; `known` storages are not counted."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.users, self.now, self.peak = known, Counter(), 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._hold(tensor, storage.data_ptr(), storage.nbytes())
        return result

    def _hold(self, tensor: torch.Tensor, place: int, size: int) -> None:
        if place in self.known:
            return
        if not self.users[place]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self.users[place] += 1
        weakref.finalize(tensor, self._release, place, size)

    def _release(self, place: int, size: int) -> None:
        self.users[place] -= 1
        if not self.users[place]:
            self.now -= size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps: under a minute")
    parser.add_argument("--out", type=Path, help="keep the run here")
    options = parser.parse_args()
    steps = 2 if options.quick else 10
    from slmgrpo.dynamics import probe
    from slmgrpo.train import train

    seconds: list[float] = []
    peaks: list[float] = []

    class Timed(probe.Probe):
        def __init__(self, policy: Any, *arguments: Any, **named: Any) -> None:
            start = time.perf_counter()
            super().__init__(policy, *arguments, **named)
            self.first = time.perf_counter() - start
            print(f"start of the probe: {self.first:.3f} s once")
            self.adapter = sum(p.nbytes for _, p in policy.trainable())
            self.known = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}

        def see(self, lines: Any) -> None:
            start = time.perf_counter()
            super().see(lines)
            seconds.append(time.perf_counter() - start)
            with Held(self.known) as held:
                list(self._rows(self._step, self._walk()))  # the same work again, with every tensor counted
            peaks.append(held.peak / self.adapter)

    real, probe.Probe = probe.Probe, Timed
    overrides = [f"train.steps={steps}", "data.heldout=[]", "dynamics.every=1", f"train.save_every={steps}"]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            loaded = load("smollm2_135m_arithmetic", overrides)
            out = options.out or Path(scratch) / "run"
            run = train(loaded.recipe, plan(loaded), base=loaded.base, out=out, resume=None, observer=Silent()).run
            step_s = median(json.loads(line)["seconds"]["total"] for line in run.metrics.read_text().splitlines())
    finally:
        probe.Probe = real
    every = Dynamics().every
    share = median(seconds) / step_s
    print(f"{steps} steps of {step_s:.2f} s, a probe {median(seconds):.3f} s; at every step it would be {share:.2%}")
    print(f"at the default cadence of {every} steps: {share / every:.3%}")
    print(json.dumps({"overhead": round(share / every, 5), "memory": round(max(peaks), 4)}))


if __name__ == "__main__":
    main()
