"""The benchmarks of the engine at their smallest: that they run to the end and print what they promise.

What would break for whom: whoever measures after a change and finds the command broken, or a figure missing or null.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from locations import ROOT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

SIZES = ["--hidden", "256", "--layers", "2", "--vocabulary", "1000", "--tokens", "16", "--threads", "1"]
CASES = {
    "generate": (
        ["--rounds", "1", "--concurrency", "1", "16", "64"],
        {"tokens_per_s_c1", "tokens_per_s_c16", "tokens_per_s_c64", "proofs_on_over_off_c64"},
    ),
    "verify": (
        ["--rounds", "1", "--concurrency", "1", "8"],
        {"verify_over_generate", "hostile_cost_over_honest"},
    ),
    "honest": (
        ["--completions", "16", "--warm-start", "0.01"],
        {
            "completions",
            "honest_rejected",
            "exponent_mismatches_max",
            "mantissa_mean_max",
            "sampling_margin_p999",
        },
    ),
}


@pytest.fixture(scope="module")
def figures():
    """Runs a benchmark: its figures by key."""

    def run(name):
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *SIZES, *CASES[name][0]]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        line = json.loads(ended.stdout.splitlines()[-1])
        assert line["benchmark"] == name
        assert line["machine"]["cores"] >= 1
        missing = {key for key in CASES[name][1] if line["figures"].get(key) is None}
        assert not missing
        assert all(math.isfinite(figure) for figure in line["figures"].values())
        return line["figures"]

    return run


def test_generate_compares_the_same_number_of_tokens_with_proofs_and_without(figures):
    found = figures("generate")
    assert found["tokens_per_s_c64"] > found["tokens_per_s_c1"] > 0
    assert found["tokens_per_s_off_c64"] > 0


def test_verify_times_honest_slots_and_each_kind_of_garbage(figures):
    found = figures("verify")
    kinds = {name: cost for name, cost in found.items() if name.startswith("cost_over_honest_")}
    assert len(kinds) == 5
    assert found["hostile_cost_over_honest"] == max(kinds.values()) > 0
    shares = [found[f"share_{part}"] for part in ("read", "prefill", "noise", "proofs", "logits", "rest")]
    assert math.isclose(sum(shares), 1)
    assert min(shares) >= 0


def test_honest_work_in_bfloat16_is_measured_in_both_dtypes_and_none_is_rejected(figures):
    found = figures("honest")
    assert found["completions"] == 32
    assert found["honest_rejected"] == 0
    assert found["exponent_mismatches_max"] == max(
        found[f"exponent_mismatches_max_{policy}_{dtype}"]
        for policy in ("trained", "random")
        for dtype in ("bfloat16", "float32")
    )
    assert found["mantissa_mean_max"] > 0
