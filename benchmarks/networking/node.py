"""An honest node: it is told one string, finds its run, registers, takes a lease, and stays.

It speaks in lines of JSON. What a worker does until its first lease, but for the policy and the engine, which are not
the network's: its lease request holds the head that its descriptor names. Moments are those of CLOCK_MONOTONIC, which
is one for all processes.
"""

from __future__ import annotations

import time

BEGAN_AT = time.monotonic()

import argparse  # noqa: E402  (the imports are what is timed)
import asyncio  # noqa: E402
import contextlib  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.broadcasting.lines import requests, say  # noqa: E402
from benchmarks.networking.meters import TcpMeter, cpu_seconds, memory_mib  # noqa: E402
from node.commands.joining_options import parse_join_options  # noqa: E402
from node.discovery.descriptor import DescriptorStore, VerifiedDescriptor  # noqa: E402
from node.joining.session import JoinSettings, RunSession, join_run  # noqa: E402
from node.keys.identity import load_or_create_key  # noqa: E402
from node.protocol.messages import LeaseRequest, Registration  # noqa: E402
from node.worker.instance import load_instance  # noqa: E402

ASK_SECONDS = 0.05
FOREVER = float("inf")


class SeenHeads:
    """When this node first knew of each head."""

    def __init__(self) -> None:
        self.heads: list[tuple[int, float]] = []

    def note(self, verified: VerifiedDescriptor) -> None:
        at, head = time.monotonic(), verified.descriptor.head
        if head is not None and (not self.heads or head.version > self.heads[-1][0]):
            self.heads.append((head.version, at))


async def first_lease(session: RunSession, state: Path) -> dict[str, float]:
    """Register and ask until there is one; when each was done."""
    client, instance = session.client, load_instance(state)
    registration = Registration(software="network", engine="none", instance=instance.id, name=instance.name)
    await client.register(registration, patience_seconds=FOREVER)
    registered_at = time.monotonic()
    while True:
        head = session.descriptor.head
        held = () if head is None else (head.version,)
        reply = await client.lease(
            LeaseRequest(held_versions=held, slots=1, instance=instance.id), patience_seconds=FOREVER
        )
        if reply.leases:
            return {"registered_at": registered_at, "leased_at": time.monotonic()}
        await asyncio.sleep(ASK_SECONDS)


async def run(entry: JoinSettings, state: Path, coordinator_port: int) -> None:
    """Run until standard input ends."""
    imported_at = time.monotonic()
    key = load_or_create_key(state / "key")
    async with join_run(entry, key=key, state=state) as session:
        entered_at = time.monotonic()
        seen, meter = SeenHeads(), TcpMeter(without_port=coordinator_port)
        watch(session.store, seen)
        following = asyncio.create_task(session.follow())
        leased = await first_lease(session, state)
        say(began_at=BEGAN_AT, imported_at=imported_at, entered_at=entered_at, **leased)
        async for _request in requests():
            say(**report(session, seen, meter))
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


def watch(store: DescriptorStore, seen: SeenHeads) -> None:
    store.listen(seen.note)
    if store.last is not None:
        seen.note(store.last)


def report(session: RunSession, seen: SeenHeads, meter: TcpMeter) -> dict[str, Any]:
    """Return all that was seen and used so far."""
    sent, received = meter.look()
    return {
        "heads": seen.heads,
        "network": None if session.network is None else session.network.status(),
        "sent_bytes": sent,
        "received_bytes": received,
        "cpu_s": cpu_seconds(),
        "memory_mib": memory_mib(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--join", action="append", default=[])
    parser.add_argument("--coordinator", action="append", default=[])
    parser.add_argument("--run-id")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--coordinator-port", type=int, required=True, help="whose bytes are not counted")
    options = parser.parse_args()
    join = parse_join_options(
        joins=tuple(options.join),
        coordinators=tuple(options.coordinator),
        run_id=options.run_id,
        peer_listen="127.0.0.1:0",
    )
    options.state.mkdir(parents=True, exist_ok=True)
    entry = join.settings(load_or_create_key(options.state / "key"))
    asyncio.run(run(entry, options.state, options.coordinator_port))


if __name__ == "__main__":
    main()
