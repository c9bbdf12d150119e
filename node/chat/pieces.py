"""Fill pieces: texts with slots between them (docs/protocol.md, section 5.3)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from node.chat.errors import Unrenderable
from node.protocol.chat import Pieces


def to_json(value: Any, *, indent: int = 0, sort_keys: bool = False) -> str:
    """Write JSON as chat templates' `tojson` does: Python's separators, and no escapes but those that JSON needs."""
    return json.dumps(value, ensure_ascii=False, indent=indent or None, sort_keys=sort_keys)


ENCODERS: Final[Mapping[str, Callable[[str], str]]] = {
    "": lambda text: text,
    "strip": str.strip,
    "strip-lf": lambda text: text.strip("\n"),
    "lstrip-lf": lambda text: text.lstrip("\n"),
    "rstrip-lf": lambda text: text.rstrip("\n"),
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
    "json": to_json,
}


def fill(pieces: Pieces, values: Mapping[str, str]) -> str:
    """Put `values` into the slots of `pieces`."""
    return "".join(piece if at % 2 == 0 else slot_value(piece, values) for at, piece in enumerate(pieces))


def slot_value(slot: str, values: Mapping[str, str]) -> str:
    """Return what stands in `slot`, a name or `name:encoding`."""
    name, _, encoding = slot.partition(":")
    return ENCODERS[encoding](values[name])


def slot_of(pieces: Pieces, name: str) -> str | None:
    """Return the slot of `name` with its encoding, None where `pieces` have none."""
    return next((slot for slot in pieces[1::2] if slot.partition(":")[0] == name), None)


def length_before(pieces: Pieces, name: str, values: Mapping[str, str]) -> int:
    """Return the number of characters before the slot of `name`; raises Unrenderable where there is none."""
    for at in range(1, len(pieces), 2):
        if pieces[at].partition(":")[0] == name:
            return len(fill(pieces[:at], values))
    raise Unrenderable(f"this chat format has no place for {name} where it is needed")
