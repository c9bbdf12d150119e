"""A whole run whose problems are in pools: every process as it is started, and an audit of all that they did."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.lab.demo.orchestration import Demonstration, DemoSettings
from node.protocol.run import PoolsSpec, parse_run_toml

RUN = """
name = "pools"

[model]
initial = "random-tiny"

[[environments]]
name = "arithmetic"
problems = { count = 16, kept = "//8=" }

[[environments]]
name = "reverse"

[sampling]
group_size = 2
max_new_tokens = 24

[batch]
groups_per_step = 4
max_async = 1
rejection_backoff_seconds = 0.1
rejection_backoff_max_seconds = 0.5

[batch.pools]
easy = 1
normal = 1
hard = 2

[limits]
exponent_mismatches = 4.0
token_margin = 0.001
rollout_margin_mean = 0.0001
logprob_error = 0.001

[training]
steps = 3
"""


@pytest.mark.timeout(280)
def test_a_run_with_pools_trains_to_its_end_and_its_audit_agrees(tmp_path: Path) -> None:
    """An untrained policy solves nothing: what it tried is hard from the next policy on, the rest still normal."""
    assert isinstance(parse_run_toml(RUN).batch.pools, PoolsSpec)
    summary = Demonstration(DemoSettings(out=tmp_path, headless=True), run_toml=RUN).run()
    assert [step.step for step in summary.steps] == [0, 1, 2]
    assert summary.figures["honest_slots_rejected"] == 0
    assert summary.figures["honest_slots_admitted"] >= 12
    assert (summary.audit.exit_code, summary.audit.result["outcome"]) == (0, "agree"), summary.audit
