"""The benchmark of a training step at its smallest: that both sides train on the same, and each option runs."""

from __future__ import annotations

import json

import pytest

from benchmarks import step

pytestmark = [pytest.mark.timeout(300)]
SMALL = [
    "--hidden",
    "64",
    "--layers",
    "1",
    "--vocabulary",
    "64",
    "--prompt",
    "24",
    "--completion",
    "16",
    "--rounds",
    "1",
]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "more", [[], ["--recompute", "--autocast", "bfloat16", "--row-tokens", "64"]], ids=["", "less"]
)
def test_a_packed_step_and_a_padded_one_have_the_same_loss(
    capsys: pytest.CaptureFixture[str], family: str, more: list[str]
) -> None:
    step.main(["--json", "--family", family, *SMALL, *more])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = told["figures"]
    assert found["tokens_computed"] < found["tokens_of_samples"]
    assert min(found[name] for name in ("seconds", "seconds_padded", "step_vs_padded", "model_flops_per_s")) > 0
    # Of the order of 1, from other sums of the same numbers; the products are bfloat16's in the second.
    assert found["loss_difference"] < (2e-3 if more else 1e-6)
