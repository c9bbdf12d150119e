"""Run untrusted Python without files, network or other processes (docs/adr/0016-sandbox.md)."""

from node.sandbox.bubblewrap import ProgramResult, Sandbox, SandboxLimits
from node.sandbox.errors import SandboxFailed

__all__ = ["ProgramResult", "Sandbox", "SandboxFailed", "SandboxLimits"]
