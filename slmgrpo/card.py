"""The model card of an exported run: evaluations with their intervals, data, recipe, licences, how to load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from slmgrpo.eval import store, table
from slmgrpo.eval.compare import compare, unlike
from slmgrpo.eval.targets import Target
from slmgrpo.recipe import Recipe
from slmgrpo.run import environment


def model_card(target: Target, recipe: Recipe, form: Literal["adapter", "merged"]) -> str:
    """README.md of an exported checkpoint."""
    import yaml

    assert target.run is not None
    hub = [s.source.removeprefix("hub:") for s in recipe.data.train if s.source.startswith("hub:")]
    head: dict[str, Any] = {
        "base_model": recipe.model.id,
        "library_name": "peft" if form == "adapter" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["slmgrpo", "grpo", "lora"],
    }
    if hub:
        head["datasets"] = hub
    versions = environment()["packages"]
    trained = json.loads((target.run.path / "env.json").read_text())["packages"]
    step = target.label.partition("@")[0].removeprefix("step_")
    scale = f" Its update is scaled by {target.scale:g}." if target.scale != 1 else ""
    what = "A LoRA adapter for" if form == "adapter" else "A LoRA adapter merged into"
    rows = "\n".join(f"- `{s.source}`, split `{s.split}`" for s in recipe.data.train)
    resolved = json.loads((target.run.path / "recipe.json").read_text())
    return f"""---
{yaml.safe_dump(head, sort_keys=False).strip()}
---

# {recipe.name}

{what} `{recipe.model.id}`, trained by GRPO with slmgrpo {versions["slmgrpo"]} for {step} steps.{scale}
{recipe.description}

## Evaluation

{_evaluation(target)}

## Use

{_usage(recipe, form)}

The system prompt and the form of the question are part of what was trained: see `prompt` in the recipe below.

## Training data

{rows}

## Licences

The licence of the base model `{recipe.model.id}` holds for this model too, and so do those of the training data.
Look at both before publishing it.

## Recipe

Trained with {", ".join(f"{name} {version}" for name, version in trained.items() if version)}.

```yaml
{yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True).strip()}
```
"""


def _evaluation(target: Target) -> str:
    """Tables of what lies in the run's eval folder for this checkpoint and its base."""
    assert target.run is not None
    homes = [target.run.path / "eval" / "base", target.home]
    found = [
        one for home in homes if home.is_dir() and any(home.glob(f"*/{store.SAMPLES}")) for one in _evaluated(home)
    ]
    after = [one for one in found if one.folder.parent == target.home]
    if not after:
        return f"None yet: run `slmgrpo eval {target.run.path}` before the export and its tables stand here."
    before = {one.suite: one for one in found if one.folder.parent != target.home}
    pairs = [(before[one.suite], one) for one in after if one.suite in before and not unlike(before[one.suite], one)]
    shown = [*(base for base, _ in pairs), *after]
    comparisons = compare(pairs)
    tables = [table.markdown(title, rows) for title, rows in table.main_table(shown, comparisons)]
    notes = [f"- {note}" for note in table.notes(shown, comparisons)]
    return "\n".join([*tables, *notes])


def _evaluated(home: Path) -> list[store.Evaluated]:
    """Evaluations of one target; training's own held-out scores have another form and are left out."""
    folders = sorted(file.parent for file in home.glob(f"*/{store.SETTINGS}") if store.finished(file.parent))
    return [store.load(folder) for folder in folders]


def _usage(recipe: Recipe, form: Literal["adapter", "merged"]) -> str:
    if form == "merged":
        return """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""
    return f"""```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{recipe.model.id}"), "PATH")
tokenizer = AutoTokenizer.from_pretrained("PATH")
```"""
