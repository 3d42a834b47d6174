"""The unsloth engine: vLLM on the very weights that are trained, as Unsloth's fast_inference loads them. CUDA only.

Everything but the start and the handing over of the adapter is the vllm engine's. Base weights exist once and are only
read: Unsloth would fold the adapter into them while it writes, which is switched off. Written against unsloth 2026.10
and not yet run on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from slmgrpo.errors import PlanError, RunError
from slmgrpo.model import Policy
from slmgrpo.plan import Plan
from slmgrpo.recipe import Recipe
from slmgrpo.rollout.vllm import Lender, VllmEngine

SWITCHES = {
    "UNSLOTH_VLLM_STANDBY": "1",  # vLLM gives its cache back while the adapter is trained
    "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",  # sampling.vllm_memory holds, where standby has a share of its own
    "UNSLOTH_VLLM_MERGED_ROLLOUT": "0",  # each load_lora makes a request with tensors and a new id and name
}
"""Set before unsloth is imported."""


def unsloth_engine(policy: Policy, recipe: Recipe, plan: Plan) -> VllmEngine:
    """The vllm engine on the vLLM that came with Unsloth's model."""
    model = policy.model
    llm = getattr(model, "vllm_engine", None)
    if llm is None or not getattr(llm, "shared_weights", False):
        raise PlanError(
            "sampling.engine=unsloth: Unsloth loaded the model without vLLM (it does so on GPUs before Volta and where "
            "vLLM cannot be imported); set model.backend=transformers"
        )

    def adapter(folder: Path) -> Any:
        request = model.load_lora(str(folder), load_tensors=True)  # a folder for its configuration only
        if type(request).__name__ != "LoRARequest":
            raise RunError(
                f"Unsloth made a {type(request).__name__}, which folds the adapter into the base weights; set "
                "UNSLOTH_VLLM_MERGED_ROLLOUT=0 before unsloth is imported"
            )
        return request

    return VllmEngine(policy, recipe, plan, Lender("unsloth", llm.llm_engine, adapter))


def fast_inference(recipe: Recipe, sequences: int) -> dict[str, Any]:
    """What FastLanguageModel.from_pretrained gets so that vLLM runs on its weights, `sequences` rows at once."""
    os.environ.update(SWITCHES)
    return {
        "fast_inference": True,
        "max_num_seqs": sequences + (sequences == 256),  # it reads 256 as "choose for me", and takes half of it
        "gpu_memory_utilization": recipe.sampling.vllm_memory,
        "max_lora_rank": recipe.lora.rank,
        "max_logprobs": -1,
        "disable_log_stats": True,
        "random_state": recipe.seed,
    }


def for_this_machine(recipe: Recipe, *, cuda: bool, vllm: bool | None = None) -> tuple[Recipe, str | None]:
    """The recipe with the engine that `sampling.engine` means here, and what a person should know of it.

    auto: unsloth on CUDA with model.backend=unsloth where vLLM is installed, else hf. Unsloth's CUDA model cannot be
    driven by hf, so without vLLM the run takes plain transformers; whoever asks for hf by name has to say so himself.
    """
    if vllm is None:
        vllm = importlib.util.find_spec("vllm") is not None
    name, by_unsloth = recipe.sampling.engine, recipe.model.backend == "unsloth"
    if name == "unsloth" and not cuda:
        raise PlanError(
            "sampling.engine=unsloth: there is no CUDA device here, which Unsloth's fast_inference needs; set "
            "sampling.engine=auto"
        )
    if name == "unsloth" and not vllm:
        raise PlanError("sampling.engine=unsloth: vLLM is not installed; pip install 'slmgrpo[vllm]'")
    if name == "hf" and cuda and by_unsloth and recipe.trainer == "slmgrpo":
        raise PlanError(
            "sampling.engine=hf: it cannot drive Unsloth's CUDA model, which keeps keys and values for a fixed batch; "
            "set model.backend=transformers, or sampling.engine=auto"
        )
    if name != "auto" and not (cuda and by_unsloth and recipe.trainer == "trl"):
        return recipe, None
    if not cuda or not by_unsloth:
        return _with(recipe, engine="hf"), None
    reason = None
    if recipe.trainer == "trl":
        reason = "trainer=trl writes and is evaluated with the model's own forward"
    elif recipe.merge_adapter:
        reason = "merge_adapter would change the weights that Unsloth shares with vLLM"
    elif not vllm:
        reason = (
            "vLLM is not installed (pip install 'slmgrpo[vllm]'), without which nothing writes with Unsloth's model"
        )
    if reason is None:
        return _with(recipe, engine="unsloth"), None
    text = f"model.backend: {reason}; the run uses plain transformers and PEFT (model.backend: transformers says so)"
    return _with(recipe, engine="hf", backend="transformers"), text


def _with(recipe: Recipe, *, engine: str, backend: str | None = None) -> Recipe:
    model = recipe.model.model_copy(update={"backend": backend or recipe.model.backend})
    sampling = recipe.sampling.model_copy(update={"engine": engine})
    return recipe.model_copy(update={"model": model, "sampling": sampling})
