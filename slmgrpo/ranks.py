"""The processes of one run and how they agree: objects gathered, gradients summed, errors and signals shared."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from slmgrpo.errors import PlanError, RecipeError, RunError, SlmgrpoError
from slmgrpo.interrupt import Interrupted, Interrupts
from slmgrpo.pulse import Pulse

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("slmgrpo")
T = TypeVar("T")

LAUNCHER = "SLMGRPO_LAUNCHER"
"""Environment of a worker: the process that launched it, whose end is its own."""
LIMIT = timedelta(hours=1)
"""A collective that takes longer ends the run; who keeps the others waiting is said long before (pulse.py)."""


@dataclass(frozen=True)
class Ranks:
    """This process among `world` equal ones; alone it needs no torch.distributed. All ranks call a method together.

    local_rank: its number on this machine, which is also its GPU's.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    pulse: Pulse = field(default_factory=Pulse, repr=False, compare=False)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and talks to people."""
        return self.rank == 0

    def own(self, items: Sequence[T]) -> Sequence[T]:
        """This rank's share of what all ranks have."""
        return items[self.rank :: self.world]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on every rank. It goes through the CPU: for objects, not for gradients."""
        if self.world == 1:
            return [value]
        from torch import distributed

        parts: list[Any] = [None] * self.world
        with self._waiting():
            distributed.all_gather_object(parts, value)
        return parts

    def gather_shares(self, share: Sequence[T]) -> list[T]:
        """The whole, in its order, from what each rank made of its `own` items."""
        parts = self.gather(list(share))
        return [parts[i % self.world][i // self.world] for i in range(sum(map(len, parts)))]

    @contextmanager
    def together(self, interrupts: Interrupts | None = None) -> Iterator[None]:
        """What each rank does for itself; at the end an error or a signal of one rank is raised on all.

        interrupts: signals end this rank's part at once; without it they wait for the next block that lets them in.
        """
        if self.world == 1:
            yield
            return
        own: BaseException | None = None
        try:
            with interrupts.released() if interrupts else nullcontext():
                yield
        except (Exception, Interrupted) as error:
            own = error
            if not isinstance(error, SlmgrpoError | Interrupted):
                log.error("%s", traceback.format_exc())
        faults = self.gather(None if own is None else _Fault.of(own))
        raise_shared(faults, own, self.rank)

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """One all-reduce of the flat gradient, in place; a rank without rows adds zeros."""
        import torch
        from torch import distributed

        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if self.world == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        with self._waiting():
            distributed.all_reduce(flat)
        _put(flat, gradients)

    def broadcast(self, parameters: Sequence[Tensor]) -> None:
        """Rank 0's values on every rank, in place."""
        import torch
        from torch import distributed

        if self.world == 1:
            return
        with torch.no_grad(), self._waiting():
            flat = torch.cat([p.flatten() for p in parameters])
            distributed.broadcast(flat, src=0)
            _put(flat, parameters)

    def others(self, value: str) -> list[int]:
        """Ranks that hold another value than rank 0, the same list on every rank."""
        found = self.gather(value)
        return [rank for rank, other in enumerate(found) if other != found[0]]

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        with self.pulse.waiting():
            try:
                yield
            except RuntimeError as error:  # torch's DistBackendError is one
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                raise RunError(f"rank {self.rank} of {self.world} lost the others ({reason})") from error


@dataclass(frozen=True)
class _Fault:
    """An error in a form that every rank can read, whatever its class needs to be made."""

    kind: type[SlmgrpoError]
    text: str
    signal: int = 0

    @classmethod
    def of(cls, error: BaseException) -> _Fault:
        if isinstance(error, Interrupted):
            return cls(RunError, "", error.exit_code - 128)
        for kind in (RecipeError, PlanError):
            if isinstance(error, kind):
                return cls(kind, str(error))
        text = str(error) if isinstance(error, SlmgrpoError) else f"{type(error).__name__}: {error}"
        return cls(RunError, text)


ALONE = Ranks()


def raise_shared(faults: Sequence[_Fault | None], own: BaseException | None, rank: int) -> None:
    """Raise the same on every rank: the first rank's error, or the first signal where there is no error."""
    found = [(i, fault) for i, fault in enumerate(faults) if fault is not None]
    if not found:
        return
    culprit, fault = min(found, key=lambda pair: (bool(pair[1].signal), pair[0]))
    if fault.signal:
        raise own if culprit == rank and own is not None else Interrupted(fault.signal)
    everywhere = all(other == fault for other in faults)
    raise fault.kind(fault.text if everywhere else f"rank {culprit}: {fault.text}") from own


def of_environment() -> Ranks:
    """What torchrun says this process is; one alone where nothing started it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks()
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined() -> Iterator[Ranks]:
    """The process group of this run from torchrun's environment, ended whatever happens: nccl and gloo, or gloo."""
    ranks = of_environment()
    if ranks.world == 1:
        yield ranks
        return
    import torch
    from torch import distributed

    if LAUNCHER in os.environ:
        _end_with(int(os.environ[LAUNCHER]))
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(ranks.local_rank)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=LIMIT)
    try:
        yield ranks
        ranks.gather(None)  # nobody leaves while another still reads from it
    finally:
        distributed.destroy_process_group()


def _end_with(parent: int) -> None:
    """Get SIGTERM, and so save and end, when the launcher is killed; Linux only."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise RunError("the launcher has ended before its workers began")


def _put(flat: Tensor, parts: Sequence[Tensor]) -> None:
    start = 0
    for part in parts:
        part.copy_(flat[start : start + part.numel()].view_as(part))
        start += part.numel()
