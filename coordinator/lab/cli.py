"""The commands that run a whole swarm on one machine, by an entry point of their own."""

from __future__ import annotations

from coordinator.lab.demo.command import demo
from coordinator.lab.redteam.command import redteam

COMMANDS = [demo, redteam]
"""What the entry point `swarmproof.commands` offers to the command line."""
