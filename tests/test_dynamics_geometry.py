"""Comparison of adapters against the formed updates, and the files of the line between two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slmgrpo.dynamics import geometry, update
from slmgrpo.dynamics.update import Factors
from slmgrpo.errors import RecipeError


def adapter(seed: int, *, d_in: int = 96, rank: int = 4, blocks: int = 2) -> dict[str, Factors]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.q_proj": (48, d_in), "mlp.down_proj": (d_in, 64)}
    return {
        f"base_model.model.model.layers.{block}.{module}": Factors(
            torch.randn(rank, shape[1], generator=generator), torch.randn(shape[0], rank, generator=generator), 2.0
        )
        for block in range(blocks)
        for module, shape in shapes.items()
    }


def formed(one: Factors) -> torch.Tensor:
    return one.scale * one.b.double() @ one.a.double()


def test_an_adapter_is_like_itself_and_unlike_a_random_one() -> None:
    x, y = adapter(0), adapter(1)
    same = geometry.likeness("all", geometry.pairs(x, x))
    assert (same.cosine, same.output, same.input) == pytest.approx((1, 1, 1))
    other = geometry.likeness("all", geometry.pairs(x, y))
    vectors = [torch.cat([formed(one).flatten() for one in side.values()]) for side in (x, y)]
    assert other.cosine == pytest.approx(float(torch.nn.functional.cosine_similarity(*vectors, dim=0)))
    assert abs(other.cosine) < 4 * other.chance
    assert other.output == pytest.approx(other.output_chance, rel=0.5)
    assert [row[0] for row in geometry.table(geometry.pairs(x, y))] == ["module", "q_proj", "down_proj", "all"]


def test_chance_is_the_spread_of_cosines_between_random_updates() -> None:
    found = [geometry.likeness("all", geometry.pairs(adapter(2 * i), adapter(2 * i + 1))) for i in range(40)]
    cosines = torch.tensor([one.cosine for one in found])
    assert float(cosines.square().mean().sqrt()) == pytest.approx(found[0].chance, rel=0.35)


def test_points_on_the_line_are_sums_of_both_updates_and_survive_their_files(tmp_path: Path) -> None:
    x, y = adapter(0), adapter(1, rank=6, blocks=3)
    (tmp_path / "like").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": False}
    (tmp_path / "like" / "adapter_config.json").write_text(json.dumps(config))
    middle = geometry.between(x, y, 0.25)
    geometry.save(middle, tmp_path / "like", tmp_path / "point")
    read = geometry.load(tmp_path / "point")
    assert read.keys() == y.keys()
    for name, one in read.items():
        wanted = 0.25 * formed(y[name]) + (0.75 * formed(x[name]) if name in x else 0)
        assert torch.allclose(formed(one), wanted, atol=1e-4)
    assert json.loads((tmp_path / "point" / "adapter_config.json").read_text())["target_modules"] == [
        "down_proj",
        "q_proj",
    ]


def test_adapters_that_cannot_be_compared_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no moved tensor in common"):
        geometry.pairs(adapter(0), {})
    with pytest.raises(RecipeError, match="not of the same base"):
        geometry.pairs(adapter(0), adapter(0, d_in=80))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"use_dora": True}))
    with pytest.raises(RecipeError, match="use_dora is not two factors a tensor"):
        geometry.load(tmp_path)


def test_scaling_does_not_change_the_cosine() -> None:
    x = adapter(0)
    doubled = {name: Factors(one.a, 3 * one.b, one.scale) for name, one in x.items()}
    assert geometry.likeness("all", geometry.pairs(x, doubled)).cosine == pytest.approx(1)
    assert update.cosine(next(iter(x.values())), next(iter(doubled.values()))) == pytest.approx(1)
