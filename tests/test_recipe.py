"""Recipes: what loads, how parents and overrides combine, and what every mistake is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slmgrpo.errors import RecipeError
from slmgrpo.plan import Plan, plan
from slmgrpo.recipe import Recipe, RewardUse, Section, resolved
from slmgrpo.recipe_load import Loaded, load, packaged_recipes
from slmgrpo.recipe_show import Difference, copy_recipe, diff, list_recipes, show
from slmgrpo.recipe_words import TRL_NAMES, _section_fields
from slmgrpo.recipe_yaml import MAX_BYTES

BASE = """model: tiny
data: {train: [{source: tiny:math}]}
rewards: [{use: math.correct}]
train: {steps: 5}
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str | bytes, name: str = "r.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def refusal(text: str | bytes, *overrides: str) -> list[str]:
    """The lines of the error, without the first one, stripped."""
    with pytest.raises(RecipeError) as error:
        load(write(text), overrides)
    head, *lines = str(error.value).split("\n")
    assert head == f"r.yaml: {len(lines)} problem{'s' * (len(lines) != 1)}"
    assert all(line.startswith("  ") and line[2] != " " for line in lines)
    return [line.strip() for line in lines]


def loaded(more: str = "", *overrides: str) -> Loaded:
    return load(write(BASE + more), overrides)


# One mistake each: what is appended to BASE (so that it stands on line 5), and what is said.
APPENDED = [
    ("sampling: {group_sise: 4}", "line 5: sampling.group_sise: no such key; did you mean `group_size`?"),
    ("sampling: {group_size: 1}", "line 5: sampling.group_size: must be at least 2, not 1"),
    ("sampling: {group_size: 8.0}", "line 5: sampling.group_size: must be a whole number, not 8.0; write 8"),
    ("sampling: {group_size: 8.5}", "line 5: sampling.group_size: must be a whole number, not 8.5"),
    (
        "sampling: {group_size: '8'}",
        "line 5: sampling.group_size: must be a whole number, not the text '8'; take the quotes off",
    ),
    (
        "sampling: {group_size: 010}",
        "line 5: sampling.group_size: must be a whole number, not the text '010'; write plain digits",
    ),
    (
        "sampling: {group_size: 1_000}",
        "line 5: sampling.group_size: must be a whole number, not the text '1_000'; write plain digits",
    ),
    ("sampling: {max_tokens: 1:30}", "line 5: sampling.max_tokens: must be a whole number, not the text '1:30'"),
    ("sampling: {group_size: true}", "line 5: sampling.group_size: must be a whole number, not true"),
    ("sampling: {temperature: 0}", "line 5: sampling.temperature: must be more than 0, not 0"),
    ("sampling: {temperature: .nan}", "line 5: sampling.temperature: must be a finite number"),
    ("sampling: {temperature: 1e999}", "line 5: sampling.temperature: must be a finite number"),
    ("sampling: {top_p: 1.5}", "line 5: sampling.top_p: must be at most 1, not 1.5"),
    (
        "sampling: {engine: vlm}",
        "line 5: sampling.engine: must be one of auto, unsloth, vllm, hf, not the text 'vlm'; did you mean `vllm`?",
    ),
    ("sampling: {stop: END}", "line 5: sampling.stop: must be a list of texts, not the text 'END'; write [END]"),
    ("sampling: {stop: [1]}", "line 5: sampling.stop.0: must be text, not 1; write '1' in quotes"),
    (
        "sampling:",
        "line 5: sampling: must be a mapping with engine, group_size, max_tokens, temperature, ..., not nothing "
        "(null); take the line out, or write its settings under it",
    ),
    (
        "sampling: [8]",
        "line 5: sampling: must be a mapping with engine, group_size, max_tokens, temperature, ..., not a list",
    ),
    ("num_generations: 8", "line 5: num_generations: no such key; here it is `sampling.group_size`"),
    ("learning_rate: 1e-5", "line 5: learning_rate: no such key; it is `optimizer.learning_rate`"),
    ("lora: {lora_alpha: 16}", "line 5: lora.lora_alpha: no such key; here it is `lora.alpha`"),
    (
        "loss: {use_bias_correction_kl: true}",
        "line 5: loss.use_bias_correction_kl: slmgrpo has no such setting: the KL penalty is TRL's default one; "
        "take it out",
    ),
    (
        "loss: {use_adaptive_entropy: true}",
        "line 5: loss.use_adaptive_entropy: slmgrpo has no such setting: use a fixed `loss.entropy_coef`; take it out",
    ),
    (
        "loss: {multi_objective_aggregation: normalize_then_sum}",
        "line 5: loss.multi_objective_aggregation: slmgrpo has no such setting: rewards are summed, then normalised; "
        "take it out",
    ),
    (
        "xyzzy: 1",
        "line 5: xyzzy: no such key; there are extends, name, description, seed, trainer, model, adapter, "
        "merge_adapter, cold_start, lora, data, prompt, rewards, grading, sampling, train, loss, optimizer, guards, "
        "eval, dynamics, report_to",
    ),
    ("seed: -1", "line 5: seed: must be at least 0, not -1"),
    ("seed: 4294967296", "line 5: seed: must be less than 4294967296, not 4294967296"),
    ("name: 2026", "line 5: name: must be text, not 2026; write '2026' in quotes"),
    ("adapter: 1e5", "line 5: adapter: must be text or null, not 100000.0; write '100000' in quotes"),
    ("adapter: None", "line 5: adapter: `None` is text here; write null, or 'None' in quotes"),
    ("merge_adapter: yes", "line 5: merge_adapter: must be true or false, not the text 'yes'; write true"),
    ("lora: {rank: 8, rank: 16}", "line 5: lora.rank: repeated key, first on line 5; keep one"),
    ("train: {steps: 6}", "line 5: train: repeated key, first on line 4; keep one"),
    (
        "lora: {layers: 5}",
        "line 5: lora.layers: must be text or a list of whole numbers, not 5; write [5]",
    ),
    (
        "lora: {layers: frist:2}",
        "line 5: lora.layers: `frist:2` is none of all, first:2+last:2, a range like 4-11, or a list like [0, 1]",
    ),
    ("lora: {layers: 11-4}", "line 5: lora.layers: the range 11-4 runs backwards; write 4-11"),
    ("lora: {layers: [-1]}", "line 5: lora.layers: numbers start at 0; for the last layers write last:2"),
    ("lora: {layers: []}", "line 5: lora.layers: is an empty list; name layers, or write all"),
    ("lora: {targets: []}", "line 5: lora.targets: is an empty list; name modules, or write all-linear"),
    (
        "lora: {targets: [lm_head]}",
        "line 5: lora.targets: lm_head gets no adapter: the loss reads the head as it is; take it out",
    ),
    (
        "lora: {targets: v_proj}",
        "line 5: lora.targets: must be one of all-linear, attention, mlp or a list of texts, not the text 'v_proj'; "
        "write [v_proj]",
    ),
    ("prompt: {examples: [{user: a}]}", "line 5: prompt.examples.0.assistant: is required: text"),
    ("report_to: 5", "line 5: report_to: must be a list of tensorboard or wandb or trackio, not 5"),
    (
        "report_to: [wandbb]",
        "line 5: report_to.0: must be one of tensorboard, wandb, trackio, not the text 'wandbb'; did you mean `wandb`?",
    ),
    (
        "loss: {loss_type: cispo}",
        "line 5: loss.epsilon_high: is the cap of the ratio itself under cispo, and 0.2 would shrink every token; "
        "set it to 5",
    ),
    (
        "loss: {epsilon_high: 0.1}",
        "line 5: loss.epsilon_high: 0.1 is below epsilon 0.2; clip-higher means at least epsilon "
        "(DAPO uses 0.2 and 0.28)",
    ),
    (
        "loss: {epsilon: 1.0}",
        "line 5: loss.epsilon: 1 leaves no lower clip (1 - epsilon must be above 0); 0.2 is usual",
    ),
    ("loss: {delta: 1.1}", "line 5: loss.delta: must be above 1 + epsilon_high = 1.2, not 1.1"),
    (
        "loss: {loss_type: vespo, delta: 4}",
        "line 5: loss.delta: the two-sided clip has no place in vespo, only in grpo, dr_grpo, dapo, bnpo, luspo; "
        "take it out",
    ),
    (
        "loss: {loss_type: vespo, sampling_correction: sequence_mask}",
        "line 5: loss.sampling_correction: vespo takes the correction inside its weights, by token; "
        "use token_truncate or token_mask",
    ),
    (
        "loss: {loss_type: vespo, importance_sampling_level: sequence}",
        "line 5: loss.importance_sampling_level: vespo forms its own sequence weights; "
        "set loss.importance_sampling_level: token",
    ),
    (
        "sampling: {top_p: 0.9, top_k: 20}",
        "line 5: loss.sampling_correction: token_truncate needs unfiltered log-probs, which vLLM does not give with "
        "sampling.top_p; set loss.sampling_correction: none, or take top_p and top_k out",
    ),
    (
        "sampling: {engine: vllm, min_p: 0.1}\nloss: {sampling_correction: none, off_policy_mask_threshold: 0.5}",
        "line 6: loss.off_policy_mask_threshold: the off-policy mask needs unfiltered log-probs, which vLLM does not "
        "give with sampling.min_p; set loss.off_policy_mask_threshold: null, or take min_p out",
    ),
    (
        "sampling: {engine: vllm, temperature: 0.001}",
        "line 5: sampling.temperature: vLLM draws at 0.01 where 0.001 is asked; set at least 0.01",
    ),
    (
        "loss: {beta: 0.01}\nadapter: runs/a",
        "line 5: loss.beta: with adapter the KL penalty would pull back to the base without it; set merge_adapter: "
        "true (the reference is then the merged model), or loss.beta: 0",
    ),
    ("merge_adapter: true", "line 5: merge_adapter: there is no adapter and no cold_start to merge; take it out"),
    (
        "guards: {actions: {unqiue: warn}}",
        "line 5: guards.actions.unqiue: no such guard; did you mean `unique`?",
    ),
    (
        "guards: {actions: {rank_equality: off}}",
        "line 5: guards.actions.rank_equality: always stops: ranks that differ train several models, of which one is "
        "saved; take it out",
    ),
    ("guards: {truncated: 50}", "line 5: guards.truncated: must be at most 1, not 50"),
    (
        "sampling: {engine: unsloth}\nmodel2: 1",
        "line 6: model2: no such key; did you mean `model`?",
    ),
    ("cold_start: {steps: 10}", "line 5: cold_start.data: is required: a list of mappings"),
    ("\tlora: {rank: 8}", "line 5: a tab where YAML wants spaces; indent with spaces"),
    ("name: a: b", "line 5: a second `:` in one line; put text with `: ` in quotes"),
    ("name: &a x", "line 5: name: anchors (&a) are not read; write the value out where it is used"),
    ("<<: {seed: 1}", "line 5: <<: merge keys (<<) are not read; use `extends:` for a parent"),
    ("seed: !!int 1", "line 5: seed: tags (!!int) are not read; quote text, write numbers plainly"),
    (
        "name: !!python/object:os.system x",
        "line 5: name: tags (!!python/object:os.system) are not read; quote text, write numbers plainly",
    ),
    ("---\nmodel: tiny", "line 5: a second document (---); a recipe is one document"),
    ("name: 'x", "line 5: a quote or bracket is not closed (found unexpected end of stream)"),
    ("[a, b]: c", "line 5: a key must be plain text"),
    ("name: `x`", "line 5: found character '`' that cannot start any token; put the text in quotes"),
    ("name: \x07", "line 5: unreadable character U+0007"),
]


@pytest.mark.parametrize(("text", "says"), APPENDED)
def test_a_mistake_is_named_with_its_line(text: str, says: str) -> None:
    assert says in refusal(BASE + text)


# Whole files that are wrong as a whole or in model, data, rewards or train.
WHOLE = [
    ("", "is empty"),
    ("# only a comment\n", "is empty"),
    ("- a\n- b\n", "line 1: a recipe is a mapping of sections, as in `model: tiny`"),
    ("tiny\n", "line 1: a recipe is a mapping of sections, as in `model: tiny`"),
    (b"model: \xff\n", "line 1: is not UTF-8 text; save the file as UTF-8"),
    (b"#" * (MAX_BYTES + 1), "is longer than 200 kB, too long for a recipe"),
    ("a: " + "[" * 30 + "]" * 30, "line 1: nested deeper than 20 levels"),
    ("seed: " + "9" * 400, "line 1: seed: a number of 400 digits"),
    (
        "seed: 1",
        "line 1: model: is required: a model id as text, or a mapping with id, revision, dtype, load_in_4bit, ...",
    ),
    ("seed: 1", "line 1: data: is required: a mapping with train, heldout, ..."),
    (BASE.replace("model: tiny", "model: {dtype: float32}"), "line 1: model.id: is required: text"),
    (
        BASE.replace("model: tiny", "model: 5"),
        "line 1: model: must be a model id as text, or a mapping with id, revision, dtype, load_in_4bit, ..., not 5",
    ),
    (
        BASE.replace("[{source: tiny:math}]", "file:nope.jsonl"),
        "line 2: data.train: must be a list of mappings, not the text 'file:nope.jsonl'; "
        'write [{source: "file:nope.jsonl"}]',
    ),
    (
        BASE.replace("{source: tiny:math}", "'file:\"a.jsonl'"),
        "line 2: data.train.0: must be a mapping with source, split, config, columns, ..., not the text "
        '\'file:"a.jsonl\'; write {source: "file:\\"a.jsonl"}',
    ),
    (
        BASE.replace("model: tiny", "model: {id: a/b, load_in_4bit: true}") + "sampling: {engine: vllm}",
        "line 5: sampling.engine: engine vllm would write with 16-bit weights while 4-bit ones are trained; "
        "set model.load_in_4bit: false",
    ),
    (
        BASE.replace("model: tiny", "model: {id: tiny, revision: main}"),
        "line 1: model.revision: only hub models have revisions, `tiny` is none; take it out",
    ),
    (BASE.replace("train: [{source: tiny:math}]", "train: []"), "line 2: data.train: needs at least one entry"),
    (BASE.replace("tiny:math", "'hub:'"), "line 2: data.train.0.source: `hub:` does not say which; write hub:NAME"),
    (
        BASE.replace("tiny:math", "openai/gsm8k"),
        "line 2: data.train.0.source: no such kind of source; write hub:openai/gsm8k",
    ),
    (
        BASE.replace("tiny:math", "sums.jsonl"),
        "line 2: data.train.0.source: no such kind of source; write file:sums.jsonl",
    ),
    (
        BASE.replace("tiny:math", "tny:math"),
        "line 2: data.train.0.source: no such kind of source; did you mean `tiny:math`?",
    ),
    (
        BASE.replace("tiny:math", "tiny:maths"),
        "line 2: data.train.0.source: no task `maths`; there are tiny:math, tiny:mcq and tiny:code",
    ),
    (
        BASE.replace("tiny:math", "file:a.txt"),
        "line 2: data.train.0.source: `a.txt` is none of .jsonl, .parquet and .csv",
    ),
    (
        BASE.replace("tiny:math", "tiny:math, config: main"),
        "line 2: data.train.0.config: is for hub: data sets, this is tiny:math; take it out",
    ),
    (
        BASE.replace("tiny:math", "tiny:math, rows: 5"),
        "line 2: data.train.0.rows: is for hub: data sets, tiny:math is counted; take it out",
    ),
    (
        BASE.replace("tiny:math", "tiny:math, options: {size: 5}"),
        "line 2: data.train.0.options: is for reasoning_gym: tasks, this is tiny:math; take it out",
    ),
    (
        BASE.replace("tiny:math", "'reasoning_gym:chain_sum', options: {ops: no}"),
        "line 2: data.train.0.options.ops: `no` is text here; write false, or 'no' in quotes",
    ),
    (
        BASE.replace("tiny:math", "'reasoning_gym:chain_sum', options: {size: -1}"),
        "line 2: data.train.0.options: size must be a whole number above 0, not -1",
    ),
    (BASE.replace("tiny:math", "tiny:math, weight: 0"), "line 2: data.train.0.weight: must be more than 0, not 0"),
    (
        BASE.replace("}]}", "}], heldout: [{source: tiny:math}]}"),
        "line 2: data.heldout.0: the same rows as data.train.0; hold out another split, "
        "as in `split: test` or `train[-200:]`",
    ),
    (
        BASE.replace("[{use: math.correct}]", "[math.correct]"),
        "line 3: rewards.0: must be a mapping with use, weight, with, when, ..., not the text 'math.correct'; "
        'write {use: "math.correct"}',
    ),
    (BASE.replace("{use: math.correct}", "{weight: 1}"), "line 3: rewards.0.use: is required: text"),
    (
        BASE.replace("math.correct}", "math.correct, settings: {}}"),
        "line 3: rewards.0.settings: no such key; here it is `with`",
    ),
    (
        BASE.replace("math.correct}", "'./a.py:f', with: {margin: 010}}"),
        "line 3: rewards.0.with.margin: `010` is text here; write a plain number, or '010' in quotes",
    ),
    (
        BASE.replace("math.correct}", "code.passes_test}"),
        "line 3: rewards.0.use: slmgrpo.rewards.code has no `passes_test`; did you mean `passes_tests`?",
    ),
    (
        BASE.replace("math.correct}", "maths.correct}"),
        "line 3: rewards.0.use: there is no rule `maths.correct`; did you mean `math.correct`?",
    ),
    (
        BASE.replace("math.correct}", "concise}"),
        "line 3: rewards.0.use: there is no rule `concise`; a rule of your own is `./file.py:name` or `pkg.mod:name`",
    ),
    (
        BASE.replace("math.correct}", "length.overlong, with: {margn: 5}}"),
        "line 3: rewards.0.with.margn: length.overlong has no such setting; did you mean `margin`?",
    ),
    (
        BASE.replace("math.correct}", "length.overlong}"),
        "line 3: rewards.0.with: length.overlong needs `with: {margin: ...}`",
    ),
    (
        BASE.replace("math.correct}", "math.correct, when: math.corect}"),
        "line 3: rewards.0.when: `math.corect` is no rule of this list; did you mean `math.correct`?",
    ),
    (
        BASE.replace("math.correct}", "math.correct, when: math.correct}"),
        "line 3: rewards.0.when: comes back to itself",
    ),
    (
        BASE.replace("{use: math.correct}", "{use: math.correct}, {use: math.correct}"),
        "line 3: rewards.1.use: `math.correct` is in the list already; keep one of them",
    ),
    (
        BASE.replace("math.correct}", "math.correct, weight: 0}"),
        "line 3: rewards: every weight is 0, so there is nothing to learn; give one rule a weight",
    ),
    (
        BASE.replace("rewards: [{use: math.correct}]\n", ""),
        "line 1: rewards: no rule scores the rows of tiny:math; add one, as in `- use: math.correct`",
    ),
    (
        BASE.replace("{steps: 5}", "{save_every: 5}"),
        "line 4: train.steps: say how long to train: train.steps, or train.epochs where the number of rows is known",
    ),
    (
        BASE.replace("{steps: 5}", "{steps: 5, epochs: 1}"),
        "line 4: train.steps: train.steps and train.epochs are both set; set the one you do not mean to null",
    ),
    (BASE.replace("5}", "0}"), "line 4: train.steps: must be at least 1, not 0"),
]


@pytest.mark.parametrize(("text", "says"), WHOLE)
def test_a_file_that_cannot_be_right_is_refused(text: str | bytes, says: str) -> None:
    assert says in refusal(text)


OVERRIDES = [
    ("sampling.group_sise=4", "--set sampling.group_sise=4: no such key; did you mean `group_size`?"),
    ("sampling.group_size=x", "--set sampling.group_size=x: must be a whole number, not the text 'x'"),
    ("sampling", "--set sampling: write it as KEY=VALUE, as in `--set sampling.group_size=16`"),
    ("=5", "--set =5: write it as KEY=VALUE, as in `--set sampling.group_size=16`"),
    ("a..b=5", "--set a..b=5: write it as KEY=VALUE, as in `--set sampling.group_size=16`"),
    ("name=", "--set name=: no value; write `name=null` for none or `name=''` for empty text"),
    ("name=a #b", "--set name=a #b: YAML reads this as `a`; put quotes around the value"),
    ("extends=x.yaml", "--set extends=x.yaml: the parent is set in the file only"),
    ("rewards.1.weight=2", "--set rewards.1.weight=2: `rewards` is a list; it has 1 entry, as in `rewards.0`"),
    ("rewards.weight=2", "--set rewards.weight=2: `rewards` is a list; it has 1 entry, as in `rewards.0`"),
    ("data.heldout.0.limit=5", "--set data.heldout.0.limit=5: `data.heldout` is a list; it is empty"),
    ("train.epochs=2", "line 4: train.steps: train.steps and train.epochs are both set"),
    ("rewards=[{usee: x}]", "--set rewards=[{usee: x}]: rewards.0.usee: no such key; did you mean `use`?"),
    ("lora.rank=[8", "--set lora.rank=[8: "),
    ("model.id.x=5", "--set model.id.x=5: model.id: must be text, not a mapping"),
    ("rewards=[{use: 'a.b:c', with: {a: yes}}]", "with: {a: yes}}]: rewards.0.with.a: `yes` is text here; write true"),
]


@pytest.mark.parametrize(("override", "says"), OVERRIDES)
def test_a_wrong_override_is_refused(override: str, says: str) -> None:
    assert any(says in line for line in refusal(BASE, override))


def test_every_problem_is_reported_at_once_in_the_order_of_the_lines() -> None:
    text = BASE.replace("tiny:math", "tiny:math, sorce: x") + "sampling:\n  group_sise: 4\nloss: {loss_type: cispo}\n"
    assert refusal(text, "lora.rank=0", "seed=x") == [
        "line 2: data.train.0.sorce: no such key; did you mean `source`?",
        "line 6: sampling.group_sise: no such key; did you mean `group_size`?",
        "line 7: loss.epsilon_high: is the cap of the ratio itself under cispo, and 0.2 would shrink every token; "
        "set it to 5",
        "--set lora.rank=0: must be at least 1, not 0",
        "--set seed=x: must be a whole number, not the text 'x'",
    ]


def test_a_problem_of_a_parent_names_the_parents_line() -> None:
    write("seed: 1\nlora: {rnk: 8}\n", "base.yaml")
    assert refusal("extends: base.yaml\n" + BASE) == ["base.yaml:2: lora.rnk: no such key; did you mean `rank`?"]


def test_what_depends_on_a_wrong_field_is_not_complained_about_too() -> None:
    assert refusal(BASE.replace("{use: math.correct}", "5")) == [
        "line 3: rewards.0: must be a mapping with use, weight, with, when, ..., not 5"
    ]


# Reading


def test_numbers_and_words_are_read_as_people_mean_them() -> None:
    recipe = loaded(
        "optimizer: {learning_rate: 1e-5, weight_decay: 0}\nloss: {scale_rewards: none}\n"
        "grading: {sandbox: off}\nlora: {layers: 4-11, alpha: 16}\nname: no\ndescription: 2026-11-30\n"
    ).recipe
    assert recipe.optimizer.learning_rate == 1e-5
    assert recipe.loss.scale_rewards == "none" and recipe.grading.sandbox == "off"
    assert (recipe.name, recipe.description, recipe.lora.layers) == ("no", "2026-11-30", "4-11")


def test_open_settings_keep_their_types() -> None:
    recipe = load(write(BASE.replace("math.correct}", "'./a.py:f', with: {a: 1e-3, b: [1, true], c: 'no', d: x}}")))
    assert recipe.recipe.rewards[0].settings == {"a": 1e-3, "b": [1, True], "c": "no", "d": "x"}


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm() -> None:
    text = b"\xef\xbb\xbf" + BASE.replace("\n", "\r\n").encode()
    assert load(write(text)).recipe.train.steps == 5


def test_aliases_cannot_blow_up() -> None:
    text = "a: &a [x, x]\n" + "\n".join(f"a{i}: &a{i} [*a{i - 1 if i else ''}, *a]" for i in range(50))
    assert len(refusal(text)) > 50


@pytest.mark.parametrize("extra", [{}, {"rank": 4}])
def test_a_recipe_file_may_be_json(extra: dict[str, int]) -> None:
    value = resolved(loaded().recipe) | ({"lora": extra} if extra else {})
    Path("recipe.json").write_text(json.dumps(value, indent=2))
    assert load("recipe.json").recipe.lora.rank == extra.get("rank", 16)


def test_files_that_are_no_recipes() -> None:
    Path("folder").mkdir()
    os.mkfifo("pipe")
    for name, says in [
        ("folder", "folder: 1 problem\n  is a folder, not a recipe file"),
        ("pipe", "pipe: 1 problem\n  is not a regular file"),
        ("a\0b", "'a\\x00b': not a file name"),
        ("x" * 5000, "no such recipe"),
    ]:
        with pytest.raises(RecipeError) as error:
            load(name)
        assert says in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read() -> None:
    Path(write(BASE)).chmod(0)
    assert refusal(BASE) == ["cannot be read: Permission denied"]


# Names


def test_a_packaged_recipe_is_found_by_name_and_by_path() -> None:
    by_name, by_path = load("quickstart"), load("recipes/quickstart.yaml")
    assert by_name == by_path
    assert by_name.recipe.name == "quickstart"
    assert by_name.origins["model.id"].startswith("recipes/quickstart.yaml:")


def test_a_file_of_ones_own_goes_before_the_packaged_one() -> None:
    write(BASE, "recipes/quickstart.yaml")
    assert load("recipes/quickstart.yaml").recipe.train.steps == 5
    assert load("quickstart").recipe.train.steps != 5


def test_an_unknown_name_gets_its_neighbours() -> None:
    write(BASE, "mine.yaml")
    for name, says in [
        ("quikstart", "did you mean `quickstart`"),
        ("recipes/code_3.yaml", "`code_3b`"),
        ("mine", "mine.yaml"),
    ]:
        with pytest.raises(RecipeError, match="no such recipe") as error:
            load(name)
        assert says in str(error.value)


def test_a_recipe_far_from_any_name_gets_the_list() -> None:
    with pytest.raises(RecipeError, match=r"lists the packaged ones: code_1\.5b, "):
        load("zzzzzzzz")


# Parents


def test_mappings_merge_and_lists_are_replaced() -> None:
    write("lora: {rank: 4, alpha: 8}\nrewards: [{use: math.correct}, {use: format.boxed_once}]\nseed: 7\n", "base.yaml")
    recipe = load(write("extends: base.yaml\n" + BASE + "lora: {rank: 2}\n")).recipe
    assert (recipe.lora.rank, recipe.lora.alpha, recipe.seed) == (2, 8, 7)
    assert [use.use for use in recipe.rewards] == ["math.correct"]


def test_origins_say_where_each_value_comes_from() -> None:
    write("lora:\n  rank: 4\n  alpha: 8\n", "base.yaml")
    origins = load(write("extends: base.yaml\n" + BASE + "lora: {rank: 2}\n"), ["loss.beta=0.1"]).origins
    assert origins["lora.rank"] == "r.yaml:6"
    assert origins["lora.alpha"] == "base.yaml:3"
    assert origins["loss.beta"] == "--set"
    assert origins["loss.epsilon"] == "default"
    assert origins["model.id"] == "r.yaml:2"


def test_origins_name_every_value_once() -> None:
    def leaves(value: object, key: str = "") -> list[str]:
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        below = [leaf for part, inner in parts for leaf in leaves(inner, f"{key}{part}.")]
        return below or [key.rstrip(".")]

    for name in ("quickstart", "code_3b"):
        recipe = load(name)
        assert list(recipe.origins) == leaves(resolved(recipe.recipe))


def test_a_null_of_the_child_clears_the_parents_value() -> None:
    write("train: {steps: 9}\n", "base.yaml")
    text = BASE.replace("{steps: 5}", "{steps: null, epochs: 1}")
    assert load(write("extends: base.yaml\n" + text)).recipe.train.steps is None


def test_a_shorthand_model_meets_the_parents_mapping() -> None:
    write("model: {id: a/b, dtype: float32}\n", "base.yaml")
    model = load(write("extends: base.yaml\n" + BASE), ["model=c/d"]).recipe.model
    assert (model.id, model.dtype) == ("c/d", "float32")


def test_a_models_path_starts_at_the_recipe_and_that_of_an_override_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "mine.yaml").write_text("extends: quickstart\nmodel: ./weights\nadapter: ../runs/a\n")
    monkeypatch.chdir(tmp_path)
    recipe = load("recipes/mine.yaml").recipe
    assert (recipe.model.id, recipe.adapter) == (str(folder / "weights"), str(tmp_path / "runs" / "a"))
    assert load("recipes/mine.yaml", ["model.id=./other"]).recipe.model.id == "./other"
    assert load("recipes/mine.yaml", ["model.id=tiny"]).recipe.model.id == "tiny"


def test_relative_paths_of_a_parent_start_at_the_parents_folder() -> None:
    write("data: {train: [{source: 'file:d/x.jsonl'}]}\nrewards: [{use: './rule.py:f'}]\n", "base/parent.yaml")
    text = "extends: ../base/parent.yaml\nmodel: tiny\ntrain: {steps: 1}\n"
    recipe = load(write(text, "mine/child.yaml")).recipe
    assert recipe.data.train[0].source == "file:../base/d/x.jsonl"
    assert recipe.rewards[0].use == "../base/rule.py:f"


def test_parents_that_cannot_be_followed() -> None:
    assert refusal("extends: nowhere.yaml\n" + BASE)[0].startswith("line 1: extends: nowhere.yaml: no such recipe")
    assert refusal("extends: r.yaml\n" + BASE) == ["line 1: extends: comes back to itself: r.yaml -> r.yaml"]
    assert refusal("extends: [a, b]\n" + BASE)[0] == (
        "line 1: extends: names one parent file, as in `extends: _math.yaml`"
    )
    write("extends: b.yaml\n", "a.yaml")
    write("extends: a.yaml\n", "b.yaml")
    assert refusal("extends: a.yaml\n" + BASE) == [
        "b.yaml:1: extends: comes back to itself: r.yaml -> a.yaml -> b.yaml -> a.yaml"
    ]


def test_a_fourth_level_is_refused() -> None:
    for child, parent in [("a", "b"), ("b", "c")]:
        write(f"extends: {parent}.yaml\n", f"{child}.yaml")
    write("seed: 1\n", "c.yaml")
    assert refusal("extends: a.yaml\n" + BASE) == [
        "b.yaml:1: extends: more than 3 levels; extend b.yaml directly and copy what a.yaml adds"
    ]


def test_a_fresh_recipe_extends_a_packaged_parent() -> None:
    recipe = load(write("extends: _math.yaml\nmodel: Qwen/Qwen2.5-0.5B-Instruct\n")).recipe
    assert recipe.data.train[0].source == "hub:openai/gsm8k"


# Overrides


def test_overrides_have_the_same_types_as_the_file() -> None:
    recipe = loaded(
        "",
        "optimizer.learning_rate=3e-4",
        "rewards.0.weight=2",
        "data.train.0.limit=5",
        "sampling.stop=['END', x]",
        "prompt.system='a: b'",
        "lora={rank: 4}",
        "model=a/b",
        "adapter=null",
        "prompt.prefill=''",
        "report_to=[wandb]",
    ).recipe
    assert (recipe.optimizer.learning_rate, recipe.rewards[0].weight, recipe.data.train[0].limit) == (3e-4, 2, 5)
    assert (recipe.sampling.stop, recipe.prompt.system, recipe.lora.rank) == (["END", "x"], "a: b", 4)
    assert (recipe.model.id, recipe.adapter, recipe.prompt.prefill) == ("a/b", None, "")


def test_the_last_override_wins() -> None:
    assert loaded("", "seed=1", "seed=2").recipe.seed == 2


# Cross-field settings that are right


@pytest.mark.parametrize(
    "more",
    [
        "sampling: {top_p: 0.9, engine: hf}",
        "sampling: {min_p: 0.1}\nloss: {sampling_correction: none}",
        "adapter: runs/a\nmerge_adapter: true\nloss: {beta: 0.1}",
        "adapter: runs/a",
        "loss: {loss_type: cispo, epsilon_high: 5}",
        "loss: {delta: 4}",
        "loss: {loss_type: vespo}",
        "lora: {layers: first:2+last:2, targets: [v_proj, o_proj]}",
        "cold_start: {data: [{source: tiny:math}], steps: 10}",
    ],
)
def test_settings_that_go_together_load(more: str) -> None:
    assert loaded(more).recipe.train.steps == 5


def test_a_source_with_its_own_rules_needs_none_of_the_recipe() -> None:
    text = BASE.replace("rewards: [{use: math.correct}]\n", "").replace(
        "tiny:math", "tiny:math, rewards: [{use: math.correct}]"
    )
    assert load(write(text)).recipe.rewards == []


# Resolved, shown, copied, compared


def test_a_resolved_recipe_is_the_same_recipe() -> None:
    for name in ("quickstart", "code_3b"):
        recipe = load(name).recipe
        again = Recipe.model_validate(json.loads(json.dumps(resolved(recipe))))
        assert resolved(again) == resolved(recipe)
        assert list(resolved(recipe)) == [field for field in Recipe.model_fields if field != "extends"]


def test_settings_are_written_as_with() -> None:
    assert RewardUse(use="a", settings={"b": 1}).model_dump(by_alias=True)["with"] == {"b": 1}


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts, st.lists(texts, max_size=3), st.dictionaries(texts.filter(lambda key: key != "<<"), values, max_size=4))
def test_what_is_shown_loads_as_the_same_recipe(system: str, stop: list[str], options: dict[str, object]) -> None:
    recipe = load(write(BASE)).recipe
    recipe = recipe.model_copy(
        update={
            "prompt": recipe.prompt.model_copy(update={"system": system}),
            "sampling": recipe.sampling.model_copy(update={"stop": stop}),
            "rewards": [RewardUse(use="./a.py:f", settings=options)],
        }
    )
    shown = load(write(show(Loaded(recipe, {}, Path("r.yaml"))), "shown.yaml")).recipe
    assert resolved(shown) == resolved(recipe)


def test_shown_values_carry_their_origin() -> None:
    lines = show(load("code_3b", ["lora.rank=8"])).splitlines()
    assert [line.split() for line in lines if line.startswith("  rank:")] == [["rank:", "8", "#", "--set"]]
    assert any(line.startswith("  system:") and "# recipes/_code.yaml:" in line for line in lines)


def test_listed_recipes_are_the_packaged_ones_without_parents() -> None:
    listed = list_recipes()
    assert {"quickstart", "code_3b", "math_1.5b"} <= {recipe.name for recipe in listed}
    assert not any(recipe.name.startswith("_") for recipe in listed)
    assert all(recipe.description.endswith(".") for recipe in listed)
    assert all(len(Path(recipe.name).name + recipe.description) <= 78 for recipe in listed)  # 80 columns


@pytest.mark.parametrize("name", [name for name in packaged_recipes() if Path(name).name[0] != "_"])
def test_a_copy_loads_as_the_packaged_recipe_does(name: str) -> None:
    copy = copy_recipe(name, "mine.yaml")
    original = resolved(load(name).recipe) | {"name": "mine"}
    assert resolved(load(copy).recipe) == original
    assert plan(load(copy)).steps == plan(load(name)).steps


def test_a_copy_brings_its_data_file_along() -> None:
    copy_recipe("smollm2_135m_arithmetic", "a.yaml")
    copy_recipe("smollm2_135m_arithmetic", "b.yaml")  # the same file is there already
    assert plan(load("a.yaml")).rows == 661
    Path("data/sums_to_40.jsonl").write_text("mine")
    with pytest.raises(RecipeError, match=r"data/sums_to_40.jsonl: another file is there already"):
        copy_recipe("smollm2_135m_arithmetic", "c.yaml")
    assert not Path("c.yaml").exists()


def test_a_packaged_recipe_is_copied_by_its_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(packaged_recipes()["code_3b"].parents[1].resolve())
    assert (
        load(copy_recipe("recipes/code_3b.yaml", tmp_path / "mine.yaml")).recipe.model.id
        == load("code_3b").recipe.model.id
    )


def test_a_copy_never_overwrites() -> None:
    copy_recipe("code_3b", "mine.yaml")
    Path("folder").mkdir()
    assert copy_recipe("recipes/code_3b.yaml", "folder") == Path("folder/code_3b.yaml")
    for name, to, says in [
        ("code_3b", "mine.yaml", "mine.yaml: is there already; choose another place, or remove it first"),
        ("code_3b", "nowhere/a.yaml", "there is no folder nowhere; `mkdir -p nowhere` first"),
        ("code_3b", "mine", "a recipe's name ends in .yaml; use mine.yaml"),
        ("mine.yaml", "b.yaml", "is a file of yours, not a packaged recipe; copy it with `cp`"),
        ("code_33", "b.yaml", "did you mean `code_3b`"),
    ]:
        with pytest.raises(RecipeError) as error:
            copy_recipe(name, to)
        assert says in str(error.value)


def test_a_difference_names_both_values() -> None:
    found = diff(load("math_3b"), load("math_3b", ["lora.rank=8", "rewards=[{use: math.correct, weight: 2}]"]))
    assert Difference("lora.rank", "16", "8") in found
    assert Difference("rewards.0.weight", "1.0", "2") not in found  # 2 is read as the number 2.0
    assert Difference("rewards.0.weight", "1.0", "2.0") in found
    assert Difference("rewards.1.use", "format.boxed_once", None) in found
    assert diff(load("math_3b"), load("math_3b")) == []


# Mutation: nothing that a person or a broken editor can write ends in anything but Loaded or RecipeError.

SHIPPED = [path.read_text() for path in packaged_recipes().values()]
ODD = [
    *("", "null", "~", "[]", "{}", "-1", "1e400", ".inf", "no", "true", "0x10", "010", "9" * 400, "'", "%", "@", "\t"),
    *("*a", "&a", "<<: 1", "---", "- -", "? a", "!!set {a}", "{a: [", "a: b: c", "\u2028", "\0", "extends: _code.yaml"),
]


@st.composite
def mutated(draw: st.DrawFn) -> str:
    lines = draw(st.sampled_from(SHIPPED)).splitlines()
    for _ in range(draw(st.integers(1, 4))):
        if not lines:
            break
        at = draw(st.integers(0, len(lines) - 1))
        odd = draw(st.sampled_from(ODD) | texts)
        match draw(st.integers(0, 5)):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, draw(st.sampled_from(lines)))
            case 2:
                lines[at] = lines[at].partition(":")[0] + ": " + odd
            case 3:
                lines[at] = " " * draw(st.integers(0, 6)) + lines[at].strip()
            case 4:
                cut = draw(st.integers(0, len(lines[at])))
                lines[at] = lines[at][:cut] + odd + lines[at][cut:]
            case _:
                lines.insert(at, odd)
    return "\n".join(lines)


def plan_or_refuse(text: str, overrides: list[str]) -> None:
    try:
        recipe = load(write(text), overrides)
    except RecipeError as error:
        assert str(error)
        return
    try:
        assert isinstance(plan(recipe, gpus=2), Plan)
    except Exception as error:
        assert type(error).__name__ in ("PlanError", "RecipeError"), error


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutated())
def test_a_mutated_recipe_loads_or_is_refused(text: str) -> None:
    plan_or_refuse(text, [])


KEYS = [
    *_section_fields(),
    *("model", "seed", "adapter", "report_to", "rewards", "rewards.0", "rewards.0.with", "prompt.examples"),
    *("data.train", "data.train.0.source", "data.heldout.0", "cold_start.steps", "cold_start.data"),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(ODD) | texts | values.map(json.dumps)), max_size=4))
def test_any_override_loads_or_is_refused(pairs: list[tuple[str, str]]) -> None:
    plan_or_refuse(BASE, [f"{key}={value}" for key, value in pairs])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(RecipeError):
        load(write(raw))


# The rest


def test_rules_are_read_as_they_are_imported() -> None:
    from slmgrpo.recipe_rules import MODULES, rules
    from slmgrpo.rewards import find

    assert MODULES == find.RULE_MODULES
    for module in MODULES:
        for name, rule in rules(module).items():
            signature = find.signature(find.load(f"{module}.{name}"))
            assert set(rule.settings) == set(signature.settings)
            assert {key for key, needed in rule.settings.items() if needed} == signature.needed_settings


def test_every_field_says_what_it_is() -> None:
    sections: list[type[Section]] = [Recipe, *Section.__subclasses__()]
    assert [f"{s.__name__}.{name}" for s in sections for name, f in s.model_fields.items() if not f.description] == []


def test_suggested_names_exist() -> None:
    known = {*_section_fields(), *Recipe.model_fields, "with", "rewards.0.weight"}
    for target in TRL_NAMES.values():
        for word in target.replace(" and so on", "").split(" (")[0].split(" and "):
            assert word in known, word


def test_loading_and_planning_import_nothing_heavy() -> None:
    code = (
        "import slmgrpo.plan, slmgrpo.recipe_show, sys; "
        "heavy = {'torch', 'transformers', 'trl', 'datasets', 'pandas', 'numpy', 'rich'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
