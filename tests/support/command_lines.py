"""What the command line makes of the arguments and variables in files of deploy/, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from node import cli
from node.commands.click_ext import ENVIRONMENT
from node.commands.config import name_variables


def parameters(arguments: Sequence[str]) -> dict[str, Any]:
    """The parameters that `swarmproof ARGUMENTS` would run with; raise what it would end with."""
    group = click.Context(cli.main, info_name="swarmproof")
    name, *rest = arguments
    command = cli.main.get_command(group, name)
    assert command is not None, f"there is no command {name}"
    return command.make_context(name, rest, parent=group).params


def variables(name: str) -> set[str]:
    """The environment variables that the command `name` takes."""
    group = click.Context(cli.main, info_name="swarmproof")
    command = cli.main.get_command(group, name)
    assert command is not None, f"there is no command {name}"
    name_variables(command, prefix=f"{ENVIRONMENT}_{name}")
    options = (*command.params, *cli.main.params)
    return {str(option.envvar) for option in options if isinstance(option, click.Option)}
