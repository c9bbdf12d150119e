"""What nodes say of themselves: nickname and hardware of each one's last registration, for pages alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import UnsetType
from sqlalchemy import Connection, bindparam, delete, insert, select

from coordinator.storage.schema import profiles
from node.protocol.messages import Registration
from node.protocol.profiles import Hardware, fold_nickname

_COLUMNS: Final = (profiles.c.nickname, profiles.c.device, profiles.c.engine, profiles.c.dtype)
_OWN: Final = profiles.c.node == bindparam("of_node")
_HELD, _FORGET = select(*_COLUMNS).where(_OWN), delete(profiles).where(_OWN)


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """What a node says of itself: "" and None for what it does not say."""

    nickname: str = ""
    hardware: Hardware | None = None


def replace(connection: Connection, node: str, registration: Registration) -> None:
    """Have the node's profile say what its registration says, and nothing else; the node's row is there."""
    nickname = "" if isinstance(registration.nickname, UnsetType) else registration.nickname
    said = registration.hardware
    texts = ("", "", "") if isinstance(said, UnsetType) else (said.device, said.engine, said.dtype)
    columns = dict(zip((column.name for column in _COLUMNS), (nickname, *texts), strict=True))
    held, says = connection.execute(_HELD, {"of_node": node}).first(), any(columns.values())
    if held is not None and says and tuple(held) == tuple(columns.values()):
        return
    if held is not None:
        connection.execute(_FORGET, {"of_node": node})
    if says:
        connection.execute(insert(profiles), columns | {"node": node, "folded": fold_nickname(nickname)})


def list_of(connection: Connection, nodes: Iterable[str]) -> dict[str, NodeProfile]:
    """Return a profile for each of these nodes, an empty one for who says nothing."""
    names = list(nodes)
    found = connection.execute(select(profiles.c.node, *_COLUMNS).where(profiles.c.node.in_(names)))
    return dict.fromkeys(names, NodeProfile()) | {
        node: NodeProfile(nickname, Hardware(device=device, engine=engine, dtype=dtype) if device else None)
        for node, nickname, device, engine, dtype in found
    }


def nodes_called(connection: Connection, nickname: str, *, most: int) -> list[str]:
    """Return at most `most` nodes with this nickname, compared as `fold_nickname` says."""
    folded = fold_nickname(nickname)
    if not folded:
        return []
    query = select(profiles.c.node).where(profiles.c.folded == folded).order_by(profiles.c.node).limit(most)
    return list(connection.execute(query).scalars())
