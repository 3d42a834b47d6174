"""Every guard provoked by a real run of the embedded model, and silent on healthy ones."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from strikes import few_rows

from slmgrpo import guards, model
from slmgrpo import train as training
from slmgrpo.callbacks import Silent
from slmgrpo.errors import RunError
from slmgrpo.plan import plan
from slmgrpo.recipe import GUARD_NAMES, Guards
from slmgrpo.recipe_load import load
from slmgrpo.rollout.hf import HfEngine
from slmgrpo.run import RunDir, open_run
from slmgrpo.trainer import packing

README = Path(__file__).parent.parent / "README.md"
SMALL = [
    "grading.workers=1",
    "train.prompts_per_step=3",
    "train.steps=4",
    "sampling.group_size=4",
    "data.heldout=[]",
]


@dataclass
class Seen(Silent):
    """What a person would have seen of a run."""

    warnings: list[str] = field(default_factory=list)
    error: str = ""
    run: RunDir = field(default_factory=lambda: RunDir(Path()))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.run.metrics.read_text().splitlines()]

    @property
    def status(self) -> dict[str, Any]:
        return self.run.read_json("status.json")

    def warned(self, name: str) -> bool:
        return any(text.startswith(f"guard {name}: ") for text in self.warnings)


def trained(out: Path, *overrides: str, resume: bool = False, whole: bool = False) -> Seen:
    """whole: on the quickstart's own data."""
    loaded = load("quickstart", [*SMALL, *(() if whole else (few_rows(),)), *overrides])
    seen = Seen(run=RunDir(out))
    place = {"out": None, "resume": open_run(out)} if resume else {"out": out, "resume": None}
    try:
        training.train(loaded.recipe, plan(loaded), base=loaded.base, observer=seen, **place)
    except RunError as error:
        seen.error = str(error)
    return seen


def rules(folder: Path, body: str) -> str:
    """A `--set` that grades every row by a rule with this body."""
    (folder / "own.py").write_text(f"def rule(completion):\n    {body}\n")
    return few_rows(f"{folder}/own.py:rule")


# each guard, for real


def test_completions_that_are_all_alike_stop_the_run_which_goes_on_with_the_guard_off(tmp_path: Path) -> None:
    cold = ("sampling.top_k=1", "sampling.engine=hf", "train.steps=5")
    seen = trained(tmp_path / "run", *cold)
    assert "guard unique: step 3: " in seen.error and "0 all alike" in seen.error and "3 steps in a row" in seen.error
    assert "--set guards.actions.unique=warn" in seen.error and "--resume" in seen.error
    assert seen.status["state"] == "failed"
    assert [line["step"] for line in seen.metrics] == [1, 2, 3]
    assert set(seen.metrics[-1]["guards"]) == {"unique"}
    assert seen.run.steps() == [3]
    again = trained(tmp_path / "run", *cold, "guards.actions={unique: off}", resume=True)
    assert not again.error
    assert [line["step"] for line in again.metrics] == [1, 2, 3, 4, 5]


def test_a_resumed_run_knows_the_steps_of_before(tmp_path: Path) -> None:
    dull = (rules(tmp_path, "return 0.0"), "guards.silent_steps=4", "train.steps=6")
    first = trained(tmp_path / "run", *dull)
    assert "4 steps in a row" in first.error
    again = trained(tmp_path / "run", *dull, resume=True)
    assert "step 5: " in again.error and "5 steps in a row" in again.error


def test_completions_that_are_cut_off_warn_once_in_view_log_metrics_and_status(tmp_path: Path) -> None:
    seen = trained(tmp_path / "run", "sampling.max_tokens=2")
    assert not seen.error
    (warning,) = [text for text in seen.warnings if text.startswith("guard truncated")]
    assert "a larger sampling.max_tokens" in warning
    assert seen.status["warnings"]["truncated"] == warning
    assert warning in (seen.run.path / "logs" / "attempt_1" / "rank_0.log").read_text()
    assert [line.get("guards", {}).get("truncated") for line in seen.metrics] == [None, None, 1.0, None]


@pytest.mark.parametrize(("paid", "stops"), [("0.0", True), ("1.0", False)])
def test_silent_steps_stop_a_run_unless_everything_is_solved(tmp_path: Path, paid: str, stops: bool) -> None:
    seen = trained(tmp_path / "run", rules(tmp_path, f"return {paid}"), "guards.silent_steps=2")
    assert ("guard silent: step 2: " in seen.error) == stops
    assert bool(seen.error) == stops
    assert not seen.warnings


def test_certainty_of_wrong_answers_warns(tmp_path: Path) -> None:
    cold = ("sampling.temperature=1e-5", "guards.engine_parity=1", "guards.log_prob_paths=1", "train.steps=5")
    seen = trained(tmp_path / "run", *cold, "guards.actions={unique: off}")
    assert seen.warned("entropy") and not seen.error


def test_a_rule_that_breaks_stops_the_run_before_anything_is_learned(tmp_path: Path) -> None:
    seen = trained(tmp_path / "run", rules(tmp_path, "raise KeyError('gold')"))
    assert "guard reward_errors: step 1: " in seen.error and "failed on 12 of 12 completions" in seen.error
    assert "gold" in seen.error
    assert not seen.run.metrics.exists()
    assert not trained(tmp_path / "more", rules(tmp_path, "return 1 / 0"), "guards.actions={reward_errors: warn}").error


def test_a_rule_that_breaks_on_held_out_rows_stops_the_run_unless_its_guard_is_off(tmp_path: Path) -> None:
    rules(tmp_path, "return 1 / 0")
    broken = f"rewards: [{{use: '{tmp_path}/own.py:rule'}}]"
    heldout = ("train.steps=1", f"data.heldout=[{{source: tiny:mcq, split: test, limit: 5, {broken}}}]")
    assert "failed on 5 of 5 completions" in trained(tmp_path / "run", few_rows(), *heldout).error
    assert not trained(tmp_path / "more", few_rows(), *heldout, "guards.actions={reward_errors: off}").error


def test_a_learning_rate_of_next_to_nothing_is_found_after_three_updates(tmp_path: Path) -> None:
    seen = trained(tmp_path / "run", "optimizer.learning_rate=1e-20", "train.prompts_per_step=6")
    assert "guard adapter_moved: step 3: " in seen.error and "is kept (step 3); resume with" in seen.error


@pytest.mark.parametrize(("bad", "stops"), [({2}, False), ({2, 3}, True)])
def test_a_step_that_is_not_finite_is_skipped_and_a_second_in_a_row_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: set[int], stops: bool
) -> None:
    count = 0

    def spoil(policy: model.Policy) -> None:
        def hook(gradient: Any) -> Any:
            nonlocal count
            count += 1
            return gradient * float("nan") if count in bad else gradient

        policy.trainable()[-1][1].register_hook(hook)

    altered(monkeypatch, spoil)
    seen = trained(
        tmp_path / "run", "train.prompts_per_step=6", "train.micro_batch_tokens=100000", "train.save_every=1"
    )
    steps = range(1, 4 if stops else 5)
    assert [bool(line.get("nonfinite")) for line in seen.metrics] == [step in bad for step in steps]
    assert seen.metrics[1]["grad_norm"] is None
    assert ("guard nonfinite: step 3: loss or gradient is not finite, 2 steps in a row" in seen.error) == stops
    assert sum("the step was skipped" in text for text in seen.warnings) == 1
    assert not bad & set(seen.run.steps())
    batch = json.loads((seen.run.path / "nonfinite" / "step_2.json").read_text(), parse_constant=pytest.fail)
    assert batch["rows"][0]["completion_ids"] and len(batch["gradients_not_finite"]) == 1


def altered(monkeypatch: pytest.MonkeyPatch, change: Callable[[model.Policy], None]) -> None:
    """Let `change` have the loaded policy before the run does."""
    load_policy = model.load

    def loading(*arguments: Any, **named: Any) -> model.Policy:
        policy = load_policy(*arguments, **named)
        change(policy)
        return policy

    monkeypatch.setattr(model, "load", loading)


def test_an_engine_of_another_temperature_stops_the_run_before_anything_is_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def warm(recipe: Any, _: Any, policy: model.Policy) -> HfEngine:
        other = recipe.sampling.model_copy(update={"temperature": 1.5})
        return HfEngine(policy.model, policy.tokenizer, other, recipe.seed)

    monkeypatch.setattr(training, "_engine", warm)
    seen = trained(tmp_path / "run")
    assert "guard engine_parity: sampler (hf) and trainer differ by " in seen.error
    assert not seen.run.metrics.exists()


def test_an_engine_that_never_gets_the_adapter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(recipe: Any, _: Any, policy: model.Policy) -> HfEngine:
        return HfEngine(copy.deepcopy(policy.model), policy.tokenizer, recipe.sampling, recipe.seed)

    monkeypatch.setattr(training, "_engine", stale)
    fast = ("optimizer.learning_rate=2e-2", "train.prompts_per_step=6", "train.steps=8")
    seen = trained(tmp_path / "run", *fast)
    assert seen.warned("sampler_gap")
    assert not seen.warned("engine_parity")


def test_a_packed_pass_that_is_wrong_steps_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = packing.layout_of

    def shifted(*arguments: Any, **named: Any) -> packing.Layout:
        layout = right(*arguments, **named)
        layout.positions.add_(3 * (layout.positions > 8))  # completions start three places late
        return layout

    monkeypatch.setattr(packing, "layout_of", shifted)
    seen = trained(tmp_path / "run", "model.backend=transformers")
    assert seen.warned("log_prob_paths") and not seen.error
    assert seen.run.read_json("resolved.json")["log_prob_path"] == "plain"


def test_a_precision_that_the_library_changes_trains_nothing(tmp_path: Path) -> None:
    seen = trained(tmp_path / "run", "model.dtype=float16")  # unsloth's CPU backend takes another
    assert "guard configuration: model.dtype is " in seen.error
    assert "the recipe says 'torch.float16'" in seen.error
    assert not seen.run.metrics.exists()


def test_an_adapter_of_another_strength_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    altered(monkeypatch, lambda policy: setattr(policy.model.peft_config["default"], "lora_alpha", 8))
    assert "lora.alpha is 8, the recipe says 32" in trained(tmp_path / "run").error


# healthy runs


HEALTHY: dict[str, tuple[str, ...]] = {
    "quickstart": ("train.steps=40", "train.prompts_per_step=24", "sampling.group_size=8"),
    "small groups": ("train.prompts_per_step=6",),
    "several updates": ("train.updates_per_rollout=2", "train.prompts_per_step=6"),
    "another seed": ("seed=7", "train.steps=40", "train.prompts_per_step=12", "sampling.group_size=8"),
    "slow": ("optimizer.learning_rate=1e-5", "train.steps=20", "train.prompts_per_step=12"),
    "warmup": ("optimizer.warmup_ratio=0.5", "train.steps=20", "train.prompts_per_step=12"),
    "a reference": ("loss.loss_type=grpo", "loss.beta=0.02", "train.steps=20", "train.prompts_per_step=12"),
    "cispo": ("loss.loss_type=cispo", "loss.epsilon_high=5", "train.steps=20", "train.prompts_per_step=12"),
    "hotter": ("sampling.temperature=1.3", "train.steps=20", "train.prompts_per_step=12"),
    "solved, and going on": ("train.steps=90", "train.prompts_per_step=12", "sampling.group_size=8"),
}


QUICK = ("small groups", "several updates")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in HEALTHY],
)
def test_healthy_runs_hear_nothing(tmp_path: Path, name: str) -> None:
    seen = trained(tmp_path / "run", *HEALTHY[name], whole=name not in QUICK)
    assert not seen.error and not seen.warnings
    assert not any("guards" in line for line in seen.metrics)
    assert seen.status["warnings"] == {}


# decisions alone


LINE: dict[str, Any] = {
    "step": 1,
    "truncated": 0.1,
    "sampler_gap": 1e-7,
    "unsolved": {"share": 0.8, "silent": 0.3, "variety": 0.4, "entropy": 0.3},
    "seconds": {"generation": 1.0},
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("unique", {"unsolved": {"share": 0.8, "variety": 0.0}}),
        ("truncated", {"truncated": 0.9}),
        ("silent", {"unsolved": {"silent": 1.0}}),
        ("entropy", {"unsolved": {"share": 0.8, "entropy": 0.0}}),
        ("nonfinite", {"nonfinite": True}),
        ("adapter_moved", {"adapter_change": 0.0}),
        ("sampler_gap", {"sampler_gap": 0.4}),
    ],
)
def test_a_limit_counts_only_in_steps_in_a_row(name: Any, change: dict[str, Any]) -> None:
    limits = Guards(silent_steps=3, actions={name: "stop"})
    watch, stops = guards.Watch(limits, lambda text: None), []
    needed = guards.steps_of(name, limits)
    for bad in [*[True] * (needed - 1), False, *[True] * needed]:
        line = LINE | {"rows_trained": 0} | ({"adapter_change": 1e-3} | (change if bad else {}))
        stops.append(watch.step(line, []) is not None)
    assert stops == [False] * (2 * needed - 1) + [True]


def test_a_stop_that_cannot_be_saved_still_says_why_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Path:
        raise RunError("no space left")

    monkeypatch.setattr(RunDir, "save_checkpoint", full)
    seen = trained(tmp_path / "run", rules(tmp_path, "return 0.0"), "guards.silent_steps=2")
    assert "guard silent: step 2: " in seen.error and "\nno space left\n" in seen.error
    assert seen.status["state"] == "failed" and "no space left" in seen.status["error"]


def test_updates_on_one_rollout_count_once() -> None:
    watch = guards.Watch(Guards(actions={"unique": "stop"}), lambda text: None)
    alike = LINE | {"rows_trained": 0, "unsolved": {"share": 1.0, "silent": 0.0, "variety": 0.0, "entropy": 1.0}}
    later = alike | {"seconds": {"forward_backward": 1.0}}
    stops = [watch.step(dict(line), []) is not None for line in (alike, later, later, later, alike, later, alike)]
    assert stops == [False] * 6 + [True]


def test_a_run_that_cannot_be_resumed_is_not_told_to() -> None:
    with pytest.raises(guards.GuardStop) as stop:
        guards.Watch(Guards(), lambda text: None, resumable=False).breach("unique", "all alike")
    assert "resume" not in str(stop.value) and str(stop.value).endswith("--set guards.actions.unique=warn")


def test_few_unsolved_groups_say_nothing_about_variety_and_entropy() -> None:
    late = {"unsolved": {"share": 0.1, "silent": 0.1, "variety": 0.0, "entropy": 0.0}}
    assert guards.passed("unique", late, Guards()) == (None, False)
    assert guards.passed("entropy", late, Guards()) == (None, False)


# the README


def readme_table() -> str:
    """One row a guard: name, default limit, action, what it watches, what it usually means."""
    defaults = load("quickstart").recipe
    rows = ["| guard | default limit | action | watches | usually means |", "|---|---|---|---|---|"]
    for name, guard in guards.GUARDS.items():
        limit = "exact"
        if guard.limit:
            section, key = guard.limit.split(".")
            value = getattr(getattr(defaults, section), key)
            limit = f"`{guard.limit}` " + ("by precision" if value is None else f"{value:g}")
        steps = guards.steps_of(name, defaults.guards)
        often = f", {steps} steps in a row" if steps > 1 else ""
        rows.append(f"| `{name}` | {limit}{often} | {guard.action} | {guard.watches} | {guard.means} |")
    return "\n".join(rows)


def test_every_guard_has_a_row_in_the_readme() -> None:
    assert tuple(guards.GUARDS) == GUARD_NAMES
    shown = re.search(r"<!-- guards -->\n(.*?)\n<!-- end -->", README.read_text(), re.DOTALL)
    assert shown and shown[1] == readme_table(), "run `python tests/test_guards.py`"


if __name__ == "__main__":
    text = README.read_text()
    README.write_text(
        re.sub(r"(<!-- guards -->\n).*?(\n<!-- end -->)", rf"\1{readme_table()}\2", text, flags=re.DOTALL)
    )
