"""`swarmproof models`."""

from __future__ import annotations

import json
from typing import Final

import click

from node.commands.options import json_option
from node.policy.families import ATTENTION_FAMILIES, RECURRENT_FAMILIES, engines_of

_WIDTHS: Final = {"family": 14, "layers": 25, "engines": 13, "besides": 0}


@click.command()
@json_option("A JSON list of objects instead of a table.")
def models(*, as_json: bool) -> None:
    """List the model families that a run can train.

    A policy of any other family, or with a setting that its family does not have, is refused.

    \b
    Example:
      swarmproof models
    """
    rows = [family_row(family) for family in sorted((*ATTENTION_FAMILIES, *RECURRENT_FAMILIES))]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in ({name: name.upper() for name in _WIDTHS}, *rows):
        click.echo("".join(f"{row[name]:<{width}}" for name, width in _WIDTHS.items()).rstrip())
    click.echo("\nWhat was measured of each: docs/models.md")


def family_row(family: str) -> dict[str, str]:
    """Return what the table of families says of one: what its layers attend to, who serves it, what else it has."""
    row, engines = ATTENTION_FAMILIES.get(family), ", ".join(sorted(engines_of(family)))
    if row is None:
        return {"family": family, "layers": "recurrent", "engines": engines, "besides": ""}
    said = {
        "divided logits": row.logit_divisor,
        "capped logits": row.logit_cap,
        "capped scores": row.score_cap,
        "partial rotary": row.is_rotary_partial,
        "rotary by kind of layer": row.has_rotary_by_kind,
        "experts": row.experts,
        "sinks": row.has_sinks,
        "latent keys and values": "kv_lora_rank" in row.fields,
    }
    besides = [name for name, is_so in said.items() if is_so]
    besides += [f"vllm with {name} {allowed[-1]}".lower() for name, allowed in row.vllm_fixed.items()]
    besides += ["vllm with layers alike"] if row.is_even_in_vllm else []
    layers = "full attention, windows" if row.has_windows else "full attention"
    return {"family": family, "layers": layers, "engines": engines, "besides": ", ".join(besides)}
