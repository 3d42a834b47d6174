"""TensorBoard, Weights & Biases and Trackio through Accelerate's trackers: step metrics passed on as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slmgrpo.callbacks import Observer
from slmgrpo.errors import PlanError
from slmgrpo.recipe import Recipe, resolved
from slmgrpo.run import RunDir


class Tracked:
    """An observer that also reports every step to the recipe's trackers."""

    def __init__(self, observer: Observer, recipe: Recipe, run: RunDir) -> None:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        PartialState()
        self._observer = observer
        self._trackers = []
        for name in recipe.report_to:
            kind = LOGGER_TYPE_TO_CLASS[name]
            if kind.requires_logging_directory:
                tracker = kind(run.path.name, logging_dir=str(run.path / "tracking"))
            else:
                tracker = kind("slmgrpo", name=run.path.name)
            tracker.start()
            tracker.store_init_configuration(dict(numbers(resolved(recipe), text=True)))
            self._trackers.append(tracker)

    def stage(self, text: str) -> None:
        self._observer.stage(text)

    def progress(self, what: str, done: int, total: int) -> None:
        self._observer.progress(what, done, total)

    def warn(self, text: str) -> None:
        self._observer.warn(text)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._observer.step(metrics)
        for tracker in self._trackers:
            tracker.log(dict(numbers(metrics)), step=metrics["step"])

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


@contextmanager
def tracked(observer: Observer, recipe: Recipe, run: RunDir) -> Iterator[Observer]:
    """The observer itself, or with the recipe's trackers beside it."""
    if not recipe.report_to:
        yield observer
        return
    watched = Tracked(observer, recipe, run)
    try:
        yield watched
    finally:
        watched.close()


def check(recipe: Recipe) -> None:
    """Refuse a tracker whose package is missing, before anything is loaded."""
    from importlib.util import find_spec

    missing = [name for name in recipe.report_to if find_spec(name) is None]
    if missing:
        raise PlanError(f"report_to: {', '.join(missing)} is not installed; `pip install {' '.join(missing)}`")


def numbers(value: Any, name: str = "", *, text: bool = False) -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping as (`a/b`, number) pairs; `text`: other leaves too, as text."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from numbers(part, f"{name}/{key}" if name else str(key), text=text)
    elif isinstance(value, bool | int | float):
        yield name, value
    elif text:
        yield name, str(value)
