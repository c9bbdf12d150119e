"""A target for every parser that a stranger can reach; each area is a module, and part of its targets' names.

Left out, because nobody but this machine's owner writes them: run.toml, node.toml and the command line; key files; the
files of a worker's, relay's, trainer's or auditor's own state folder; the database. What passes between an engine and
its worker processes stays on one machine, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from benchmarks.fuzzing.target import Target

BROKEN = "broken"
"""The area of targets that are broken on purpose, which is in no campaign."""

AREAS = (
    "messages",
    "peers",
    "broadcast",
    "log",
    "submission",
    "proofs",
    "policy",
    "checkpoint",
    "dataset",
    "door",
    "control",
    "replies",
    "graders",
    "recording",
)


def find(name: str) -> Target:
    """Return the target of this name; import no other area. Raise KeyError."""
    area = name.partition(".")[0]
    if area not in (*AREAS, BROKEN):
        raise KeyError(name)
    return {target.name: target for target in _of(area)}[name]


def all_targets() -> Iterator[Target]:
    """Yield every target, by area."""
    for area in AREAS:
        yield from _of(area)


def _of(area: str) -> tuple[Target, ...]:
    targets: tuple[Target, ...] = import_module(f"{__name__}.{area}").TARGETS
    return targets
