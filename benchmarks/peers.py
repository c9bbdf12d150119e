"""Other projects' packages, measured beside ours: each in a virtual environment of its own, made once and kept."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "peers"

_INSTALL_SECONDS = 3600
_REASON_CHARACTERS = 300


class PeerUnavailable(Exception):
    """There is no peer to compare with; the message says why."""


def add_peer_options(parser: argparse.ArgumentParser, package: str, *, interpreter: bool = True) -> None:
    """Add `--no-peer`, `--peer-folder` and, with `interpreter`, `--peer-python`."""
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--no-peer", action="store_true", help=f"measure without {package}")
    peer.add_argument("--peer-folder", type=Path, default=FOLDER, help="where to build and keep it (build/peers)")
    if interpreter:
        peer.add_argument("--peer-python", type=Path, help=f"an interpreter that has {package} and this torch")


def environment(name: str, installs: Sequence[Sequence[str]], *, folder: Path = FOLDER) -> Path:
    """Return the environment `name` in `folder`; on first use, make it by a `pip install` of each of `installs`.

    They come from the package index that pip is configured for. Raise PeerUnavailable.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    made = folder.absolute() / f"{name}-python-{version}"
    stamp = made / ".installed"
    if stamp.exists():
        return made
    print(f"installing {name} in {made}: takes minutes, once", file=sys.stderr)
    _run(name, [sys.executable, "-m", "venv", "--clear", str(made)], path=made / "bin")
    pip = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for packages in installs:
        _run(name, [*pip, *packages], path=made / "bin")
    stamp.touch()
    return made


def _run(name: str, command: list[str], *, path: Path) -> None:
    # torch's build looks for ninja in the environment.
    variables = os.environ | {"PATH": f"{path}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    try:
        ended = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{name} could not be installed: {error}") from error
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        said = [line for line in ended.stderr.splitlines() if line.strip()] or ["no reason given"]
        errors = [line for line in said if line.lstrip().lower().startswith("error")] or said[-1:]
        raise PeerUnavailable(f"{name} could not be installed: {' '.join(errors)[:_REASON_CHARACTERS]}")
