"""`swarmproof coordinator --role ROLE`: one command for what a run's coordinator consists of, in one process or in
many.

`all` is everything but the verifiers, on one machine; `api`, `leader` and `verifier` are its parts, any number of each,
over one database. The last two are commands of their own, `swarmproof leader` and `swarmproof verifier`, with their own
options, environment variables and tables in the file of --config.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

ROLE = "--role"
VARIABLE = "SWARMPROOF_COORDINATOR_ROLE"
HERE, COMMANDS = ("all", "api"), ("leader", "verifier")
"""The roles of the command itself, and those that are other commands."""

F = TypeVar("F", bound=Callable[..., object])


class ByRole(click.Command):
    """A command that is another one of its group where `--role` names that."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Make the context of the role's command, which click invokes."""
        role, rest = _taken(args)
        role = role or os.environ.get(VARIABLE, "")
        if role in COMMANDS and parent is not None and isinstance(parent.command, click.Group):
            other = parent.command.get_command(parent, role)
            if other is not None:
                return other.make_context(role, rest, parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


def _taken(args: list[str]) -> tuple[str, list[str]]:
    """Split the arguments into the role that they name, "" for none, and the others."""
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
    """Add the option as `--help` shows it."""
    return click.option(
        ROLE,
        type=click.Choice((*HERE, *COMMANDS)),
        default="all",
        show_default=True,
        envvar=VARIABLE,
        help="api: only answers. leader, verifier: as the commands of these names, with their options.",
    )(function)
