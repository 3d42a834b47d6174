"""What a person sees fits 80 columns and says what it should."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from slmgrpo import view


def shown(renderable: Any) -> str:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(renderable)
    return console.export_text()


def metrics(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "reward": step / 100,
        "accuracy": {"tiny:code": 0.25, "tiny:math": 0.5, "hub:openai/gsm8k": 1.0},
        "length": 123.4,
        "silent": 0.33,
        "tokens_per_s": 12345.6,
        "seconds": {"total": 101.23},
    }


def test_the_steps_table_fits_80_columns_and_names_tasks_shortly() -> None:
    text = shown(view.steps_table([metrics(99), metrics(100)]))
    assert "gsm8k" in text
    assert "openai" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_summary_shows_change_in_points_with_intervals() -> None:
    def scores(accuracy: float) -> dict[str, Any]:
        task = {"hits": 1, "n": 100, "accuracy": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}
        return {"tasks": {"tiny:math": task}, "mean_tokens": 10.0, "truncated": 0.0}

    text = shown(view.summary("quickstart", [metrics(1), metrics(2)], scores(0.3), scores(0.9)))
    assert "30 % [20, 40]" in text
    assert "90 % [80, 100]" in text
    assert "+60 points" in text


def test_a_run_without_held_out_rows_still_has_a_summary() -> None:
    assert "reward 0.01" in shown(view.summary("x", [metrics(1)], None, None))


def test_a_sparkline_rises_with_its_values() -> None:
    assert view.sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert view.sparkline([0, 0, 1, 1], 2) == "▁█"
    assert view.sparkline([5], 10) == "▁"


def test_square_brackets_in_values_are_shown_as_they_are() -> None:
    assert "pip install 'slmgrpo[vllm]'" in shown(view.pairs_table([("vllm", "pip install 'slmgrpo[vllm]'")]))
