"""What a clone of this checkout has, and the wheel that is built of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from locations import ROOT

PACKAGES = ("toploc", "shardcast", "node", "coordinator")
CLEAN = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")


def copied_clone(folder: Path, *, beside: tuple[str, ...] = ()) -> Path:
    """Copy what a clone has into `folder`: the packages, the files of the top, and the folders `beside` them."""
    folder.mkdir(parents=True)
    for name in (*PACKAGES, *beside):
        shutil.copytree(ROOT / name, folder / name, ignore=CLEAN)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def built_wheel(folder: Path) -> Path:
    """Build the wheel alone, in `folder`, and return its path."""
    clone = copied_clone(folder / "clone")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder / "dist"), str(clone)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel
