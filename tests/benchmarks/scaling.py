"""Two ranks against one, measured, and 1 to 8 GPUs, simulated; the last line is JSON.

    python tests/benchmarks/scaling.py [--quick] [--steps N] [--prompts N]

weak_scaling_2: tokens a second and rank of two gloo ranks with twice the prompts over those of one rank, each rank on a
core of its own, on the embedded model at a learning rate that moves nothing. `cpu` takes every stage of a step at the
CPU seconds of its slower rank, which other work on the machine hardly changes; `wall` is the clock.
simulation_error: the simulation of the one- and the two-rank steps, with costs fitted to one rank alone, over the
measured CPU seconds, less 1; the two-rank steps are predicted, not fitted.
weak, strong: efficiency of the simulated GPUs on the lengths of ../shared/traces, with the costs in GPU below, which
are assumptions: no step was run on a GPU.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

TRACES = Path(__file__).parents[2].parent / "shared/traces"
GROUP = 8


@dataclass(frozen=True)
class Row:
    """A completion: tokens of its prompt (for the first member of a group, else 0), its own, and its advantage."""

    prompt: int
    tokens: int
    signal: bool


Groups = Sequence[Sequence[Row]]


@dataclass(frozen=True)
class Costs:
    """Seconds. Decoding: a step of the batch and a row in it; prefill and learning by token; the rest by rank."""

    decode_step: float
    decode_row: float
    prefill_token: float
    learn_token: float
    row: float
    """Bookkeeping of a completion, done by every rank for the rows of all."""
    fixed: float
    """Of a step: optimizer, files."""
    all_reduce: float
    """Of the adapter's gradient, with more than one rank."""
    slots: int
    """Rows that are decoded together."""


GPU = Costs(0.008, 1e-5, 8e-6, 4e-5, 2e-4, 0.1, 0.004, 256)
"""A 1.5B model in bfloat16 on an 80 GB GPU, assumed: 8 ms a decoding step, 125,000 prefill, 25,000 learned tokens/s."""


@dataclass(frozen=True)
class Step:
    """A simulated step: when the slowest rank is done with a stage, and what the mean rank waits for it."""

    generation: float
    generation_wait: float
    learning: float
    learning_wait: float
    other: float

    @property
    def total(self) -> float:
        return self.generation + self.learning + self.other


def decode(rows: Sequence[Row], costs: Costs) -> float:
    """Seconds until the last row of a rank is written: rows enter free slots in order and leave when they end."""
    now, position = 0.0, 0
    waiting, live = list(reversed(rows)), []
    while waiting or live:
        while waiting and len(live) < costs.slots:
            row = waiting.pop()
            now += costs.prefill_token * row.prompt
            heapq.heappush(live, position + row.tokens)
        until = live[0]  # the next event: a row ends
        now += (until - position) * (costs.decode_step + costs.decode_row * len(live))
        position = until
        while live and live[0] <= position:
            heapq.heappop(live)
    return now


def trunk_tokens(group: Sequence[Row]) -> int:
    """Tokens that a group is trained on: its prompt once, and its rows with a signal."""
    own = sum(row.tokens for row in group if row.signal)
    return own + sum(row.prompt for row in group) if own else 0


def simulate(groups: Groups, ranks: int, costs: Costs) -> Step:
    """A step: groups dealt out in turn to be written, and by tokens, longest first, to be learned."""
    written = [decode([row for group in groups[rank::ranks] for row in group], costs) for rank in range(ranks)]
    learned = [0] * ranks
    for tokens in sorted(map(trunk_tokens, groups), reverse=True):
        learned[learned.index(min(learned))] += tokens
    other = costs.fixed + costs.row * sum(map(len, groups)) + (costs.all_reduce if ranks > 1 else 0.0)
    generation, learning = max(written), max(learned) * costs.learn_token
    return Step(
        generation,
        generation - fmean(written),
        learning,
        learning - fmean(learned) * costs.learn_token,
        other,
    )


# simulated GPUs


def traces(kind: str) -> list[list[Row]]:
    prompts = json.loads((TRACES / f"{kind}.json").read_text())["prompts"]
    groups = []
    for prompt in prompts:
        rewards = prompt["rewards"][:GROUP]
        signal = len(set(rewards)) > 1
        lengths = enumerate(prompt["completions"][:GROUP])
        groups.append([Row(0 if i else prompt["prompt"], tokens, signal) for i, tokens in lengths])
    return groups


def show_simulated(kind: str, prompts: int) -> dict[str, Any]:
    """Weak: `prompts` groups a rank, mean over the trace; strong: the trace's 64 groups in all."""
    groups = traces(kind)
    alone = simulate(groups, 1, GPU).total
    print(f"\n{kind}, simulated: GPUs | weak: s, efficiency | strong: s, efficiency | of a strong step, what waits")
    weak, strong = {}, {}
    for ranks in (1, 2, 4, 8):
        size = prompts * ranks
        seconds = fmean(
            simulate(groups[i : i + size], ranks, GPU).total for i in range(0, len(groups) - size + 1, size)
        )
        weak[ranks] = seconds
        whole = simulate(groups, ranks, GPU)
        strong[ranks] = alone / whole.total / ranks
        print(
            f"  {ranks} | {seconds:6.2f} {weak[1] / seconds:5.2f} | {whole.total:6.2f} {strong[ranks]:5.2f} | "
            f"generation {whole.generation / whole.total:.0%} (waiting {whole.generation_wait / whole.total:.0%}), "
            f"learning {whole.learning / whole.total:.0%} (waiting {whole.learning_wait / whole.total:.0%}), "
            f"other {whole.other / whole.total:.0%}"
        )
    longest = max(row.tokens for group in groups for row in group)
    print(f"  limit: the longest completion, {longest} tokens, takes {longest * GPU.decode_step:.1f} s on any number")
    return {"weak": {ranks: weak[1] / seconds for ranks, seconds in weak.items()}, "strong": strong}


# measured ranks


def child(folder: Path, prompts: int, steps: int) -> None:
    """One rank: train, and leave each step's CPU seconds by stage, wall seconds and, on rank 0, lengths."""
    from slmgrpo import ranks, run, train
    from slmgrpo.callbacks import Silent
    from slmgrpo.plan import plan
    from slmgrpo.recipe_load import load
    from slmgrpo.trainer import loop

    class CpuClock(run.Clock):
        """Seconds of this process on a core, reward workers not counted."""

        def __init__(self) -> None:
            super().__init__()
            self.start = self._mark = time.process_time()

        def lap(self, stage: str) -> None:
            now = time.process_time()
            self.stages[stage] = self.stages.get(stage, 0.0) + now - self._mark
            self._mark = now

        def total(self) -> float:
            return time.process_time() - self.start

    class Timed(Silent):
        def __init__(self) -> None:
            self.seen: list[dict[str, Any]] = []
            self.mark = time.perf_counter()

        def step(self, metrics: Any) -> None:
            now = time.perf_counter()
            self.seen.append({"wall": now - self.mark, "cpu": metrics["seconds"], "tokens": metrics["tokens"]})
            self.mark = now

    loop.Clock = CpuClock
    with ranks.joined() as here:
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[here.rank % len(os.sched_getaffinity(0))]})
        settings = [f"train.prompts_per_step={prompts}", f"train.steps={steps}", "optimizer.learning_rate=1e-6"]
        more = ["data.heldout=[]", "model.backend=transformers", "grading.workers=1", "train.save_every=1000"]
        loaded = load("quickstart", [*settings, *more])
        timed = Timed()
        planned = plan(loaded, gpus=here.world)
        out = folder / "run"
        train.train(loaded.recipe, planned, base=loaded.base, out=out, resume=None, observer=timed, ranks=here)
        (folder / f"rank_{here.rank}.json").write_text(json.dumps(timed.seen))


def measure(world: int, prompts: int, steps: int) -> tuple[list[list[dict[str, Any]]], list[Groups]]:
    """(what every rank saw of each step, the groups of each step); the first step, which warms up, is left out."""
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, "--child", scratch, "--prompts", str(prompts), "--steps", str(steps)]
        quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(command, env=os.environ | common | quiet | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(world)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank failed")
        seen = [json.loads((Path(scratch) / f"rank_{rank}.json").read_text())[1:] for rank in range(world)]
        by_step: dict[int, dict[str, list[Row]]] = {}
        for line in (Path(scratch) / "run/samples.jsonl").read_text().splitlines():
            sample = json.loads(line)
            group = by_step.setdefault(sample["step"], {}).setdefault(sample["id"], [])
            prompt = 0 if group else 40  # the quickstart's prompts are all about as long
            group.append(Row(prompt, sample["tokens"], sample["advantage"] != 0))
        return seen, [list(by_step[step].values()) for step in sorted(by_step)[1:]]


WAITS = ("rank_wait", "all_reduce")


def cpu_seconds(seen: Sequence[Sequence[dict[str, Any]]], step: int) -> float:
    """A step as if every rank had a quiet core: each stage takes as long as its slower rank, on the CPU."""
    stages = set().union(*(rank[step]["cpu"] for rank in seen)) - {"total"}
    return sum(max(rank[step]["cpu"].get(stage, 0.0) for rank in seen) for stage in stages)


def fit(measured: Sequence[tuple[list[dict[str, Any]], Sequence[Groups]]]) -> Costs:
    """Costs of one rank by non-negative least squares, stage by stage, over runs of different sizes."""
    import numpy
    from scipy.optimize import nnls

    def solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
        return [float(value) for value in nnls(numpy.array(rows), numpy.array(seconds))[0]]

    unit = [Costs(1, 0, 0, 0, 0, 0, 0, 10**6), Costs(0, 1, 0, 0, 0, 0, 0, 10**6)]
    pairs = [(seen, groups) for steps, each in measured for seen, groups in zip(steps, each, strict=True)]
    step, row_of_step = solve(
        [[decode([row for group in groups for row in group], one) for one in unit] for _, groups in pairs],
        [seen["cpu"].get("generation", 0.0) for seen, _ in pairs],
    )
    (learn,) = solve(
        [[float(sum(map(trunk_tokens, groups)))] for _, groups in pairs],
        [seen["cpu"].get("forward_backward", 0.0) for seen, _ in pairs],
    )
    rest = [
        sum(v for k, v in s["cpu"].items() if k not in ("generation", "forward_backward", "total")) for s, _ in pairs
    ]
    row, fixed = solve([[float(sum(map(len, groups))), 1.0] for _, groups in pairs], rest)
    return Costs(step, row_of_step, 0.0, learn, row, fixed, 0.0, 10**6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short steps")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--prompts", type=int, default=16, help="of a rank and step")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.prompts, asked.steps)
        return
    steps, prompts = (4, 6) if asked.quick else (asked.steps, asked.prompts)
    (one,), groups = measure(1, prompts, steps)
    (half,), half_groups = measure(1, prompts // 2, steps)
    two, two_groups = measure(2, 2 * prompts, steps)
    tokens_one, tokens_two = (sum(step["tokens"] for step in seen) for seen in (one, two[0]))
    wall = (tokens_two / sum(s["wall"] for s in two[0])) / (2 * tokens_one / sum(s["wall"] for s in one))
    cpu_one = sum(cpu_seconds([one], step) for step in range(len(one)))
    cpu_two = sum(cpu_seconds(two, step) for step in range(len(two[0])))
    cpu = (tokens_two / cpu_two) / (2 * tokens_one / cpu_one)
    costs = fit([(one, groups), (half, half_groups)])
    errors = {
        "one": sum(simulate(each, 1, costs).total for each in groups) / cpu_one - 1,
        "two": sum(simulate(each, 2, costs).total for each in two_groups) / cpu_two - 1,
    }
    print(f"one rank, {prompts} prompts a step: {cpu_one / len(one):.3f} CPU s a step, two with {2 * prompts}: "
          f"{cpu_two / len(two[0]):.3f}; efficiency {cpu:.3f} by CPU, {wall:.3f} by the clock")  # fmt: skip
    for name, seen in (("one", [one]), ("two", two)):
        stages = sorted(set().union(*(step["cpu"] for step in seen[0])) - {"total"})
        means = {
            stage: fmean(max(r[i]["cpu"].get(stage, 0) for r in seen) for i in range(len(seen[0]))) for stage in stages
        }
        print(f"  {name}: " + ", ".join(f"{stage} {value:.3f}" for stage, value in means.items()))
    print("  the simulation is off by " + ", ".join(f"{value:+.1%} ({name})" for name, value in errors.items()))
    simulated = {kind: show_simulated(kind, 8) for kind in ("math", "code", "mcq")}
    found = {"weak_scaling_2": {"cpu": cpu, "wall": wall}, "simulation_error": errors, "simulated": simulated}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
