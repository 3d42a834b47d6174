"""Says what is wrong with a field in words a person can act on: what was wanted, what stands there, what to write."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from slmgrpo.recipe import Recipe, Section

Key = tuple[str | int, ...]

TRL_NAMES = {
    "num_generations": "sampling.group_size",
    "max_completion_length": "sampling.max_tokens",
    "max_new_tokens": "sampling.max_tokens",
    "max_prompt_length": "prompt.max_tokens",
    "num_iterations": "train.updates_per_rollout",
    "num_train_epochs": "train.epochs",
    "max_steps": "train.steps",
    "save_steps": "train.save_every",
    "eval_steps": "eval.every",
    "save_total_limit": "train.keep_checkpoints",
    "per_device_train_batch_size": "train.prompts_per_step and train.micro_batch_tokens",
    "gradient_accumulation_steps": "train.prompts_per_step and train.micro_batch_tokens",
    "generation_batch_size": "train.prompts_per_step",
    "optim": "optimizer.name",
    "lr": "optimizer.learning_rate",
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "target_modules": "lora.targets",
    "layers_to_transform": "lora.layers",
    "model_name": "model.id",
    "kl_coef": "loss.beta",
    "vllm_importance_sampling_correction": "loss.sampling_correction",
    "vllm_importance_sampling_mode": "loss.sampling_correction",
    "vllm_importance_sampling_cap": "loss.sampling_correction_cap",
    "vllm_importance_sampling_clip_max": "loss.sampling_correction_cap",
    "use_vllm": "sampling.engine",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "warmup_steps": "optimizer.warmup_ratio",
    "system_prompt": "prompt.system",
    "dataset_name": "data.train",
    "reward_weights": "rewards.0.weight and so on",
    "reward_funcs": "rewards",
    "reference_model": "loss.beta (the reference is the base model)",
    "settings": "with",
}
"""What others call it -> where it is here."""

NOT_HERE = {
    "use_bias_correction_kl": "the KL penalty is TRL's default one",
    "normalize_then_sum": "rewards are summed, then normalised",
    "multi_objective_aggregation": "rewards are summed, then normalised",
    "use_adaptive_entropy": "use a fixed `loss.entropy_coef`",
    "entropy_target": "use a fixed `loss.entropy_coef`",
    "entropy_coef_min": "use a fixed `loss.entropy_coef`",
    "entropy_coef_max": "use a fixed `loss.entropy_coef`",
    "entropy_coef_delta": "use a fixed `loss.entropy_coef`",
    "vllm_importance_sampling_clip_min": "the weights have an upper bound only, `loss.sampling_correction_cap`",
    "steps_per_generation": "every update uses the whole rollout, see `train.updates_per_rollout`",
    "repetition_penalty": "the loss would not know of it; a rule such as length.repetition can",
    "logging_steps": "every step is logged",
    "sync_ref_model": "the reference is always the base model",
    "use_liger_kernel": "the loss has its own memory-saving path",
}
"""Settings of TRL that slmgrpo does not have, and why nothing is lost."""

_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


_ALSO: dict[Key, str] = {("model",): "a model id as text, or "}
"""What may be written beside the types of the schema."""


def explain(error: ValidationError, data: Any) -> dict[Key, str]:
    """One sentence for each place that pydantic complains about."""
    found: dict[Key, list[dict[str, Any]]] = {}
    for detail in error.errors(include_url=False, include_input=False):
        found.setdefault(_cut(detail["loc"], data, missing=detail["type"] == "missing"), []).append(dict(detail))
    return {key: _sentence(key, details, data) for key, details in found.items()}


def members(key: Key) -> set[Any]:
    """The types allowed at a key; Any where the schema does not know them (`with:`, `options:`)."""
    return {member for annotation in _annotations(key) for member in _members(annotation)}


def within(data: Any, part: str | int) -> Any:
    """One level down, or raises LookupError."""
    if isinstance(data, dict):
        return data[part]
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        return data[part]
    raise LookupError(part)


def _cut(loc: tuple[int | str, ...], data: Any, *, missing: bool) -> Key:
    """pydantic's place without the names of union members, which are no keys."""
    key: list[int | str] = []
    for i, part in enumerate(loc):
        try:
            data = within(data, part)
        except LookupError:
            if missing and i == len(loc) - 1:
                key.append(part)
            break
        key.append(part)
    return tuple(key)


def _sentence(key: Key, details: list[dict[str, Any]], data: Any) -> str:
    kinds = {detail["type"]: detail.get("ctx", {}) for detail in details}
    if "missing" in kinds:
        return f"is required: {_ALSO.get(key, '')}{_wanted(_annotations(key))}"
    if "extra_forbidden" in kinds:
        return _no_such_key(key)
    value = _value(data, key)
    for kind, (words, name) in _BOUNDS.items():
        if kind in kinds:
            return f"must be {words} {_number(kinds[kind][name])}, not {_show(value)}"
    if "finite_number" in kinds:
        return "must be a finite number"
    if "too_short" in kinds:
        return "needs at least one entry"
    if "string_too_short" in kinds:
        return "must not be empty"
    annotations = _annotations(key)
    return f"must be {_ALSO.get(key, '')}{_wanted(annotations)}, not {_show(value)}{_advice(annotations, value)}"


def _no_such_key(key: Key) -> str:
    name, outer = str(key[-1]), key[:-1]
    section = next((a for a in _annotations(outer) if _is_section(a)), Recipe)
    names = field_names(section)
    if name in NOT_HERE:
        return f"slmgrpo has no such setting: {NOT_HERE[name]}; take it out"
    if name in TRL_NAMES and TRL_NAMES[name] != ".".join(map(str, outer)):
        return f"no such key; here it is `{TRL_NAMES[name]}`"
    elsewhere = [dotted for dotted in _section_fields() if dotted.rpartition(".")[2] == name]
    if elsewhere and name not in names:
        return f"no such key; it is `{elsewhere[0]}`"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"no such key; did you mean `{close[0]}`?"
    far = difflib.get_close_matches(name, [dotted.rpartition(".")[2] for dotted in _section_fields()], n=1, cutoff=0.8)
    if far:
        return f"no such key; did you mean `{next(d for d in _section_fields() if d.endswith(f'.{far[0]}'))}`?"
    return f"no such key; there are {', '.join(names)}"


def _advice(annotations: list[Any], value: Any) -> str:
    """What to write instead, where that can be told."""
    allowed = {member for annotation in annotations for member in _members(annotation)}
    literals = [word for member in allowed if get_origin(member) is Literal for word in get_args(member)]
    lists = [member for member in allowed if get_origin(member) is list]
    if isinstance(value, str):
        if type(None) in allowed and value.lower() in ("none", "nil", "nothing"):
            return "; write null"
        if bool in allowed and value.lower() in ("yes", "on", "y", "no", "off", "n"):
            return f"; write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
        if allowed & {int, float} and _is_number(value):
            if not math.isfinite(float(value)):
                return "; write a finite number"
            return "; write plain digits" if re.match(r"[-+]?0\d|.*_", value) else "; take the quotes off"
        close = difflib.get_close_matches(value.lower(), literals, n=1, cutoff=0.5)
        if close:
            return f"; did you mean `{close[0]}`?"
        if lists and _wanted([get_args(lists[0])[0]]) == "text":
            return f"; write [{value}]"
        return _as_entry(allowed, lists, value)
    if isinstance(value, bool) or value is None:
        return "; take the line out, or write its settings under it" if any(map(_is_section, allowed)) else ""
    if isinstance(value, int | float):
        if isinstance(value, float) and int in allowed and value.is_integer() and abs(value) < 2**53:
            return f"; write {int(value)}"
        if lists and type(value) is get_args(lists[0])[0]:
            return f"; write [{_number(value)}]"
        if str in allowed and value == value:
            return f"; write '{_number(value)}' in quotes"
    return ""


def _as_entry(allowed: set[Any], lists: list[Any], value: str) -> str:
    """A text where a section with one required text, or a list of such, is wanted: the text in its place."""
    sections = [*filter(_is_section, allowed), *(get_args(member)[0] for member in lists)]
    for section in filter(_is_section, sections):
        needed = [
            (field_key(name, info), info.annotation)
            for name, info in section.model_fields.items()
            if info.is_required()
        ]
        if len(needed) == 1 and needed[0][1] is str:
            entry = f"{{{needed[0][0]}: {json.dumps(value, ensure_ascii=False)}}}"
            return f"; write {entry if section in allowed else f'[{entry}]'}"
    return ""


def _annotations(key: Key) -> list[Any]:
    """The types that the schema allows at a key; empty where it knows none."""
    at: list[Any] = [Recipe]
    for part in key:
        at = [below for annotation in at for member in _members(annotation) for below in _below(member, part)]
    return at


def _below(member: Any, part: str | int) -> Iterator[Any]:
    if member is Any:
        yield Any
    elif _is_section(member):
        for name, info in member.model_fields.items():
            if part == field_key(name, info):
                yield info.annotation
    elif get_origin(member) is list and isinstance(part, int):
        yield get_args(member)[0]
    elif get_origin(member) is dict and isinstance(part, str):
        yield get_args(member)[1]


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def field_key(name: str, info: FieldInfo) -> str:
    """What a recipe file calls a field (`with` for RewardUse.settings)."""
    return info.validation_alias if isinstance(info.validation_alias, str) else name


def field_names(section: type[Section]) -> list[str]:
    """The keys of a section as a recipe writes them."""
    return [field_key(name, info) for name, info in section.model_fields.items()]


def _section_fields() -> list[str]:
    return [
        f"{name}.{field}"
        for name, info in Recipe.model_fields.items()
        if name != "cold_start"
        for member in _members(info.annotation)
        if _is_section(member)
        for field in field_names(member)
    ]


def _wanted(annotations: list[Any]) -> str:
    words: list[str] = []
    for member in (member for annotation in annotations for member in _members(annotation)):
        if get_origin(member) is Literal:
            options = [str(option) for option in get_args(member)]
            words.append(options[0] if len(options) == 1 else f"one of {', '.join(options)}")
        elif get_origin(member) is list:
            words.append(f"a list of {_plural(get_args(member)[0])}")
        elif _is_section(member):
            words.append(f"a mapping with {', '.join(field_names(member)[:4])}, ...")
        else:
            words.append(_NAMES.get(get_origin(member) or member, "something else"))
    return " or ".join(dict.fromkeys(words)) or "something else"


def _plural(annotation: Any) -> str:
    if _is_section(annotation):
        return "mappings"
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    return {str: "texts", int: "whole numbers"}.get(annotation, "values")


_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a mapping",
    type(None): "null",
    Any: "anything",
}


def _value(data: Any, key: Key) -> Any:
    for part in key:
        data = within(data, part)
    return data


def _show(value: Any) -> str:
    if isinstance(value, str):
        return f"the text '{value if len(value) <= 40 else value[:37] + '...'}'"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing (null)"
    if isinstance(value, float):
        return repr(value)
    return str(value).lower() if isinstance(value, bool) else _number(value)


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = str(value)
    return text if len(text) <= 20 else f"{text[:8]}... ({len(text)} digits)"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
