"""What a worker says of itself for the run's pages: `--nickname` and `--no-hardware`."""

from __future__ import annotations

import unicodedata

import click

from node.commands.options import all_of
from node.protocol.profiles import check_nickname
from node.protocol.reasons import Refusal


def _read_nickname(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    try:
        return None if value is None else check_nickname(unicodedata.normalize("NFC", value.strip()))
    except Refusal as refusal:
        raise click.BadParameter(refusal.detail) from refusal


profile_options = all_of(
    click.option(
        "--nickname",
        metavar="NAME",
        callback=_read_nickname,
        help="What the run's pages call this node, beside its id: up to 32 letters, digits, spaces and . _ -",
    ),
    click.option(
        "--hardware/--no-hardware",
        default=True,
        show_default=True,
        help="Tell the run's pages what this worker computes on: its GPU's name or CPU, engine and dtype.",
    ),
)
