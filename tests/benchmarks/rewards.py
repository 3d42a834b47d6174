"""Times math.correct in a pool of two workers against TRL's accuracy_reward, on ../shared/corpora.

    python tests/benchmarks/rewards.py [--quick]      the last line is JSON

Both sides judge the same completions in one run, golds in a box on TRL's side, each warm before the clock starts.
`disagreements` lists every row on which they differ.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CORPORA = Path(__file__).parents[2].parent / "shared" / "corpora"
NAMES = ("short", "latex", "mixed")
WORKERS = 2
BATCH = 64
PATIENCE_S = 30.0
WARM_UP = [
    (r"\boxed{\sqrt{2}x}", r"\mathbb{R}"),
    (r"\boxed{x \neq 3}", r"(-\infty,3)\cup(3,\infty)"),
    (r"\boxed{7}", "8"),
]

Side = Callable[[list[dict[str, Any]]], tuple[float, list[float | None]]]


def ours(rows: list[dict[str, Any]]) -> tuple[float, list[float | None]]:
    """Seconds and values of `math.correct` behind a fresh pool, which remembers nothing."""
    from slmgrpo.rewards.base import Reward
    from slmgrpo.rewards.pool import Pool, Task

    reward = Reward("math.correct", required=True)

    def task(key: int, completion: str, answer: str) -> Task:
        return Task(key, (reward,), "", completion, (), {"answer": answer})

    with Pool(WORKERS) as pool:
        for _ in range(WORKERS * 4):
            pool.grade([task(i, f"{i}{text}", gold) for i, (text, gold) in enumerate(WARM_UP * WORKERS)])
        start = time.perf_counter()
        verdicts: list[dict[str, Any]] = []
        for first in range(0, len(rows), BATCH):
            batch = enumerate(rows[first : first + BATCH], first)
            verdicts += pool.grade([task(i, row["completion"], row["answer"]) for i, row in batch])
        seconds = time.perf_counter() - start
    return seconds, [row[reward.name].value for row in verdicts]


def theirs(rows: list[dict[str, Any]]) -> tuple[float, list[float | None]]:
    """Seconds and values of TRL's reward function, on the main thread as in its trainer."""
    from trl.rewards.accuracy_rewards import accuracy_reward

    def judge(pairs: list[tuple[str, str]]) -> list[float | None]:
        chats = [[{"role": "assistant", "content": text}] for text, _ in pairs]
        return accuracy_reward(chats, [f"\\boxed{{{gold}}}" for _, gold in pairs])

    judge(WARM_UP)
    start = time.perf_counter()
    values: list[float | None] = []
    for first in range(0, len(rows), BATCH):
        values += judge([(row["completion"], row["answer"]) for row in rows[first : first + BATCH]])
    return time.perf_counter() - start, values


def fastest(side: Side, rows: list[dict[str, Any]]) -> tuple[float, list[float | None]]:
    """The best of three runs, or of as many as start within half a minute; the machine's other work slows some."""
    began = time.perf_counter()
    runs = [side(rows)]
    while len(runs) < 3 and time.perf_counter() - began < PATIENCE_S:
        runs.append(side(rows))
    return min(runs, key=lambda run: run[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpora", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="128 rows of short and latex: under a minute")
    arguments = parser.parse_args()
    names = [name for name in arguments.corpora if not (arguments.quick and name == "mixed")]
    result: dict[str, Any] = {"workers": WORKERS, "math_ratio": {}, "seconds": {}, "rows": {}, "disagreements": []}
    for name in names:
        path = CORPORA / f"math_{name}.jsonl"
        if not path.is_file():
            raise SystemExit(f"{path} is not on this machine")
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = rows[:128] if arguments.quick else rows
        ours_s, our_values = fastest(ours, rows)
        theirs_s, their_values = fastest(theirs, rows)
        result["math_ratio"][name] = round(theirs_s / ours_s, 2)
        result["seconds"][name] = {"slmgrpo": round(ours_s, 4), "trl": round(theirs_s, 4)}
        result["rows"][name] = len(rows)
        for row, our, their in zip(rows, our_values, their_values, strict=True):
            if our != their:
                said = {"corpus": name, "id": row["id"], "gold": row["answer"], "end": row["completion"][-80:]}
                result["disagreements"].append(said | {"slmgrpo": our, "trl": their})
        seconds = f"{ours_s:.3f} s against {theirs_s:.3f} s of TRL"
        print(f"{name}: {result['math_ratio'][name]} times faster ({len(rows)} rows, {seconds})", flush=True)
    print(json.dumps(result, ensure_ascii=False))


if __name__ == "__main__":
    main()
