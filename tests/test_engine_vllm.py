"""The vllm engine against a real vLLM (its CPU build); .ci/run makes the environment of tests/vllm_cpu.txt for this."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; .ci/run runs this file where it is", allow_module_level=True)

import torch
from scipy.stats import chisquare

from slmgrpo import model
from slmgrpo.errors import RunError
from slmgrpo.model import Policy
from slmgrpo.plan import plan
from slmgrpo.recipe import Recipe
from slmgrpo.recipe_load import load
from slmgrpo.rollout.engine import Completion, Request
from slmgrpo.rollout.hf import HfEngine
from slmgrpo.rollout.vllm import VllmEngine

STOP = ["4", "no"]
Written = dict[tuple[int, int], Completion]


def recipe_of(*changes: str) -> Recipe:
    return load("quickstart", ["model.backend=transformers", *changes]).recipe


def start(recipe: Recipe) -> tuple[VllmEngine, Policy]:
    policy = model.load(recipe, max_length=160)
    engine = VllmEngine(policy, recipe, plan(recipe, base=Path()))
    assert list(engine.generate([], step=0)) == []
    return engine, policy


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[VllmEngine, Policy]]:
    engine, policy = start(recipe_of())
    yield engine, policy
    engine.close()


def write(engine: VllmEngine, requests: list[Request], *, step: int = 0, seed: int = 42, **changed: Any) -> Written:
    """Completions with other sampling settings than the engine was started with."""
    settings = recipe_of().sampling.model_copy(update={"stop": [], **changed})
    other = engine.under(settings, seed, max_batch_tokens=0)
    return {(c.index, c.member): c for c in other.generate(requests, step=step)}


def by_hf(policy: Policy, requests: list[Request], **changed: Any) -> Written:
    settings = recipe_of().sampling.model_copy(update={"stop": [], **changed})
    engine = HfEngine(policy.model, policy.tokenizer, settings, seed=3)
    return {(c.index, c.member): c for c in engine.generate(requests, step=0)}


def ask(count: int = 6, members: int = 4, max_tokens: int = 24, **more: Any) -> list[Request]:
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(4, 100) for _ in range(rng.randrange(1, 60))) for _ in range(count)]
    return [Request(i, prompt, tuple(range(members)), 1000 + i, max_tokens, **more) for i, prompt in enumerate(prompts)]


def shake(policy: Policy, size: float = 0.05) -> None:
    """Change the adapter, whose B starts at zero."""
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if "lora_B" in name:
                parameter.add_(torch.randn_like(parameter) * size)


def logits(policy: Policy, request: Request, token_ids: tuple[int, ...] = ()) -> torch.Tensor:
    """Of the tokens that follow the prompt, (len(token_ids) + 1, V)."""
    policy.model.eval()
    with torch.no_grad():
        return policy.model(torch.tensor([request.prompt_ids + token_ids])).logits[0, len(request.prompt_ids) - 1 :]


def gap(policy: Policy, requests: list[Request], written: Written, temperature: float = 1.0) -> float:
    """Largest difference between an engine's log-probs and the trainer's."""
    gaps = []
    for (index, _), completion in written.items():
        ids = torch.tensor(completion.token_ids)[:, None]
        plain = (logits(policy, requests[index], completion.token_ids)[:-1] / temperature).log_softmax(-1)
        gaps.append((plain.gather(1, ids)[:, 0] - torch.tensor(completion.log_probs)).abs().max())
    return float(max(gaps))


def test_log_probs_follow_the_trainers_adapter_at_step_0_1_and_k(running: tuple[VllmEngine, Policy]) -> None:
    engine, policy = running
    requests = ask()
    for step in (0, 1, 7):
        if step:
            shake(policy)
            engine.sync(step)
        written = write(engine, requests, step=step)
        assert len(written) == 24
        assert gap(policy, requests, written) < 5e-5
        with policy.model.disable_adapter():
            assert (gap(policy, requests, written) > 0.05) == (step > 0)


def test_log_probs_are_of_logits_over_temperature(running: tuple[VllmEngine, Policy]) -> None:
    engine, policy = running
    requests = ask()
    assert gap(policy, requests, write(engine, requests, temperature=0.7), 0.7) < 5e-5


DRAWS = 3000
FILTERS = [
    {"temperature": 1.0},
    {"temperature": 2.0},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 5},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.5, "top_p": 0.9, "top_k": 12, "min_p": 0.02},
]


def allowed(scores: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> torch.Tensor:
    """Exact probabilities of one token, (V,): each filter looks at what the one before it left."""
    probabilities = scores.double().softmax(-1)
    probabilities[probabilities < min_p * probabilities.max()] = 0
    if top_k:
        probabilities[probabilities < probabilities.topk(top_k).values[-1]] = 0
    ordered, order = (probabilities / probabilities.sum()).sort(descending=True)
    ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
    kept = torch.zeros_like(ordered).scatter(0, order, ordered)
    return kept / kept.sum()


@pytest.mark.parametrize("settings", FILTERS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
def test_frequencies_are_those_of_the_exact_distribution(
    running: tuple[VllmEngine, Policy], settings: dict[str, Any]
) -> None:
    engine, policy = running
    request = Request(0, (14,), tuple(range(DRAWS)), 77, 1)
    filters = {name: value for name, value in settings.items() if name != "temperature"}
    exact = allowed(logits(policy, request)[-1] / settings["temperature"], **filters)
    written = write(engine, [request], **settings)
    counts = Counter(c.token_ids[0] for c in written.values())
    assert all(exact[token_id] > 0 for token_id in counts)
    likely = [i for i in range(len(exact)) if exact[i] * DRAWS >= 5]
    assert len(likely) > 3
    observed, expected = [counts[i] for i in likely], [float(exact[i]) * DRAWS for i in likely]
    rest = DRAWS - sum(expected)
    if rest > 1:
        observed, expected = [*observed, DRAWS - sum(observed)], [*expected, rest]
    assert chisquare(observed, [e * sum(observed) / sum(expected) for e in expected]).pvalue > 1e-4
    for c in written.values():  # vLLM's log-probs are renormalised by its filters
        assert abs(c.log_probs[0] - float(exact[c.token_ids[0]].log())) < 1e-3


def test_greedy_means_what_it_means_in_the_hf_engine(running: tuple[VllmEngine, Policy]) -> None:
    engine, policy = running
    requests = ask(members=1, greedy=True)
    cases: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.5}]
    for settings in cases:
        ours, theirs = write(engine, requests, **settings), by_hf(policy, requests, **settings)
        for key, c in ours.items():
            assert (c.token_ids, c.finish_reason) == (theirs[key].token_ids, theirs[key].finish_reason)
            assert c.log_probs == pytest.approx(theirs[key].log_probs, abs=5e-5)


def test_other_settings_are_lent_and_closed_without_a_trace(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    requests = ask(count=3)
    own = {(c.index, c.member): c for c in engine.generate(requests, step=0)}
    other = engine.under(recipe_of().sampling, seed=7, max_batch_tokens=0)
    drawn = {(c.index, c.member): c for c in other.generate(requests, step=0)}
    other.close()
    assert drawn != own
    assert {(c.index, c.member): c for c in engine.generate(requests, step=0)} == own


def test_completions_end_as_in_the_hf_engine(running: tuple[VllmEngine, Policy]) -> None:
    """End tokens, the limit, and stop texts wherever token borders fall; greedy ones can be compared token by token."""
    engine, policy = running
    requests = ask(count=20, members=1, max_tokens=30, greedy=True)
    for stop in ([], STOP, ["o"], ["e ", "think"]):
        ours, theirs = write(engine, requests, stop=stop), by_hf(policy, requests, stop=stop)
        assert {k: (c.token_ids, c.finish_reason) for k, c in ours.items()} == {
            k: (c.token_ids, c.finish_reason) for k, c in theirs.items()
        }
    drawn = write(engine, ask(count=20, max_tokens=30), stop=STOP)
    free = write(engine, ask(count=20, max_tokens=30))
    assert {c.finish_reason for c in drawn.values()} == {"stop", "length"}
    assert sum(len(drawn[key].token_ids) < len(free[key].token_ids) for key in drawn) > 4
    for key, c in drawn.items():
        assert free[key].token_ids[: len(c.token_ids)] == c.token_ids
        text = policy.tokenizer.decode(c.token_ids, skip_special_tokens=False)
        if c.finish_reason == "stop":
            assert c.token_ids[-1] in engine.end_ids or text.endswith(tuple(STOP))
        else:
            assert len(c.token_ids) == 30


def test_completions_come_as_they_finish(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    requests = [Request(0, (5, 6), (0,), 0, 30, greedy=True), Request(1, (5, 6), (0, 9), 1, 2)]
    assert list(write(engine, requests)) == [(1, 0), (1, 9), (0, 0)]
    assert write(engine, []) == {}


def test_a_reader_that_leaves_early_leaves_nothing_behind(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    completions = engine.generate(ask(), step=0)
    next(completions)
    completions.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not engine._llm.has_unfinished_requests()
    assert len(write(engine, ask())) == 24


def test_tokens_depend_on_seed_step_prompt_and_member_not_on_the_batch(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    requests = ask(count=16, members=8)
    whole = write(engine, requests)
    assert write(engine, requests, step=1) != whole
    assert len({c.token_ids for c in whole.values()}) > 100
    apart: Written = {}
    for i, request in enumerate(reversed(requests)):
        alone, together = request.members[: i % 4], request.members[i % 4 :]
        for members in [*((member,) for member in alone), together]:
            apart |= write(engine, [replace(request, members=members)])
    equal = sum(
        sum(a == b for a, b in zip(apart[key].token_ids, c.token_ids, strict=False)) for key, c in whole.items()
    )
    share = equal / sum(len(c.token_ids) for c in whole.values())
    print(f"{100 * share:.2f} % of the tokens are the same in another batch")
    assert share >= 0.999


def test_syncs_leave_every_base_weight_as_it_was(running: tuple[VllmEngine, Policy]) -> None:
    engine, policy = running

    def sums(vllm_model: Any) -> dict[str, float]:
        return {
            name: float(value.double().abs().sum())
            for name, value in vllm_model.state_dict().items()
            if "lora" not in name
        }

    before, held = model.base_fingerprint(policy), engine._llm.apply_model(sums)
    for step in range(1000):
        shake(policy, 1e-3)
        engine.sync(step)
        engine._wake()
    assert model.base_fingerprint(policy) == before
    assert engine._llm.apply_model(sums) == held
    assert len(engine._llm.list_loras()) == 1
    assert not list(Path(engine._folder.name).iterdir())


def test_a_prompt_is_computed_once_for_its_group(running: tuple[VllmEngine, Policy]) -> None:
    engine, _ = running
    prompt = tuple(random.Random(5).choices(range(4, 100), k=100))
    seen: list[int] = []
    core = engine._llm.engine_core.engine_core
    schedule = core.scheduler.schedule

    def watched(*arguments: Any, **more: Any) -> Any:
        found = schedule(*arguments, **more)
        seen.append(found.total_num_scheduled_tokens)
        return found

    core.scheduler.schedule = watched
    try:
        write(engine, [Request(0, prompt, tuple(range(8)), 5, 1)])
    finally:
        core.scheduler.schedule = schedule
    assert seen[0] == 100 + 7 * (100 - 96)  # blocks of 32 tokens are shared


def test_a_merged_base_is_handed_over_too(running: tuple[VllmEngine, Policy], tmp_path: Path) -> None:
    _, policy = running
    running[0].close()
    policy.save_adapter(tmp_path)
    engine, merged = start(recipe_of(f"adapter={tmp_path}", "merge_adapter=true"))
    requests = ask(count=3)
    written = write(engine, requests)
    assert gap(merged, requests, written) < 5e-5
    assert gap(policy, requests, written) < 5e-5
    engine.close()


def test_an_engine_that_dies_says_what_to_try(tmp_path: Path) -> None:
    engine, _ = start(recipe_of())
    assert len(write(engine, ask(count=1))) == 4

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 20 GiB")

    inner = engine._llm.model_executor.driver_worker.model_runner.model
    inner.model.layers[1].register_forward_pre_hook(full)
    with pytest.raises(RunError, match=r"failed while writing: OutOfMemoryError: tried.*sampling.vllm_memory .now 0.4"):
        write(engine, ask())
    assert engine._llm is None


def test_a_diverged_model_ends_the_run() -> None:
    engine, policy = start(recipe_of())
    with torch.no_grad():
        for _, p in policy.trainable():
            p.fill_(torch.nan)
    engine.sync(1)
    with pytest.raises(RunError, match="not finite"):
        write(engine, ask())
    engine.close()


SLMGRPO = [sys.executable, "-m", "slmgrpo"]


def slmgrpo(*arguments: str | Path, cwd: Path, program: list[str] = SLMGRPO) -> subprocess.CompletedProcess[str]:
    command = [*program, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900)


DIES = """
import sys, torch
from slmgrpo.__main__ import main
from slmgrpo.rollout.vllm import VllmEngine

def full(*_):
    raise torch.OutOfMemoryError("none left")

def sync(self, step, plain=VllmEngine.sync):
    plain(self, step)
    if step == 3:
        self._llm.model_executor.driver_worker.model_runner.model.register_forward_pre_hook(full)

VllmEngine.sync = sync
sys.exit(main())
"""


def test_a_dead_engine_ends_the_run_and_a_resume_finishes_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = ["sampling.engine=vllm", "train.steps=4", "train.save_every=2", "data.heldout=[]"]
    sets = [f"--set={change}" for change in changes]
    done = slmgrpo("train", "quickstart", *sets, "--out", run, cwd=tmp_path, program=[sys.executable, "-c", DIES])
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed while writing: OutOfMemoryError: none left; try another sampling.vllm_memory" in done.stderr
    assert f"slmgrpo train --resume {run}" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    again = slmgrpo("train", "--resume", run, cwd=tmp_path)
    assert again.returncode == 0, again.stdout + again.stderr
    assert json.loads((run / "status.json").read_text())["state"] == "finished"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == [1, 2, 3, 4]


RANK = """
import torch
import test_engine_vllm as t

torch.distributed.init_process_group("gloo")
engine, policy = t.start(t.recipe_of())
requests = t.ask(count=4)
written = t.write(engine, requests)
assert t.gap(policy, requests, written) < 5e-5
engine.close()
every = [None, None]
torch.distributed.all_gather_object(every, [written[key].token_ids for key in sorted(written)])
assert every[0] == every[1]
torch.distributed.destroy_process_group()
"""


def test_every_rank_has_an_engine_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--local-addr=localhost"]
    done = subprocess.run(
        [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", tmp_path / "rank.py"],
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_embedded_model_learns_what_it_learns_with_the_hf_engine(tmp_path: Path) -> None:
    done = slmgrpo("train", "quickstart", "--set=sampling.engine=vllm", "--out", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    scores = json.loads((tmp_path / "run/eval/step_40/heldout/scores.json").read_text())["tasks"]
    assert all(task["accuracy"] >= 0.85 for task in scores.values()), scores


def test_smollm2_takes_three_steps(tmp_path: Path) -> None:
    changes = ["sampling.engine=vllm", "train.steps=3", "data.heldout.0.limit=16"]
    sets = [f"--set={change}" for change in changes]
    done = slmgrpo("train", "smollm2_135m_arithmetic", *sets, "--out", tmp_path / "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    print(metrics[-1])
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert all(line["sampler_gap_max"] < 2e-4 for line in metrics)
