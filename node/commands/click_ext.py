"""Extensions of click: commands by entry point, and errors with hints.

An error is one line that says what is wrong, and one that begins with `hint:` and says what to do
(`node.commands.hints`). Output that nobody reads any more (`swarmproof ... | head`) is no error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import IO, Any

import click
from click.core import ParameterSource

from node.commands.config import name_variables
from node.commands.hints import REPORT, hint_for
from node.protocol.reasons import Refusal
from node.runtime import logs
from node.runtime.extras import install_hint

log = logging.getLogger(__name__)

ENTRY_POINTS = "swarmproof.commands"
ENVIRONMENT = "SWARMPROOF"


SECTIONS = {
    "Contribute": ("worker", "doctor", "status", "receipt", "env", "models"),
    "Operate": (
        *("init", "plan", "dataset", "calibrate", "problems", "sft", "import", "coordinator", "leader", "verifier"),
        *(
            "trainer",
            "peer",
            "join-string",
            "invite",
            "stakes",
            "control",
            "authority",
            "evaluate",
            "export",
            "backup",
            "restore",
        ),
        *("check", "demo", "redteam"),
    ),
    "Verify": ("audit", "witness"),
    "Broadcast": ("relay", "publish", "fetch"),
    "Tools": ("keys", "completion"),
}
"""The sections of --help, and their commands in its order; others stand in the last one."""

INVOKED = f"{__name__}.invoked"
"""Where a context's `meta` has the words of the command that runs, such as "dataset add": hints name it."""

UNFORESEEN = 70
"""The exit code of a defect: EX_SOFTWARE of sysexits.h."""

UNREAD = 141
"""The exit code once nobody reads the output: 128 + SIGPIPE, as a shell says of a program that the signal ended."""


class Failed(click.ClickException):
    """An error with a hint, printed as text or logged as JSON."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on stderr."""
        _show(self.format_message(), self.hint, file)


class CouldNotRun(Failed):
    """An error of a command whose exit code 1 is an answer."""

    exit_code = 2


class Defect(Failed):
    """An unexpected error."""

    exit_code = UNFORESEEN


class WrongCommandLine(click.UsageError):
    """A usage error of click, with a pointer to --help."""

    def show(self, file: IO[Any] | None = None) -> None:
        """Print it on stderr."""
        if self.ctx is None:
            super().show(file)
            return
        if not logs.is_json():
            click.echo(self.ctx.get_usage(), file=file, err=True)
        hint = f"`{self.ctx.command_path} --help` has every option, and an example."
        _show(self.format_message(), hint, file)


def _show(said: str, hint: str, file: IO[Any] | None) -> None:
    """Print an error, which may quote a stranger's text, such as a run's rules, so that no terminal acts on that."""
    if logs.is_json():
        log.error("%s hint: %s", said, hint)
        return
    lines = "\n    ".join(map(logs.one_line, said.expandtabs(4).splitlines()))  # indented, none is taken for a hint
    click.echo(f"Error: {lines}", file=file, err=True)
    click.echo(f"hint: {hint}", file=file, err=True)


@contextlib.contextmanager
def reported(failure: type[Failed] = Failed) -> Iterator[None]:
    """Turn exceptions of the block into `failure` with a hint, unless --debug was given.

    The error of a closed output passes, which `Commands.main` ends the process for.
    """
    try:
        yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _closed_outputs():
            raise
        ctx = click.get_current_context(silent=True)
        if ctx is not None and ctx.find_root().params.get("debug"):
            raise
        sentence = _sentence(error)
        if sentence is None:
            said = f"Something unexpected happened: {type(error).__name__}: {error}."
            raise (Defect if failure is Failed else failure)(said, hint=REPORT) from error
        command = None if ctx is None else ctx.meta.get(INVOKED)
        raise failure(sentence, hint=hint_for(error, command)) from error


def _sentence(error: Exception) -> str | None:
    """Return the message of an error of this project or the system; None for a defect."""
    if isinstance(getattr(error, "code", None), str) or isinstance(error, Refusal):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'The system'}: {error.strerror or error}"
    return None


def _closed_outputs() -> list[int]:
    """Return which of stdout and stderr nobody reads any more: a broken pipe may as well be a child's, or a socket."""
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):  # a test's, which is no file
                poll.register(stream.fileno(), 0)
    return [number for number, happened in poll.poll(0) if happened & (select.POLLERR | select.POLLHUP)]


@contextlib.contextmanager
def _unread_is_quiet() -> Iterator[None]:
    """Exit with UNREAD, without a word, where a closed output ends the block."""
    try:
        yield
    except (SystemExit, BrokenPipeError) as error:
        is_by_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        if not is_by_rich and not (isinstance(error, BrokenPipeError) and _closed_outputs()):
            raise
        _discard_output()
        raise SystemExit(UNREAD) from error


def _flush_output() -> None:
    """Write what is buffered; where that fails only while Python exits, it says so itself, and exits with 120."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _discard_output() -> None:
    """Let what is buffered for nobody go to /dev/null when Python exits."""
    for closed in _closed_outputs():
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, closed)
        os.close(nowhere)


@contextlib.contextmanager
def _reworded() -> Iterator[None]:
    """Turn click's usage errors into WrongCommandLine."""
    try:
        yield
    except (WrongCommandLine, click.exceptions.NoArgsIsHelpError):
        raise
    except click.UsageError as error:
        raise WrongCommandLine(_naming_variable(error) or error.format_message(), error.ctx) from error


def _naming_variable(error: click.UsageError) -> str | None:
    """Return the message of a bad value that came from an environment variable, which it blames."""
    option = error.param if isinstance(error, click.BadParameter) else None
    if option is None or error.ctx is None or option.name is None:
        return None
    if error.ctx.get_parameter_source(option.name) is not ParameterSource.ENVIRONMENT:
        return None
    names = [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()
    variable = next((name for name in names if os.environ.get(name)), None)
    return None if variable is None else f"Invalid value of the environment variable {variable}: {error.message}"


def _is_uninstalled(error: Exception) -> bool:
    """Return whether a package of somebody else's is missing, which an extra would bring."""
    ours = ("coordinator", "node", "shardcast", "toploc")
    return isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in ours


class Commands(click.Group):
    """The built-in commands and those of other packages, by entry point."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._others: dict[str, click.Command] | None = None
        self._unloadable: dict[str, Exception] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command, in the order of the help."""
        return sorted({*super().list_commands(ctx), *self._load_others()})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section."""
        left = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        *_, last = SECTIONS
        for section, names in SECTIONS.items():
            here = [name for name in names if name in left]
            if section == last:
                here += sorted(left.keys() - here)
            found = [(name, left.pop(name)) for name in here]
            rows = [(name, one.get_short_help_str(60)) for name, one in found if one is not None and not one.hidden]
            if rows:
                with formatter.section(section):
                    formatter.write_dl(rows, col_max=14)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command; other packages are imported only if it is not built in."""
        command = super().get_command(ctx, cmd_name) or self._load_others().get(cmd_name)
        if command is not None:
            name_variables(command, prefix=f"{ENVIRONMENT}_{cmd_name}")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve as click does; if a package failed to load, the error says so."""
        try:
            name, command, rest = super().resolve_command(ctx, args)
        except click.UsageError as error:
            if not self._unloadable:
                raise
            if all(map(_is_uninstalled, self._unloadable.values())):
                first = next(iter(self._unloadable.values()))
                said = f"Those of operators are not installed here ({first}): {install_hint('operator')}"
            else:
                why = "; ".join(f"those of {name!r} do not load: {reason}" for name, reason in self._unloadable.items())
                said = f"Some commands are missing ({why})."
            raise click.UsageError(f"{error.format_message()} {said}", ctx) from error
        inner = rest[:1] if isinstance(command, click.Group) and rest and rest[0] in command.commands else []
        ctx.meta[INVOKED] = " ".join([str(name), *inner])
        return name, command, rest

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Make the context as click does, with hints in usage errors."""
        with _unread_is_quiet(), _reworded():
            return super().make_context(info_name, args, parent, **extra)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line as click does, and end quietly once nobody reads the output."""
        with _unread_is_quiet():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command, turning exceptions into errors with hints."""
        with _unread_is_quiet(), _reworded(), reported():
            try:
                result = super().invoke(ctx)
            except click.exceptions.Exit:
                _flush_output()
                raise
            _flush_output()
            return result

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
