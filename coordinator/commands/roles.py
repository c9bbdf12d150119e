"""`swarmproof coordinator --role ROLE`: the coordinator's parts, in one process or in many over one database.

`all` is API and leader in one process; `api`, `leader` and `verifier` are single parts. The last two dispatch to the
commands `swarmproof leader` and `swarmproof verifier`, with their own options, environment variables and --config
tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

ROLE = "--role"
VARIABLE = "SWARMPROOF_COORDINATOR_ROLE"
HERE, COMMANDS = ("all", "api"), ("leader", "verifier")
"""Roles of this command, and those that are other commands."""

F = TypeVar("F", bound=Callable[..., object])


class RoleCommand(click.Command):
    """A command that dispatches to another one of its group if `--role` names it."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Return the context of the role's command."""
        role, rest = _split_role(args)
        role = role or os.environ.get(VARIABLE, "")
        if role in COMMANDS and parent is not None and isinstance(parent.command, click.Group):
            other = parent.command.get_command(parent, role)
            if other is not None:
                return other.make_context(role, rest, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _split_role(args: list[str]) -> tuple[str, list[str]]:
    """Return the role that the arguments name, "" for none, and the other arguments."""
    role, rest = "", list[str]()
    values = iter(args)
    for arg in values:
        if arg == ROLE:
            role = next(values, "")
        elif arg.startswith(f"{ROLE}="):
            role = arg.removeprefix(f"{ROLE}=")
        else:
            rest.append(arg)
    return role, rest


def role_option(function: F) -> F:
    """Add `--role`, for --help; `RoleCommand` parses it."""
    return click.option(
        ROLE,
        type=click.Choice((*HERE, *COMMANDS)),
        default="all",
        show_default=True,
        envvar=VARIABLE,
        help="api: only answers. leader, verifier: as the commands of these names, with their options.",
    )(function)
