"""The engine contract: requests in, completions out as they finish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from slmgrpo.recipe import Sampling


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be completed `n` times.

    prompt_ids: token ids with the chat template applied.
    members: group-member numbers, one completion each (usually range(G)).
    prompt_key: stable identity of the prompt in the data set; with (seed, step, member, position) it keys the noise.
    greedy: take the likeliest token in place of a draw; log-probs stay those under the temperature.
    """

    index: int
    prompt_ids: tuple[int, ...]
    members: tuple[int, ...]
    prompt_key: int
    max_tokens: int
    greedy: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished completion of request `index`, member `member`.

    log_probs: of the sampled tokens under the unfiltered logits / temperature, (len(token_ids),).
    finish_reason: `stop` (an end token was written, it is the last of token_ids) or `length`.
    """

    index: int
    member: int
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]


class Writer(Protocol):
    """Answers requests."""

    name: str
    end_ids: frozenset[int]
    """Tokens that end a completion by themselves."""

    def generate(self, requests: list[Request], *, step: int) -> Iterator[Completion]:
        """Yield every completion of every request once, in any order, as they finish."""
        ...


class Engine(Writer, Protocol):
    """Writes completions with the policy's current adapter."""

    @property
    def context(self) -> int | None:
        """Tokens that a prompt and its completion may have together; None: without bound."""
        ...

    def sync(self, step: int) -> None:
        """Take over the adapter's present weights; a no-op where engine and trainer share them."""
        ...

    def under(self, settings: Sampling, seed: int, *, max_batch_tokens: int) -> Engine:
        """The same weights under other sampling settings, for evaluations; closing it leaves this engine as it is.

        max_batch_tokens: tokens of keys and values held at once, where the engine does not see to that itself.
        """
        ...

    def close(self) -> None: ...
