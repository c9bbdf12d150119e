"""The network's benchmark at its smallest: real processes that join by one string, attackers among them.

What would break for whom: whoever measures after a change and finds a figure missing, a zero that counts nothing, or
attackers that are not there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from locations import ROOT

from benchmarks.networking.heads import NEVER, Span, Spread, costs, spread

SMALL = ("--nodes", "6", "--heads", "8", "--bursts", "1", "--idle", "3")
PARTS = ("floor", "calm", "bootstrap", "hostile", "gossipsub")
PHASES = ("", "_third_killed", "_bootstrap_dead", "_third_hostile", "_third_hostile_bootstrap_dead")


def test_a_newer_head_counts_for_an_older_one_and_an_unknown_one_never() -> None:
    published = [(1, 10.0), (2, 11.0)]
    found = spread(published, [[[1, 10.1], [2, 11.4]], [[2, 11.2]], [[1, 13.0]]])
    assert [round(one, 3) for one in found.seconds] == [0.1, 0.4, 1.2, 0.2, 3.0, NEVER]
    assert found.reached_share == 4 / 6
    assert found.quantile_ms(0.5) == 1200.0
    assert found.quantile_ms(0.99) is None


def test_two_seconds_are_in_time_and_more_are_not() -> None:
    assert Spread([2.0]).reached_share == 1.0
    assert Spread([2.001]).reached_share == 0.0


def test_what_a_node_uses_while_nothing_happens_is_no_heads_cost() -> None:
    def report(cpu_s: float, sent: int, sent_bytes: int) -> dict[str, Any]:
        return {"cpu_s": cpu_s, "sent_bytes": sent_bytes, "network": {"frames": {"sent": sent}}}

    idle = Span([report(1.0, 0, 0)], [report(1.1, 10, 1000)], 10.0)
    busy = Span([report(2.0, 50, 5000)], [report(2.6, 90, 25_000)], 20.0)
    cost = costs(idle, busy, heads=10)
    assert round(cost.cpu_ms, 6) == 40.0
    assert round(cost.frames, 6) == 2.0
    assert round(cost.sent_bytes, 6) == 1800.0
    assert round(cost.idle_cpu_ms_per_s, 6) == 10.0


@pytest.mark.timeout(900)
def test_a_small_network_joins_and_hears_of_every_head_whoever_is_killed_or_hostile() -> None:
    parts = [option for part in PARTS for option in ("--only", part)]
    command = [sys.executable, "-m", "benchmarks.network", "--json", *SMALL, *parts]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    figures = line["figures"]
    assert line["benchmark"] == "network"
    assert figures["nodes"] == 6
    assert figures["killed_by_input"] == 0, ended.stderr[-4000:]
    for phase in PHASES:
        # A machine that does everything at once may be late for one of them.
        assert figures[f"reached_share{phase}"] >= 0.9, phase
        assert 0 < figures[f"head_ms_p50{phase}"] <= figures[f"head_ms_p99{phase}"]
    for name in ("join_s", "join_s_at_once", "join_s_third_hostile"):
        assert 0 < figures[f"{name}_p50"] <= figures[f"{name}_p95"]
    # The attackers were there, and did what is refused; none of them ended by itself.
    assert figures["hostile"] == figures["hostile_alive"] == 2
    assert figures["hostile_frames_refused"] > 0
    assert figures["frames_per_head"] >= 1
    assert figures["sent_bytes_per_head"] > 1000
    assert figures["memory_libp2p_mib"] > 0
    assert figures["links_reached_share"] >= 0.9
    assert figures["gossipsub_reached_share"] > 0
