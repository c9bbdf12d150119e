"""One active instance per node key (docs/protocol.md, 3.4): the last registered one, and when it was last seen.

Protects operators from running two machines with one key, which would use up each other's leases and share rejections.
Instance ids are self-reported, so this is no defence against a node that evades it.
"""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy import Connection, bindparam, select, update

from coordinator.storage.gaps import CLOCK_STEP_SECONDS
from coordinator.storage.prepared import Prepared
from coordinator.storage.schema import nodes
from node.protocol.messages import Registration
from node.protocol.reasons import Reason, Refusal

INSTANCE_SECONDS = 120.0
"""Inactivity after which another instance may register."""

_HELD = Prepared(
    select(nodes.c.instance, nodes.c.instance_name, nodes.c.instance_seen_at)
    .where(nodes.c.node == bindparam("key"))
    .with_for_update()
)
_HEARD = Prepared(
    update(nodes)
    .where(nodes.c.node == bindparam("key"), nodes.c.instance == bindparam("own"))
    .values(instance_seen_at=bindparam("at"))
    .returning(nodes.c.node)
)


def is_active(seen_at: float, *, now: float) -> bool:
    """Return whether an instance last seen at `seen_at` blocks others; a time in the future is a clock error."""
    return -CLOCK_STEP_SECONDS <= now - seen_at < INSTANCE_SECONDS


def instance_columns(
    connection: Connection, node: str, registration: Registration, *, now: float
) -> dict[str, str | float]:
    """Return the registering instance's columns of `nodes`; raises Refusal while another one is active."""
    held = _HELD.first(connection, {"key": node})
    if held is not None and held[0] not in ("", registration.instance):
        _refuse_if_active(*held[1:], now=now)
    return {"instance": registration.instance, "instance_name": registration.name, "instance_seen_at": now}


def record_activity(connection: Connection, node: str, instance: str, *, now: float) -> Callable[[], None]:
    """Update when the node's instance was last seen; return what raises Refusal unless it is the last registered one.

    PostgreSQL is not waited for before that is called.
    """
    heard = _HEARD.send(connection, {"key": node, "own": instance, "at": now})

    def check() -> None:
        if heard():
            return
        held = _HELD.first(connection, {"key": node})
        if held is not None:
            _refuse_if_active(*held[1:], now=now)
        # The registered instance is inactive: have this one register, which records its name.
        raise Refusal(Reason.UNKNOWN_IDENTITY, f"This instance of node {node[:16]}….")

    return check


def _refuse_if_active(name: str, seen_at: float, *, now: float) -> None:
    if is_active(seen_at, now=now):
        ago = f"{max(0.0, now - seen_at):.0f} s ago"
        raise Refusal(Reason.KEY_IN_USE, f"This key is at work on {name or 'another machine'}, heard {ago}.")
