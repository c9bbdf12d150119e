"""One key works on one machine (docs/protocol.md, 3.4): which instance of a node registered last, and when it spoke.

Two machines with one key would spend each other's leases and share each other's rejections without anybody knowing
why. It is no defence against a node that wants it so: what an instance calls itself is its own word.
"""

from __future__ import annotations

from sqlalchemy import Connection, bindparam, select, update

from coordinator.storage.schema import nodes
from coordinator.storage.work import CLOCK_STEP_SECONDS
from node.protocol.messages import Registration
from node.protocol.reasons import Reason, Refusal

INSTANCE_SECONDS = 120.0
"""An instance that was not heard for so long makes way for another."""

# Built once: a lease request is often asked, and building a statement costs more than running it.
_HELD = (
    select(nodes.c.instance, nodes.c.instance_name, nodes.c.instance_seen_at)
    .where(nodes.c.node == bindparam("key"))
    .with_for_update()
)
_HEARD = (
    update(nodes)
    .where(nodes.c.node == bindparam("key"), nodes.c.instance == bindparam("own"))
    .values(instance_seen_at=bindparam("at"))
)


def is_at_work(seen_at: float, *, now: float) -> bool:
    """Whether an instance that was last heard at `seen_at` keeps others from its key.

    One heard in a time to come does not: this machine's clock was ahead then, or is set back now.
    """
    return -CLOCK_STEP_SECONDS <= now - seen_at < INSTANCE_SECONDS


def admit(connection: Connection, node: str, registration: Registration, *, now: float) -> dict[str, str | float]:
    """What is to be stored of the instance that registers; raises Refusal while another one is at work."""
    held = connection.execute(_HELD, {"key": node}).first()
    if held is not None and held.instance not in ("", registration.instance):
        _refuse_if_at_work(held.instance_name, held.instance_seen_at, now=now)
    return {"instance": registration.instance, "instance_name": registration.name, "instance_seen_at": now}


def hear(connection: Connection, node: str, instance: str, *, now: float) -> None:
    """Note that the node's instance is at work. Raises Refusal for any other than the one that registered last."""
    if connection.execute(_HEARD, {"key": node, "own": instance, "at": now}).rowcount == 1:
        return
    held = connection.execute(_HELD, {"key": node}).first()
    if held is not None:
        _refuse_if_at_work(held.instance_name, held.instance_seen_at, now=now)
    # The other one is silent. Who takes its place says what it is called, so that it can be named in turn.
    raise Refusal(Reason.UNKNOWN_IDENTITY, f"This instance of node {node[:16]}….")


def _refuse_if_at_work(name: str, seen_at: float, *, now: float) -> None:
    if is_at_work(seen_at, now=now):
        seconds = max(0.0, now - seen_at)
        who = name or "another machine"
        raise Refusal(Reason.KEY_IN_USE, f"This key is at work on {who}, heard {seconds:.0f} s ago.")
