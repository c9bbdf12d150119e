"""The entry point of the `swarmproof` script: imports the command line, during which Ctrl-C ends in one line."""

from __future__ import annotations

from node.runtime.interrupts import exiting_at_once


def main() -> None:
    """Run the command line."""
    with exiting_at_once():
        from node.cli import main as run  # noqa: PLC0415  (this takes half a second)
    run()
