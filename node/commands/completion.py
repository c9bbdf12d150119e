"""`swarmproof completion`: shell completion scripts."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "swarmproof"
VARIABLE = "_SWARMPROOF_COMPLETE"
"""The environment variable of click's completion protocol."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, *, shell: str) -> None:
    """Print the script that completes commands and options in SHELL.

    \b
    Examples, each for good:
      swarmproof completion bash > ~/.local/share/bash-completion/completions/swarmproof
      swarmproof completion zsh > "${fpath[1]}/_swarmproof"
      swarmproof completion fish > ~/.config/fish/completions/swarmproof.fish

    For this shell alone: eval "$(swarmproof completion bash)". Bash needs version 4.4 or newer.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click completes in each of the choices"
    click.echo(kind(ctx.find_root().command, {}, PROGRAM, VARIABLE).source())
