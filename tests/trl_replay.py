"""TRL's own pass and slmgrpo's loop on the same completions; a process of its own, since unsloth changes TRL for good.

Prints one line of JSON. `share FOLDER`: gradients of some cases, and weights after twenty optimizer steps.
`full NAME...`: gradients of every case of these loss types.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from replayed import Row, flat_gradient, groups_of, loop_gradient

GROUPS, SIZE, MAX_TOKENS = 4, 4, 12
PROMPT_LENGTHS = (3, 11, 1, 7)
"""Unequal, so that TRL pads prompts on the left."""

LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")
AXES: dict[str, tuple[Any, ...]] = {
    "importance_sampling_level": ("token", "sequence"),
    "scale_rewards": ("group", "batch", "none"),
    "beta": (0.0, 0.05),
    "mask_truncated_completions": (False, True),
    "accumulation": (1, 4),
    "batch": ("ragged", "silent"),
    "update": (1, 2),
}
ASIDE: dict[str, tuple[Any, ...]] = {
    "sampling_correction": ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    "epsilon_high": (None, 0.28, 5.0),
    "entropy": ((0.0, 1.0), (0.01, 1.0), (0.0, 0.4), (0.01, 0.4)),
    "off_policy_mask_threshold": (None, 0.05),
}
"""Not crossed with the others: the values take turns (every combination at the log-probs is in test_losses.py)."""


def cases(loss_type: str, *, full: bool) -> Iterator[dict[str, Any]]:
    """Every combination of the axes, or six cases in which each value of each axis occurs."""
    draw = random.Random(loss_type)
    if full:
        chosen = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]
    else:
        turns = {name: draw.sample([values[i % len(values)] for i in range(6)], 6) for name, values in AXES.items()}
        chosen = [{name: turn[i] for name, turn in turns.items()} for i in range(6)]
    for i, case in enumerate(chosen):
        case |= {name: draw.choice(values) for name, values in ASIDE.items()}
        if loss_type == "bnpo":  # TRL normalises this, the entropy bonus and the quantile in each micro-batch
            case["accumulation"] = 1
        if case["accumulation"] > 1:
            case["entropy"] = (0.0, 1.0)
        yield case | {"loss_type": loss_type, "seed": i}


def rollout(case: dict[str, Any], written: list[list[list[int]]], end: int) -> list[list[Row]]:
    """Rows with empty, one-token and maximal completions, cut and ended ones, out of what was written to a prompt."""
    draw = random.Random(case["seed"])
    groups = []
    for g, completions in enumerate(written):
        lengths = [0, MAX_TOKENS, MAX_TOKENS, 1] if g == 0 else [draw.randint(1, MAX_TOKENS) for _ in range(SIZE)]
        # the second group is silent always; so are all groups of a silent batch; one row of the third has no verdict
        equal = case["batch"] == "silent" or g == 1
        rewards: list[float | None] = [float(g % 2)] * SIZE if equal else [1.0, 0.0, 0.0, draw.choice([0.0, 1.0])]
        if g == 2:
            rewards[3] = None
        rows = []
        for member, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
            cut = length == MAX_TOKENS and member == 1
            ids = draw.choice(completions)[:length]
            rows.append(Row(tuple(ids if cut or not ids else [*ids[:-1], end]), cut, reward))
        groups.append(rows)
    return groups


class Sides:
    """Both trainers around one model in float32, the embedded one with a random adapter."""

    def __init__(self) -> None:
        from slmgrpo.model import load
        from slmgrpo.plan import plan
        from slmgrpo.recipe_load import load as load_recipe

        settings = [
            f"train.prompts_per_step={GROUPS}",
            f"sampling.group_size={SIZE}",
            f"sampling.max_tokens={MAX_TOKENS}",
            "sampling.temperature=0.9",
            "model.dtype=float32",
        ]
        self.recipe = load_recipe("quickstart", settings).recipe
        self.plan = plan(self.recipe)
        self.policy = load(self.recipe, max_length=self.plan.max_length)
        import torch

        torch.manual_seed(1)
        self.parameters = [p for _, p in self.policy.trainable()]
        self.start = [0.03 * torch.randn_like(p) for p in self.parameters]
        self.moved = [p + 0.003 * torch.randn_like(p) for p in self.start]
        self.prompts = [
            tuple(torch.randint(3, self.policy.model.config.vocab_size, (n,)).tolist()) for n in PROMPT_LENGTHS
        ]
        self.written = [self._write(prompt) for prompt in self.prompts]
        self.trainer = self._trainer()

    def _write(self, prompt: tuple[int, ...], count: int = 16) -> list[list[int]]:
        """Completions of MAX_TOKENS tokens, drawn from the policy at the start."""
        import torch

        self.put(self.start)
        tokenizer = self.policy.tokenizer
        ids = torch.tensor([prompt] * count)
        with torch.no_grad():
            for _ in range(MAX_TOKENS):
                logits = self.policy.model(input_ids=ids).logits[:, -1] / self.recipe.sampling.temperature
                logits[:, [tokenizer.eos_token_id, tokenizer.pad_token_id]] = -math.inf  # TRL would call a row ended
                ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
        return ids[:, len(prompt) :].tolist()

    def rollout(self, case: dict[str, Any]) -> list[list[Row]]:
        """Rows whose sampler's log-probs are a little off the policy's, and one of them unknown."""
        import torch

        from slmgrpo.trainer.logprobs import TokenRow, log_probs

        self.put(self.start)
        groups = rollout(case, self.written, self.policy.tokenizer.eos_token_id)
        noise = random.Random(case["seed"])
        result = []
        for prompt, rows in zip(self.prompts, groups, strict=True):
            with torch.no_grad():
                passed = log_probs(self.policy.model, [TokenRow(prompt, row.ids) for row in rows], 0.9).log_probs
            exact = [values[: len(row.ids)] for values, row in zip(passed.tolist(), rows, strict=True)]
            near = [tuple(value + noise.gauss(0.0, 0.3) for value in values) for values in exact]
            result.append([replace(row, log_probs=values) for row, values in zip(rows, near, strict=True)])
        unknown = result[3][0]
        result[3][0] = replace(unknown, log_probs=(math.nan, *unknown.log_probs[1:]))
        return result

    def put(self, weights: list[Any]) -> None:
        for p, value in zip(self.parameters, weights, strict=True):
            p.data.copy_(value)

    def _trainer(self) -> Any:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

        sides = self

        class Replay(GRPOTrainer):
            rollout: list[list[Row]]

            def _generate(self, prompts: list[Any]) -> Any:
                rows = [row for group in self.rollout for row in group]
                asked = [list(prompt) for prompt in sides.prompts for _ in range(SIZE)]
                # TRL 1.15 fails on an empty completion; here it is a token outside of the loss
                ids = [list(row.ids) or [0] for row in rows]
                trained = [[1] * len(row.ids) or [0] for row in rows]
                log_probs = [list(row.log_probs) or [0.0] for row in rows]
                return asked, ids, trained, ["" for _ in rows], log_probs, {}, None, []

        def rewards(prompts: list[Any], completions: list[Any], **_: Any) -> list[float | None]:
            return [row.reward for group in trainer.rollout for row in group]

        trainer = Replay(
            model=self.policy.model,
            processing_class=self.policy.tokenizer,
            reward_funcs=[rewards],
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(),
                per_device_train_batch_size=GROUPS * SIZE,
                num_generations=SIZE,
                max_completion_length=MAX_TOKENS,
                temperature=self.recipe.sampling.temperature,
                gradient_checkpointing=False,
                use_bias_correction_kl=False,
                use_cpu=True,
                bf16=False,
                report_to=[],
            ),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * GROUPS * SIZE),
        )
        assert trainer.model is not None
        trainer.model.train()
        return trainer

    def theirs(self, case: dict[str, Any], loss: Any, data: list[list[Row]]) -> Any:
        """Generation step (replayed), advantages, old and reference passes, loss and gradient: all of it TRL's."""
        trainer, args, accumulation = self.trainer, self.trainer.args, case["accumulation"]
        trainer.rollout = data
        trainer.loss_type, trainer.beta = loss.loss_type, loss.beta
        trainer.scale_rewards = args.scale_rewards = loss.scale_rewards
        trainer.importance_sampling_level = loss.importance_sampling_level
        trainer.mask_truncated_completions = loss.mask_truncated_completions
        trainer.epsilon_low = loss.epsilon
        trainer.epsilon_high = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
        trainer.top_entropy_quantile, trainer.entropy_coef = loss.top_entropy_quantile, loss.entropy_coef
        trainer._entropy_bonus_enabled = loss.entropy_coef != 0
        trainer.off_policy_mask_threshold = loss.off_policy_mask_threshold
        trainer.use_vllm = loss.sampling_correction != "none"
        trainer.vllm_importance_sampling_correction = trainer.use_vllm
        trainer.vllm_importance_sampling_mode = loss.sampling_correction
        trainer.vllm_importance_sampling_clip_max = loss.sampling_correction_cap
        trainer.num_iterations = args.num_iterations = case["update"]
        args.steps_per_generation = args.gradient_accumulation_steps = accumulation
        args.per_device_train_batch_size = GROUPS * SIZE // accumulation
        trainer.current_gradient_accumulation_steps = accumulation
        trainer._step, trainer._buffered_inputs = 0, None
        batch = [{"prompt": "a"} for _ in range(GROUPS * SIZE)]
        self.put(self.start)
        trainer._prepare_inputs(batch)
        if case["update"] == 2:
            self.put(self.moved)
            trainer._step = accumulation
        for _ in range(accumulation):
            inputs = trainer._prepare_inputs(batch)
            trainer._compute_loss(trainer.model, inputs).backward()
            trainer._step += 1
        return flat_gradient(self.policy)

    def ours(self, case: dict[str, Any], loss: Any, data: list[list[Row]]) -> Any:
        """The loop's micro-batches and one of its updates."""
        train = self.recipe.train.model_copy(update={"micro_batch_tokens": 1 + 40 * (case["seed"] % 3)})
        recipe = self.recipe.model_copy(update={"loss": loss, "train": train})
        self.put(self.start)
        move = partial(self.put, self.moved) if case["update"] == 2 else None
        return loop_gradient(self.policy, recipe, self.plan, groups_of(self.prompts, data), move)

    def settle(self, quantile: float, data: list[list[Row]], update: int) -> float:
        """The share near it whose threshold is furthest from any entropy: on a tie (first tokens of a group) rounding
        decides."""
        import torch

        from slmgrpo.trainer.logprobs import TokenRow, log_probs

        self.put(self.moved if update == 2 else self.start)
        rows = [TokenRow(p, row.ids) for p, rows in zip(self.prompts, data, strict=True) for row in rows]
        with torch.no_grad():
            passed = log_probs(self.policy.model, rows, self.recipe.sampling.temperature, entropy=True)
        assert passed.entropies is not None
        cut = torch.tensor([row.cut for rows in data for row in rows])
        sets = [passed.entropies[mask] for mask in (passed.mask, passed.mask & ~cut[:, None])]

        def distance(share: float) -> float:
            return min(float((values - torch.quantile(values, 1 - share)).abs().min()) for values in sets)

        best = max((quantile + step / 137 for step in range(-25, 26)), key=distance)  # 100 steps meet all of 101 tokens
        assert distance(best) > 1e-5
        return best


class PlainHead:
    """The formulas of TRL's log-prob kernel, which is for CUDA; Unsloth's stand-in on a CPU is part float32 always."""

    @staticmethod
    def apply(
        hidden: Any, weight: Any, bias: Any, targets: Any, temperature: float, *_: Any
    ) -> tuple[Any, Any, None, None, None]:
        logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
        log_p = logits.log_softmax(-1)
        return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), None, None, None


@contextmanager
def in_float64(model: Any) -> Iterator[None]:
    """Both sides in float64, also where transformers and TRL name float32 (norms, angles, advantages)."""
    import torch
    import trl.trainer.utils as trl_utils
    from torch.overrides import TorchFunctionMode

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class Wide(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})

    torch.set_default_dtype(torch.float64)
    model.double()
    try:
        with pytest.MonkeyPatch.context() as patch, Wide():
            patch.setattr(trl_utils, "_ChunkedLogProbFunction", PlainHead)
            yield
    finally:
        model.float()
        torch.set_default_dtype(torch.float32)


def apart(a: Any, b: Any) -> float:
    return float((a - b).norm()) / (float(b.norm()) or 1)


def grid(loss_types: list[str], *, full: bool) -> list[dict[str, Any]]:
    """Each case: size of TRL's gradient, relative distance of ours, and that distance with both in float64."""
    from slmgrpo.recipe import Loss

    sides = Sides()
    results = []
    for loss_type in loss_types:
        for case in cases(loss_type, full=full):
            named = {name: case[name] for name in case if name in Loss.model_fields}
            data = sides.rollout(case)
            entropy_coef, top_entropy_quantile = case["entropy"]
            if top_entropy_quantile < 1:
                top_entropy_quantile = sides.settle(top_entropy_quantile, data, case["update"])
            loss = Loss.model_validate(
                named | {"entropy_coef": entropy_coef, "top_entropy_quantile": top_entropy_quantile}
            )
            theirs, ours = sides.theirs(case, loss, data), sides.ours(case, loss, data)
            size, gap = float(theirs.norm()), apart(ours, theirs)
            with in_float64(sides.policy.model):
                exact = apart(sides.ours(case, loss, data), sides.theirs(case, loss, data))
            results.append({"case": case, "size": size, "gap": gap, "exact": exact})
    return results


if __name__ == "__main__":
    if sys.argv[1] == "share":
        from trl_steps import steps

        print(json.dumps({"steps": steps(Path(sys.argv[2])), "grid": grid(list(LOSS_TYPES), full=False)}))
    else:
        print(json.dumps({"grid": grid(sys.argv[2:], full=True)}))
