"""Worker processes that judge completions beside generation: one deadline a judgement, nothing stalls, nothing is lost.

A judgement is one rule on one completion. Equal judgements are made once. Workers are fresh Python processes without
torch and without threads, so math-verify's alarms work in them; one that is stuck or dead is replaced, and the
judgement that it was making becomes a verdict of its own.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import pickle
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from statistics import quantiles
from typing import Any

from slmgrpo.errors import RunError
from slmgrpo.rewards.base import Reward, Verdict
from slmgrpo.rewards.worker import Worker

CHUNK = 16
"""Judgements sent to a worker at once: few enough to share the work evenly, enough to make pipes cheap."""
REMEMBERED = 100_000
"""Verdicts kept for equal judgements, the oldest forgotten first."""
DEATHS = 2
"""Workers that may die over one judgement before it counts as an error of the rule."""


@dataclass(frozen=True)
class Task:
    """One completion to be judged by all its rules. key: the caller's name for it."""

    key: int
    rewards: tuple[Reward, ...]
    prompt: str
    completion: str
    completion_ids: tuple[int, ...]
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class RuleStats:
    """What a rule's judgements cost and gave since the pool was opened; p50 and p95 in seconds, without repetitions."""

    statuses: dict[str, int]
    p50_s: float
    p95_s: float
    total_s: float


@dataclass
class _Job:
    """One judgement; `waiting` are the (task, rule name) that get its verdict."""

    identity: Hashable
    reward: Reward
    inputs: tuple[str, str, tuple[int, ...], Mapping[str, Any]]
    waiting: list[tuple[_Pending, str]] = field(default_factory=list)
    deaths: int = 0


@dataclass
class _Pending:
    task: Task
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return len(self.verdicts) == len(self.task.rewards)


class Pool:
    """Use it as a context manager; `submit` never waits, `drain` and `grade` do.

    timeout_s: wall time of one judgement; beyond it the verdict is 0 with status `timeout` and the worker is replaced.
    sandbox: for rules that run code, handed to the workers.
    """

    def __init__(self, workers: int, timeout_s: float = 10.0, sandbox: str = "strict") -> None:
        self._timeout_s = timeout_s
        self._sandbox = sandbox
        self._lock = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._open: dict[Hashable, _Job] = {}
        self._known: OrderedDict[Hashable, Verdict] = OrderedDict()
        self._submitted: deque[_Pending] = deque()
        self._statuses: dict[str, Counter[str]] = collections.defaultdict(Counter)
        self._seconds: dict[str, deque[float]] = collections.defaultdict(lambda: deque(maxlen=10_000))
        self._total_s: dict[str, float] = collections.defaultdict(float)
        self._closing = False
        self._failure: BaseException | None = None
        self._wake_out, self._wake_in = os.pipe()
        self._workers = [Worker(sandbox) for _ in range(workers)]
        self._manager = threading.Thread(target=self._manage, name="reward-pool", daemon=True)
        self._manager.start()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, task: Task) -> None:
        """Start judging; returns at once."""
        pending = _Pending(task)
        with self._lock:
            self._submitted.append(pending)
            before = len(self._jobs)
            for reward in task.rewards:
                self._ask(pending, reward)
            more = len(self._jobs) > before
        if more:
            self._wake()

    def drain(self) -> Iterator[tuple[int, dict[str, Verdict]]]:
        """The verdicts of everything submitted so far, in that order, each as soon as it is there."""
        while True:
            with self._lock:
                if not self._submitted:
                    return
                pending = self._submitted[0]
                while not pending.done and self._failure is None:
                    self._lock.wait(1.0)
                if self._failure is not None:
                    raise RunError(f"the reward workers cannot go on: {self._failure}") from self._failure
                self._submitted.popleft()
            yield pending.task.key, {reward.name: pending.verdicts[reward.name] for reward in pending.task.rewards}

    def grade(self, tasks: Sequence[Task]) -> list[dict[str, Verdict]]:
        """Verdicts of these tasks, in order; nothing else may be under way."""
        for task in tasks:
            self.submit(task)
        return [verdicts for _, verdicts in self.drain()]

    def stats(self) -> dict[str, RuleStats]:
        """Per rule: status counts of all verdicts, and the time that judging took."""
        with self._lock:
            return {
                name: RuleStats(dict(self._statuses[name]), *_percentiles(self._seconds[name]), self._total_s[name])
                for name in sorted(self._statuses)
            }

    def close(self) -> None:
        """End all workers; verdicts that nobody has drained are gone."""
        with self._lock:
            self._closing = True
        self._wake()
        self._manager.join(timeout=5)
        for worker in self._workers:
            worker.end()
        with contextlib.suppress(OSError):
            os.close(self._wake_in)
            os.close(self._wake_out)

    # under the lock

    def _ask(self, pending: _Pending, reward: Reward) -> None:
        task = pending.task
        inputs = (task.prompt, task.completion, task.completion_ids, _needed(reward, task.columns))
        quick = reward.quick(task.prompt, task.completion, task.completion_ids, task.columns)
        if quick is not None:
            self._settle(pending, reward.name, quick)
            return
        identity = _identity(reward, inputs)
        if identity in self._known:
            self._known.move_to_end(identity)
            self._settle(pending, reward.name, self._known[identity])
        elif identity in self._open:
            self._open[identity].waiting.append((pending, reward.name))
        else:
            job = _Job(identity, reward, inputs, [(pending, reward.name)])
            self._open[identity] = job
            self._jobs.append(job)

    def _settle(self, pending: _Pending, name: str, verdict: Verdict) -> None:
        pending.verdicts[name] = verdict
        self._statuses[name][verdict.status] += 1
        if pending.done:
            self._lock.notify_all()

    def _finish(self, job: _Job, verdict: Verdict, seconds: float) -> None:
        with self._lock:
            del self._open[job.identity]
            if verdict.status not in ("error", "timeout"):  # those may be the machine's fault: another try is allowed
                self._known[job.identity] = verdict
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)
            self._seconds[job.reward.name].append(seconds)
            self._total_s[job.reward.name] += seconds
            for pending, name in job.waiting:
                self._settle(pending, name, verdict)

    # the manager's thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_in, b"x")

    def _manage(self) -> None:
        try:
            while not self._closing:
                self._hand_out()
                ready = wait([self._wake_out, *(w.connection for w in self._workers)], self._patience())
                for item in ready:
                    if item == self._wake_out:
                        os.read(self._wake_out, 65536)
                    else:
                        self._collect(next(w for w in self._workers if w.connection is item))
                for worker in self._workers:
                    if worker.chunk and worker.elapsed() > self._timeout_s:
                        self._replace(worker, Verdict(0.0, "timeout", why=f"not judged within {self._timeout_s:g} s"))
        except BaseException as error:  # the thread must not die silently: whoever waits for verdicts gets it
            with self._lock:
                self._failure = error
                self._lock.notify_all()

    def _hand_out(self) -> None:
        for worker in self._workers:
            if worker.chunk:
                continue
            with self._lock:
                share = -(-len(self._jobs) // (2 * len(self._workers)))
                chunk = [self._jobs.popleft() for _ in range(min(CHUNK, share))]
            if chunk and not worker.send(chunk):
                self._died(worker)

    def _patience(self) -> float | None:
        """Seconds until a worker could be overdue; None where all are idle."""
        left = [self._timeout_s - worker.elapsed() for worker in self._workers if worker.chunk]
        return max(min(left), 0.01) if left else None

    def _collect(self, worker: Worker) -> None:
        try:
            results = worker.connection.recv()
        except (EOFError, OSError):
            self._died(worker)
            return
        for verdict, seconds in results:
            self._finish(worker.chunk.popleft(), verdict, seconds)

    def _died(self, worker: Worker) -> None:
        if not worker.started:
            raise RunError(f"a reward worker ended at its start with code {worker.kill()}; try `slmgrpo doctor`")
        self._replace(worker, None)

    def _replace(self, worker: Worker, verdict: Verdict | None) -> None:
        """Kill and start anew; the judgement under way gets `verdict` (None: it is tried again), the others wait."""
        position = worker.position()
        code = worker.kill()
        chunk = list(worker.chunk)
        guilty = chunk[position] if 0 <= position < len(chunk) else None
        self._workers[self._workers.index(worker)] = Worker(self._sandbox)
        if guilty is not None and verdict is None:
            guilty.deaths += 1
            if guilty.deaths >= DEATHS:
                verdict = Verdict(None, "error", why=f"the grading process died twice over it (code {code})")
        if guilty is not None and verdict is not None:
            chunk.remove(guilty)
            self._finish(guilty, verdict, self._timeout_s)
        with self._lock:
            self._jobs.extendleft(reversed(chunk))


def _needed(reward: Reward, columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """The columns that the rule can read, so that pipes and memory carry no more."""
    names = reward.reads
    return columns if names is None else {name: columns[name] for name in names if name in columns}


_fresh = itertools.count()


def _identity(reward: Reward, inputs: tuple[str, str, tuple[int, ...], Mapping[str, Any]]) -> Hashable:
    """Equal for equal judgements: rule, settings, completion and columns; unique where that cannot be told."""
    prompt, completion, ids, columns = inputs
    names = reward.reads
    if names is None:
        return next(_fresh)
    given = (prompt if "prompt" in names else "", completion, ids if "completion_ids" in names else ())
    try:
        rest = pickle.dumps((dict(reward.settings), {name: columns[name] for name in sorted(columns)}))
    except Exception:  # a column that cannot be pickled cannot be compared either
        return next(_fresh)
    return (reward.use, str(reward.base), *given, rest)


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    if len(seconds) < 2:
        return (seconds[0], seconds[0]) if seconds else (0.0, 0.0)
    cuts = quantiles(seconds, n=20, method="inclusive")
    return cuts[9], cuts[18]
