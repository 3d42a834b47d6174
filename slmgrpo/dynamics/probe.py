"""Follows a run's LoRA tensors: at a cadence one small parquet file with each one's displacement beside its null."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slmgrpo.dynamics import null, update
from slmgrpo.dynamics.update import Factors
from slmgrpo.model import ATTENTION, Policy
from slmgrpo.recipe import Recipe
from slmgrpo.run import RunDir

log = logging.getLogger("slmgrpo")

START = "start"
"""Folder with the adapter that a run began with, where that was not a fresh one."""


@dataclass(frozen=True)
class Place:
    """A tensor's place in the model: `layer` is the block's number, -1 outside of blocks."""

    tensor: str
    layer: int
    module: str
    role: str

    @staticmethod
    def of(name: str) -> Place:
        tensor = name.removeprefix("base_model.model.")
        number, module = re.search(r"\.(\d+)\.", tensor), tensor.rsplit(".", 1)[-1]
        return Place(tensor, int(number[1]) if number else -1, module, "attention" if module in ATTENTION else "mlp")


def lora_layers(model: Any) -> dict[str, Any]:
    """Module name -> PEFT's LoRA layer, of those with the active adapter."""
    from peft.tuners.lora import LoraLayer

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and any(adapter in module.lora_A for adapter in module.active_adapters)
    }


def factors(layer: Any, adapter: str | None = None) -> Factors:
    """The update that a LoRA layer holds (of its active adapter)."""
    name = adapter or layer.active_adapters[0]
    a, b = layer.lora_A[name].weight.detach(), layer.lora_B[name].weight.detach()
    return Factors(a, b, float(layer.scaling[name]))


def base_weight(layer: Any) -> torch.Tensor:
    """The frozen weight under a LoRA layer (d_out, d_in), out of 4 or 8 bits where it is kept in them."""
    from peft.utils.integrations import dequantize_module_weight

    return dequantize_module_weight(layer.get_base_layer()).detach()


def weight_norm(layer: Any) -> float:
    """||W||_F of the frozen weight, summed in float64."""
    return float(torch.linalg.vector_norm(base_weight(layer), dtype=torch.float64))


class Probe:
    """Call `see` with the metrics of every rollout; at the recipe's cadence it writes dynamics/step_N.parquet.

    The file of step 0 holds how the tensors began. The null is computed from the learning rates and gradient norms in
    the metrics, so a resumed run needs no state but its files. Only rank 0 has a probe.
    """

    def __init__(self, policy: Policy, run: RunDir, recipe: Recipe, *, step: int, steps: int) -> None:
        self._layers = lora_layers(policy.model)
        self._run, self._recipe, self._steps, self._step = run, recipe, steps, step
        self._norms = {name: weight_norm(layer) for name, layer in self._layers.items()}
        self._history: list[tuple[float, float]] = []
        if step:
            for line in run.lines(run.metrics):
                self._remember(line)
        else:
            if any(factors(layer).b.any() for layer in self._layers.values()):
                policy.save_adapter(run.dynamics / START)
            self._write(self._rows(0, None))
        first = run.dynamics / "step_0.parquet"
        if not first.is_file():
            log.warning("dynamics: this run began without a probe, so what it started from is not known; none is kept")
            self._layers = {}
            return
        self._start = {row["tensor"]: row for row in _read(first)}

    def see(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """lines: one object a step, as they stand in metrics.jsonl."""
        every, before = self._recipe.dynamics.every, self._step
        for line in lines:
            self._remember(line)
            self._step = line["step"]
        if self._layers and (self._step // every > before // every or self._step >= self._steps):
            self._write(self._rows(self._step, self._walk()))

    def _remember(self, line: Mapping[str, Any]) -> None:
        if line.get("nonfinite"):  # no step was taken
            return
        size = min(line["grad_norm"], self._recipe.optimizer.max_grad_norm)
        self._history.append((line["learning_rate"], size))

    def _walk(self) -> null.Walk:
        settings = self._recipe.optimizer
        return null.walk(
            [rate for rate, _ in self._history],
            [size for _, size in self._history],
            beta1=settings.adam_beta1,
            beta2=settings.adam_beta2,
            weight_decay=settings.weight_decay,
        )

    def _rows(self, step: int, noise: null.Walk | None) -> Iterator[dict[str, Any]]:
        for name, layer in self._layers.items():
            place, now = Place.of(name), factors(layer)
            d_out, d_in = now.shape
            row = {
                "step": step,
                "tensor": place.tensor,
                "layer": place.layer,
                "module": place.module,
                "role": place.role,
                "rank": now.a.shape[0],
                "d_out": d_out,
                "d_in": d_in,
                "scale": now.scale,
                "a_norm": float(now.a.float().norm()),
                "b_norm": float(now.b.float().norm()),
                "update_norm": update.norm(now),
                "base_norm": self._norms[name],
            }
            yield row | (self._measures(name, now, noise, self._start[place.tensor]) if noise else UNMOVED)

    def _measures(self, name: str, now: Factors, noise: null.Walk, first: Mapping[str, Any]) -> dict[str, Any]:
        moved = now
        if first["b_norm"]:
            moved = update.combined([(1.0, now), (-1.0, _saved(self._run.dynamics / START, name, now))])
        values = update.spectrum(moved)
        size = float(values.norm())
        start = null.Start(
            first["rank"],
            first["d_out"],
            first["d_in"],
            first["a_norm"],
            first["b_norm"],
            first["update_norm"] / first["scale"],
        )
        expected = null.displacement(start, noise, now.scale)
        return {
            "norm": size,
            "relative": size / self._norms[name],
            "null": expected,
            "coherence": null.coherence(size, expected),
            "effective_rank": update.effective_rank(values),
            "spectrum": values[: now.a.shape[0]].tolist(),
        }

    def _write(self, rows: Iterator[dict[str, Any]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = pa.Table.from_pylist(list(rows), schema=_schema())
        folder = self._run.dynamics
        folder.mkdir(exist_ok=True)
        final = folder / f"step_{self._step}.parquet"
        partial = folder / f".{final.name}.{os.getpid()}"
        pq.write_table(table, partial)
        partial.replace(final)


UNMOVED = {"norm": 0.0, "relative": 0.0, "null": 0.0, "coherence": None, "effective_rank": 0.0, "spectrum": []}
_TEXT = ("tensor", "module", "role")
_WHOLE = ("step", "layer", "rank", "d_out", "d_in")


def _schema() -> Any:
    import pyarrow as pa

    names = ["step", "tensor", "layer", "module", "role", "rank", "d_out", "d_in", "scale", "a_norm", "b_norm"]
    kinds = {name: pa.string() for name in _TEXT} | {name: pa.int32() for name in _WHOLE}
    kinds["spectrum"] = pa.list_(pa.float32())
    return pa.schema([(name, kinds.get(name, pa.float64())) for name in [*names, "update_norm", "base_norm", *UNMOVED]])


def _saved(folder: Path, name: str, like: Factors) -> Factors:
    """A tensor's saved start; read one at a time, so that no second adapter stands in memory."""
    from safetensors import safe_open

    with safe_open(str(folder / "adapter_model.safetensors"), framework="pt") as file:
        a, b = (file.get_tensor(f"{name}.lora_{side}.weight").to(like.a.device) for side in "AB")
    return Factors(a, b, like.scale)


def _read(file: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    return pq.read_table(file).to_pylist()


def steps(run: RunDir) -> list[int]:
    """The steps that were measured, in order."""
    return sorted(int(file.stem.removeprefix("step_")) for file in run.dynamics.glob("step_*.parquet"))


def read(run: RunDir, step: int) -> list[dict[str, Any]]:
    """One row a tensor at a measured step; the columns are in dynamics/README.md."""
    return _read(run.dynamics / f"step_{step}.parquet")
