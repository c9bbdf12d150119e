"""A disk that the kernel remounts read-only, as it does after an error: each role waits for whoever mends it.

The operator would find a trainer that ended, a verifier that failed submissions, and no word of what to do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from locations import ROOT
from trainers import outcome_of, run_in, train_to_the_end

UNSHARE = ("unshare", "--user", "--map-root-user", "--mount")


def can_mount(folder: Path) -> bool:
    command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.timeout(300)
def test_every_role_says_that_its_disk_is_read_only_waits_and_goes_on(tmp_path: Path, tiny_policy_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if not can_mount(disk):
        pytest.skip("mount namespaces are not permitted here")
    support = ROOT / "tests" / "support"
    ended = subprocess.run(
        [*UNSHARE, sys.executable, str(support / "read_only.py"), str(disk), str(tiny_policy_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(support), str(ROOT)))},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr.decode()[-4000:]
    found = json.loads(ended.stdout)
    assert found["verifier"] == {"refused": [503, "unavailable"], "outcome": "admitted"}
    with run_in(tmp_path / "undisturbed") as home:
        train_to_the_end(home, tmp_path / "undisturbed")
        assert found["trainer"]["policies"] == outcome_of(home)[0]
    for name in ("training.trainer", "verifier.daemon", "http.errors", "run.leader"):
        lines = [line for line in found["said"].get(f"coordinator.{name}", []) if "read-only" in line]
        if name != "run.leader":  # which is a process of its own here
            assert lines, f"{name} says nothing: {found['said']}"
        for line in lines:
            assert "mount" in line, line
            assert "\n" not in line
            assert "traceback" not in line
