"""The loop's gradient against one plain pass over every row: micro-batches, order and dropped rows do not change it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import VOCABULARY, random_model, with_adapter
from replayed import Row, context_of, flat_gradient, groups_of, loop_gradient
from torch import Tensor

from slmgrpo.guards import GuardStop, Watch
from slmgrpo.model import Policy
from slmgrpo.plan import plan
from slmgrpo.recipe import Guards, Loss, Recipe
from slmgrpo.recipe_load import load
from slmgrpo.rollout.groups import Group
from slmgrpo.trainer import losses, update
from slmgrpo.trainer.advantages import advantages
from slmgrpo.trainer.logprobs import TokenRow, log_probs
from slmgrpo.trainer.update import _pad

MAX_TOKENS = 6
RECIPE = load("quickstart", [f"sampling.max_tokens={MAX_TOKENS}", "sampling.temperature=0.8"]).recipe
PLAN = plan(RECIPE)
POLICY = Policy(with_adapter(random_model("llama")), None, "", "transformers", torch.device("cpu"))

TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=MAX_TOKENS)
ROW = st.builds(
    lambda ids, reward, noise, cut: Row(
        tuple(ids), cut and len(ids) == MAX_TOKENS, reward, tuple(-4 + noise[i] for i in range(len(ids)))
    ),
    ids=TOKENS,
    reward=st.sampled_from([0.0, 1.0, 1.0, None]),
    noise=st.lists(st.floats(-0.5, 0.5), min_size=MAX_TOKENS, max_size=MAX_TOKENS),
    cut=st.booleans(),
)
PROMPT = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5).map(tuple)
ROLLOUT = st.lists(st.tuples(PROMPT, st.lists(ROW, min_size=4, max_size=4)), min_size=1, max_size=4)
LOSS = st.fixed_dictionaries(
    {
        "loss_type": st.sampled_from(["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"]),
        "importance_sampling_level": st.sampled_from(["token", "sequence"]),
        "scale_rewards": st.sampled_from(["group", "batch", "none"]),
        "beta": st.sampled_from([0.0, 0.0, 0.05]),
        "entropy_coef": st.sampled_from([0.0, 0.0, 0.01]),
        "mask_truncated_completions": st.booleans(),
        "sampling_correction": st.sampled_from(["none", "bypass", "token_truncate", "sequence_mask"]),
    }
)


def plain_gradient(groups: list[Group], recipe: Recipe) -> Tensor:
    """Every row of the step, silent ones too, right-padded in a single pass."""
    members = [(group.prompted.prompt_ids, member.completion) for group in groups for member in group.members]
    rows = [TokenRow(prompt, completion.token_ids) for prompt, completion in members]
    rewards = [[member.reward for member in group.members] for group in groups]
    weights = [weight for group in advantages(rewards, recipe.loss.scale_rewards) for weight in group]
    truncated = [completion.finish_reason == "length" for _, completion in members]
    model, temperature = POLICY.model, recipe.sampling.temperature
    with torch.no_grad(), model.disable_adapter():
        reference = log_probs(model, rows, temperature).log_probs
    passed = log_probs(model, rows, temperature, entropy=True, entropy_grad=True)
    batch = losses.LossBatch(
        mask=passed.mask,
        advantages=torch.tensor(weights),
        truncated=torch.tensor(truncated),
        sampler=_pad([completion.log_probs for _, completion in members], passed.log_probs),
        reference=reference,
    )
    lengths = [len(row.completion_ids) for row in rows]
    norms = losses.norms_of(lengths, truncated, recipe.loss, max_tokens=MAX_TOKENS)
    losses.policy_loss(passed.log_probs, batch, recipe.loss, norms, entropies=passed.entropies).loss.backward()
    return flat_gradient(POLICY)


@pytest.mark.parametrize("filtered", [False, True])
def test_log_probs_of_a_filtered_distribution_are_compared_with_none(filtered: bool) -> None:
    """vLLM renormalises by its filters, so such log-probs are no measure of the engine."""
    sampling = RECIPE.sampling.model_copy(update={"top_p": 0.5 if filtered else 1.0})
    recipe = RECIPE.model_copy(update={"sampling": sampling, "loss": Loss(sampling_correction="none")})
    ctx = context_of(POLICY, recipe, PLAN, optimizer=None, scheduler=None)
    ctx.guards = Watch(Guards(), print)
    groups = groups_of([(1, 2)], [[Row((3, 4), False, float(reward), (-0.1, -0.1)) for reward in range(4)]])
    if filtered:
        assert update.work_of(ctx, groups, [[-1.0, 0.0, 0.0, 1.0]]).micros[0].sampler is None
        return
    with pytest.raises(GuardStop, match="engine_parity"):
        update.work_of(ctx, groups, [[-1.0, 0.0, 0.0, 1.0]])


@settings(max_examples=40, deadline=None)
@given(rollout=ROLLOUT, loss=LOSS, micro_batch_tokens=st.integers(1, 80), order=st.randoms(use_true_random=False))
def test_the_gradient_depends_neither_on_micro_batches_nor_on_order_nor_on_dropped_rows(
    rollout: list[tuple[tuple[int, ...], list[Row]]], loss: dict[str, Any], micro_batch_tokens: int, order: Any
) -> None:
    train = RECIPE.train.model_copy(update={"micro_batch_tokens": micro_batch_tokens})
    recipe = RECIPE.model_copy(update={"loss": Loss.model_validate(loss), "train": train})
    prompts, rows = zip(*rollout, strict=True)
    whole = plain_gradient(groups_of(prompts, rows), recipe)
    shuffled = [(prompt, order.sample(group, len(group))) for prompt, group in order.sample(rollout, len(rollout))]
    prompts, rows = zip(*shuffled, strict=True)
    looped = loop_gradient(POLICY, recipe, PLAN, groups_of(prompts, rows))
    assert (looped - whole).norm() <= 1e-6 * whole.norm() + 1e-9


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_float16_gradient_keeps_its_small_numbers_when_the_step_has_many_tokens(loss_type: str, packed: bool) -> None:
    """Divided by 262,144 tokens, a token's share would be below what float16 can tell apart."""
    length = 2**13
    base = random_model("llama", max_position_embeddings=2 * length, initializer_range=0.2).half()
    model = with_adapter(base).float()
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()  # the same numbers in both precisions
    policy = Policy(model, None, "", "transformers", torch.device("cpu"))
    loss = Loss.model_validate({"loss_type": loss_type, "sampling_correction": "none"})
    recipe = RECIPE.model_copy(
        update={"loss": loss, "sampling": RECIPE.sampling.model_copy(update={"max_tokens": length})}
    )
    ids = torch.randint(VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(0)).tolist()
    learned = [Row(tuple(row), False, float(i % 2)) for i, row in enumerate(ids)]
    silent = [[Row((1,) * length, False, 1.0)] * 4] * 8  # counted, and not run: their rewards are equal
    groups = groups_of([(5, 6, 7)] * 9, [learned, *silent])
    exact = loop_gradient(policy, recipe, PLAN, groups, packed=packed)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.half()
    assert model.dtype == torch.float16
    half = loop_gradient(policy, recipe, PLAN, groups, packed=packed)
    assert half.dtype == torch.float32
    assert (half - exact).norm() <= 0.02 * exact.norm()
