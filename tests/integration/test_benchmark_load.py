"""The load benchmark at its smallest: real processes, real signatures, and no request that fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ("--workers", "20", "--rate", "40", "--seconds", "4", "--busy", "4", "--registrations-per-s", "50")


def test_a_coordinator_takes_a_small_load_without_an_error() -> None:
    command = [sys.executable, "-m", "benchmarks.load", "--json", *SMALL]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr
    figures = json.loads(ran.stdout.splitlines()[-1])["figures"]
    assert figures["workers"] == 20
    assert figures["errors"] == 0, ran.stderr
    assert 0 < figures["p50_ms_sqlite"] <= figures["p99_ms_sqlite"] <= figures["max_ms_sqlite"]
    assert figures["requests_per_s_sqlite"] > 0
    for kind in ("lease", "upload", "receipt"):
        assert figures[f"p99_ms_{kind}"] > 0, f"no {kind} was asked for"
