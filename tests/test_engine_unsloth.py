"""The unsloth engine as far as a CPU goes: where it is chosen, and its calls against the installed source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from slmgrpo import model
from slmgrpo.errors import PlanError
from slmgrpo.plan import plan
from slmgrpo.recipe import Recipe
from slmgrpo.recipe_load import load
from slmgrpo.rollout.unsloth import SWITCHES, fast_inference, for_this_machine


def recipe_of(*changes: str) -> Recipe:
    return load("quickstart", list(changes)).recipe


@pytest.mark.parametrize(
    ("changes", "cuda", "vllm", "engine", "backend"),
    [
        ([], True, True, "unsloth", "unsloth"),
        ([], True, False, "hf", "transformers"),
        ([], False, True, "hf", "unsloth"),
        (["model.backend=transformers"], True, True, "hf", "transformers"),
        (["sampling.engine=unsloth"], True, True, "unsloth", "unsloth"),
        (["sampling.engine=vllm"], True, True, "vllm", "unsloth"),
        (["sampling.engine=hf"], False, True, "hf", "unsloth"),
        (["trainer=trl"], True, True, "hf", "transformers"),
        (["adapter=./a", "merge_adapter=true"], True, True, "hf", "transformers"),
    ],
)
def test_auto_is_unsloth_on_cuda_with_vllm_and_else_hf(
    changes: list[str], cuda: bool, vllm: bool, engine: str, backend: str
) -> None:
    recipe, said = for_this_machine(recipe_of(*changes), cuda=cuda, vllm=vllm)
    assert (recipe.sampling.engine, recipe.model.backend) == (engine, backend)
    changed = backend != recipe_of(*changes).model.backend
    assert (said is not None) == changed
    assert not changed or "plain transformers and PEFT" in str(said)


@pytest.mark.parametrize(
    ("engine", "cuda", "vllm", "said"),
    [
        ("unsloth", False, True, "there is no CUDA device here"),
        ("unsloth", True, False, "vLLM is not installed; pip install 'slmgrpo"),
        ("hf", True, True, "cannot drive Unsloth's CUDA model"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused(engine: str, cuda: bool, vllm: bool, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        for_this_machine(recipe_of(f"sampling.engine={engine}"), cuda=cuda, vllm=vllm)


@pytest.mark.parametrize("sequences", [64, 255, 256, 257])
def test_vllm_writes_all_rows_of_a_step_at_once(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)
    asked = fast_inference(recipe_of("lora.rank=24", "sampling.vllm_memory=0.3"), sequences)
    assert asked["max_num_seqs"] >= sequences
    assert asked["max_num_seqs"] not in (None, 256)  # Unsloth reads them as its own choice
    assert (asked["max_lora_rank"], asked["gpu_memory_utilization"]) == (24, 0.3)
    assert {name: os.environ[name] for name in SWITCHES} == SWITCHES
    for name in SWITCHES:
        monkeypatch.delenv(name)


# the installed source, parsed: most of it cannot be imported without CUDA


def parsed(package: str, path: str) -> ast.Module:
    return ast.parse(text_of(package, path))


def text_of(package: str, path: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return (Path(spec.origin).parent / path).read_text()


def arguments_of(tree: ast.Module, name: str, within: str | None = None) -> set[str]:
    """Parameter names of a function, or of a class's method."""
    scope: Any = tree
    if within is not None:
        scope = next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == within)
    found = next(n for n in ast.walk(scope) if isinstance(n, ast.FunctionDef) and n.name == name)
    return {argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}


def keywords_of(function: Any, called: str) -> set[str]:
    """The keywords that our function passes to a call whose name ends so."""
    tree = ast.parse(inspect.getsource(function))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func).endswith(called)]
    assert calls, called
    return {keyword.arg for call in calls for keyword in call.keywords if keyword.arg is not None}


def test_every_keyword_of_the_load_exists_in_unsloth(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, SWITCHES[name])
    ours = keywords_of(model._load_unsloth, "FastLanguageModel.from_pretrained") | set(fast_inference(recipe_of(), 8))
    loader = arguments_of(parsed("unsloth", "models/loader.py"), "from_pretrained", "FastLanguageModel")
    vllm = arguments_of(parsed("unsloth_zoo", "vllm_utils.py"), "load_vllm")
    assert {"max_num_seqs", "max_logprobs"} <= ours - loader  # these are handed on to load_vllm by name
    assert not ours - loader - vllm
    llama = text_of("unsloth", "models/llama.py")
    assert "allowed_args = inspect.getfullargspec(load_vllm).args" in llama
    assert "if allowed_arg not in load_vllm_kwargs and allowed_arg in kwargs" in llama
    assert "load_in_4bit" in ours  # True by default


def test_every_keyword_of_the_adapter_exists_in_unsloth() -> None:
    ours = keywords_of(model._add_adapter, "FastLanguageModel.get_peft_model")
    assert not ours - arguments_of(parsed("unsloth", "models/llama.py"), "get_peft_model", "FastLlamaModel")


def test_the_adapter_is_handed_over_by_a_call_that_unsloth_has() -> None:
    tree, text = parsed("unsloth_zoo", "vllm_utils.py"), text_of("unsloth_zoo", "vllm_utils.py")
    assert {"model", "save_directory", "load_tensors", "lora_request_id"} <= arguments_of(tree, "load_lora")
    assert "LoRARequest(str(lora_request_id), lora_request_id, lora_tensors = state_dict" in text  # new id and name
    assert "LORA_REQUEST_ID += 1" in text
    utils, llama = text_of("unsloth", "models/_utils.py"), text_of("unsloth", "models/llama.py")
    assert "model.load_lora = functools.partial(load_lora, model)" in utils
    assert "model.vllm_engine = model.model.vllm_engine" in utils
    assert "llm.shared_weights = True" in llama
    assert "model.fast_generate = model.vllm_engine.generate" in llama  # what is stepped here in its place


def test_unsloth_reads_every_switch_as_it_is_meant() -> None:
    text = text_of("unsloth_zoo", "vllm_utils.py")
    for name in SWITCHES:
        assert f'"{name}"' in text, name
    assert "if max_num_seqs not in (None, 256)" in text or "max_num_seqs not in (None, 256)" in text
    mode = text[text.index("def _merged_rollout_mode") :][:1200]
    assert 'if value in ("", "auto")' in mode and "return None" in mode  # "0" is neither, so nothing is folded
    assert 'logprobs_mode          = "processed_logprobs" if training' in text
    assert "if unsloth_vllm_standby and not standby_util_override:" in text


def test_unsloth_steps_its_engine_by_the_calls_that_ours_makes() -> None:
    server = text_of("unsloth", "models/_async_grpo_vllm.py")
    for call in ("self.engine = llm.llm_engine", "self.engine.add_request(", '{"prompt_token_ids": prompt_ids}'):
        assert call in server, call
    for call in (
        "self.engine.step()",
        "self.engine.abort_request(",
        "self.engine.remove_lora(",
        "self.engine.add_lora(",
    ):
        assert call in server, call


def test_a_model_without_vllm_is_refused() -> None:
    from slmgrpo.rollout.unsloth import unsloth_engine

    recipe = recipe_of("model.backend=transformers")
    policy = model.load(recipe, max_length=160)
    with pytest.raises(PlanError, match="Unsloth loaded the model without vLLM"):
        unsloth_engine(policy, recipe, plan(recipe, base=Path()))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")
def test_a_lent_vllm_writes_what_its_owner_would_write() -> None:
    """The part that Unsloth plays, played by a second engine of our own on a real vLLM."""
    import torch

    from slmgrpo.rollout.engine import Request
    from slmgrpo.rollout.vllm import Lender, VllmEngine

    recipe = recipe_of("model.backend=transformers", "sampling.engine=vllm")
    policy = model.load(recipe, max_length=160)
    own = VllmEngine(policy, recipe, plan(recipe, base=Path()))
    requests = [Request(i, (5, 6 + i, 7), (0, 1), i, 12) for i in range(3)]
    for _, p in policy.trainable():
        torch.nn.init.normal_(p, std=0.05)
    own.sync(1)
    expected = {(c.index, c.member): c.token_ids for c in own.generate(requests, step=0)}
    handed: list[Path] = []

    def adapter(folder: Path) -> Any:
        handed.append(folder)
        policy.save_adapter(folder)
        return own._handed_over(folder)

    lent = VllmEngine(policy, recipe, plan(recipe, base=Path()), Lender("unsloth", own._llm, adapter))
    assert lent.name == "unsloth"
    assert {(c.index, c.member): c.token_ids for c in lent.generate(requests, step=0)} == expected
    for _, p in policy.trainable():
        torch.nn.init.normal_(p, std=0.3)
    lent.sync(1)
    assert {(c.index, c.member): c.token_ids for c in lent.generate(requests, step=0)} != expected
    assert len(handed) == 2
    lent.close()
    own.close()


@pytest.mark.gpu
def test_on_a_gpu_a_run_writes_with_the_adapter_that_it_trains(tmp_path: Path) -> None:
    import torch

    from slmgrpo.callbacks import Silent
    from slmgrpo.train import train

    if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
        pytest.skip("needs a GPU and vLLM")
    loaded = load("smollm2_135m_arithmetic", ["train.steps=4", "sampling.engine=unsloth", "model.backend=unsloth"])
    run = train(loaded.recipe, plan(loaded), base=loaded.base, out=tmp_path / "run", resume=None, observer=Silent()).run
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["sampler_gap"] < 0.05 for line in lines if line["rows_trained"])
