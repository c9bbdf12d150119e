"""Settings of commands: flags, then the environment, then a TOML file, then defaults.

    [worker]                       # a table per command
    coordinator = "http://..."     # a key per flag, with - or _
    slots = 8

Environment variables are SWARMPROOF_<COMMAND>_<FLAG>. An unknown key is an error that names the nearest one, so that a
typo does not become a default.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from node.errors import ConfigError
from shardcast.errors import Malformed
from shardcast.files import read_bounded

MAX_CONFIG_BYTES = 256 * 1024


def load_config(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file; raises ConfigError."""
    try:
        return tomllib.loads(read_bounded(path, max_bytes=MAX_CONFIG_BYTES).decode("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", code="config_unreadable") from error
    except (ValueError, RecursionError, Malformed) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}.", code="config_malformed") from error


def default_map(tables: Mapping[str, Any], group: click.Group, ctx: click.Context) -> dict[str, Any]:
    """Return `tables` as click's default_map for the commands of `group`; raises ConfigError for unknown settings."""
    return {
        name: _of_command(value, _known(name, group.list_commands(ctx), "command", table=""), group, ctx, table=name)
        for name, value in tables.items()
    }


def check_variables(group: click.Group, ctx: click.Context, environ: Iterable[str], *, prefix: str) -> None:
    """Raise ConfigError for a variable that would set an option of the invoked command, if it had that option.

    Those of other commands are left alone: one file of variables may be every role's.
    """
    if ctx.invoked_subcommand is None or (command := group.get_command(ctx, ctx.invoked_subcommand)) is None:
        return
    own = f"{prefix}_{ctx.invoked_subcommand}_".replace("-", "_").upper()
    known = set(_variables(command))
    for name in environ:
        if name.startswith(own) and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"There is no setting for the environment variable {name}{advice}", code="unknown_setting"
            )


def _variables(command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from _variables(inner)
    for option in command.params:
        yield from [option.envvar] if isinstance(option.envvar, str) else option.envvar or ()


def name_variables(command: click.Command, *, prefix: str) -> None:
    """Give every flag of `command` its environment variable, named after the flag."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            name_variables(inner, prefix=f"{prefix}_{name}")
    for option in command.params:
        if isinstance(option, click.Option) and option.envvar is None:
            option.envvar = f"{prefix}_{flag_name(option)}".replace("-", "_").upper()


def flag_name(option: click.Parameter) -> str:
    """Return a setting's key: its flag without leading dashes, `_` for `-`."""
    flags = [flag for flag in option.opts if flag.startswith("--")]
    return flags[0][2:].replace("-", "_") if flags else str(option.name)


def _of_command(value: Any, name: str, group: click.Group, ctx: click.Context, *, table: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{table} must be a table of settings: write [{table}] and the settings below.")
    command = group.get_command(ctx, name)
    if command is None:
        raise ConfigError(f"[{table}] is for a command that cannot be loaded here.", code="unknown_command")
    if isinstance(command, click.Group):
        return {
            key: _of_command(
                inner,
                _known(key, command.list_commands(ctx), "command", table=table),
                command,
                ctx,
                table=f"{table}.{key}",
            )
            for key, inner in value.items()
        }
    options = {flag_name(option): option for option in command.params}
    settings = {}
    for key, setting in value.items():
        option = options[_known(key.replace("-", "_"), options, "setting", table=table)]
        settings[str(option.name)] = _checked(setting, option, where=f"{table}.{key}")
    return settings


def _known(name: str, names: Iterable[str], what: str, *, table: str) -> str:
    known = sorted(names)
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    where = f"in [{table}]" if table else "in the configuration file"
    advice = f"did you mean {near[0]!r}?" if near else "there are none."
    raise ConfigError(f"There is no {what} {name!r} {where}; {advice}", code=f"unknown_{what}")


def _checked(value: Any, option: click.Parameter, *, where: str) -> Any:
    """Convert `value` to its command-line form, so that click validates both alike."""
    if isinstance(option, click.Option) and option.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false.", code="bad_setting")
        return value
    if option.multiple or option.nargs != 1:
        items = value if isinstance(value, list) else [value]
        return [_scalar(item, where=where) for item in items]
    return _scalar(value, where=where)


def _scalar(value: Any, *, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{where} must be a string or a number.", code="bad_setting")
    return str(value)
