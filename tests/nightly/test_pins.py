"""The suite with the lowest and the newest version of everything that is depended on.

`constraints.txt` holds one version of each, so that nothing else would notice a bound that is a wish: who installs
without it gets the newest, and who has an older one keeps that.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from locations import ROOT
from packaging.requirements import Requirement

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("dev", "docs", "operator", "p2p", "postgresql", "s3", "wandb")
"""What `make install` takes."""
SUITE = ("-n", "2", "--dist", "loadfile", "-m", "unit or service", "tests/unit", "tests/service")
# Torch has builds for devices, of which this machine's is the one that can be had here.
TORCH = f"torch=={metadata.version('torch')}"


def lowest(requirement: Requirement) -> str:
    """The requirement with its lower bound as its only version, and its extras."""
    (bound,) = (each.version for each in requirement.specifier if each.operator in (">=", "=="))
    extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
    return f"{requirement.name}{extras}=={bound}"


def run(*command: str, seconds: float) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.timeout(4500)
@pytest.mark.parametrize("bound", ["lowest", "newest"])
def test_the_suite_passes_at_both_ends_of_every_bound(bound: str, tmp_path: Path) -> None:
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra])]
    asked = [Requirement(line) for line in lines if not line.startswith("torch>")]
    wanted = sorted(set(map(lowest, asked))) if bound == "lowest" else ()
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", TORCH, *wanted)
    run(*install, "-e", f"{ROOT}[{','.join(EXTRAS)}]", seconds=1800)
    run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SUITE, seconds=2600)
