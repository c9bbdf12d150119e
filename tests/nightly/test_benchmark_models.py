"""The benchmark of recurrent policies at its smallest: that it runs to the end and prints what it promises."""

from __future__ import annotations

import json

import pytest

from benchmarks import models
from benchmarks.modelling import verified
from benchmarks.modelling.policies import RECURRENT_NAMES

pytestmark = [pytest.mark.timeout(400)]
KEYS = [name.replace("-", "_") for name in RECURRENT_NAMES]


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, float]:
    models.main(["--json", *arguments])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["benchmark"] == "models"
    return told["figures"]


def test_exactness_is_within_what_is_claimed(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, "--only", "exact")
    assert {f"{name}_logits_vs_rwkv_package" for name in ("eagle", "finch")} <= found.keys()
    assert {f"decode_vs_prefill_fp32_{key}" for key in KEYS} <= found.keys()
    assert all(found[f"{name}_logits_vs_rwkv_package"] <= 1e-3 for name in ("eagle", "finch"))
    assert all(found[f"decode_vs_prefill_fp32_{key}"] <= 1e-4 for key in KEYS)


def test_no_honest_group_is_rejected_and_each_that_forgets_its_state_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "RESET_GROUPS", 4)
    monkeypatch.setattr(verified, "ALTERED_GROUPS", 2)
    found = figures(capsys, "--only", "verified", "--chunks", "1")
    assert (found["honest_rejected"], found["state_reset_detected"]) == (0, 1)
    assert {f"int4_detected_{key}" for key in KEYS} <= found.keys()
