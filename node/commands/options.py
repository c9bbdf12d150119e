"""Options that several commands share.

Only click is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Option(Protocol):
    """A decorator that adds an option to a command."""

    def __call__(self, command: F, /) -> F:
        """Return `command` with the option."""


FILE: Final = click.Path(path_type=Path, dir_okay=False)
FOLDER: Final = click.Path(path_type=Path, file_okay=False)
EXISTING_FILE: Final = click.Path(path_type=Path, dir_okay=False, exists=True)
EXISTING_FOLDER: Final = click.Path(path_type=Path, file_okay=False, exists=True)


def all_of(*options: Option) -> Option:
    """Combine `options` into one decorator; --help lists them in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def json_option(said: str = "One JSON object instead of text.") -> Option:
    """Return `--json`, passed as `as_json`; `said` is its help."""
    return click.option("--json", "as_json", is_flag=True, help=said)


def state_option(
    said: str = "This node's own folder, kept across restarts.  [default: under ~/.swarmproof]",
    *,
    kind: click.Path = FOLDER,
    required: bool = False,
) -> Option:
    """Return `--state`, a folder; `said` is its help."""
    return click.option("--state", type=kind, required=required, help=said)


def key_option(
    said: str = "This node's key file, made if missing.  [default: key in the state folder]", *, required: bool = False
) -> Option:
    """Return `--key`, a file; `said` is its help."""
    return click.option("--key", type=FILE, required=required, help=said)


def threads_option(said: str, *, default: int | None = None) -> Option:
    """Return `--threads`; `said` is its help."""
    kind = click.IntRange(1, 1024)
    return click.option(
        "--threads", type=kind, metavar="COUNT", default=default, show_default=default is not None, help=said
    )


def listen_options(port: int) -> Option:
    """Return `--host` and `--port`: where a process listens, by default on `port`."""
    return all_of(
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all."),
        click.option(
            "--port",
            type=click.IntRange(0, 65535),
            metavar="PORT",
            default=port,
            show_default=True,
            help="0 takes a free one.",
        ),
    )


def metrics_options(command: F) -> F:
    """Add `--metrics-port` and `--metrics-host`, which `node.runtime.metrics.serving_metrics` takes."""
    return all_of(
        click.option(
            "--metrics-port",
            type=click.IntRange(0, 65535),
            metavar="PORT",
            help="Serve Prometheus metrics here; 0 takes a free one.  [default: nowhere]",
        ),
        click.option(
            "--metrics-host",
            default="127.0.0.1",
            show_default=True,
            help="Where --metrics-port listens: keep it private.",
        ),
    )(command)
