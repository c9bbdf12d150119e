"""What the command line adds to click: commands of other packages, failures as one sentence, quiet logs."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import click

from node.config import name_variables
from node.protocol.reasons import Refusal

log = logging.getLogger(__name__)

ENTRY_POINTS = "veriswarm.commands"
ENVIRONMENT = "VERISWARM"
REPEAT_SECONDS = 60.0


class Failed(click.ClickException):
    """A failure as a person should see it."""

    exit_code = 1


class CouldNotRun(Failed):
    """A failure of a command whose exit code 1 is an answer."""

    exit_code = 2


@contextlib.contextmanager
def explained(failure: type[Failed] = Failed) -> Iterator[None]:
    """Turn whatever goes wrong inside into one sentence, unless --debug was given."""
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        ctx = click.get_current_context(silent=True)
        if ctx is not None and ctx.find_root().params.get("debug"):
            raise
        raise failure(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    """Errors of this project speak for themselves: each has a stable `code`, or a `reason`."""
    if isinstance(getattr(error, "code", None), str) or isinstance(error, Refusal):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'The system'}: {error.strerror or error}"
    return f"Something unexpected happened ({type(error).__name__}: {error}); run again with --debug, and report it."


class Commands(click.Group):
    """The built-in commands, and those of other packages by entry point."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._others: dict[str, click.Command] | None = None
        self._unloadable: dict[str, Exception] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every command there is, in the order of the help."""
        return sorted({*super().list_commands(ctx), *self._load_others()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; other packages are imported only when it is none of ours."""
        command = super().get_command(ctx, cmd_name) or self._load_others().get(cmd_name)
        if command is not None:
            name_variables(command, prefix=f"{ENVIRONMENT}_{cmd_name}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does it; a command that is missing because its package does not load says so."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not self._unloadable:
                raise
            why = "; ".join(f"those of {name!r} do not load: {reason}" for name, reason in self._unloadable.items())
            raise click.UsageError(f"{error.format_message()} Some commands are missing ({why}).", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; its failure is one sentence."""
        with explained():
            return super().invoke(ctx)

    def _load_others(self) -> dict[str, click.Command]:
        if self._others is None:
            self._others = {}
            for entry in metadata.entry_points(group=ENTRY_POINTS):
                try:
                    self._others |= {str(command.name): command for command in entry.load()}
                except Exception as error:
                    log.debug("the commands of %s", entry.value, exc_info=True)
                    self._unloadable[entry.name] = error
        return self._others


class Unrepeated(logging.Filter):
    """Lets a message through once a minute: an outage is a line, not a line per retry."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether `record` says something new."""
        now = time.monotonic()
        self._said = {text: at for text, at in self._said.items() if now - at < REPEAT_SECONDS}
        return self._said.setdefault(record.getMessage(), now) == now


def set_up_logging(*, verbose: bool) -> None:
    """Lines on stderr: time, level where it is not INFO, and the message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"))
    if not verbose:
        handler.addFilter(Unrepeated())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler], force=True)
    for package in ("node", "coordinator", "shardcast"):
        logging.getLogger(package).setLevel(logging.DEBUG if verbose else logging.INFO)
