"""What a mistyped key of run.toml may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from node.protocol.run import RunSpec

_UNKNOWN: Final = re.compile(r"unknown field `(?P<key>[^`]+)`(?: - at `\$(?P<path>[^`]*)`)?")


def unknown_key(message: str) -> str | None:
    """Return a sentence that names the nearest known key, or all, if a message of msgspec is of an unknown one."""
    found = _UNKNOWN.search(message)
    if found is None:
        return None
    tables = re.findall(r"\.(\w+)", found["path"] or "")
    known = sorted(_keys(RunSpec, tables))
    near = difflib.get_close_matches(found["key"], known, n=1)
    where = f"in [{'.'.join(tables)}]" if tables else "at the top level"
    meant = f"; did you mean {near[0]!r}?" if near else ", where a run can have " + ", ".join(known)
    return f"there is no key {found['key']!r} {where}{meant}" if known else None


def _keys(kind: Any, tables: list[str]) -> Iterator[str]:
    """Yield the keys of the table in which `tables` end."""
    for struct in _structs(msgspec.inspect.type_info(kind)):
        if not tables:
            yield from (field.encode_name for field in struct.fields)
        for field in struct.fields:
            if tables and field.encode_name == tables[0]:
                for inner in _structs(field.type):
                    yield from _keys(inner.cls, tables[1:])


def _structs(kind: msgspec.inspect.Type) -> Iterator[msgspec.inspect.StructType]:
    """Yield the structs that a value of this type may be, or hold."""
    match kind:
        case msgspec.inspect.StructType():
            yield kind
        case msgspec.inspect.UnionType():
            for one in kind.types:
                yield from _structs(one)
        case msgspec.inspect.VarTupleType() | msgspec.inspect.ListType():
            yield from _structs(kind.item_type)
        case msgspec.inspect.Metadata():
            yield from _structs(kind.type)
