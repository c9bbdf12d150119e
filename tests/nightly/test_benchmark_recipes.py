"""The ablations at their smallest: that each kind of switch trains, is evaluated and drawn.

What would break for whom: whoever repeats a table of docs/training.md and finds the command broken.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import recipes
from benchmarks.train import summary
from node.policy.file import save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer

pytestmark = [pytest.mark.timeout(300)]
KINDS = ("baseline", "KL 0.02", "Muon", "online filtering", "pools", "length targets", "0 steps old")


def test_every_kind_of_switch_trains_is_evaluated_and_drawn(tmp_path: Path) -> None:
    first = tmp_path / "first.safetensors"
    save_policy(make_model(1), make_tokenizer(), first)
    rows = []
    for variant in (each for each in recipes.VARIANTS if each.name in KINDS):
        curve = recipes.trained(str(first), 0, 1, variant)
        assert summary(curve)["seconds_per_step"] > 0
        rows.append(recipes.row_of(variant, [curve]))
    assert [row["variant"] for row in rows] == list(KINDS)
    assert all(len(row["curves"][0]) == 1 for row in rows)
    assert all(0 <= row["held_out"] <= 1 and 0 <= row["signal"] <= 1 for row in rows)
    recipes.draw(rows, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
