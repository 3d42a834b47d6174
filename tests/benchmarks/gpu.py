"""Training phase and peak memory on one GPU: TRL, Unsloth as in its notebooks, and slmgrpo; the last line is JSON.

    python tests/benchmarks/gpu.py [--quick] [--arms trl,unsloth,ours,ours_plain]
    python tests/benchmarks/gpu.py --cpu-check    # the same code on a tiny model without a GPU; its numbers say nothing

Every arm is a process of its own and trains the same replayed completions (../shared/traces, math, groups of 8; the
same spread where that is absent) on the same random weights of 1.5B shapes (Qwen2.5-1.5B) in bfloat16 with an adapter
of rank 16 on all linear layers. Nobody generates: what is timed is everything from finished completions to the updated
adapter, the mean of the steps after the first. Memory is the most that torch allocated in those steps.
trl: GRPOTrainer with its defaults (gradient checkpointing), 8 rows a pass, without the old-log-prob pass that it adds
under vLLM. unsloth: FastLanguageModel and GRPOTrainer as unsloth patches it, with its own defaults. ours, ours_plain:
slmgrpo's loop on Unsloth's model and on transformers', without checkpointing.
*_wall_ratio, *_memory_ratio: that arm's seconds and bytes / those of `ours`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

TRACES = Path(__file__).parents[2].parent / "shared/traces/math.json"
GROUP, STEPS = 8, 4
ARMS = ("trl", "unsloth", "ours", "ours_plain")
LARGE = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 groups in place of 64")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--cpu-check", action="store_true", help="run the code on a CPU; measures nothing")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        print(json.dumps(measure(options.arm, options.folder)))
        return
    import torch

    if not torch.cuda.is_available() and not options.cpu_check:
        print(
            "gpu.py: needs a CUDA device and this machine has none; --cpu-check runs its code on a CPU", file=sys.stderr
        )
        sys.exit(2)
    arms = options.arms.split(",")
    if wrong := [arm for arm in arms if arm not in ARMS]:
        print(f"gpu.py: --arms {wrong[0]}: there are {', '.join(ARMS)}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="slmgrpo-gpu-") as scratch:
        folder = Path(scratch)
        groups = trace(5, 40) if options.cpu_check else trace(8 if options.quick else 64, 1)
        (folder / "groups.json").write_text(json.dumps(groups))
        write_model(folder / "model", TINY if options.cpu_check else LARGE)
        found = {arm: in_a_process(arm, folder) for arm in arms}
    report(found, checked=options.cpu_check)


def trace(prompts: int, shorter: int) -> list[dict[str, Any]]:
    """Lengths and rewards of so many groups, divided by `shorter`."""
    if TRACES.is_file():
        rows = json.loads(TRACES.read_text())["prompts"][:prompts]
    else:
        draw = random.Random(0)
        rows = [
            {
                "prompt": draw.randrange(60, 200),
                "completions": [min(1024, int(draw.lognormvariate(5.6, 0.7))) for _ in range(GROUP)],
                "rewards": [draw.random() < 0.5 for _ in range(GROUP)],
            }
            for _ in range(prompts)
        ]
    return [
        {
            "prompt": max(2, row["prompt"] // shorter),
            "completions": [max(1, n // shorter) for n in row["completions"][:GROUP]],
            "rewards": [float(reward) for reward in row["rewards"][:GROUP]],
        }
        for row in rows
    ]


def write_model(folder: Path, shape: dict[str, Any]) -> None:
    """Random weights in bfloat16 with a tokenizer of bytes: what the tokens are makes no difference to the work."""
    import torch
    from byte_tokenizer import CHATML, tokenizer_with
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    tokenizer = tokenizer_with(CHATML)
    tokenizer.pad_token = "<s>"
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    AutoModelForCausalLM.from_config(Qwen2Config(**shape, **ids), dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def in_a_process(arm: str, folder: Path) -> dict[str, Any] | None:
    command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{arm}: failed\n{done.stderr[-3000:]}")
        return None
    line = json.loads(done.stdout.splitlines()[-1])
    print(f"{arm}: {line}", flush=True)
    return line


def report(found: dict[str, dict[str, Any] | None], *, checked: bool) -> None:
    ours = found.get("ours") or found.get("ours_plain")
    line: dict[str, Any] = {"arms": found, "cpu_check": checked}
    if ours and not checked:
        for arm, result in found.items():
            if result and result is not ours:
                line[f"{arm}_wall_ratio"] = round(result["step_s"] / ours["step_s"], 2)
                line[f"{arm}_memory_ratio"] = round(result["peak_mb"] / ours["peak_mb"], 2)
    print(json.dumps(line))
    if None in found.values():
        sys.exit(1)


# in the process of an arm


@dataclass(frozen=True)
class Replayed:
    """What every arm learns from: by prompt its ids, its completions' ids and rewards; `mark` ends a step."""

    model: Path
    prompts: list[list[int]]
    completions: list[list[list[int]]]
    rewards: list[list[float]]
    mark: Callable[[], None]

    @property
    def max_tokens(self) -> int:
        return max(len(ids) for own in self.completions for ids in own)


def measure(arm: str, folder: Path) -> dict[str, Any]:
    """Seconds of a step and megabytes at its peak; on a CPU the process's own peak, model and all."""
    import torch

    groups = json.loads((folder / "groups.json").read_text())
    if arm != "trl" or not torch.cuda.is_available():  # TRL's kernel is Triton's; without a GPU unsloth replaces it
        import unsloth  # noqa: F401  before trl and transformers
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(group["prompt"])] for group in groups]
    completions = [[[draw.randrange(256) for _ in range(n)] for n in group["completions"]] for group in groups]
    rewards = [group["rewards"] for group in groups]
    marks: list[float] = []

    def mark() -> None:
        """The end of a step; the peak is that of the steps after the first."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if len(marks) == 1:
                torch.cuda.reset_peak_memory_stats()
        marks.append(time.perf_counter())

    replayed = Replayed(folder / "model", prompts, completions, rewards, mark)
    path = by_loop(replayed, plain=arm == "ours_plain") if arm.startswith("ours") else by_trl(replayed, arm)
    seconds = (marks[-1] - marks[1]) / (len(marks) - 2)
    if torch.cuda.is_available():
        peak, device = torch.cuda.max_memory_allocated() / 2**20, torch.cuda.get_device_name()
    else:
        peak, device = _resident_peak_mb(), "cpu"
    return {"step_s": round(seconds, 4), "peak_mb": round(peak, 1), "path": path, "device": device}


def by_trl(load: Replayed, arm: str) -> str:
    """TRL's own trainer, or the one that unsloth has put in its place, with completions from a list."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    cuda = torch.cuda.is_available()
    longest = max(len(p) + len(c) for p, own in zip(load.prompts, load.completions, strict=True) for c in own)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapter: Any = None
    if arm == "unsloth":
        from unsloth import FastLanguageModel  # pyright: ignore[reportPrivateImportUsage]

        policy, tokenizer = FastLanguageModel.from_pretrained(
            model_name=str(load.model), max_seq_length=longest + 1, load_in_4bit=False
        )
        policy = FastLanguageModel.get_peft_model(
            policy, r=16, lora_alpha=32, target_modules=targets, use_gradient_checkpointing="unsloth"
        )
    else:
        from peft import LoraConfig

        tokenizer = AutoTokenizer.from_pretrained(load.model)
        policy = AutoModelForCausalLM.from_pretrained(load.model, dtype=torch.bfloat16 if cuda else torch.float32)
        adapter = LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")

    def replay(asked: list[str], trainer: Any) -> dict[str, Any]:
        """Prompts come G times each; which ones, their text says."""
        places = [int(text) for text in asked]
        seen: dict[int, int] = {}
        members = [_next(seen, place) for place in places]
        written = [load.completions[p][m] for p, m in zip(places, members, strict=True)]
        return {
            "prompt_ids": [load.prompts[p] for p in places],
            "completion_ids": written,
            "logprobs": [[-1.0] * len(ids) for ids in written],
            "reward": [load.rewards[p][m] for p, m in zip(places, members, strict=True)],
        }

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            load.mark()

    def from_trace(prompts: Any, completions: Any, reward: list[float], **_: Any) -> list[float]:
        return reward

    kind = f"{GRPOTrainer.__module__}.{GRPOTrainer.__name__}"
    trainer = GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=[from_trace],  # pyright: ignore[reportArgumentType]  TRL calls it by keywords
        args=GRPOConfig(
            output_dir=str(load.model.parent / arm),
            max_steps=STEPS,
            per_device_train_batch_size=GROUP,
            gradient_accumulation_steps=len(load.prompts),
            num_generations=GROUP,
            max_completion_length=load.max_tokens,
            learning_rate=1e-5,
            temperature=1.0,
            beta=0.0,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            use_cpu=not cuda,
            bf16=cuda,
            optim="adamw_8bit" if arm == "unsloth" and cuda else "adamw_torch",
        ),
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(load.prompts))]),
        peft_config=adapter,
        rollout_func=replay,
        callbacks=[Marks()],
    )
    if arm == "unsloth" and cuda:
        assert GRPOTrainer.__name__.startswith("Unsloth"), f"unsloth left {kind} as it is"
    load.mark()
    trainer.train()
    return kind


def _next(seen: dict[int, int], prompt: int) -> int:
    seen[prompt] = seen.get(prompt, -1) + 1
    return seen[prompt]


def by_loop(load: Replayed, *, plain: bool) -> str:
    """slmgrpo's loop from the graded groups to the updated adapter. plain: on transformers' model."""
    from replayed import Row, context_of, groups_of

    from slmgrpo.model import load as load_model
    from slmgrpo.plan import plan
    from slmgrpo.recipe_load import load as load_recipe
    from slmgrpo.run import Clock
    from slmgrpo.trainer import context, update
    from slmgrpo.trainer.advantages import advantages

    settings = [
        f"model.id={load.model}",
        f"model.backend={'transformers' if plain else 'unsloth'}",
        "sampling.engine=hf",  # for the load alone: Unsloth's model without vLLM
        f"sampling.max_tokens={load.max_tokens}",
        f"sampling.group_size={GROUP}",
        f"prompt.max_tokens={max(map(len, load.prompts))}",
        f"train.prompts_per_step={len(load.prompts)}",
        f"train.steps={STEPS}",
        "lora={rank: 16, alpha: 32, targets: all-linear}",
        "loss.sampling_correction=none",
    ]
    recipe = load_recipe("quickstart", settings).recipe
    planned = plan(recipe)
    policy = load_model(recipe, max_length=planned.max_length)
    optimizer = context.optimizer_of(recipe.optimizer, policy)
    scheduler = context.scheduler_of(recipe.optimizer, optimizer, planned)
    ctx = context_of(policy, recipe, planned, optimizer=optimizer, scheduler=scheduler)
    ctx.guards.begin(policy.trainable())
    rows = [
        [Row(tuple(ids), False, reward, (-1.0,) * len(ids)) for ids, reward in zip(own, earned, strict=True)]
        for own, earned in zip(load.completions, load.rewards, strict=True)
    ]
    groups = groups_of([tuple(prompt) for prompt in load.prompts], rows)
    micros: list[Any] = []
    load.mark()
    for _ in range(STEPS):
        micros = update.work_of(ctx, groups, advantages(load.rewards, recipe.loss.scale_rewards)).micros
        update.optimise(ctx, groups, micros, Clock())
        load.mark()
    assert micros, "no group of the trace has a signal"
    kind = type(policy.model.get_base_model()).__module__.partition(".")[0]
    return f"{kind}, {'packed' if ctx.packed else 'plain'}"


def _resident_peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


if __name__ == "__main__":
    main()
