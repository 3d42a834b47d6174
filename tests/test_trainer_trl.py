"""The recipe through TRL's trainer: every field set, every difference refused, the same gradient and run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slmgrpo.errors import PlanError, RecipeError
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir
from slmgrpo.trainer import trl_config

CHILD = Path(__file__).with_name("trl_child.py")


def child(*arguments: str | Path, **environment: str) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def config(*settings: str, device: trl_config.Device = "cpu") -> dict[str, Any]:
    given = ["train.steps=60", "train.prompts_per_step=24", "prompt.max_tokens=128", "sampling.max_tokens=32"]
    rate = ["optimizer.learning_rate=1e-3", "optimizer.lr_scheduler_type=cosine"]
    recipe = load("quickstart", [*given, *rate, *settings]).recipe
    return trl_config.config(recipe, plan(recipe), RunDir(Path("run")), device=device)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trl")
    return folder, child("train", folder)


CASES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "what Unsloth would change": (
        [],
        {
            "learning_rate": 1e-3,
            "optim": "adamw_torch_fused",
            "weight_decay": 0.0,
            "warmup_steps": 0,
            "seed": 42,
            "beta": 0.0,
            "epsilon_high": 0.2,
            "mask_truncated_completions": False,
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "use_bias_correction_kl": False,
            "gradient_checkpointing": False,
            "lr_scheduler_type": "cosine",
        },
    ),
    "a step is a rollout, in whole groups": (
        ["train.micro_batch_tokens=4000"],
        {"per_device_train_batch_size": 24, "gradient_accumulation_steps": 8, "steps_per_generation": 8},
    ),
    "a group larger than a micro-batch runs alone": (
        ["train.micro_batch_tokens=1"],
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 24},
    ),
    "several updates": (["train.updates_per_rollout=3"], {"num_iterations": 3, "max_steps": 60}),
    "constant with warmup": (
        ["optimizer.lr_scheduler_type=constant", "optimizer.warmup_ratio=0.1"],
        {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 6},
    ),
    "filters": (
        ["sampling.top_p=0.9", "sampling.top_k=20", "sampling.min_p=0.1", "loss.sampling_correction=none"],
        {"top_p": 0.9, "top_k": 20, "min_p": 0.1, "vllm_importance_sampling_correction": False},
    ),
    "objective": (
        ["loss.loss_type=cispo", "loss.epsilon_high=5", "loss.beta=0.04", "loss.scale_rewards=none"],
        {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.04, "scale_rewards": "none"},
    ),
    "precision on a CPU": ([], {"use_cpu": True, "bf16": False, "fp16": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_config_says_what_the_recipe_says(name: str) -> None:
    settings, expected = CASES[name]
    asked = config(*settings)
    assert {field: asked[field] for field in expected} == expected


def test_on_cuda_the_precision_is_bfloat16_and_checkpointing_is_the_kind_that_unsloth_takes() -> None:
    asked = config("train.gradient_checkpointing=true", device="cuda")
    assert (asked["use_cpu"], asked["bf16"], asked["fp16"]) == (False, True, False)
    assert asked["gradient_checkpointing_kwargs"] == {"use_reentrant": True}


def test_a_difference_names_field_recipe_and_both_values() -> None:
    recipe = load("quickstart", ["loss.loss_type=dr_grpo"]).recipe
    planned = plan(recipe)
    asked = trl_config.config(recipe, planned, RunDir(Path("run")), device="cpu")
    held = SimpleNamespace(**asked, generation_batch_size=planned.completions_per_step)
    assert trl_config.differences(recipe, planned, asked, SimpleNamespace(args=held)) == []
    held.scale_rewards = "none"
    del held.delta
    found = trl_config.differences(recipe, planned, asked, SimpleNamespace(args=held, epsilon_high=0.28))
    for part in (
        "UnslothGRPOTrainer changed 3 settings",
        "scale_rewards: the recipe asks 'group' (loss.scale_rewards), the engine holds 'none'",
        "epsilon_high: the recipe asks 0.2 (loss.epsilon_high), the engine holds 0.28",
        "delta: the recipe asks None (loss.delta), the engine holds 'no such field'",
    ):
        assert part in trl_config.as_text(found, "UnslothGRPOTrainer")


def test_what_trl_cannot_express_is_refused_together() -> None:
    settings = ['sampling.stop=["END"]', "sampling.engine=vllm", "loss.sampling_correction=bypass"]
    settings.append("guards.actions={nonfinite: warn}")
    recipe = load("quickstart", settings).recipe
    with pytest.raises(PlanError) as raised:
        trl_config.check(recipe, None)
    wanted = ("guards.actions.nonfinite", "sampling.stop", "sampling.engine=vllm", "sampling_correction=bypass")
    for part in ("4 problems", *wanted):
        assert part in str(raised.value)


def test_resuming_is_refused_with_the_way_on(tmp_path: Path) -> None:
    recipe = load("quickstart", ["trainer=trl"]).recipe
    with pytest.raises(RecipeError, match=r"cannot be resumed.*--set adapter="):
        trl_config.check(recipe, RunDir(tmp_path))


def test_trl_before_unsloth_and_unsloth_before_plain_trl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_unsloth = load("quickstart").recipe
    monkeypatch.setitem(sys.modules, "trl", ModuleType("trl"))
    monkeypatch.delitem(sys.modules, "unsloth", raising=False)
    with pytest.raises(PlanError, match="import unsloth before it"):
        trl_config.check(with_unsloth, None)
    alone = load("quickstart", ["model.backend=transformers"]).recipe
    monkeypatch.setitem(sys.modules, "unsloth", ModuleType("unsloth"))
    with pytest.raises(PlanError, match="unsloth is imported in this process"):
        trl_config.check(alone, None)


def test_plain_trl_is_refused_on_a_cpu_before_anything_is_loaded(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so plain TRL works")
    command = [sys.executable, "-m", "slmgrpo", "train", "quickstart", "--set", "trainer=trl"]
    done = subprocess.run(
        [*command, "--set", "model.backend=transformers"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2
    assert "set model.backend=unsloth" in done.stderr
    assert not list(tmp_path.iterdir())


def test_trl_trains_the_quickstart_with_the_gradient_of_our_own_loss(trained: tuple[Path, dict[str, Any]]) -> None:
    _, seen = trained
    assert len(seen["gaps"]) == 2
    assert max(seen["gaps"]) < 1e-5


def test_its_run_directory_looks_like_our_own(trained: tuple[Path, dict[str, Any]]) -> None:
    run = trained[0] / "run"
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    metrics = lines(run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2]
    names = {"reward", "accuracy", "rules", "length", "truncated", "silent", "loss", "entropy", "clip_high", "seconds"}
    assert names | {"grad_norm", "learning_rate", "tokens", "rows_trained"} <= set(metrics[0])
    assert {"generation", "reward_wait", "forward_backward", "optimizer"} <= set(metrics[0]["seconds"])
    assert [m["learning_rate"] for m in metrics] == pytest.approx([1e-3, 5e-4])
    samples = lines(run / "samples.jsonl")
    assert len(samples) == 2 * 6 * 8
    assert len({sample["id"] for sample in samples if sample["step"] == 1}) == 6
    assert (run / "checkpoints" / "step_2" / "adapter" / "adapter_model.safetensors").is_file()
    for step in (0, 2):
        scores = json.loads((run / f"eval/step_{step}/heldout/scores.json").read_text())
        assert set(scores["tasks"]) == {"tiny:math", "tiny:mcq", "tiny:code"}


def test_resolved_json_holds_what_the_engine_holds(trained: tuple[Path, dict[str, Any]]) -> None:
    resolved = json.loads((trained[0] / "run" / "resolved.json").read_text())
    assert resolved["class"].endswith("GRPOTrainer")
    assert resolved["path"] == "TRL's own class on unsloth's cpu backend"
    assert resolved["differences"] == []
    assert resolved["held"]["generation_batch_size"] == 48
    assert {name: resolved["held"][name] for name in ("loss_type", "optim", "seed")} == {
        "loss_type": "dapo",
        "optim": "adamw_torch_fused",
        "seed": 42,
    }


def test_our_own_trainer_starts_from_the_same_prompts_and_accuracy_and_writes_what_it_holds(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    theirs, own = trained[0] / "run", trained[0] / "own"
    scores = "eval/step_0/heldout/scores.json"
    assert (own / scores).read_text() == (theirs / scores).read_text()
    asked = [[sample["id"] for sample in lines(run / "samples.jsonl")] for run in (theirs, own)]
    assert asked[0] == asked[1]
    resolved = json.loads((own / "resolved.json").read_text())
    assert resolved["trainer"] == "slmgrpo"
    assert resolved["log_prob_path"] in ("packed", "plain")
    assert resolved["loss"]["epsilon_high"] == 0.2
    assert resolved["optimizer"]["class"] == "torch.optim.adamw.AdamW"
    assert resolved["optimizer"]["learning_rate"] == 1e-3


def test_an_engine_that_holds_something_else_trains_nothing(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = trained  # unsloth's CPU backend turns float16 into bfloat16 or float32
    assert "guard configuration" in seen["refusal"]
    assert "fp16: the recipe asks True (model.dtype), the engine holds False" in seen["refusal"]
    run = folder / "refused"
    assert not (run / "metrics.jsonl").exists()
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    differences = json.loads((run / "resolved.json").read_text())["differences"]
    assert {"field": "fp16", "key": "model.dtype", "asked": True, "held": False} in differences


UNSLOTH: dict[str, tuple[list[str], list[str]]] = {
    "dapo": ([], []),
    "cispo": (["loss.loss_type=cispo", "loss.epsilon_high=5"], []),
    "grpo with KL": (["loss.loss_type=grpo", "loss.beta=0.04", "optimizer.warmup_ratio=0.1"], []),
    "dr_grpo unscaled": (["loss.loss_type=dr_grpo", "loss.scale_rewards=none"], []),
    "dr_grpo scaled": (["loss.loss_type=dr_grpo"], ["scale_rewards"]),
    "checkpointing of another kind": (["train.gradient_checkpointing=true"], ["gradient_checkpointing_kwargs"]),
}
"""Recipe settings, and the fields that Unsloth's config for CUDA still changes."""


def test_unsloth_changes_no_field_that_we_set_except_those_we_refuse(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("the switch that builds Unsloth's CUDA config without a GPU is not meant for a machine with one")
    cases = json.dumps([settings for settings, _ in UNSLOTH.values()])
    switches = {"UNSLOTH_ALLOW_CPU": "1", "UNSLOTH_COMPILE_LOCATION": str(tmp_path / "compiled")}
    seen = child("unsloth", tmp_path, cases, **switches)
    if "skip" in seen:
        pytest.skip(seen["skip"])
    assert dict(zip(UNSLOTH, seen["changed"], strict=True)) == {name: fields for name, (_, fields) in UNSLOTH.items()}
    # evaluation and a token count that TRL has of its own: nothing of the training hangs on them
    harmless = {"per_device_eval_batch_size", "eval_accumulation_steps", "include_num_input_tokens_seen"}
    assert set(seen["defaults_not_set"]) <= harmless
