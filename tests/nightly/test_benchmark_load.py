"""The load benchmark at its smallest: real processes, real signatures, and no request that fails."""

from __future__ import annotations

import json
import subprocess
import sys

from locations import ROOT

SMALL = (
    "--workers",
    "20",
    "--rate",
    "40",
    "--seconds",
    "4",
    "--busy",
    "4",
    "--registrations-per-s",
    "50",
    "--apis",
    "2",
    "--groups",
    "40",
)


def test_a_coordinator_takes_a_small_load_without_an_error() -> None:
    command = [sys.executable, "-m", "benchmarks.load", "--json", *SMALL]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])["figures"]
    assert figures["workers"] == 20
    assert figures["errors"] == 0, ran.stderr
    for database in ("sqlite", "postgresql"):
        quantiles = [figures[f"{name}_ms_{database}"] for name in ("p50", "p99", "max")]
        assert 0 < quantiles[0] <= quantiles[1] <= quantiles[2]
        assert figures[f"requests_per_s_{database}"] > 0
        for kind in ("lease", "upload", "receipt"):
            assert figures[f"p99_ms_{kind}_{database}"] > 0, f"no {kind} was asked for"
        assert figures[f"verdicts_per_s_{database}"] > 0
    assert figures["requests_per_s_postgresql_apis_2"] > 0
