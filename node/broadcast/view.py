"""Output of `swarmproof fetch`: progress and a line for each version, or JSON.

Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial

import click
from rich.filesize import decimal

from node.broadcast.fetching import FetchedVersion
from node.broadcast.progress import FetchProgress
from shardcast import Report


class FetchView:
    """Output on a terminal or a log; with `as_json`, results only, as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._progress = FetchProgress(None if as_json else partial(click.echo, err=True))

    def fetching(self, version: int) -> AbstractContextManager[Report | None]:
        """Context manager around one fetch; yields its progress callback."""
        return self._progress.fetching(version)

    def here(self, result: FetchedVersion) -> None:
        """Write the result to stdout."""
        click.echo(json.dumps(asdict(result)) if self._as_json else _sentence(result))


def _sentence(result: FetchedVersion) -> str:
    what = f"version {result.version} is in {result.path}: {decimal(result.size_bytes)}"
    if not result.transferred_bytes:
        return f"{what}, which was here already"
    how = "as a delta" if result.way == "delta" else "in full"
    rate = decimal(int(result.transferred_bytes / max(result.seconds, 1e-3)))
    return f"{what}; {decimal(result.transferred_bytes)} transferred {how} in {result.seconds:.1f} s, {rate}/s"
