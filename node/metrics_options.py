"""Where a command serves Prometheus metrics, if it is told to: options alone, for --help answers at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help="Serve Prometheus metrics here; 0 takes a free one.  [default: nowhere]",
    ),
    click.option(
        "--metrics-host", default="127.0.0.1", show_default=True, help="Where --metrics-port listens: keep it private."
    ),
)


@dataclass(frozen=True, slots=True)
class MetricsPlace:
    """Where a process serves its metrics; nowhere without a port."""

    host: str = "127.0.0.1"
    port: int | None = None


def metrics_options(command: F) -> F:
    """Add to a command what `MetricsPlace` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
