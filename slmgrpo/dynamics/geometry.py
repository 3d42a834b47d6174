"""Adapters of one base beside each other: cosines, shared directions, and adapters on the straight line between two."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from slmgrpo.dynamics import update
from slmgrpo.dynamics.probe import Place
from slmgrpo.dynamics.update import Factors
from slmgrpo.errors import RecipeError

TOP = 4
"""Singular directions of each update that are compared."""
Adapter = Mapping[str, Factors]
"""Module name -> its update."""


def load(folder: Path) -> dict[str, Factors]:
    """A saved LoRA adapter; one with other parts than two factors a tensor (DoRA, ranks by pattern) is refused."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    odd = [name for name in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if config.get(name)]
    if odd:
        raise RecipeError(f"{folder}: an adapter with {odd[0]} is not two factors a tensor, and cannot be compared")
    rank, alpha = config["r"], config["lora_alpha"]
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    weights = load_file(str(folder / "adapter_model.safetensors"))
    names = [name.removesuffix(".lora_A.weight") for name in weights if name.endswith(".lora_A.weight")]
    return {name: Factors(weights[f"{name}.lora_A.weight"], weights[f"{name}.lora_B.weight"], scale) for name in names}


@dataclass(frozen=True)
class Pair:
    """One weight in two adapters. output, input: mean squared cosine of the principal angles between their TOP left
    (right) singular directions: 1 for the same space, TOP / d by chance.
    """

    place: Place
    inner: float
    norms: tuple[float, float]
    shape: tuple[int, int]
    output: float
    input: float

    @property
    def cosine(self) -> float:
        return self.inner / (self.norms[0] * self.norms[1])


def pairs(x: Adapter, y: Adapter) -> list[Pair]:
    """Every weight that both adapters move."""
    found = []
    for name in (name for name in x if name in y):
        one, other = x[name], y[name]
        if one.shape != other.shape:
            raise RecipeError(f"{name}: {one.shape} in one adapter, {other.shape} in the other: not of the same base")
        norms = update.norm(one), update.norm(other)
        if all(norms):
            count = min(TOP, one.a.shape[0], other.a.shape[0])
            sides = zip(update.directions(one, count), update.directions(other, count), strict=True)
            output, into = (float((update.principal_cosines(u, v) ** 2).mean()) for u, v in sides)
            found.append(Pair(Place.of(name), update.inner(one, other), norms, one.shape, output, into))
    if not found:
        raise RecipeError("dynamics compare: the adapters have no moved tensor in common")
    return found


@dataclass(frozen=True)
class Likeness:
    """Tensors together, as one vector. chance: standard deviation of the cosine between updates of these sizes and
    spectra in random directions, where each tensor's is 1 / sqrt(d_out d_in).
    """

    name: str
    tensors: int
    cosine: float
    chance: float
    output: float
    output_chance: float
    input: float
    input_chance: float


def likeness(name: str, own: Sequence[Pair]) -> Likeness:
    """One line of the table."""
    lengths = math.prod(math.sqrt(math.fsum(pair.norms[i] ** 2 for pair in own)) for i in (0, 1))
    random = math.fsum((pair.norms[0] * pair.norms[1]) ** 2 / math.prod(pair.shape) for pair in own)
    return Likeness(
        name=name,
        tensors=len(own),
        cosine=math.fsum(pair.inner for pair in own) / lengths,
        chance=math.sqrt(random) / lengths,
        output=fmean(pair.output for pair in own),
        output_chance=fmean(TOP / pair.shape[0] for pair in own),
        input=fmean(pair.input for pair in own),
        input_chance=fmean(TOP / pair.shape[1] for pair in own),
    )


def table(found: Sequence[Pair]) -> list[list[str]]:
    """A line a module, then all tensors; the heading first."""
    modules: dict[str, list[Pair]] = {}
    for pair in found:
        modules.setdefault(pair.place.module, []).append(pair)
    rows = [["module", "tensors", "cosine", "chance", "output", "chance", "input", "chance"]]
    for one in [*(likeness(name, own) for name, own in modules.items()), likeness("all", found)]:
        sides = (one.output, one.output_chance, one.input, one.input_chance)
        cosine = (f"{one.cosine:+.3f}", f"+-{one.chance:.3f}")
        rows.append([one.name, str(one.tensors), *cosine, *(f"{value:.3f}" for value in sides)])
    return rows


def notes(x: Adapter) -> list[str]:
    """Sentences below the tables."""
    shared = fmean(one.a.shape[0] / one.shape[1] for one in x.values())
    return [
        f"output, input: mean squared cosine between the top {TOP} left (right) singular directions, 1 for the same",
        "chance: random directions; for the cosine one standard deviation",
        "runs of different seeds begin with different random input factors: while these have hardly moved, even equal "
        f"gradients give a cosine near r / d_in, here {shared:.3f}; another seed of A is the measure",
    ]


def between(x: Adapter, y: Adapter, t: float) -> dict[str, Factors]:
    """The updates (1 - t) dW_x + t dW_y, factors side by side; a tensor that one of them lacks counts as unmoved."""
    points = {}
    for name in {**x, **y}:
        parts = [(weight, one[name]) for weight, one in ((1 - t, x), (t, y)) if name in one]
        points[name] = update.combined(parts)
    return points


def save(adapter: Adapter, like: Path, folder: Path) -> None:
    """Write factors as PEFT's files, with the configuration of the adapter in `like`."""
    from safetensors.torch import save_file

    rank = max(one.a.shape[0] for one in adapter.values())
    weights: dict[str, torch.Tensor] = {}
    for name, one in adapter.items():
        missing = rank - one.a.shape[0]  # a tensor that only one side has: PEFT wants one rank for all
        a, b = torch.nn.functional.pad(one.a, (0, 0, 0, missing)), torch.nn.functional.pad(one.b, (0, missing))
        weights[f"{name}.lora_A.weight"] = a.float().contiguous()
        weights[f"{name}.lora_B.weight"] = (one.scale * b).float().contiguous()
    modules = sorted({Place.of(name).module for name in adapter})
    config: dict[str, Any] = json.loads((like / "adapter_config.json").read_text())
    config |= {"r": rank, "lora_alpha": rank, "use_rslora": False, "target_modules": modules}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
