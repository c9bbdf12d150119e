"""Options for whoever believes a log that witnesses have signed: `swarmproof audit` and `receipt verify`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from node.commands.options import all_of, number_option

if TYPE_CHECKING:
    from node.audit.witnesses import WitnessRule

witness_options = all_of(
    click.option(
        "--witness",
        "witnesses",
        multiple=True,
        metavar="VKEY[@URL]",
        help="A witness that has to have signed the log; with its address, it is asked itself. Repeatable.",
    ),
    number_option("--quorum", "How many of the witnesses have to.  [default: all]"),
)


def witness_rule(witnesses: Sequence[str], quorum: int | None) -> WitnessRule | None:
    """Return what the options ask for, None without a witness; raises UsageError and ConfigError."""
    if not witnesses:
        if quorum is not None:
            raise click.UsageError("--quorum says how many of --witness; give these, too.")
        return None
    from node.audit.witnesses import WitnessRule
    from node.client.witness import parse_witnesses

    asked = parse_witnesses(witnesses)
    return WitnessRule(asked, quorum or len(asked))
