"""Options that several commands share.

Only click is imported here, so that `--help` answers at once.
"""

from __future__ import annotations

import json
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


def number_option(
    name: str,
    said: str,
    *,
    least: int = 1,
    most: int | None = None,
    default: int | None = None,
    metavar: str = "COUNT",
    cls: type[click.Option] | None = None,
) -> Option:
    """Return an integer option from `least` to `most`; `said` is its help."""
    kind, shown = click.IntRange(least, most), default is not None
    return click.option(name, cls=cls, type=kind, metavar=metavar, default=default, show_default=shown, help=said)


def json_option(said: str = "One JSON object instead of text.") -> Option:
    """Return `--json`, passed as `as_json`; `said` is its help."""
    return click.option("--json", "as_json", is_flag=True, help=said)


def json_line(value: object) -> str:
    """Return `value` as JSON in ASCII, so that a terminal that it is shown on acts on no stranger's text in it."""
    import msgspec

    return json.dumps(msgspec.json.decode(msgspec.json.encode(value)))


def state_option(
    said: str = "This node's own folder, kept across restarts.  [default: under ~/.swarmproof]",
    *,
    kind: click.Path = FOLDER,
    required: bool = False,
) -> Option:
    """Return `--state`, a folder; `said` is its help."""
    return click.option("--state", type=kind, required=required, help=said)


def state_folder(state: Path | None, run_id: str, role: str) -> Path:
    """Return the folder that `--state` named, or by default a node's own for its run and role."""
    return state or Path.home() / ".swarmproof" / run_id[:16] / role


def key_option(
    said: str = "This node's key file, made if missing.  [default: key in the state folder]", *, required: bool = False
) -> Option:
    """Return `--key`, a file; `said` is its help."""
    return click.option("--key", type=FILE, required=required, help=said)


def threads_option(said: str, *, default: int | None = None) -> Option:
    """Return `--threads`; `said` is its help."""
    return number_option("--threads", said, most=1024, default=default)


def listen_options(port: int) -> Option:
    """Return `--host` and `--port`: where a process listens, by default on `port`."""
    return all_of(
        click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 for all."),
        number_option("--port", "0 takes a free one.", least=0, most=65535, default=port, metavar="PORT"),
    )


def metrics_options(command: F) -> F:
    """Add `--metrics-port` and `--metrics-host`, which `node.runtime.metrics.serving_metrics` takes."""
    return all_of(
        number_option(
            "--metrics-port",
            "Serve Prometheus metrics here; 0 takes a free one.  [default: nowhere]",
            least=0,
            most=65535,
            metavar="PORT",
        ),
        click.option(
            "--metrics-host",
            default="127.0.0.1",
            show_default=True,
            help="Where --metrics-port listens: keep it private.",
        ),
    )(command)
