"""One training phase of SmolLM2-135M in a process of its own, by TRL or by us; trainer.py starts these and compares.

The last line is JSON: wall and CPU seconds of the pass, resident memory before it and at its peak (VmHWM, reset by
/proc/self/clear_refs once model and libraries are loaded). The adapter's gradient goes into a file.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

GROUP = 8


def main(name: str, model: str, batch: str, out: str) -> None:
    """name: an arm; model: id or folder; batch: JSON of prompts, lengths and rewards; out: file for the gradient."""
    from slmgrpo.model import load
    from slmgrpo.plan import plan
    from slmgrpo.recipe_load import load as load_recipe

    chosen = json.loads(batch)
    settings = [
        f"model={model}",
        f"sampling.max_tokens={max(max(p['completions']) for p in chosen)}",
        f"prompt.max_tokens={max(p['prompt'] for p in chosen)}",
        f"train.prompts_per_step={len(chosen)}",
        f"train.gradient_checkpointing={str(name == 'trl_defaults').lower()}",
        f"train.micro_batch_tokens={micro_batch_tokens(chosen, whole=name == 'ours_whole')}",
        "loss.sampling_correction=none",
        "model.dtype=float32",
    ]
    recipe = load_recipe("quickstart", settings).recipe
    planned = plan(recipe)
    policy = load(recipe, max_length=planned.max_length)
    import torch
    import trl  # noqa: F401  in every arm, so that all hold the same libraries

    noise = torch.Generator().manual_seed(0)
    for parameter_name, p in policy.trainable():
        if "lora_B" in parameter_name:
            p.data.copy_(0.02 * torch.randn(p.shape, generator=noise))
    groups = replayed_groups(chosen, policy.model.config.vocab_size)
    arms: dict[str, Callable[[Any], Any]] = {
        "trl_defaults": lambda some: by_trl(policy, recipe, some, old_pass=True),
        "trl": lambda some: by_trl(policy, recipe, some, old_pass=False),
        "unpadded": lambda some: by_hand(policy, recipe, some, packed=False),
        "packed": lambda some: by_hand(policy, recipe, some, packed=True),
        "ours_whole": lambda some: by_loop(policy, recipe, planned, some),
        "ours": lambda some: by_loop(policy, recipe, planned, some),
    }
    run = arms[name]
    run(groups[-1:])()  # the last has a signal: weights are read from the disk, kernels chosen
    learn = run(groups)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # what the first pass has freed goes back, so that it does not count as held before
    before = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    start, start_cpu = time.perf_counter(), time.process_time()
    gradient = learn()
    wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    torch.save(gradient, out)
    print(json.dumps({"wall_s": wall, "cpu_s": cpu, "before_mb": before, "peak_mb": memory_mb("VmHWM")}))


def micro_batch_tokens(chosen: list[dict[str, Any]], *, whole: bool) -> int:
    """For our arms: a quarter of the tokens of TRL's 8 padded rows, or as many as the largest group has."""
    if whole:
        return max(p["prompt"] + sum(p["completions"]) for p in chosen)
    return GROUP * (max(p["prompt"] for p in chosen) + max(max(p["completions"]) for p in chosen)) // 4


def memory_mb(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def replayed_groups(chosen: list[dict[str, Any]], vocabulary: int) -> list[Any]:
    """Random tokens of the trace's lengths; log-probs of the sampler are not used."""
    import random

    from replayed import Row, groups_of

    draw = random.Random(0)

    def words(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(100, vocabulary) for _ in range(count))

    prompts = [words(p["prompt"]) for p in chosen]
    rows = [
        [
            Row(words(n), False, float(reward), (0.0,) * n)
            for n, reward in zip(p["completions"], p["rewards"], strict=True)
        ]
        for p in chosen
    ]
    return groups_of(prompts, rows)


def by_loop(policy: Any, recipe: Any, planned: Any, groups: list[Any]) -> Callable[[], Any]:
    """One update of slmgrpo's loop, as in a run after its first step."""
    from replayed import loop_gradient

    return lambda: loop_gradient(policy, recipe, planned, groups, packed=True)


def by_hand(policy: Any, recipe: Any, groups: list[Any], *, packed: bool) -> Callable[[], Any]:
    """All rows, silent ones too: each alone without padding, or a group as one packed row."""
    import torch
    from replayed import flat_gradient

    from slmgrpo.trainer import losses
    from slmgrpo.trainer.advantages import advantages
    from slmgrpo.trainer.logprobs import TokenRow, log_probs
    from slmgrpo.trainer.packing import packed_log_probs

    rewards = [[member.reward for member in group.members] for group in groups]
    rows, weights = [], []
    for group, group_weights in zip(groups, advantages(rewards, recipe.loss.scale_rewards), strict=True):
        of_group = [TokenRow(group.prompted.prompt_ids, member.completion.token_ids) for member in group.members]
        rows += [of_group] if packed else [[row] for row in of_group]
        weights += [group_weights] if packed else [[weight] for weight in group_weights]
    lengths = [len(row.completion_ids) for some in rows for row in some]
    norms = losses.norms_of(lengths, [False] * len(lengths), recipe.loss, max_tokens=recipe.sampling.max_tokens)

    def learn() -> Any:
        for some, advantage in zip(rows, weights, strict=True):
            passed = (packed_log_probs if packed else log_probs)(policy.model, some, 1.0, entropy=True)
            batch = losses.LossBatch(passed.mask, torch.tensor(advantage), torch.zeros(len(some), dtype=torch.bool))
            losses.policy_loss(passed.log_probs, batch, recipe.loss, norms).loss.backward()
        return flat_gradient(policy)

    return learn


def by_trl(policy: Any, recipe: Any, groups: list[Any], *, old_pass: bool) -> Callable[[], Any]:
    """TRL's loss over micro-batches of 8 rows, padded to the longest prompt and completion of them all, as TRL pads.

    old_pass: also the pass without gradient that TRL makes for old log-probs under vLLM (the sampler agrees with it).
    """
    import torch
    from datasets import Dataset
    from replayed import flat_gradient
    from torch.nn.utils.rnn import pad_sequence
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    from slmgrpo.trainer.advantages import advantages

    trainer: Any = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=[lambda prompts, completions, **_: [0.0] * len(prompts)],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
            gradient_checkpointing=recipe.train.gradient_checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            use_cpu=True,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUP),
    )
    trainer.model.train()
    members = [(group.prompted.prompt_ids, member) for group in groups for member in group.members]
    prompts = [torch.tensor(prompt) for prompt, _ in members]
    completions = [torch.tensor(member.completion.token_ids) for _, member in members]
    rewards = [[member.reward for member in group.members] for group in groups]
    weights = torch.tensor([weight for row in advantages(rewards, recipe.loss.scale_rewards) for weight in row])
    ids = {
        "prompt_ids": pad_sequence(prompts, batch_first=True, padding_side="left"),
        "prompt_mask": pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True, padding_side="left"),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence([torch.ones_like(c) for c in completions], batch_first=True),
        "advantages": weights,
    }
    steps = len(groups)
    trainer.args.steps_per_generation = trainer.current_gradient_accumulation_steps = steps
    tokens = ids["completion_mask"].sum()

    def learn() -> Any:
        parts = [{name: value[i * GROUP : (i + 1) * GROUP] for name, value in ids.items()} for i in range(steps)]
        if old_pass:
            with torch.no_grad():
                for part in parts:
                    whole = [
                        torch.cat([part[f"prompt_{what}"], part[f"completion_{what}"]], 1) for what in ("ids", "mask")
                    ]
                    width = part["completion_ids"].shape[1]
                    passed = trainer._get_per_token_logps_and_entropies(trainer.model, *whole, width)
                    part["old_per_token_logps"] = passed[0]
        for part in parts:
            trainer._compute_loss(trainer.model, {**part, "num_items_in_batch": tokens}).backward()
        return flat_gradient(policy)

    return learn


if __name__ == "__main__":
    main(*sys.argv[1:])
