"""Each role with what its extra installs, and nothing else: a contributor does not download an operator's packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from installed import brought_by, link_packages
from locations import ROOT

IMPORTS = {
    "base": ["node.cli", "node.relay.daemon", "node.doctor.checks", "node.broadcast.publishing"],
    "worker": ["node.worker.daemon", "node.engines.torch", "node.doctor.trial", "numba"],
    "audit": ["node.audit.auditor", "node.verification.prefill", "numba"],
    "operator": [
        "coordinator.app",
        "coordinator.calibration.chart",
        "coordinator.calibration.write_limits",
        "coordinator.lab.cli",
        "coordinator.training.trainer",
        "coordinator.verifier.daemon",
        "tensorboardX",
    ],
}
WITHOUT = {
    "base": {"fastapi", "numba", "pyarrow", "sqlalchemy", "torch", "transformers"},
    "worker": {"fastapi", "pyarrow", "sqlalchemy"},
    "audit": {"fastapi", "pyarrow", "sqlalchemy"},
    "operator": {"pyarrow"},
}


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python without the site's packages, with those in `folder` and the code."""
    env = {"PATH": os.defpath, "HOME": str(folder), "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-S", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=250, check=False
    )


def test_the_sizes_on_the_page_are_those_of_what_is_installed() -> None:
    """Whoever has little disk, or pays for a connection, decides by them."""
    page = (ROOT / "docs" / "index.md").read_text()
    shown = {name.strip("`"): int(size) for name, size in re.findall(r"(?m)^\| (none|`\w+`) \|.*\| (\d+) \|$", page)}
    assert shown.keys() == {"none", *IMPORTS} - {"base"}
    for extra, megabytes in shown.items():
        files = (f.locate() for name in brought_by(extra) for f in metadata.distribution(name).files or ())
        size = sum(Path(str(file)).stat().st_size for file in files if Path(str(file)).exists())
        assert size / 1e6 == pytest.approx(megabytes, rel=0.1), extra


@pytest.mark.parametrize("extra", IMPORTS)
def test_each_role_runs_with_its_extra_alone(extra: str, tmp_path: Path) -> None:
    brought = brought_by(extra)
    assert not WITHOUT[extra] & brought
    link_packages({"swarmproof", *brought}, tmp_path)
    done = run(tmp_path, "-c", f"import importlib\nfor name in {IMPORTS[extra]}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_a_command_whose_packages_are_missing_says_what_brings_them(tmp_path: Path) -> None:
    link_packages({"swarmproof", *brought_by("base")}, tmp_path)
    join = ("--coordinator", "http://127.0.0.1:9", "--run-id", "ab" * 32, "--state", str(tmp_path / "state"))
    for arguments, extra in ((("worker", *join), "worker"), (("coordinator",), "operator")):
        done = run(tmp_path, "-m", "node.cli", *arguments)
        assert done.returncode in {1, 2}
        (said,) = (line for line in done.stderr.splitlines() if line.startswith("Error:"))
        assert re.search(rf"pip install -e '?{re.escape(str(tmp_path))}\[{extra}\]", said), done.stderr
