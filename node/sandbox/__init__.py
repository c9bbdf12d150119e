"""Running strangers' Python so that it can compute, and do nothing else (docs/adr/0016-sandbox.md)."""

from node.sandbox.bubblewrap import Ended, Limits, Sandbox
from node.sandbox.errors import SandboxFailed

__all__ = ["Ended", "Limits", "Sandbox", "SandboxFailed"]
