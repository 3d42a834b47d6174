"""Two ranks against one, measured, and 1 to 8 GPUs, simulated; the last line is JSON.

    python tests/benchmarks/scaling.py [--quick] [--steps N] [--prompts N] [--rounds N]

weak_scaling_2: tokens a second of two gloo ranks with twice the prompts over twice those of one rank, each rank on a
core of its own, on the embedded model at a learning rate that moves nothing; of each step the fastest repetition.
`wall`: by the clock. `beside`: by the clock, over those of two unrelated one-rank runs at the same time on the same
cores, which is what this machine gives when both its cores work; the rest is what working together costs. `cpu`: by
the CPU seconds of each stage's slower rank.
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
from concurrent.futures import ThreadPoolExecutor
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


def child(folder: Path, prompts: int, steps: int, core: int) -> None:
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
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(here.rank + core) % len(cores)]})
        settings = [f"train.prompts_per_step={prompts}", f"train.steps={steps}", "optimizer.learning_rate=1e-6"]
        more = ["data.heldout=[]", "model.backend=transformers", "grading.workers=1", "train.save_every=1000"]
        loaded = load("quickstart", [*settings, *more])
        timed = Timed()
        planned = plan(loaded, gpus=here.world)
        out = folder / "run"
        train.train(loaded.recipe, planned, base=loaded.base, out=out, resume=None, observer=timed, ranks=here)
        (folder / f"rank_{here.rank}.json").write_text(json.dumps(timed.seen))


@dataclass(frozen=True)
class Run:
    """What every rank saw of each step, and the groups of each step, without the first one, which warms up."""

    seen: list[list[dict[str, Any]]]
    groups: list[Groups]

    def speed(self, clock: str) -> float:
        """Tokens a second of all ranks: by the clock on the wall, or by the CPU seconds of the slower rank."""
        steps = self.seen[0]
        seconds = [self.cpu(i) if clock == "cpu" else step["wall"] for i, step in enumerate(steps)]
        return sum(step["tokens"] for step in steps) / sum(seconds)

    def cpu(self, step: int) -> float:
        """As if every rank had a quiet core: each stage takes as long as its slower rank, on the CPU."""
        return sum(self.stage(name, step) for name in self.stages())

    def stage(self, name: str, step: int) -> float:
        return max(rank[step]["cpu"].get(name, 0.0) for rank in self.seen)

    def stages(self) -> list[str]:
        return sorted(set().union(*(step["cpu"] for rank in self.seen for step in rank)) - {"total"})


def measure(world: int, prompts: int, steps: int, core: int = 0) -> Run:
    """core: that of rank 0; the others take the next ones."""
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sizes = ["--prompts", str(prompts), "--steps", str(steps), "--core", str(core)]
        command = [sys.executable, __file__, "--child", scratch, *sizes]
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
        return Run(seen, [list(by_step[step].values()) for step in sorted(by_step)[1:]])


def fit(runs: Sequence[Run]) -> Costs:
    """Costs of one rank by non-negative least squares, stage by stage, over its runs of different sizes."""
    import numpy
    from scipy.optimize import nnls

    def solve(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
        return [float(value) for value in nnls(numpy.array(rows), numpy.array(seconds))[0]]

    unit = [Costs(1, 0, 0, 0, 0, 0, 0, 10**6), Costs(0, 1, 0, 0, 0, 0, 0, 10**6)]
    pairs = [pair for run in runs for pair in zip(run.seen[0], run.groups, strict=True)]
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


def fastest(runs: Sequence[Run]) -> Run:
    """Repetitions of one run as one: of each step, rank and stage the shortest time, as `timeit` does it."""

    def shortest(same: Sequence[dict[str, Any]]) -> dict[str, Any]:
        cpu = {stage: min(step["cpu"][stage] for step in same) for stage in same[0]["cpu"]}
        return {"wall": min(step["wall"] for step in same), "cpu": cpu, "tokens": same[0]["tokens"]}

    ranks = zip(*(run.seen for run in runs), strict=True)
    seen = [[shortest(same) for same in zip(*repeated, strict=True)] for repeated in ranks]
    return Run(seen, runs[0].groups)


def error(run: Run, ranks: int, costs: Costs) -> float:
    """Of the simulated steps against their CPU seconds."""
    steps = range(len(run.groups))
    return sum(simulate(run.groups[i], ranks, costs).total for i in steps) / sum(map(run.cpu, steps)) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few short steps")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--prompts", type=int, default=16, help="of a rank and step")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions, in turn")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.prompts, asked.steps, asked.core)
        return
    steps, prompts, rounds = (4, 6, 1) if asked.quick else (asked.steps, asked.prompts, asked.rounds)
    repeated: list[list[Run]] = []
    for _ in range(rounds):  # in turn, so that what else the machine does strikes all of them
        with ThreadPoolExecutor() as both:
            pair = list(both.map(lambda core: measure(1, prompts, steps, core), (0, 1)))
        alone = [measure(1, size, steps) for size in (prompts, prompts // 2)]
        repeated.append([*alone, measure(2, 2 * prompts, steps), *pair])
    one, half, two, first, second = map(fastest, zip(*repeated, strict=True))
    weak = {
        "wall": two.speed("wall") / one.speed("wall") / 2,
        "beside": two.speed("wall") / (first.speed("wall") + second.speed("wall")),
        "cpu": two.speed("cpu") / one.speed("cpu") / 2,
    }
    costs = fit([one, half])
    errors = {"one": error(one, 1, costs), "two": error(two, 2, costs)}
    print(
        f"one rank with {prompts} prompts a step, two with {2 * prompts}: efficiency {weak['wall']:.3f} by the clock,"
    )
    print(
        f"{weak['beside']:.3f} against two unrelated runs at once, {weak['cpu']:.3f} by CPU seconds; {steps - 1} steps,"
    )
    print(f"the fastest of {rounds} repetitions of each; CPU seconds by stage:")
    for name, run in (("one", one), ("two", two)):
        means = {stage: fmean(run.stage(stage, i) for i in range(len(run.groups))) for stage in run.stages()}
        print(f"  {name}: " + ", ".join(f"{stage} {value:.3f}" for stage, value in means.items()))
    print("  the simulation is off by " + ", ".join(f"{value:+.1%} ({name})" for name, value in errors.items()))
    simulated = {kind: show_simulated(kind, 8) for kind in ("math", "code", "mcq")}
    found = {"weak_scaling_2": weak, "simulation_error": errors, "simulated": simulated}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
