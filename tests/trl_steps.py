"""Twenty optimizer steps by slmgrpo and by TRL on the same completions; runs in the process of trl_replay.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RUNS = {
    "dapo": ["optimizer.lr_scheduler_type=cosine"],
    "grpo with KL, two updates a rollout, accumulation": [
        "loss.loss_type=grpo",
        "loss.beta=0.05",
        "loss.mask_truncated_completions=true",
        "loss.scale_rewards=none",
        "train.updates_per_rollout=2",
        "train.micro_batch_tokens=1",
        "optimizer.weight_decay=0.1",
        "optimizer.warmup_ratio=0.2",
    ],
}
"""Twenty optimizer steps of the quickstart with these settings."""


@dataclass
class Recorder:
    """An engine that remembers what it wrote, rollout by rollout."""

    engine: Any
    rollouts: list[list[list[int]]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, requests: list[Any], *, step: int) -> Iterator[Any]:
        written = {}
        for completion in self.engine.generate(requests, step=step):
            written[completion.index, completion.member] = list(completion.token_ids)
            yield completion
        self.rollouts.append([written[key] for key in sorted(written)])


def steps(folder: Path) -> dict[str, dict[str, float]]:
    """slmgrpo trains and its completions are kept, TRL trains on the same ones; how far the adapters end apart."""
    from slmgrpo import train as worker
    from slmgrpo.cli import app
    from slmgrpo.model import quiet

    with quiet():
        import unsloth  # noqa: F401  before trl
    import torch
    from safetensors.torch import load_file
    from trl import GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    make_engine = worker._engine
    apart = {}
    for i, (name, settings) in enumerate(RUNS.items()):
        rollouts: list[list[list[int]]] = []
        worker._engine = lambda *given, kept=rollouts: Recorder(make_engine(*given), kept)
        small = ["train.steps=20", "train.prompts_per_step=4", "sampling.group_size=4", "data.heldout=[]"]
        small += ["loss.sampling_correction=none", "grading.workers=1"]
        small += ['data.train=[{source: "tiny:mcq", rewards: [{use: mcq.correct}]}]']
        rate = ["optimizer.learning_rate=1e-3", "model.dtype=float32", "train.save_every=20"]
        adapters = []
        for trainer in ("slmgrpo", "trl"):
            replayed = iter(rollouts)
            GRPOTrainer._generate_single_turn = lambda *_, source=replayed, **__: (next(source), None)
            out = folder / f"{i}-{trainer}"
            sets = [f"--set={setting}" for setting in (*small, *rate, *settings, f"trainer={trainer}")]
            app(["train", "quickstart", *sets, "--out", str(out)], standalone_mode=False)
            worker._engine = make_engine
            adapters.append(load_file(out / "checkpoints/step_20/adapter/adapter_model.safetensors"))
        ours, theirs = ({key: adapter[key] for key in sorted(adapter)} for adapter in adapters)
        assert list(ours) == list(theirs)

        def distance(part: str, a: dict[str, Any] = ours, b: dict[str, Any] = theirs) -> float:
            pairs = [(a[key].flatten(), b[key].flatten()) for key in a if part in key]
            mine, other = (torch.cat(side) for side in zip(*pairs, strict=True))
            return float((mine - other).norm() / other.norm())

        left = len(list(replayed))
        apart[name] = {
            "weights": distance("lora"),
            "lora_B": distance("lora_B"),
            "rollouts": len(rollouts),
            "left": left,
        }
    return apart
