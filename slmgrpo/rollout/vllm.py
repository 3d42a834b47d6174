"""The vllm engine: stock vLLM in the worker's process, stepped by us, with base weights of its own.

vLLM starts at the first `generate` and on CUDA sleeps whenever it does not write. Each sync hands the adapter over in a
folder in memory, under a new id and a new name: an old name would bring back keys and values of the old adapter. Every
member of a group is a request with its own seed, so that it leaves as it finishes; the prompt is computed once for all
of them by vLLM's prefix cache. Log-probs are vLLM's processed ones: of logits / temperature, renormalised by top-p,
top-k and min-p where one is set (recipes that would need others are refused).
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import math
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slmgrpo.errors import PlanError, RunError
from slmgrpo.model import Policy, quiet
from slmgrpo.rollout import sampling
from slmgrpo.rollout.engine import Completion, Request
from slmgrpo.rollout.hf import end_ids

if TYPE_CHECKING:
    from slmgrpo.plan import Plan
    from slmgrpo.recipe import Recipe, Sampling

log = logging.getLogger("slmgrpo")

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Adapter ranks that vLLM can make room for."""
BLOCK = 32
"""Tokens of a cache block on a CPU: only whole ones are shared between members, and vLLM's own choice there is 128."""


@dataclass(frozen=True)
class Lender:
    """Whoever runs vLLM already, on the weights that are trained, and hands the adapter over himself."""

    name: str
    llm: Any
    """vLLM's LLMEngine, awake."""
    adapter: Callable[[Path], Any]
    """A LoRARequest of the adapter as it is, under a new id and name, from an empty folder."""


class VllmEngine:
    """Writes completions with vLLM's copy of the base model and the adapter of the last sync."""

    def __init__(self, policy: Policy, recipe: Recipe, plan: Plan, lender: Lender | None = None) -> None:
        self.name = lender.name if lender else "vllm"
        self._lender = lender
        if lender is None and importlib.util.find_spec("vllm") is None:
            raise PlanError(
                "sampling.engine=vllm: vLLM is not installed; pip install 'slmgrpo[vllm]' (its wheels need CUDA), or "
                "set sampling.engine=auto"
            )
        self._policy, self._recipe, self._plan = policy, recipe, plan
        self._base = policy.model.get_base_model()
        self._longest = min(plan.max_length, getattr(self._base.config, "max_position_embeddings", plan.max_length))
        self._cuda = policy.device.type == "cuda"
        self._numbers = itertools.count(1)
        shared = Path("/dev/shm")
        in_memory = str(shared) if os.access(shared, os.W_OK) else None
        self._folder = tempfile.TemporaryDirectory(prefix="slmgrpo-adapter-", dir=in_memory)
        self._saved: Path | None = None
        """An adapter that vLLM has not read yet."""
        self._llm: Any = None
        self._adapter: Any = None
        self.end_ids = end_ids(self._base, policy.tokenizer)

    @property
    def context(self) -> int:
        return self._longest

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        """Yield every completion once, as it finishes."""
        longest = max((len(r.prompt_ids) + r.max_tokens for r in requests), default=1)
        if longest > self._longest:
            raise RunError(
                f"a prompt and sampling.max_tokens make {longest} tokens, more than the {self._longest} that vLLM was "
                "started for; lower prompt.max_tokens or sampling.max_tokens"
            )
        with self._failing_as_run_error("starting"):
            self._wake()
        waiting: dict[str, tuple[Request, int]] = {}
        try:
            with self._failing_as_run_error("taking requests"):
                for request in requests:
                    for member in request.members:
                        name = str(next(self._numbers))
                        prompt = {"prompt_token_ids": list(request.prompt_ids)}
                        asked = self._asked(request, member, step)
                        self._llm.add_request(name, prompt, asked, lora_request=self._adapter)
                        waiting[name] = (request, member)
            while waiting:
                with self._failing_as_run_error("writing"):
                    finished = self._step()
                for output in finished:
                    yield self._completion(output.outputs[0], *waiting.pop(output.request_id))
        finally:
            if self._llm is not None:  # it has not failed
                self._llm.abort_request(list(waiting))
                if self._cuda:
                    self._llm.sleep(level=1)

    def sync(self, step: int) -> None:
        """Save the adapter for the next `generate`; base weights stay as they are on both sides."""
        if self._saved is not None:
            shutil.rmtree(self._saved)
        self._saved = Path(self._folder.name) / f"step-{step}-{next(self._numbers)}"
        self._saved.mkdir()
        if self._lender is None:
            self._policy.save_adapter(self._saved)

    def under(self, settings: Sampling, seed: int, *, max_batch_tokens: int) -> Under:
        return Under(self, self._recipe.model_copy(update={"sampling": settings, "seed": seed}))

    def close(self) -> None:
        """Give back vLLM's memory."""
        llm, self._llm, self._adapter = self._llm, None, None
        if llm is not None and _beside_other_ranks():
            llm.engine_core._finalizer.detach()  # vLLM's shutdown would end the process group of all ranks
            gc.unfreeze()  # its start hid its objects from the collector
        elif llm is not None and self._lender is None:
            with suppress(Exception):  # what already failed may fail again
                llm.engine_core.shutdown()
        self._folder.cleanup()

    @contextmanager
    def lent(self, recipe: Recipe) -> Iterator[None]:
        """Sampling settings and seed of another recipe while the block runs; vLLM itself is started by its own."""
        with self._failing_as_run_error("starting"):
            self._wake()
        own, self._recipe = self._recipe, recipe
        try:
            yield
        finally:
            self._recipe = own

    @contextmanager
    def _failing_as_run_error(self, doing: str) -> Iterator[None]:
        """Anything that vLLM raises ends the run with one message; the engine is not used again."""
        try:
            yield
        except RunError:
            raise
        except Exception as error:
            log.error("%s", traceback.format_exc())
            self.close()
            reason = " ".join(str(error).split())[:300] or "no reason given"
            advice = "the log has the details"
            if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error).lower():
                advice = (
                    f"try another sampling.vllm_memory (now {self._recipe.sampling.vllm_memory:g}), fewer "
                    "train.prompts_per_step or a smaller sampling.max_tokens"
                )
            raise RunError(
                f"the {self.name} engine failed while {doing}: {type(error).__name__}: {reason}; {advice}"
            ) from None  # vLLM shares out its own memory: asking for fewer at a time, as eval does, would not help

    def _step(self) -> list[Any]:
        """One token more for every request that vLLM has scheduled; the finished ones."""
        if not self._llm.has_unfinished_requests():
            raise RunError(f"the {self.name} engine ended without all completions; resume the run")
        if self._cuda:
            return self._llm.step()
        with torch.compiler.set_stance("force_eager"):  # its sampler would first spend 20 s in a C++ compiler
            return self._llm.step()

    def _wake(self) -> None:
        """Start vLLM or wake it, and let it read the adapter of the last sync."""
        if self._llm is None:
            self._llm = self._lender.llm if self._lender else self._start()
        elif self._cuda:
            self._llm.wake_up()
        if self._adapter is None and self._saved is None:
            self.sync(0)
        if self._saved is not None:
            old, new = self._adapter, self._handed_over(self._saved)
            if old is not None:
                self._llm.remove_lora(old.lora_int_id)
            self._llm.add_lora(new)
            shutil.rmtree(self._saved)
            self._adapter, self._saved = new, None

    def _handed_over(self, folder: Path) -> Any:
        if self._lender:
            return self._lender.adapter(folder)
        from vllm.lora.request import LoRARequest

        return LoRARequest(folder.name, next(self._numbers), str(folder))

    def _start(self) -> Any:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        devices = [torch.cuda.current_device()] if self._cuda else []
        with quiet(), torch.random.fork_rng(devices), tempfile.TemporaryDirectory() as scratch:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            vllm_log = logging.getLogger("vllm")
            vllm_log.handlers.clear()
            vllm_log.parent, vllm_log.propagate = log, True
            vllm_log.setLevel(logging.WARNING)
            return LLMEngine.from_engine_args(EngineArgs(**self._arguments(Path(scratch))))

    def _arguments(self, scratch: Path) -> dict[str, Any]:
        recipe, plan, peft = self._recipe, self._plan, self._policy.model
        rank = peft.peft_config[peft.active_adapter].r
        shared = {
            "model": self._weights(scratch),
            "revision": recipe.model.revision,
            "dtype": str(self._base.get_input_embeddings().weight.dtype).removeprefix("torch."),
            "generation_config": "vllm",
            "seed": 0,
            "max_model_len": self._longest,
            "max_num_seqs": plan.completions_per_rank,
            "enable_prefix_caching": True,
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "max_lora_rank": next((room for room in RANKS if room >= rank), rank),
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": -1,
            "async_scheduling": False,  # no batch may be in flight when the engine goes to sleep
            "disable_log_stats": True,
            "distributed_executor_backend": "external_launcher" if _beside_other_ranks() else "uni",
        }
        if self._cuda:
            return shared | {
                "gpu_memory_utilization": recipe.sampling.vllm_memory,
                "enable_sleep_mode": True,
            }
        return shared | {
            "enforce_eager": True,
            "enable_chunked_prefill": False,  # seeded requests fail on part of a prompt: CPU generators have no offset
            "max_num_batched_tokens": max(4096, self._longest),
            "block_size": BLOCK,
            "kv_cache_memory_bytes": self._cache_bytes(),
        }

    def _weights(self, scratch: Path) -> str:
        """Where vLLM reads the base: the policy's source, or a copy where an adapter was folded into it."""
        if not self._recipe.merge_adapter:
            return self._policy.source
        state = self._base.state_dict()
        plain = {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}
        self._base.save_pretrained(scratch, state_dict=plain)
        self._policy.tokenizer.save_pretrained(scratch)
        return str(scratch)

    def _cache_bytes(self) -> int:
        """Keys and values of all completions of a step at full length, within the recipe's share of this machine."""
        config = self._base.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token = 2 * config.num_hidden_layers * heads * size * self._base.get_input_embeddings().weight.element_size()
        blocks = (self._plan.completions_per_rank + 1) * -(-self._longest // BLOCK)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(blocks * BLOCK * token, int(self._recipe.sampling.vllm_memory * machine))

    def _asked(self, request: Request, member: int, step: int) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        settings = self._recipe.sampling
        return SamplingParams(
            temperature=0.0 if request.greedy else settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            min_p=settings.min_p,
            seed=sampling.row_key(self._recipe.seed, step, request.prompt_key, member) & (2**63 - 1),
            max_tokens=request.max_tokens,
            stop=list(settings.stop),
            stop_token_ids=sorted(self.end_ids),
            ignore_eos=True,  # end_ids says which tokens end a completion
            detokenize=bool(settings.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=-1 if request.greedy and settings.temperature != 1 else 0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, written: Any, request: Request, member: int) -> Completion:
        finish, ids = written.finish_reason, tuple(written.token_ids)
        if finish not in ("stop", "length") or not ids:
            raise RunError(f"the {self.name} engine gave a completion up ({finish}, {len(ids)} tokens); resume the run")
        found = written.logprobs
        if len(found.logprobs) == len(ids):
            log_probs = tuple(found.logprobs)
        else:
            log_probs = tuple(
                self._tempered(found.token_ids[start:end], found.logprobs[start:end], token_id)
                for start, end, token_id in zip(found.start_indices, found.end_indices, ids, strict=True)
            )
        if not math.isfinite(sum(log_probs)):
            raise RunError(
                "the model's logits are not finite: the policy has diverged; resume from an earlier checkpoint with a "
                "lower optimizer.learning_rate"
            )
        return Completion(request.index, member, ids, log_probs, finish)

    def _tempered(self, token_ids: Sequence[int], log_probs: Sequence[float], token_id: int) -> float:
        """A greedy token's log-prob under the temperature; vLLM lists the vocabulary's at 1, the token's twice."""
        scores = dict(zip(token_ids, log_probs, strict=True))
        temperature = self._recipe.sampling.temperature
        return scores[token_id] / temperature - float((torch.tensor(list(scores.values())) / temperature).logsumexp(0))


class Under:
    """A vllm engine that writes under another recipe's sampling settings and seed; it owns nothing."""

    def __init__(self, engine: VllmEngine, recipe: Recipe) -> None:
        self.name = engine.name
        self._engine, self._recipe = engine, recipe
        self.end_ids = engine.end_ids

    @property
    def context(self) -> int:
        return self._engine.context

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        with self._engine.lent(self._recipe):
            yield from self._engine.generate(requests, step=step)

    def sync(self, step: int) -> None:
        self._engine.sync(step)

    def under(self, settings: Sampling, seed: int, *, max_batch_tokens: int) -> Under:
        return self._engine.under(settings, seed, max_batch_tokens=max_batch_tokens)

    def close(self) -> None: ...


def _beside_other_ranks() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
