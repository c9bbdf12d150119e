"""Interpreters of environments: where tests find them, and how they start one without the sandbox around it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from node.environments.isolated.process import GUEST_PROGRAM

ROOMS = Path(__file__).parent.parent / "environments" / ".rooms"
"""One virtual environment a folder, made by `make environments`: legacy, v1, gym."""


def guest_command(python: Path | str = sys.executable, *, variables: dict[str, str] | None = None) -> list[str]:
    """Return the command of a guest in an interpreter, with more environment variables."""
    settings = [f"{name}={value}" for name, value in (variables or {}).items()]
    return ["/usr/bin/env", *settings, str(python), "-P", "-s", "-B", "-u", str(GUEST_PROGRAM)]


def room(name: str) -> list[str]:
    """Return the command of a guest in the room `name`; skips the test where it was not made."""
    python = ROOMS / name / "bin" / "python"
    if not python.exists():
        pytest.skip("the environments' interpreters are not made: make environments")
    return guest_command(python)
