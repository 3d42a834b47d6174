"""A run's result to hand on: the adapter alone or a merged model, with a model card, checked after writing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from slmgrpo import prompts
from slmgrpo.card import model_card
from slmgrpo.data import load_sources, prompt_key
from slmgrpo.errors import RecipeError, RunError
from slmgrpo.eval.evaluate import writing_to
from slmgrpo.eval.targets import Base, Target, recipe_of
from slmgrpo.recipe import Model, Recipe, Sampling
from slmgrpo.rollout.engine import Request

Form = Literal["adapter", "merged"]
CHECKED = 20
"""Prompts whose greedy outputs are compared."""
CHECKED_TOKENS = 64
Outputs = list[tuple[int, ...]]


@dataclass(frozen=True)
class Exported:
    """What was written: `equal` of `checked` greedy outputs are the run's own, token for token."""

    folder: Path
    form: Form
    checked: int
    equal: int
    dtype: str


def export(target: Target, form: Form, out: Path, *, stage: Callable[[str], None]) -> Exported:
    """Write a run's checkpoint to a new folder, load it again and compare; a folder that differs is not kept.

    In float32 every output must be equal. Merged 16-bit weights round the update: there half of them must be.
    """
    adapter = target.adapter
    if target.run is None or adapter is None:
        raise RecipeError(f"{target.text}: export takes a run, as in `slmgrpo export runs/mine --to merged --out mine`")
    if out.exists():
        raise RecipeError(f"{out}: exists; choose another --out")
    if form == "adapter" and target.base.merged:
        raise RecipeError(f"{target.text}: its adapter belongs on a merged base that nobody else has; use --to merged")
    if form == "adapter" and target.scale != 1:
        raise RecipeError(f"{target.text}: an adapter is exported whole; use --to merged, or leave @ out")
    from slmgrpo.eval.models import Bench

    recipe, folder = recipe_of(target.run)
    card = model_card(target, recipe, form)  # its faults show before the work is done
    if form == "merged" and target.base.model.load_in_4bit:
        target = replace(
            target, base=replace(target.base, model=target.base.model.model_copy(update={"load_in_4bit": False}))
        )
    stage(f"loading {recipe.model.id}")
    bench = Bench(target.base, [target])
    asked = _prompts(recipe, folder, bench.tokenizer)
    stage("writing greedy outputs to compare with")
    with bench.turned_into(target) as model:
        wanted = _greedy(model, bench.tokenizer, asked)
        partial = out.with_name(f".{out.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with writing_to(out):
            partial.mkdir(parents=True)
        stage(f"writing {out}")
        if form == "adapter":
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                shutil.copyfile(adapter / name, partial / name)
        else:
            _save_merged(model, partial)
    bench.tokenizer.save_pretrained(str(partial))
    dtype = bench.dtype
    del bench, model
    stage("loading it again")
    got = _outputs_of(partial, form, target, asked)
    equal = sum(a == b for a, b in zip(wanted, got, strict=True))
    if equal < (len(wanted) if dtype == "float32" else len(wanted) / 2):
        shutil.rmtree(partial)
        raise RunError(
            f"{out}: {len(wanted) - equal} of {len(wanted)} greedy outputs differ from the run's; nothing is kept"
        )
    done = Exported(out, form, len(wanted), equal, dtype)
    (partial / "README.md").write_text(f"{card}\n## Checks\n\n{_sentence(done)}\n", encoding="utf-8")
    partial.rename(out)
    return done


def _sentence(done: Exported) -> str:
    return (
        f"{done.equal} of {done.checked} greedy outputs of these files equal the checkpoint's, token for token "
        f"({done.dtype})."
    )


def _prompts(recipe: Recipe, folder: Path, tokenizer: Any) -> list[tuple[int, tuple[int, ...]]]:
    """(key, token ids) of held-out prompts, or of training prompts where nothing is held out."""
    sources = recipe.data.heldout or recipe.data.train
    share = -(-CHECKED // len(sources))
    rows = load_sources(
        [source.model_copy(update={"limit": min(share, source.limit or share)}) for source in sources],
        base=folder,
        need=prompts.columns(recipe.prompt),
    )[:CHECKED]
    rendered = prompts.render_all(rows, recipe.prompt, tokenizer)
    return [(prompt_key(row["id"]), one.ids) for row, one in zip(rows, rendered, strict=True)]


def _greedy(model: Any, tokenizer: Any, asked: Sequence[tuple[int, tuple[int, ...]]]) -> Outputs:
    import torch

    from slmgrpo.rollout.hf import HfEngine, unfit

    if unfit(model.config):
        found = []
        for _, ids in asked:
            prompt = torch.tensor([ids], device=model.device)
            settings = {"do_sample": False, "max_new_tokens": CHECKED_TOKENS, "pad_token_id": tokenizer.pad_token_id}
            written = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
            found.append(tuple(written[0, len(ids) :].tolist()))
        return found
    engine = HfEngine(model, tokenizer, Sampling(), 0)
    requests = [Request(i, ids, (0,), key, CHECKED_TOKENS, greedy=True) for i, (key, ids) in enumerate(asked)]
    found = {one.index: one.token_ids for one in engine.generate(requests, step=0)}
    return [found[i] for i in range(len(asked))]


def _save_merged(model: Any, folder: Path) -> None:
    """Fold the active adapter into the weights and save them; the model in memory is the merged one from here on."""
    from slmgrpo.model import quiet

    with quiet():
        model.merge_and_unload().save_pretrained(str(folder))


def _outputs_of(folder: Path, form: Form, target: Target, asked: Sequence[tuple[int, tuple[int, ...]]]) -> Outputs:
    from slmgrpo.eval.models import Bench

    if form == "adapter":
        written = replace(target, adapter=folder)
    else:
        model = Model(id=str(folder.resolve()), dtype=target.base.model.dtype)
        written = Target(str(folder), "merged", Base(model), None, folder)
    bench = Bench(written.base, [written])
    with bench.turned_into(written) as model:
        return _greedy(model, bench.tokenizer, asked)
