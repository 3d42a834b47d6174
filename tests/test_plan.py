"""The plan: the same work on any number of GPUs, arithmetic that the run repeats, refusals with a way out."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slmgrpo.errors import PlanError, RecipeError
from slmgrpo.plan import describe, lr_sums, plan
from slmgrpo.recipe import Data, Evaluation, Loss, Model, Optimizer, Recipe, Sampling, Source, Train
from slmgrpo.recipe_load import load


def recipe(source: Source | None = None, heldout: list[Source] | None = None, **train: object) -> Recipe:
    data = Data(train=[source or Source(source="tiny:math", limit=100)], heldout=heldout or [])
    return Recipe(model=Model(id="tiny"), data=data, train=Train.model_validate({"steps": 10} | train))


sizes = st.integers(1, 400)


@settings(deadline=None)
@given(sizes, st.integers(2, 64), st.integers(1, 4), sizes, st.sampled_from([1, 2, 3, 4, 8]))
def test_a_step_is_the_same_on_any_number_of_gpus(
    prompts: int, group: int, updates: int, steps: int, gpus: int
) -> None:
    spec = recipe(prompts_per_step=prompts * gpus, updates_per_rollout=updates, steps=steps)
    spec = spec.model_copy(update={"sampling": Sampling(group_size=group)})
    one, many = plan(spec, rows=1), plan(spec, gpus=gpus, rows=1)
    assert (one.steps, one.rollouts, one.prompts_per_step, one.completions_per_step) == (
        many.steps,
        many.rollouts,
        many.prompts_per_step,
        many.completions_per_step,
    )
    assert many.prompts_per_rank * gpus == many.prompts_per_step
    assert many.completions_per_rank == many.prompts_per_rank * group
    assert (many.rollouts - 1) * updates < many.steps <= many.rollouts * updates
    assert many.completions == many.rollouts * many.completions_per_step == many.prompts * group
    assert many.completion_tokens_max == many.rollouts * many.completion_tokens_per_step_max


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 64), st.integers(1, 4))
def test_the_settings_that_a_refusal_names_work(prompts: int, gpus: int, nodes: int) -> None:
    """`gpus` of each of `nodes` machines, as --gpus and --nodes say it."""
    spec, ranks = recipe(prompts_per_step=prompts), gpus * nodes
    if prompts % ranks == 0:
        assert plan(spec, gpus=ranks, rows=1, nodes=nodes).prompts_per_rank == prompts // ranks
        return
    with pytest.raises(PlanError) as error:
        plan(spec, gpus=ranks, nodes=nodes)
    sets, _, counts = str(error.value).split("; use --set train.prompts_per_step=")[1].partition(", or --gpus ")
    for size in re.findall(r"\d+", sets):
        assert plan(recipe(prompts_per_step=int(size)), gpus=ranks, rows=1).prompts_per_rank * ranks == int(size)
    for count in re.findall(r"\d+", counts):
        assert plan(spec, gpus=int(count) * nodes, rows=1).prompts_per_step == prompts


def test_a_refusal_reads_like_this() -> None:
    with pytest.raises(PlanError) as error:
        plan(recipe(prompts_per_step=12), gpus=8)
    assert str(error.value) == (
        "plan: train.prompts_per_step=12 on 8 GPUs is not the same number of whole groups for each; "
        "use --set train.prompts_per_step=8 or 16, or --gpus 6 or 12"
    )
    with pytest.raises(PlanError) as error:
        plan(recipe(prompts_per_step=12), gpus=16, nodes=2)
    assert str(error.value).endswith("use --set train.prompts_per_step=16, or --gpus 6")
    with pytest.raises(PlanError, match="write --gpus 1 or more"):
        plan(recipe(), gpus=0)


def test_what_runs_in_one_process_is_refused_on_several_gpus() -> None:
    baseline = load("quickstart", ["trainer=trl"])
    with pytest.raises(PlanError, match="trainer=trl on 2 GPUs: this baseline runs in one process; use --gpus 1"):
        plan(baseline, gpus=2)
    started = load("quickstart", ["cold_start={data: [{source: 'file:rows.jsonl'}], steps: 4}"])
    with pytest.raises(PlanError, match="make the adapter first"):
        plan(started, gpus=2)
    assert plan(baseline).gpus == plan(started).gpus == 1


# Rows and epochs


def test_epochs_become_whole_rollouts_over_counted_rows() -> None:
    planned = plan(recipe(steps=None, epochs=2, prompts_per_step=8, updates_per_rollout=2))
    assert (planned.rows, planned.rollouts, planned.steps) == (100, 25, 50)
    assert planned.epochs == 2.0


def test_part_of_an_epoch_is_at_least_one_rollout() -> None:
    assert plan(recipe(steps=None, epochs=1e-3)).steps == 1


def test_epochs_of_a_hub_source_need_its_rows() -> None:
    hub = Source(source="hub:a/b")
    with pytest.raises(PlanError) as error:
        plan(recipe(hub, steps=None, epochs=2))
    assert str(error.value) == (
        "plan: train.epochs=2 needs the number of rows of hub:a/b; use --set data.train.0.rows=N "
        "(its page says how many), or --set train.epochs=null --set train.steps=300"
    )
    assert plan(recipe(hub, steps=None, epochs=2), rows=800).steps == 200
    assert plan(recipe(Source(source="hub:a/b", rows=800), steps=None, epochs=2)).steps == 200
    assert plan(recipe(Source(source="hub:a/b", rows=800, limit=80), steps=None, epochs=2)).steps == 20
    assert plan(recipe(hub)).epochs is None


def test_a_file_is_counted_as_it_will_be_read(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n\n{"question": "b"}\n{"question": "c"}\n')
    for source, count in [
        (Source(source="file:rows.jsonl"), 3),
        (Source(source="file:rows.jsonl", limit=2), 2),
        (Source(source="file:rows.jsonl", split="train[:-1]"), 2),
    ]:
        assert plan(recipe(source, steps=None, epochs=8, prompts_per_step=1), base=tmp_path).steps == 8 * count


def test_a_missing_file_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        plan(recipe(Source(source="file:nowhere.jsonl")), base=tmp_path)


def test_a_generator_says_its_own_size() -> None:
    gym = Source(source="reasoning_gym:chain_sum")
    assert plan(recipe(gym)).rows == 1000
    assert plan(recipe(gym.model_copy(update={"options": {"size": 50}}))).rows == 50
    assert plan(recipe(gym.model_copy(update={"limit": 7}))).rows == 7


# Tokens


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), min_size=1, max_size=24), st.integers(1, 3000))
def test_micro_batches_stay_under_their_bound(lengths: list[int], budget: int) -> None:
    group = 4
    spec = recipe(prompts_per_step=len(lengths), micro_batch_tokens=budget).model_copy(
        update={"sampling": Sampling(group_size=group, max_tokens=32)}
    )
    spec = spec.model_copy(update={"prompt": spec.prompt.model_copy(update={"max_tokens": 32})})
    batches, rows, longest = 0, 0, 0
    for length in lengths:  # groups one after the other, padded to the longest row; whole ones where they fit
        if rows and (rows + group) * max(longest, length) <= budget:
            rows, longest = rows + group, max(longest, length)
            continue
        batches, rows, longest = batches + 1, 0, length
        for _ in range(group):
            if rows and (rows + 1) * length > budget:
                batches, rows = batches + 1, 0
            rows += 1
    assert batches <= plan(spec, rows=1).micro_batches_max


def test_a_group_above_the_token_budget_is_noted() -> None:
    notes = plan(recipe(micro_batch_tokens=1000)).notes
    assert notes == (
        "a full group has 8 x 1024 = 8,192 tokens, more than train.micro_batch_tokens=1,000: such a group is split",
    )


# Schedule


@settings(deadline=None)
@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 300), st.floats(0, 0.99))
def test_sums_of_the_schedule_are_those_of_its_steps(name: str, steps: int, ratio: float) -> None:
    warmup = math.ceil(ratio * steps)
    factors = []
    for step in range(steps):
        progress = (step - warmup) / max(1, steps - warmup)
        after = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[name]
        factors.append(step / warmup if step < warmup else after)
    first, second = lr_sums(name, steps, warmup)
    assert first == pytest.approx(math.fsum(factors), abs=1e-9)
    assert second == pytest.approx(math.fsum(factor**2 for factor in factors), abs=1e-9)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_the_schedule_is_the_one_transformers_makes(name: str) -> None:
    import torch
    import transformers

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    kind = "constant_with_warmup" if name == "constant" else name
    scheduler = transformers.get_scheduler(kind, optimizer, num_warmup_steps=4, num_training_steps=20)
    rates = []
    for _ in range(20):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert lr_sums(name, 20, 4) == pytest.approx((sum(rates), sum(rate**2 for rate in rates)))


def test_learning_rate_sums_carry_the_rate() -> None:
    spec = recipe(steps=100).model_copy(update={"optimizer": Optimizer(learning_rate=2e-3)})
    planned = plan(spec)
    assert planned.lr_sum == pytest.approx(0.2)
    assert planned.lr_norm == pytest.approx(0.02)


# Checkpoints and evaluations


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(1, 200), st.integers(1, 5))
def test_checkpoints_are_counted_as_the_loop_writes_them(every: int, steps: int, updates: int) -> None:
    step = written = 0
    while step < steps:
        taken = min(updates, steps - step)
        step += taken
        written += step // every > (step - updates) // every or step >= steps
    assert plan(recipe(steps=steps, save_every=every, updates_per_rollout=updates), rows=1).checkpoints == written


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 200), st.integers(1, 5))
def test_evaluations_are_counted_as_the_loop_runs_them(every: int, steps: int, updates: int) -> None:
    step, run = 0, 2
    while step < steps:
        step += min(updates, steps - step)
        run += every > 0 and step < steps and step // every > (step - updates) // every
    spec = recipe(heldout=[Source(source="tiny:math", split="test")], steps=steps, updates_per_rollout=updates)
    spec = spec.model_copy(update={"eval": Evaluation(every=every)})
    assert plan(spec, rows=1).evaluations == run
    assert plan(recipe(steps=steps), rows=1).evaluations == 0


# Notes and text


@pytest.mark.parametrize(
    ("loss", "note"),
    [
        (Loss(beta=0.1), "rows without signal are run too, because of loss.beta > 0"),
        (
            Loss(loss_type="dr_grpo"),
            "dr_grpo's paper does not divide by a deviation; here loss.scale_rewards is group",
        ),
        (
            Loss(loss_type="luspo"),
            "luspo's paper takes ratios by sequence; here loss.importance_sampling_level is token",
        ),
        (
            Loss(importance_sampling_level="sequence"),
            "dapo sums over tokens, so sequence ratios count by length; GSPO's paper uses grpo",
        ),
    ],
)
def test_what_is_allowed_but_odd_is_noted(loss: Loss, note: str) -> None:
    assert plan(recipe().model_copy(update={"loss": loss})).notes == (note,)


def test_a_plain_recipe_has_no_notes() -> None:
    assert plan(recipe()).notes == ()


def test_a_plan_is_json() -> None:
    planned = plan(load("code_3b"), gpus=8)
    assert json.loads(json.dumps(asdict(planned)))["prompts_per_rank"] == 4


def test_a_plan_reads_well_in_80_columns() -> None:
    pairs = describe(plan(load("code_3b"), gpus=8))
    assert dict(pairs)["a step"] == "32 prompts x 8 = 256 completions"
    assert dict(pairs)["a rank"] == "4 prompts of a step"
    assert all(len(what) <= 18 and len(how_much) <= 76 for what, how_much in pairs if what != "note")


def test_huge_numbers_are_planned_too() -> None:
    planned = plan(recipe(steps=10**9, save_every=1), rows=1)
    assert planned.checkpoints == 10**9
    assert describe(planned)
