"""Every shipped recipe loads, plans on 1, 2, 4 and 8 GPUs, says nothing twice and cites its numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slmgrpo.plan import plan
from slmgrpo.recipe import Recipe, Section, resolved
from slmgrpo.recipe_load import load, merged_tree, packaged_recipes
from slmgrpo.recipe_validate import plain
from slmgrpo.recipe_yaml import parse

NAMES = [name for name in packaged_recipes() if not name.rpartition("/")[2].startswith("_")]
FAILURES, PAPER = "studies/failures/", "studies/paper/"
PARENTS = [name for name in packaged_recipes() if name not in NAMES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_a_shipped_recipe_plans(name: str, gpus: int) -> None:
    one, many = plan(load(name)), plan(load(name), gpus=gpus)
    assert many.prompts_per_rank * gpus == one.prompts_per_rank
    assert many.completions_per_step == one.completions_per_step and many.steps == one.steps


def test_each_domain_has_three_sizes_and_another_family() -> None:
    for domain in ("math", "code", "mcq"):
        ids = {name: load(name).recipe.model.id for name in NAMES if name.startswith(f"{domain}_")}
        assert {f"{domain}_{size}" for size in ("1.5b", "3b", "7b")} <= set(ids)
        assert any("Qwen2.5" not in model for model in ids.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_note_of_the_plan_is_a_surprise(name: str) -> None:
    for note in plan(load(name)).notes:
        reason = "an entropy bonus" if name == f"{FAILURES}entropy_collapse" else "loss.beta > 0"
        assert note.startswith(f"rows without signal are run too, because of {reason}")
        assert name.startswith(("mcq_", FAILURES, PAPER))


@pytest.mark.parametrize("name", packaged_recipes())
def test_a_child_holds_only_what_differs(name: str) -> None:
    assert redundant(packaged_recipes()[name]) == []


def test_redundancy_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "extends: _math.yaml\nmodel: x/y\nlora: {rank: 16}\nloss: {delta: null, beta: 0.1}\nprompt: {prefill: ''}\n"
    )
    assert redundant(file) == ["lora.rank", "loss.delta", "prompt.prefill"]
    file.write_text("model: x/y\ndata: {train: [{source: tiny:math, split: train}]}\n")
    assert redundant(file) == ["data.train.0.split"]


def redundant(path: Path) -> list[str]:
    """Keys of a file that its parents or the schema's defaults say already (without a parent it may say defaults)."""
    tree, _ = parse(path.read_text(), path.name)
    own = plain(tree)
    model = own.get("model")
    own |= {"model": {"id": model}} if isinstance(model, str) else {}
    parent = own.pop("extends", None)
    beside = path.parent / str(parent)
    file = beside if parent and beside.is_file() else packaged_recipes().get(str(parent).removesuffix(".yaml"))
    before = plain(merged_tree(file)[0]) if file else {}
    before.pop("extends", None)
    if parent:
        before = with_defaults(before)
    return [key for key, value in leaves(own) if get(before, key) == (True, value)] + repeated_defaults(own)


def with_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with the schema's defaults under it (a parent needs neither model nor data)."""
    bare = Recipe.model_validate({"model": {"id": "?"}, "data": {"train": [{"source": "?"}]}})
    defaults = resolved(bare)
    del defaults["model"]["id"], defaults["data"]["train"]

    def merge(below: Any, above: Any) -> Any:
        if isinstance(below, dict) and isinstance(above, dict):
            return {**below, **{key: merge(below.get(key), value) for key, value in above.items()}}
        return above

    return merge(defaults, tree)


def leaves(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from leaves(below, (*key, name))
    else:
        yield ".".join(key), value


def get(tree: Any, key: str) -> tuple[bool, Any]:
    for part in key.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False, None
        tree = tree[part]
    return True, tree


def repeated_defaults(own: dict[str, Any]) -> list[str]:
    """Defaults written out in entries of lists (sources, rules, examples)."""
    whole = {"model": {"id": "?"}, "data": {"train": [{"source": "?"}]}} | own
    found: list[str] = []

    def visit(value: Any, key: str, in_list: bool) -> None:
        if isinstance(value, Section):
            for name, info in type(value).model_fields.items():
                if (
                    in_list
                    and name in value.model_fields_set
                    and getattr(value, name) == info.get_default(call_default_factory=True)
                ):
                    found.append(f"{key}{name}")
                visit(getattr(value, name), f"{key}{name}.", in_list)
        elif isinstance(value, list):
            for i, item in enumerate(value):
                visit(item, f"{key}{i}.", True)

    visit(Recipe.model_validate(whole), "", False)
    return found


@pytest.mark.parametrize("name", packaged_recipes())
def test_every_number_of_lora_and_optimizer_cites_its_source(name: str) -> None:
    section = ""
    for line in packaged_recipes()[name].read_text().splitlines():
        section = line.partition(":")[0] if line[:1].isalpha() else section
        setting = line.strip()
        value = setting.partition("#")[0].partition(":")[2]
        if section in ("lora", "optimizer") and any(character.isdigit() for character in value):
            assert "#" in setting, f"{name}: {setting}"


def test_the_sums_are_all_sums_up_to_40() -> None:
    file = packaged_recipes()["smollm2_135m_arithmetic"].parent / "data" / "sums_to_40.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    pairs = [tuple(map(int, row["id"].split("+"))) for row in rows]
    assert sorted(pairs) == [(a, b) for a in range(41) for b in range(41 - a)]
    assert all(
        row["question"] == f"What is {a} + {b}?" and row["answer"] == str(a + b)
        for row, (a, b) in zip(rows, pairs, strict=True)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_never_outscores_a_right_one(name: str) -> None:
    from slmgrpo.rewards.base import load_rewards

    loaded = load(name)
    for source in loaded.recipe.data.train:
        uses = loaded.recipe.rewards if source.rewards is None else source.rewards
        rewards = load_rewards(uses, base=loaded.base, known={"max_tokens": loaded.recipe.sampling.max_tokens})
        right_gates = {reward.name for reward in rewards if reward.is_correctness}
        assert right_gates
        best_wrong = sum(
            reward.weight * max(reward.bounds.wrong, 0) for reward in rewards if reward.when not in right_gates
        )
        worst_right = sum(reward.weight * reward.bounds.right for reward in rewards)
        unsound = {f"{FAILURES}wrong_answer_wins", f"{PAPER}code", f"{PAPER}code_revised"}
        assert (best_wrong < worst_right) == (name not in unsound)


def test_the_readmes_new_domain_works_as_written(tmp_path: Path) -> None:
    readme = (packaged_recipes()["quickstart"].parent / "README.md").read_text()
    for name, text in re.findall(r"```\w+\n# (\S+)\n(.*?)```", readme, re.DOTALL):
        (tmp_path / name).write_text(text)
    commands = [line.strip() for line in readme.split("\nThen:\n")[1].splitlines() if line.startswith("    ")]
    assert [command.split()[:2] for command in commands[1:]] == [
        ["slmgrpo", "check"],
        ["slmgrpo", "reward"],
        ["slmgrpo", "train"],
    ]
    programs = {"python": [sys.executable], "slmgrpo": [sys.executable, "-m", "slmgrpo"]}
    for command in commands:
        program, *arguments = command.split()
        done = subprocess.run([*programs[program], *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "eval" / "step_20" / "heldout" / "scores.json").is_file()


def test_the_readme_names_every_shipped_recipe() -> None:
    readme = (packaged_recipes()["quickstart"].parent / "README.md").read_text()
    named = set(re.findall(r"`([a-z0-9_.]+)`", readme.split("| recipes |")[1].split("Files that")[0]))
    assert named == {name for name in NAMES if not name.startswith("studies/")}
    for folder, heading in ((FAILURES, "## Known failures"), (PAPER, "## The paper's runs")):
        section = readme.split(heading)[1].split("\n## ")[0]
        assert {f"{folder}{name}" for name in re.findall(r"^\| `(\w+)`", section, re.MULTILINE)} == {
            name for name in NAMES if name.startswith(folder)
        }
