"""Write calibrated values into a copy of the operator's run.toml, keeping its comments and order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from coordinator.errors import BadConfiguration
from node.protocol.evidence import STATISTICS
from node.protocol.run import LevelSpec, RunSpec, parse_run_toml
from shardcast.errors import Malformed


def calibrated_text(text: str, found: RunSpec, *, remarks: Sequence[str]) -> str:
    """Return run.toml `text` with the proofs and limits of `found`; `remarks` become comments above the levels.

    Raises BadConfiguration if the file's form cannot take the values.
    """
    try:
        document = tomlkit.parse(text)
        before = parse_run_toml(text)
        _set(document, "proofs", before.proofs, found.proofs)
        _set(document, "limits", before.limits, found.limits)
        limits: Any = document["limits"]
        if "honest" in limits:
            del limits["honest"]
        limits["honest"] = _levels(found, remarks)
        result = tomlkit.dumps(document)
        same = parse_run_toml(result) == found
    except (TOMLKitError, Malformed, KeyError, TypeError, ValueError) as error:
        raise _unsuitable(str(error)) from error
    if not same:
        raise _unsuitable("the written values would not parse back")
    return result


def _unsuitable(why: str) -> BadConfiguration:
    return BadConfiguration(
        f"cannot write the limits into this run.toml ({why}): give it [proofs] and [limits] as tables of their own"
    )


def _set(document: tomlkit.TOMLDocument, name: str, before: msgspec.Struct, found: msgspec.Struct) -> None:
    """Write the values of table `name` that differ, or that the file already has."""
    if name not in document:
        document[name] = tomlkit.table()
    table: Any = document[name]
    old, new = (msgspec.structs.asdict(struct) for struct in (before, found))
    for key, value in new.items():
        if key != "honest" and (value != old[key] or (key in table and table[key] != value)):
            table[key] = value


def _levels(found: RunSpec, remarks: Sequence[str]) -> Table:
    table, last = tomlkit.table(), None
    for remark in remarks:
        table.add(tomlkit.comment(remark))
    for name in STATISTICS:
        level: LevelSpec | None = getattr(found.limits.honest, name)
        if level is not None:
            values: Mapping[str, float] = msgspec.structs.asdict(level)
            table[name] = tomlkit.item(dict(values))
            last = table[name]
    if last is not None:
        last.add(tomlkit.nl())
    return table
