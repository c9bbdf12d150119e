"""For tests that run code in the sandbox: whether this machine can, and a sandbox that soon runs out of patience."""

from __future__ import annotations

from functools import cache

import pytest

from node.environments import code
from node.environments.code import Code
from node.sandbox import Sandbox, SandboxFailed, SandboxLimits
from node.sandbox.root import PYTHON_VERSION


@cache
def why_not() -> str:
    """What stands against running a sandbox here; empty if it works."""
    try:
        Sandbox().check()
    except SandboxFailed as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(why_not()), reason=why_not() or "the sandbox works")


def impatient(monkeypatch: pytest.MonkeyPatch, *, wall_seconds: float) -> None:
    """Let the environment's sandboxes end after so long."""
    limited(monkeypatch, SandboxLimits(wall_seconds=wall_seconds))


def limited(monkeypatch: pytest.MonkeyPatch, limits: SandboxLimits) -> None:
    """Give the environment's sandboxes these limits."""
    monkeypatch.setattr(code, "Sandbox", lambda: Sandbox(limits))


def functions(steps: int = 2) -> Code:
    """The environment that wants functions, judged by the Python that runs the tests."""
    return Code(form="function", steps=steps, python=PYTHON_VERSION)


def expressions(steps: int = 2) -> Code:
    """The same that wants expressions."""
    return Code(form="expression", steps=steps, python=PYTHON_VERSION)
