"""The questions of a run: rows rendered as prompts, those short enough, options shuffled; what the log says of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from slmgrpo import data, prompts
from slmgrpo.errors import RecipeError
from slmgrpo.recipe import Recipe, Source
from slmgrpo.rewards.base import Reward
from slmgrpo.rewards.shuffle import one_letter_baseline, shuffle_options
from slmgrpo.rollout.groups import Prompted

log = logging.getLogger("slmgrpo")


def prompted_of(
    rows: Sequence[data.Row],
    sources: Sequence[Source],
    rules: Sequence[tuple[Reward, ...]],
    recipe: Recipe,
    tokenizer: Any,
) -> dict[str, Prompted]:
    """Rendered prompts by row id, those within prompt.max_tokens; options shuffled where a source asks for it."""
    orders = [sources[row["source_index"]].shuffle_options for row in rows]
    plain = [ordered(row, order, recipe.seed) for row, order in zip(rows, orders, strict=True)]
    kept = {}
    for row, order, rendered in zip(plain, orders, prompts.render_all(plain, recipe.prompt, tokenizer), strict=True):
        if len(rendered.ids) > recipe.prompt.max_tokens:
            continue
        own = rules[row["source_index"]]
        variants: tuple[Prompted, ...] = ()
        if order == "member":
            turned = [_shuffled(row, recipe.seed, member) for member in range(recipe.sampling.group_size)]
            seen = prompts.render_all(turned, recipe.prompt, tokenizer)
            variants = tuple(Prompted(r, p.ids, p.prefill, own) for r, p in zip(turned, seen, strict=True))
            if any(len(variant.prompt_ids) > recipe.prompt.max_tokens for variant in variants):
                continue
        kept[row["id"]] = Prompted(row, rendered.ids, rendered.prefill, own, variants)
    return kept


def ordered(row: data.Row, order: str | None, seed: int) -> data.Row:
    """The row as a single prompt shows it. order: its source's `shuffle_options`; item alone shuffles here."""
    if order is None:
        return row
    shuffled = _shuffled(row, seed, None)  # also refuses what no member could shuffle
    return shuffled if order == "item" else row


def _shuffled(row: data.Row, seed: int, member: int | None) -> data.Row:
    if not row.get("choices") or prompts.question(row) == row["question"]:
        raise RecipeError(
            f"shuffle_options: {row['id']} has no `choices`, or its question lists them itself; take it out"
        )
    return shuffle_options(row, seed=seed, member=member)


def check_lengths(rows: data.Rows, kept: dict[str, Prompted], recipe: Recipe) -> None:
    """A source without a prompt that is short enough would vanish from the mixture."""
    left = {prompted.row["source_index"] for prompted in kept.values()}
    lost = sorted({row["source_index"] for row in rows} - left)
    if lost:
        names = ", ".join(recipe.data.train[index].source for index in lost)
        raise RecipeError(
            f"data.train: every prompt of {names} is longer than prompt.max_tokens={recipe.prompt.max_tokens}; raise it"
        )


def lengths_of(kept: dict[str, Prompted]) -> dict[str, int]:
    """Tokens of each row's prompt, in the longest order of its options."""
    return {row_id: max(len(one.prompt_ids) for one in (p, *p.variants)) for row_id, p in kept.items()}


def check_context(train: Mapping[str, int], heldout: Mapping[str, int], recipe: Recipe, context: int | None) -> None:
    """A prompt with sampling.max_tokens behind it that goes beyond the context would end the run when its turn comes.

    train, heldout: tokens of each row's prompt. context: the model's, in tokens; None: without bound.
    """
    if context is None:
        return
    limit, problems, longest = recipe.sampling.max_tokens, [], 0
    for name, lengths in (("train", train), ("heldout", heldout)):
        row_id = max(lengths, key=lambda row_id: lengths[row_id], default=None)
        if row_id is not None and lengths[row_id] + limit > context:
            longest = max(longest, lengths[row_id])
            problems.append(
                f"data.{name}: the prompt of {row_id} ({lengths[row_id]} tokens) and sampling.max_tokens={limit} make "
                f"{lengths[row_id] + limit} tokens, {recipe.model.id} has {context} positions"
            )
    if problems:
        ways = {"sampling.max_tokens": context - longest, "prompt.max_tokens": context - limit}
        advice = " or ".join(f"{key}={room}" for key, room in ways.items() if room > 0)
        raise RecipeError("\n".join([*problems, f"set {advice}" if advice else f"lower {' and '.join(ways)}"]))


def log_data(recipe: Recipe, *parts: tuple[data.Rows, dict[str, Prompted]]) -> None:
    """Counts, the readers' notes, and what always naming one letter would score; parts: rows and their prompts."""
    for rows, kept in parts:
        log.info("%d rows, %d prompts within %d tokens", len(rows), len(kept), recipe.prompt.max_tokens)
        for note in rows.notes:
            log.warning("%s", note)
        choice = [prompted.row for prompted in kept.values() if prompted.row.get("choices")]
        if choice:
            always = one_letter_baseline(choice)
            log.info(
                "always naming %s would be right in %.1f %% of %d rows", always.letter, 100 * always.share, always.rows
            )
