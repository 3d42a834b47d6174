"""Step metrics reach a real tracker; a missing one is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from slmgrpo import trackers
from slmgrpo.callbacks import Silent
from slmgrpo.errors import PlanError
from slmgrpo.recipe_load import load
from slmgrpo.run import RunDir


def test_tensorboard_gets_every_number_of_a_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = load("quickstart", ["report_to=[tensorboard]"]).recipe
    with trackers.tracked(Silent(), recipe, RunDir(tmp_path)) as watched:
        for step in (1, 2):
            watched.step({"step": step, "reward": 0.5 * step, "accuracy": {"tiny:math": 0.25}, "statuses": {}})
    read = EventAccumulator(str(tmp_path / "tracking" / tmp_path.name)).Reload()
    assert [(e.step, e.value) for e in read.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    assert [e.value for e in read.Scalars("accuracy/tiny:math")] == [0.25, 0.25]


def test_without_trackers_the_observer_is_passed_on_as_it_is(tmp_path: Path) -> None:
    observer = Silent()
    with trackers.tracked(observer, load("quickstart").recipe, RunDir(tmp_path)) as watched:
        assert watched is observer


def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_mends_it() -> None:
    recipe = load("quickstart", ["report_to=[trackio]"]).recipe
    with pytest.raises(PlanError, match="report_to: trackio is not installed; `pip install trackio`"):
        trackers.check(recipe)
