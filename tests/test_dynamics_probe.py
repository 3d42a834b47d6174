"""The probe in real runs of the embedded model, and its table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import random_model, with_adapter
from trained_run import slmgrpo, trained_run

from slmgrpo.callbacks import Silent
from slmgrpo.dynamics import probe, table
from slmgrpo.model import Policy
from slmgrpo.plan import plan
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir
from slmgrpo.train import train

OVERRIDES = ["train.prompts_per_step=3", "sampling.group_size=4", "data.heldout=[]", "train.steps=5"]
CADENCE = ["dynamics.every=2", "train.save_every=2"]


def run_of(out: Path, *, resume: bool = False) -> RunDir:
    loaded = load("quickstart", [*OVERRIDES, *CADENCE])
    found = RunDir(out) if resume else None
    made = None if resume else out
    return train(loaded.recipe, plan(loaded), base=loaded.base, out=made, resume=found, observer=Silent()).run


def test_a_run_is_measured_at_its_cadence_and_a_resumed_one_measures_the_same(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    assert probe.steps(run) == [0, 2, 4, 5]
    whole = {step: probe.read(run, step) for step in probe.steps(run)}
    first, last = whole[0], whole[5]
    assert len(first) == len(last) == 28
    assert all(row["norm"] == 0 and row["coherence"] is None and row["b_norm"] == 0 for row in first)
    for row in last:
        assert row["coherence"] == pytest.approx(row["norm"] / row["null"])
        assert row["relative"] == pytest.approx(row["norm"] / row["base_norm"])
        assert 1 < row["effective_rank"] <= row["rank"] == len(row["spectrum"])
    again = RunDir(Path(shutil.copytree(run.path, tmp_path / "again")))
    shutil.rmtree(again.checkpoints / "step_5")
    shutil.rmtree(again.checkpoints / "step_4")
    (again.dynamics / "step_4.parquet").unlink()  # lost with the machine; step 5 must not survive the rewind either
    run_of(again.path, resume=True)
    assert {step: probe.read(again, step) for step in probe.steps(again)} == whole


def policy() -> Policy:
    return Policy(with_adapter(random_model("llama")), None, "", "transformers", torch.device("cpu"))


def measured(run: RunDir, subject: Policy, *, move: float) -> list[dict[str, Any]]:
    """One step of a probe on a model whose adapter already holds something."""
    recipe = load("quickstart", ["dynamics.every=1"]).recipe
    watch = probe.Probe(subject, run, recipe, step=0, steps=3)
    with torch.no_grad():
        for _, parameter in subject.trainable():
            parameter += move * torch.randn_like(parameter)
    watch.see([{"step": 1, "learning_rate": 1e-3, "grad_norm": 0.5}])
    return probe.read(run, 1)


def test_displacement_is_counted_from_the_adapter_that_a_run_began_with(tmp_path: Path) -> None:
    subject = policy()
    before = {name: probe.factors(layer) for name, layer in probe.lora_layers(subject.model).items()}
    before = {name: x.scale * (x.b @ x.a) for name, x in before.items()}
    rows = {row["tensor"]: row for row in measured(RunDir(tmp_path), subject, move=0.01)}
    assert len(rows) == 14
    for name, layer in probe.lora_layers(subject.model).items():
        now = probe.factors(layer)
        moved = float((now.scale * (now.b @ now.a) - before[name]).norm())
        row = rows[name.removeprefix("base_model.model.")]
        assert row["norm"] == pytest.approx(moved, rel=1e-6)
        assert row["update_norm"] > 3 * row["norm"]


def test_a_run_that_began_without_a_probe_goes_on_without_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.append(run.metrics, [{"step": 1, "learning_rate": 1e-3, "grad_norm": 0.5}])
    watch = probe.Probe(policy(), run, load("quickstart").recipe, step=1, steps=2)
    watch.see([{"step": 2, "learning_rate": 1e-3, "grad_norm": 0.5}])
    assert probe.steps(run) == []


def test_a_step_that_was_skipped_counts_for_nothing(tmp_path: Path) -> None:
    lines = [{"step": 1, "learning_rate": 1e-3, "grad_norm": 0.5}]
    skipped = {"step": 2, "learning_rate": 1e-3, "grad_norm": None, "nonfinite": True}
    nulls = []
    for name, seen in (("plain", lines), ("skipped", [*lines, skipped])):
        run = RunDir(tmp_path / name)
        run.path.mkdir()
        subject = policy()
        probe.Probe(subject, run, load("quickstart").recipe, step=0, steps=len(seen)).see(seen)
        nulls.append([row["null"] for row in probe.read(run, len(seen))])
    assert nulls[0] == nulls[1]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("base_model.model.model.layers.3.self_attn.q_proj", (3, "q_proj", "attention")),
        ("base_model.model.transformer.h.11.mlp.c_fc", (11, "c_fc", "mlp")),
        ("base_model.model.model.layers.2.mlp.experts.7.up_proj", (2, "up_proj", "mlp")),
        ("base_model.model.score", (-1, "score", "mlp")),
    ],
)
def test_a_tensor_has_a_place(name: str, place: tuple[int, str, str]) -> None:
    found = probe.Place.of(name)
    assert (found.layer, found.module, found.role) == place


def row(layer: int, module: str, norm: float, null: float) -> dict[str, float | int | str]:
    return {
        "layer": layer,
        "module": module,
        "role": "mlp",
        "norm": norm,
        "base_norm": 10.0,
        "null": null,
        "effective_rank": 4.0,
    }


def test_groups_are_measured_as_one_vector() -> None:
    rows = [row(layer, module, norm, 1.0) for layer in (10, 9) for module, norm in (("q_proj", 3.0), ("up_proj", 4.0))]
    groups = table.grouped(rows, "layer")
    assert [one.name for one in groups] == ["9", "10", "all"]
    assert [one.relative for one in groups] == pytest.approx([5 / 200**0.5] * 2 + [50**0.5 / 20])
    assert [one.mass for one in groups] == pytest.approx([0.5, 0.5, 1.0])
    assert [one.coherence for one in groups] == pytest.approx([12.5**0.5] * 3)
    assert table.coherence_of(rows) == pytest.approx(12.5**0.5)
    by_module = {one.name: one.coherence for one in table.grouped(rows, "module")}
    assert by_module == pytest.approx({"q_proj": 3.0, "up_proj": 4.0, "all": 12.5**0.5})


def test_the_interval_over_tensors_covers_their_spread_and_is_left_out_for_a_few() -> None:
    rows = [row(layer, "q_proj", 1.0 + layer % 2, 1.0) for layer in range(20)]
    whole = table.grouped(rows, "module")[-1]
    assert 1.2 < whole.low < whole.coherence < whole.high < 2.0
    assert table.coherence(table.group("few", rows[:4], 1.0)).count("[") == 0
    lines = table.update_table(table.grouped(rows, "layer"), "layer")
    assert all(len("  ".join(cells)) < 78 for cells in lines)


def test_the_command_shows_groups_and_refuses_what_was_not_measured(tmp_path: Path) -> None:
    run = trained_run()
    done = slmgrpo("dynamics", run, "--by", "role", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["role", "attention", "mlp", "all"]
    assert "coherence by step: 10 " in done.stdout
    assert max(map(len, lines[1:])) <= 80
    refused = slmgrpo("dynamics", run, "--step", "7", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "step 7 was not measured; there are 10, 12" in refused.stderr


def test_the_commands_about_adapters_show_each_measure_beside_its_null(tmp_path: Path) -> None:
    run = trained_run()
    shift = slmgrpo("dynamics", "shift", run, "--limit", "2", "--seeds", "1", cwd=tmp_path)
    assert shift.returncode == 0, shift.stderr
    assert "last block / middle block, no first: tuned " in shift.stdout
    principal = slmgrpo("dynamics", "principal", run, "--top", "4", cwd=tmp_path)
    assert principal.returncode == 0, principal.stderr
    compared = slmgrpo("dynamics", "compare", run, run, cwd=tmp_path)
    assert compared.returncode == 0, compared.stderr
    (whole,) = [line.split() for line in compared.stdout.splitlines() if line.split()[:1] == ["all"]]
    assert (whole[2], whole[4], whole[6]) == ("+1.000", "1.000", "1.000")
    for done in (shift, principal, compared):
        assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    (tmp_path / "line").mkdir()
    (tmp_path / "line" / "line.json").write_text('{"other": "adapters"}')
    refused = slmgrpo("dynamics", "compare", run, run, "--eval", "--out", "line", cwd=tmp_path)
    assert refused.returncode == 2 and "holds the line between other adapters" in refused.stderr
    shutil.copytree(Path(run) / "checkpoints" / "step_12" / "adapter", tmp_path / "adapter")
    refused = slmgrpo("dynamics", "compare", "adapter", "adapter", "--eval", cwd=tmp_path)
    assert refused.returncode == 2 and "is no run with held-out rows" in refused.stderr
    refused = slmgrpo("dynamics", "compare", run, "tiny", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "tiny has no adapter" in refused.stderr
