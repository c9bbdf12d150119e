"""What can go wrong with the demonstration itself.

DemoError
├── KeepsDying    a process of the swarm ends again and again
└── SwarmTooSlow  something did not happen in the time it was given
"""

from __future__ import annotations


class DemoError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "demo_error"


class KeepsDying(DemoError):
    code = "keeps_dying"


class SwarmTooSlow(DemoError):
    code = "too_slow"
