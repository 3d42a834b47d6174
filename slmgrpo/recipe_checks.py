"""What cannot be right although each value alone is: rules between a recipe's fields, none of them about hardware."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slmgrpo.recipe import GUARD_NAMES, Recipe, RewardUse, Source, is_path
from slmgrpo.recipe_rules import wrong_use

Key = tuple[str | int, ...]

KINDS = ("tiny", "file", "hub", "reasoning_gym")
CLIPPED = ("grpo", "dr_grpo", "dapo", "bnpo", "luspo")
"""Losses with a clipped surrogate, to which the two-sided clip belongs."""
_LAYERS = re.compile(r"all|((first|last):[1-9][0-9]*|[0-9]+(-[0-9]+)?)(\+((first|last):[1-9][0-9]*|[0-9]+(-[0-9]+)?))*")


@dataclass(frozen=True, slots=True)
class Clash:
    """keys: the fields it is about, the one to change first."""

    keys: tuple[Key, ...]
    text: str


def clashes(recipe: Recipe) -> Iterator[Clash]:
    """Everything that cannot be right in a recipe whose fields are all well formed."""
    yield from _model(recipe)
    yield from _lora(recipe)
    yield from _data(recipe)
    yield from _rewards(recipe)
    yield from _train(recipe)
    yield from _loss(recipe)
    yield from _correction(recipe)
    yield from _guards(recipe)
    yield from _eval(recipe)


def _model(recipe: Recipe) -> Iterator[Clash]:
    model, sampling = recipe.model, recipe.sampling
    if model.revision is not None and (model.id == "tiny" or model.id.startswith("pypi:") or is_path(model.id)):
        yield Clash((("model", "revision"),), f"only hub models have revisions, `{model.id}` is none; take it out")
    if sampling.engine == "unsloth" and model.backend != "unsloth":
        text = "engine unsloth writes with unsloth's model; set model.backend: unsloth, or sampling.engine: auto"
        yield Clash((("sampling", "engine"), ("model", "backend")), text)
    if sampling.engine == "vllm" and model.load_in_4bit:
        text = "engine vllm would write with 16-bit weights while 4-bit ones are trained; set model.load_in_4bit: false"
        yield Clash((("sampling", "engine"), ("model", "load_in_4bit")), text)
    if sampling.engine in ("vllm", "unsloth") and sampling.temperature < 0.01:
        text = f"vLLM draws at 0.01 where {sampling.temperature:g} is asked; set at least 0.01"
        yield Clash((("sampling", "temperature"), ("sampling", "engine")), text)
    start = recipe.adapter is not None or recipe.cold_start is not None
    if recipe.merge_adapter and not start:
        yield Clash((("merge_adapter",),), "there is no adapter and no cold_start to merge; take it out")
    if recipe.merge_adapter and recipe.adapter is not None and recipe.cold_start is not None:
        text = "with adapter and cold_start both it is not clear what to merge; take one of them out"
        yield Clash((("merge_adapter",), ("adapter",), ("cold_start",)), text)
    if recipe.merge_adapter and sampling.engine == "unsloth":
        text = (
            "engine unsloth shares the base weights with vLLM, and a merge would change them; use sampling.engine: vllm"
        )
        yield Clash((("sampling", "engine"), ("merge_adapter",)), text)
    if recipe.merge_adapter and model.load_in_4bit:
        text = "an adapter cannot be folded into 4-bit weights without loss; set model.load_in_4bit: false"
        yield Clash((("merge_adapter",), ("model", "load_in_4bit")), text)
    if recipe.loss.beta > 0 and start and not recipe.merge_adapter:
        what = "adapter" if recipe.adapter is not None else "cold_start"
        text = (
            f"with {what} the KL penalty would pull back to the base without it; "
            "set merge_adapter: true (the reference is then the merged model), or loss.beta: 0"
        )
        yield Clash((("loss", "beta"), (what,)), text)


def _lora(recipe: Recipe) -> Iterator[Clash]:
    lora = recipe.lora
    if isinstance(lora.layers, str):
        if not _LAYERS.fullmatch(lora.layers):
            text = f"`{lora.layers}` is none of all, first:2+last:2, a range like 4-11, or a list like [0, 1]"
            yield Clash((("lora", "layers"),), text)
        for low, high in re.findall(r"([0-9]+)-([0-9]+)", lora.layers):
            if int(low) > int(high):
                yield Clash((("lora", "layers"),), f"the range {low}-{high} runs backwards; write {high}-{low}")
    elif not lora.layers:
        yield Clash((("lora", "layers"),), "is an empty list; name layers, or write all")
    elif min(lora.layers) < 0:
        yield Clash((("lora", "layers"),), "numbers start at 0; for the last layers write last:2")
    if lora.targets == []:
        yield Clash((("lora", "targets"),), "is an empty list; name modules, or write all-linear")
    if isinstance(lora.targets, list) and "lm_head" in lora.targets:
        yield Clash((("lora", "targets"),), "lm_head gets no adapter: the loss reads the head as it is; take it out")


def _data(recipe: Recipe) -> Iterator[Clash]:
    lists: list[tuple[Key, Sequence[Source]]] = [
        (("data", "train"), recipe.data.train),
        (("data", "heldout"), recipe.data.heldout),
    ]
    if recipe.cold_start is not None:
        lists.append((("cold_start", "data"), recipe.cold_start.data))
    for key, sources in lists:
        for i, source in enumerate(sources):
            yield from _source(source, (*key, i))
    trained = {_identity(source): i for i, source in enumerate(recipe.data.train)}
    for i, source in enumerate(recipe.data.heldout):
        if (twin := trained.get(_identity(source))) is not None:
            text = f"the same rows as data.train.{twin}; hold out another split, as in `split: test` or `train[-200:]`"
            yield Clash((("data", "heldout", i),), text)


def _source(source: Source, key: Key) -> Iterator[Clash]:
    kind, colon, name = source.source.partition(":")
    at = (*key, "source")
    if not colon or kind not in KINDS or not name.strip():
        yield Clash((at,), _kind_advice(source.source, kind, name))
        return
    if source.config is not None and kind != "hub":
        yield Clash(((*key, "config"),), f"is for hub: data sets, this is {source.source}; take it out")
    if source.options and kind != "reasoning_gym":
        yield Clash(((*key, "options"),), f"is for reasoning_gym: tasks, this is {source.source}; take it out")
    size = source.options.get("size")
    if kind == "reasoning_gym" and size is not None and (type(size) is not int or size < 1):
        yield Clash(((*key, "options"),), f"size must be a whole number above 0, not {size}")
    if source.rows is not None and kind != "hub":
        yield Clash(((*key, "rows"),), f"is for hub: data sets, {source.source} is counted; take it out")
    if kind == "file" and not name.endswith((".jsonl", ".parquet", ".csv")):
        yield Clash((at,), f"`{name}` is none of .jsonl, .parquet and .csv")
    if kind == "tiny" and name not in ("math", "mcq", "code"):
        yield Clash((at,), f"no task `{name}`; there are tiny:math, tiny:mcq and tiny:code")


def _kind_advice(text: str, kind: str, name: str) -> str:
    if not name and (close := difflib.get_close_matches(text.partition(":")[0], KINDS, n=1)):
        return f"`{text}` does not say which; write {close[0]}:NAME"
    if name and (close := difflib.get_close_matches(kind, KINDS, n=1, cutoff=0.5)):
        return f"no such kind of source; did you mean `{close[0]}:{name}`?"
    if text.endswith((".jsonl", ".parquet", ".csv")):
        return f"no such kind of source; write file:{text}"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        return f"no such kind of source; write hub:{text}"
    return f"`{text}` is none of tiny:TASK, file:PATH, hub:ORG/NAME, reasoning_gym:TASK"


def _identity(source: Source) -> str:
    return f"{source.source} {source.config} {source.split} {sorted(source.options.items(), key=str)}"


def _rewards(recipe: Recipe) -> Iterator[Clash]:
    yield from _rules(recipe.rewards, ("rewards",))
    for name, sources in (("train", recipe.data.train), ("heldout", recipe.data.heldout)):
        for i, source in enumerate(sources):
            yield from _rules(source.rewards or [], ("data", name, i, "rewards"))
    for i, source in enumerate(recipe.data.train):
        key = ("data", "train", i, "rewards")
        if not (recipe.rewards if source.rewards is None else source.rewards):
            yield Clash(
                (("rewards",), key), f"no rule scores the rows of {source.source}; add one, as in `- use: math.correct`"
            )


def _rules(uses: Sequence[RewardUse], key: Key) -> Iterator[Clash]:
    names = [use.use for use in uses]
    gates = {use.use: use.when for use in uses}
    for i, use in enumerate(uses):
        if use.use in names[:i]:
            yield Clash(((*key, i, "use"),), f"`{use.use}` is in the list already; keep one of them")
        for inner, text in wrong_use(use):
            yield Clash(((*key, i, *inner),), text)
        if use.when is None:
            continue
        if use.when not in names:
            close = difflib.get_close_matches(use.when, names, n=1, cutoff=0.5)
            hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(names)}"
            yield Clash(((*key, i, "when"),), f"`{use.when}` is no rule of this list; {hint}")
        elif _circular(use.use, gates):
            yield Clash(((*key, i, "when"),), "comes back to itself")
    if uses and all(use.weight == 0 for use in uses):
        yield Clash((key,), "every weight is 0, so there is nothing to learn; give one rule a weight")


def _circular(name: str, gates: dict[str, str | None]) -> bool:
    seen: set[str] = set()
    at = gates.get(name)
    while at is not None and at not in seen:
        if at == name:
            return True
        seen.add(at)
        at = gates.get(at)
    return False


def _train(recipe: Recipe) -> Iterator[Clash]:
    train = recipe.train
    keys: tuple[Key, ...] = (("train", "steps"), ("train", "epochs"))
    if train.steps is None and train.epochs is None:
        yield Clash(keys, "say how long to train: train.steps, or train.epochs where the number of rows is known")
    if train.steps is not None and train.epochs is not None:
        yield Clash(keys, "train.steps and train.epochs are both set; set the one you do not mean to null")


def _eval(recipe: Recipe) -> Iterator[Clash]:
    wanted = recipe.eval
    if min(wanted.budgets or [1]) < 1:
        yield Clash((("eval", "budgets"),), f"a token budget is at least 1, not {min(wanted.budgets or [])}")
    if not wanted.suites:
        for name in ("samples", "budgets", "limit"):
            if getattr(wanted, name) is not None:
                yield Clash((("eval", name),), "is for suites, and eval.suites names none; name some, or take it out")
        if not recipe.data.heldout and (wanted.every or wanted.best is not None):
            text = "there is nothing to evaluate; name eval.suites, or hold rows out in data.heldout"
            yield Clash((("eval", "every" if wanted.every else "best"),), text)


def _loss(recipe: Recipe) -> Iterator[Clash]:
    loss = recipe.loss
    high = loss.epsilon if loss.epsilon_high is None else loss.epsilon_high
    at: tuple[Key, ...] = (("loss", "epsilon_high"), ("loss", "epsilon"))
    if loss.loss_type == "cispo":
        if loss.epsilon_high is None or high < 1:
            text = f"is the cap of the ratio itself under cispo, and {high:g} would shrink every token; set it to 5"
            yield Clash((*at, ("loss", "loss_type")), text)
    elif high < loss.epsilon:
        text = (
            f"{high:g} is below epsilon {loss.epsilon:g}; clip-higher means at least epsilon (DAPO uses 0.2 and 0.28)"
        )
        yield Clash(at, text)
    if loss.loss_type in CLIPPED and loss.epsilon >= 1:
        text = f"{loss.epsilon:g} leaves no lower clip (1 - epsilon must be above 0); 0.2 is usual"
        yield Clash((("loss", "epsilon"),), text)
    if loss.delta is not None:
        if loss.loss_type not in CLIPPED:
            text = f"the two-sided clip has no place in {loss.loss_type}, only in {', '.join(CLIPPED)}; take it out"
            yield Clash((("loss", "delta"), ("loss", "loss_type")), text)
        elif loss.delta <= 1 + high:
            text = f"must be above 1 + epsilon_high = {1 + high:g}, not {loss.delta:g}"
            yield Clash((("loss", "delta"), *at), text)
    if loss.loss_type == "vespo" and loss.importance_sampling_level == "sequence":
        text = "vespo forms its own sequence weights; set loss.importance_sampling_level: token"
        yield Clash((("loss", "importance_sampling_level"), ("loss", "loss_type")), text)
    if loss.loss_type == "vespo" and loss.sampling_correction.startswith("sequence_"):
        text = "vespo takes the correction inside its weights, by token; use token_truncate or token_mask"
        yield Clash((("loss", "sampling_correction"), ("loss", "loss_type")), text)


def _correction(recipe: Recipe) -> Iterator[Clash]:
    """The hf engine reports log-probs before its filters; vLLM renormalises by them, which would bias every ratio."""
    sampling, loss = recipe.sampling, recipe.loss
    filters = sampling.filters
    if not filters or sampling.engine == "hf":
        return
    readers = []
    if loss.sampling_correction != "none":
        readers.append(("sampling_correction", loss.sampling_correction, "none"))
    if loss.off_policy_mask_threshold is not None:
        readers.append(("off_policy_mask_threshold", "the off-policy mask", "null"))
    for name, what, way_out in readers:
        text = (
            f"{what} needs unfiltered log-probs, which vLLM does not give with "
            f"sampling.{filters[0]}; set loss.{name}: {way_out}, or take {' and '.join(filters)} out"
        )
        yield Clash((("loss", name), *(("sampling", name) for name in filters)), text)


def _guards(recipe: Recipe) -> Iterator[Clash]:
    if recipe.guards.actions.get("rank_equality", "stop") != "stop":
        text = "always stops: ranks that differ train several models, of which one is saved; take it out"
        yield Clash((("guards", "actions", "rank_equality"),), text)
    for name in recipe.guards.actions:
        if name not in GUARD_NAMES:
            close = difflib.get_close_matches(name, GUARD_NAMES, n=1, cutoff=0.5)
            hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(GUARD_NAMES)}"
            yield Clash((("guards", "actions", name),), f"no such guard; {hint}")
