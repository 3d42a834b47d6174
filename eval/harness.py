"""Hands targets to lm-evaluation-harness: the same weights, its own tasks, prompts and graders."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slmgrpo.errors import RecipeError, RunError
from slmgrpo.eval.targets import Target


def command(target: Target, tasks: Sequence[str], *, limit: int | None) -> list[str]:
    """The harness's command line for one target; what it cannot express is refused."""
    from slmgrpo.model import locate

    model = target.base.model
    if target.base.merged or target.scale != 1 or model.load_in_4bit or model.chat_template:
        way_out = f"; export it first: `slmgrpo export {target.text} --to merged --out DIR`" if target.run else ""
        raise RecipeError(
            f"{target.text}: lm-evaluation-harness cannot load a scaled adapter, one on a merged base, 4-bit weights "
            f"or a chat template apart from the tokenizer{way_out}"
        )
    settings = {"pretrained": locate(model.id), "dtype": _dtype() if model.dtype == "auto" else model.dtype}
    if model.revision:
        settings["revision"] = model.revision
    if target.adapter is not None:
        settings["peft"] = str(target.adapter)
    arguments = ",".join(f"{name}={value}" for name, value in settings.items())
    parts = ["--model", "hf", "--model_args", arguments, "--tasks", *tasks, "--apply_chat_template"]
    parts += ["--output_path", str(target.home / "lm_eval"), "--log_samples"]
    return [sys.executable, "-m", "lm_eval", "run", *parts, *(["--limit", str(limit)] if limit else [])]


def hand_over(targets: Sequence[Target], tasks: str, *, limit: int | None, stage: Callable[[str], None]) -> None:
    """Run the harness on each target; its tables go to the terminal, its files to lm_eval/ in the target's folder.

    tasks: names, groups or YAML files of the harness, with commas between them.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise RecipeError(
            "--lm-eval: lm-evaluation-harness is not installed; run `pip install 'slmgrpo[eval]'` (or lm-eval alone)"
        )
    names = [name.strip() for name in tasks.split(",")]
    lines = [(target, command(target, names, limit=limit)) for target in targets]
    stage("lm-evaluation-harness: looking for its tasks")
    _check_tasks(names)
    for target, line in lines:
        stage(f"lm-evaluation-harness: {target.label}")
        done = subprocess.run(line, check=False)
        if done.returncode:
            raise RunError(
                f"lm-evaluation-harness ended with code {done.returncode} on {target.text}: {' '.join(line)}"
            )


def _check_tasks(names: Sequence[str]) -> None:
    from lm_eval.tasks import TaskManager

    known = TaskManager()
    missing = [name for name in names if not known.match_tasks([name]) and not Path(name).is_file()]
    if missing:
        raise RecipeError(f"--lm-eval: the harness has no task {', '.join(missing)}; `lm-eval ls tasks` lists them")


def _dtype() -> str:
    import torch

    return "bfloat16" if torch.cuda.is_available() else "float32"
