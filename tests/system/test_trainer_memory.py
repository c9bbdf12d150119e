"""What a trainer holds beside its model, measured in real processes: a model that fits is trained, and not killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory import measure
from benchmarks.workload import Size

SIZE = Size("qwen3", hidden=768, layers=4, vocabulary=40_000)
"""57 million parameters, of which the embedding has 54 %: the share that counts is that of the largest layer, too."""


@pytest.mark.timeout(900)
def test_a_policy_is_loaded_shared_trained_and_published_without_a_second_copy_of_it(tmp_path: Path) -> None:
    """Whoever sizes machines by docs/training.md would see the kernel kill a process, and the run stop."""
    found = measure(tmp_path, SIZE, ranks=4, tied=True)
    assert found["parameters"] > 50_000_000
    assert found["start_bytes_per_parameter"] < 5, "the model in float32 is 4"
    assert found["step_bytes_per_parameter"] < 17, "weights, gradients and AdamW's state are 16"
    assert found["publish_extra_tensors"] <= 2
    assert found["fsdp_rank_peak_over_share"] <= 1.2
    assert found["fsdp_step_peak_over_share"] <= 1.2, "embedding and head are gathered by nobody"
    assert found["published_differently"] == 0
