"""How often `slmgrpo diagnose` names what a run was made to show: real runs of recipes/studies/failures, by seed.

python tests/benchmarks/diagnose.py [--quick] [--seeds 11,12] [--runs DIR]. Limits were set on seed 1; the
default seeds are others. With --runs, runs that are there already are not made again. --quick: one seed, four recipes.
The other side is what a glance at the reward says: a run is well where it rises.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from slmgrpo.callbacks import Silent
from slmgrpo.curves import change, read
from slmgrpo.diagnose import diagnose
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load

EXPECTED = {
    "healthy": "learning",
    "healthy_two_updates": "saturated",
    "healthy_saturated": "saturated",
    "collapse_by_learning_rate": "instability",
    "nothing_to_learn": "degenerate advantages",
    "too_cold": "degenerate advantages",
    "format_only": "format-only learning",
    "wrong_answer_wins": "reward hacking",
    "loose_grader": "reward hacking",
    "entropy_collapse": "entropy collapse",
    "length_drift": "length drift",
    "stale_rollouts": "staleness",
}
"""Recipe under recipes/studies/failures -> what the run should be called."""
SCORED_ON = (11, 12)
QUICK = ("nothing_to_learn", "too_cold", "wrong_answer_wins", "format_only")
HEALTHY = ("learning", "saturated")


def make(folder: Path, name: str, seed: int) -> Path:
    """The run directory of this recipe and seed, trained if it is not there whole."""
    from slmgrpo.errors import RunError
    from slmgrpo.train import train

    out = folder / f"{name}_{seed}"
    if not (out / "status.json").exists() or json.loads((out / "status.json").read_text())["state"] == "running":
        shutil.rmtree(out, ignore_errors=True)
        loaded = load(f"studies/failures/{name}", [f"seed={seed}"])
        started = time.monotonic()
        try:
            train(loaded.recipe, plan(loaded), base=loaded.base, out=out, resume=None, observer=Silent())
        except RunError as error:  # a collapse may end a run; it is diagnosed as it stands
            logging.warning("%s, seed %d: %s", name, seed, error)
        logging.info("%s, seed %d: %.0f s", name, seed, time.monotonic() - started)
    return out


def said(run: Path) -> tuple[str, bool]:
    """The chief finding, and whether the reward rises by more than chance."""
    findings = diagnose(run).findings
    rewards = change(read(run).signal("reward"))
    return findings[0].name if findings else "nothing", rewards.up(1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, four recipes")
    parser.add_argument("--seeds", default=",".join(map(str, SCORED_ON)))
    parser.add_argument("--runs", type=Path, help="folder of the runs, kept")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    seeds = SCORED_ON[:1] if arguments.quick else [int(seed) for seed in arguments.seeds.split(",")]
    names = QUICK if arguments.quick else tuple(EXPECTED)
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.runs or Path(scratch)
        results = {name: [said(make(folder, name, seed)) for seed in seeds] for name in names}
    print("| recipe | should be | said |\n|---|---|---|")
    for name, pairs in results.items():
        counts = Counter(found for found, _ in pairs).most_common()
        print(f"| `{name}` | {EXPECTED[name]} | {', '.join(f'{found} {count}' for found, count in counts)} |")
    runs = sum(map(len, results.values()))
    named = sum(found == EXPECTED[name] for name, pairs in results.items() for found, _ in pairs)
    told = sum(
        (found in HEALTHY) == (EXPECTED[name] in HEALTHY) for name, pairs in results.items() for found, _ in pairs
    )
    glance = sum(rises == (EXPECTED[name] in HEALTHY) for name, pairs in results.items() for _, rises in pairs)
    print(f"\n{named} of {runs} runs named; healthy or not told for {told}, by a glance at the reward for {glance}")
    print(
        json.dumps(
            {
                "runs": runs,
                "seeds": list(seeds),
                "named": named / runs,
                "healthy_or_not": told / runs,
                "glance": glance / runs,
                "ratio": told / glance if glance else None,
                "results": {name: [found for found, _ in pairs] for name, pairs in results.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
