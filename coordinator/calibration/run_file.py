"""The values found, written into a copy of the operator's run.toml that keeps its comments and its order."""

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
    """`text`, a run.toml, with the proofs and limits of `found`; `remarks` become comments above the levels.

    Raises BadConfiguration where the file is written in a way that takes no such values.
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
        raise _unsuitable("it would not say what was found")
    return result


def _unsuitable(why: str) -> BadConfiguration:
    return BadConfiguration(
        f"the limits cannot be written into this run.toml ({why}): give it [proofs] and [limits] as tables of their own"
    )


def _set(document: tomlkit.TOMLDocument, name: str, before: msgspec.Struct, found: msgspec.Struct) -> None:
    """Write what differs in the table `name`, or is there already."""
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
