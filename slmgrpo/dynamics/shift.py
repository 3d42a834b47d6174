"""How far the residual stream moved behind each block, under three treatments, beside untrained noise of equal norm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slmgrpo.dynamics import update
from slmgrpo.dynamics.probe import factors, lora_layers, weight_norm

NOISE = "noise"
"""Name of the adapter that holds the null."""
MASSIVE = 0.5
"""A token with more than this share of a block's squared norm is listed."""
TREATMENTS = ("paper", "no first", "median")
PROMPTS = (
    "A baker fills 7 trays with 12 rolls each and sells 58 of them before noon. How many rolls are left?",
    "Which of these is a conductor of electricity? (A) a wooden spoon (B) a copper wire (C) a rubber band (D) a cup",
    "Write a Python function that returns the second largest number of a list without sorting it.",
    "A train leaves at 9:40 and arrives at 13:05. It stood still for 25 minutes on the way. How long did it move?",
    "What makes the Moon change its shape in the sky over a month? (A) clouds (B) its orbit (C) tides (D) seasons",
    "Explain in one sentence why the sum of two odd numbers is always even.",
)
"""For models that come without a recipe."""


def shifts(base: Tensor, tuned: Tensor) -> Tensor:
    """(3, blocks): relative shift behind each block, for one prompt. base, tuned: (blocks, tokens, width).

    paper: ||H' - H||_F / ||H||_F over all tokens (Shift_l of 2609.39321); no_first: without the first token, which in
    many models carries nearly all of the norm; median: of the tokens' own ||h' - h|| / ||h||.
    """
    moved, stood = (tuned - base).float().norm(dim=-1), base.float().norm(dim=-1)
    paper, no_first = (moved[:, i:].norm(dim=1) / stood[:, i:].norm(dim=1) for i in (0, 1))
    return torch.stack([paper, no_first, (moved / stood).median(dim=1).values])


def squared_shares(hidden: Tensor) -> Tensor:
    """(blocks, tokens): each token's share of the squared norm behind a block ("Massive Activations", 2402.17762)."""
    squared = hidden.float().square().sum(dim=-1)
    return squared / squared.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class Massive:
    """A token that outweighs all others together, and the first and last block behind which it does."""

    prompt: int
    position: int
    token: str
    first: int
    last: int
    share: float
    """The largest one."""


@dataclass(frozen=True)
class Shift:
    """tuned, noise: (3, blocks) means over prompts (noise: and seeds), rows as in TREATMENTS; tuned is None without an
    adapter. top: (blocks,) mean share of the squared norm that the heaviest token has.
    """

    tuned: Tensor | None
    noise: Tensor
    spread: Tensor
    """(3, blocks): standard deviation of the noise over its seeds."""
    top: Tensor
    massive: list[Massive]
    prompts: int


def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    adapter: str | None,
    seeds: int = 3,
    relative: float = 0.01,
    rank: int = 16,
) -> Shift:
    """Shifts of a model, and of untrained low-rank noise in its place.

    model: a PEFT model whose adapter is `adapter` (the noise gets the norm that each of its tensors has), or a plain
    one (None: every linear layer of every block gets noise of `relative` of its weight's norm and of rank `rank`).
    prompts: token ids, at least two each. The model is changed: it holds another adapter afterwards.
    """
    if adapter is None:
        model = _with_noise_everywhere(model, rank)
        sizes = {name: relative * weight_norm(one) for name, one in lora_layers(model).items()}
    else:
        sizes = {name: update.norm(factors(one, adapter)) for name, one in lora_layers(model).items()}
        model.add_adapter(NOISE, model.peft_config[adapter])
    model.eval()
    blocks = blocks_of(model)
    with model.disable_adapter():
        base = [hidden_states(model, blocks, ids) for ids in prompts]
    tuned = None
    if adapter is not None:
        model.set_adapter(adapter)
        tuned = _mean(base, [hidden_states(model, blocks, ids) for ids in prompts])
    model.set_adapter(NOISE)
    drawn = []
    for seed in range(seeds):
        _draw(lora_layers(model), sizes, seed)
        drawn.append(_mean(base, [hidden_states(model, blocks, ids) for ids in prompts]))
    noise = torch.stack(drawn)
    shares = [squared_shares(hidden) for hidden in base]
    top = torch.stack([share.max(dim=1).values for share in shares]).mean(dim=0)
    massive = [one for i, share in enumerate(shares) for one in _massive(i, share, prompts[i], tokenizer)]
    spread = noise.std(dim=0) if seeds > 1 else torch.zeros_like(noise[0])
    return Shift(tuned, noise.mean(dim=0), spread, top, massive, len(prompts))


def jump(row: Tensor) -> float:
    """Last block over middle block: the "sharp growth in the last layers" of a (blocks,) row as one number."""
    return float(row[-1] / row[len(row) // 2])


def scale(model: Any, adapter: str, factor: float) -> None:
    """Multiply an adapter's update."""
    for layer in lora_layers(model).values():
        layer.scaling[adapter] *= factor


def table(found: Shift) -> list[list[str]]:
    """A line a block: each treatment in %, with the noise beside it, or the noise alone; the heading first."""
    sides = [found.noise] if found.tuned is None else [found.tuned, found.noise]
    names = [heading for treatment in TREATMENTS for heading in (treatment, "noise")[: len(sides)]]
    rows = [["block", *names, "top token"]]
    for block in range(found.noise.shape[1]):
        cells = [
            f"{100 * float(values[treatment, block]):.2f}" for treatment in range(len(TREATMENTS)) for values in sides
        ]
        rows.append([str(block), *cells, f"{100 * float(found.top[block]):.0f} %"])
    return rows


def notes(found: Shift, noise: str) -> Iterator[str]:
    """Sentences below the table. noise: what it is."""
    yield "paper: over all tokens; no first: without the first one; median: of the tokens' own shifts"
    yield f"noise: untrained {noise}, mean of its draws; top token: the heaviest one's share of ||H||^2"
    for i, treatment in enumerate(TREATMENTS):
        tuned = "" if found.tuned is None else f"tuned {jump(found.tuned[i]):.1f}, "
        yield f"last block / middle block, {treatment}: {tuned}noise {jump(found.noise[i]):.1f}"
    places: dict[int, list[Massive]] = {}
    for one in found.massive:
        places.setdefault(one.position, []).append(one)
    for position, own in sorted(places.items()):
        tokens = ", ".join(sorted({repr(one.token) for one in own})[:4])
        yield (
            f"massive: token {position} ({tokens}) in {len(own)} of {found.prompts} prompts, blocks "
            f"{min(one.first for one in own)}-{max(one.last for one in own)}, up to "
            f"{100 * max(one.share for one in own):.1f} % of ||H||^2"
        )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder's blocks: the longest list of modules of one class in the model."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(one) for one in m}) == 1]
    return max(lists, key=len)


@torch.no_grad()
def hidden_states(model: Any, blocks: Sequence[nn.Module], ids: Sequence[int]) -> Tensor:
    """(blocks, tokens, width) on the CPU: the residual stream behind each block. transformers' own last hidden state
    stands behind the final norm, so blocks are asked themselves.
    """
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        kept.append((output[0] if isinstance(output, tuple) else output)[0].detach().cpu())

    hooks = [block.register_forward_hook(keep) for block in blocks]
    try:
        model(input_ids=torch.tensor([list(ids)], device=next(model.parameters()).device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(kept)


def _mean(base: Sequence[Tensor], tuned: Sequence[Tensor]) -> Tensor:
    return torch.stack([shifts(x, y) for x, y in zip(base, tuned, strict=True)]).mean(dim=0)


def _with_noise_everywhere(model: Any, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    inside = {id(module) for block in blocks_of(model) for module in block.modules()}
    names = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in inside]
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=names), adapter_name=NOISE)


@torch.no_grad()
def _draw(layers: dict[str, Any], sizes: dict[str, float], seed: int) -> None:
    """Gaussian factors in every tensor of the noise adapter, scaled to its norm."""
    generator = torch.Generator().manual_seed(seed)
    for name, layer in layers.items():
        a, b = layer.lora_A[NOISE].weight, layer.lora_B[NOISE].weight
        for weight in (b, a):
            weight.copy_(torch.randn(weight.shape, generator=generator))
        b.mul_(sizes[name] / update.norm(factors(layer, NOISE)))


def _massive(prompt: int, shares: Tensor, ids: Sequence[int], tokenizer: Any) -> Iterator[Massive]:
    for position in range(shares.shape[1]):
        over = [block for block in range(len(shares)) if shares[block, position] > MASSIVE]
        if over:
            token = tokenizer.decode([ids[position]])
            yield Massive(prompt, position, token, over[0], over[-1], float(shares[over, position].max()))
