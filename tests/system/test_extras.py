"""Each role with what its extra installs, and nothing else: a contributor does not download an operator's packages."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from locations import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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


def brought_by(extra: str) -> set[str]:
    """The distributions that an installation with the extra has, ours aside."""
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    waiting += [Requirement(line) for line in PROJECT["optional-dependencies"].get(extra, ())]
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        one = waiting.pop()
        if (key := (canonicalize_name(one.name), frozenset(one.extras))) in seen:
            continue
        seen.add(key)
        with contextlib.suppress(metadata.PackageNotFoundError):
            needed = map(Requirement, metadata.requires(one.name) or ())
            found.add(key[0])
            names = {"", *one.extras}
            waiting += [r for r in needed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in names)]
    return found


def folder_of(extra: str, folder: Path) -> Path:
    """A folder of packages: links to what the extra brings, and our own metadata."""
    for name in ("swarmproof", *brought_by(extra)):
        distribution = metadata.distribution(name)
        for path in {Path(file.parts[0]) for file in distribution.files or () if file.parts[0] != ".."}:
            source, link = Path(str(distribution.locate_file(path))), folder / path
            if source.exists() and not link.exists() and path.suffix != ".pth" and path.name != "__pycache__":
                link.symlink_to(source)
    return folder


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
    folder = folder_of(extra, tmp_path)
    done = run(folder, "-c", f"import importlib\nfor name in {IMPORTS[extra]}: importlib.import_module(name)")
    assert done.returncode == 0, done.stderr


def test_a_command_whose_packages_are_missing_says_what_brings_them(tmp_path: Path) -> None:
    folder = folder_of("base", tmp_path)
    join = ("--coordinator", "http://127.0.0.1:9", "--run-id", "ab" * 32, "--state", str(tmp_path / "state"))
    for arguments, extra in ((("worker", *join), "worker"), (("coordinator",), "operator")):
        done = run(folder, "-m", "node.cli", *arguments)
        assert done.returncode in {1, 2}
        (said,) = (line for line in done.stderr.splitlines() if line.startswith("Error:"))
        assert re.search(rf"pip install -e '?{re.escape(str(folder))}\[{extra}\]", said), done.stderr
