"""One hostile process at work: takes turns through its attacks, and comes back with a new key when it is thrown out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.lab.processes.journal import STORED, Journal
from coordinator.lab.processes.layout import WORKER_KEY
from coordinator.lab.redteam.attack import Attack, DoorAttack, Forged, SlotAttack
from coordinator.lab.redteam.http_client import HostileClient, Identity
from coordinator.lab.redteam.workshop import Workshop
from node.client.http import Backoff
from node.keys.identity import load_or_create_key
from node.protocol.messages import MAX_MESSAGE_BYTES, Lease, RelayList
from node.protocol.reasons import Reason
from node.protocol.run import RunSpec
from node.runtime.signals import Stopped, race
from node.worker.policies import PolicyFeed
from shardcast import Client
from shardcast.errors import PeerFault
from shardcast.urls import valid_sources
from shardcast.wire import decode

log = logging.getLogger(__name__)

REFRESH_SECONDS = 10.0
PACE_SECONDS = 0.5
STRIKES_AT_ONCE = 4
"""Those that draw alike share an engine's batches, as an honest worker's slots do."""

IDLE_SECONDS = 0.25
BARREN_LEASES = 8
"""A key that got no work so many times in a row is thrown away: whoever is made to wait takes a new one."""

_GONE = frozenset({"banned", Reason.UNKNOWN_IDENTITY.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class RaidSettings:
    """One hostile process. `share` is the part of all submitted slots that it aims at.

    Between attacks at the door are `door_seconds`. `address` is the local address to come from.
    """

    coordinator: str
    run_id: str
    state: Path
    attacks: tuple[Attack, ...]
    share: float = 1.0
    door_seconds: float = 2.0
    address: str | None = None


@dataclass(eq=False)
class Raid:
    """What attacks work with; `open_raid` makes one that has joined a run. `arrived` is set by its first policy."""

    settings: RaidSettings
    spec: RunSpec
    door: HostileClient
    feed: PolicyFeed
    arrived: asyncio.Event
    workshop: Workshop
    journal: Journal
    _identities: dict[str, Identity] = field(default_factory=dict)
    _barren: Counter[str] = field(default_factory=Counter)
    _busy: set[str] = field(default_factory=set)

    async def identity(self, attack: Attack) -> Identity:
        """Return the key that an attack uses now, registered if the coordinator lets it in."""
        found = self._identities.get(attack.name)
        if found is None:
            found = self._identities[attack.name] = self.fresh()
        if not found.is_known:
            answer = await self.door.register(found)
            if not answer.accepted:
                log.info("%s: registration refused (%s)", attack.name, answer.code)
        return found

    def fresh(self) -> Identity:
        """Return a new key; the first one is kept in the state folder."""
        first = not self._identities
        identity = Identity(load_or_create_key(self.settings.state / WORKER_KEY)) if first else Identity()
        self.journal.introduce(identity.node)
        return identity

    def discard(self, attack: Attack) -> None:
        """Throw an attack's key away; the next one costs nothing."""
        self._identities[attack.name] = self.fresh()
        self._barren.pop(attack.name, None)

    async def lease(self, attack: Attack, *, per_key: int | None = None) -> tuple[Identity, Lease] | None:
        """Lease a slot for an attack; None if there is none for it now."""
        limit = attack.slots_per_key if isinstance(attack, SlotAttack) else per_key
        identity = await self.identity(attack)
        if limit is not None and identity.uses >= limit:
            self.discard(attack)
            identity = await self.identity(attack)
        held = self.feed.versions()
        if not held or not identity.is_known:
            return None
        answer, leases = await self.door.lease(identity, held=held)
        if leases:
            identity.uses += 1
            self._barren.pop(attack.name, None)
            return identity, leases[0]
        self._barren[attack.name] += 1
        if answer.code in _GONE or self._barren[attack.name] >= BARREN_LEASES:
            log.info("%s: key replaced after %d slots (%s)", attack.name, identity.uses, answer.code)
            self.discard(attack)
        return None

    async def submit(self, attack: Attack, identity: Identity, lease: Lease, forged: Forged) -> None:
        """Submit what was forged for a slot, and record the coordinator's answer."""
        answer, submission = await self.door.submit(identity, lease, forged.body)
        self.journal.write(
            attack.name,
            identity.node,
            code=STORED if answer.accepted else answer.code,
            hostile=forged.hostile,
            submission=submission if answer.accepted else None,
            slot=f"{lease.version}/{lease.slot}",
            note=forged.note,
        )

    def note(
        self, attack: Attack, code: str, *, node: str, note: str = "", slot: str | None = None, count: int = 1
    ) -> None:
        """Record what became of a hostile request, or of `count` alike."""
        self.journal.write(attack.name, node, code=code, note=note, slot=slot, count=count)

    def elsewhere(self) -> HostileClient:
        """Yield a client of the same coordinator from an address that this process uses for nothing else."""
        own = self.settings.address
        return HostileClient(
            self.door.url, run_id=self.door.run_id, address=own and own.replace("127.0.1.", "127.0.2.")
        )

    # -- the process

    async def run(self, stop: asyncio.Event) -> None:
        """Attack until `stop` is set."""
        slots = [attack for attack in self.settings.attacks if isinstance(attack, SlotAttack)]
        doors = [attack for attack in self.settings.attacks if isinstance(attack, DoorAttack)]
        turns = itertools.cycle(slots)
        work = [self._take_slots(turns, len(slots)) for _ in range(min(STRIKES_AT_ONCE, len(slots)))]
        work += [self._knock(doors)] if doors else []
        async with _background(work) as tasks:
            with contextlib.suppress(Stopped):
                await race(_first_failure(tasks), stop)

    async def _take_slots(self, turns: Iterator[SlotAttack], attacks: int) -> None:
        barren = 0
        while True:
            await self._keep_pace()
            attack = next(turns)
            if attack.name not in self._busy:
                self._busy.add(attack.name)
                barren = 0 if await self._strike(attack) else barren + 1
                self._busy.discard(attack.name)
            if barren >= attacks:
                await asyncio.sleep(IDLE_SECONDS)

    async def _keep_pace(self) -> None:
        """Wait while more than this process's share of all slots is its own, and hostile."""
        while self.settings.share < 1.0:
            status = await self.door.status()
            judged = sum(row["count"] for row in status["verdicts"]) if status else 0
            if self.journal.stored < self.settings.share * (judged + 1 / self.settings.share):
                return
            await asyncio.sleep(PACE_SECONDS)

    async def _knock(self, attacks: Sequence[DoorAttack]) -> None:
        """Run the request attacks in turn; those that take long run on beside the next."""
        await self.arrived.wait()  # before there is work, there is nothing to keep others from
        running: dict[str, asyncio.Task[bool]] = {}
        try:
            for attack in itertools.cycle(attacks):
                if attack.name not in running or running[attack.name].done():
                    running[attack.name] = asyncio.create_task(self._strike(attack))
                await asyncio.sleep(self.settings.door_seconds)
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)

    async def _strike(self, attack: Attack) -> bool:
        try:
            return await attack.strike(self)
        except Exception:
            log.exception("%s fails by a fault of its own", attack.name)
            await asyncio.sleep(IDLE_SECONDS)
            return False

    async def follow_relays(self) -> None:
        """Fetch policies from whoever the coordinator names; never ends."""
        while True:
            answer = await self.door.send("GET", "/v1/relays")
            with contextlib.suppress(PeerFault):
                if answer.accepted:
                    advice = decode(RelayList, answer.body, max_bytes=4 * MAX_MESSAGE_BYTES)
                    self.feed.use_relays(RelayList(relays=advice.relays))
            await asyncio.sleep(REFRESH_SECONDS if self.feed.versions() else 1.0)


async def _first_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


@contextlib.asynccontextmanager
async def _background(work: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Context manager around tasks that are cancelled with the block."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def open_raid(settings: RaidSettings) -> AsyncIterator[Raid]:
    """Join the run, follow its policies, and yield the raid. Raises PeerFault, TimeoutError."""
    async with contextlib.AsyncExitStack() as stack:
        journal = Journal(settings.state)
        stack.callback(journal.close)
        door = await stack.enter_async_context(
            HostileClient(settings.coordinator, run_id=settings.run_id, address=settings.address)
        )
        descriptor, run_key = await door.descriptor()
        broadcast = await stack.enter_async_context(
            Client(
                settings.run_id,
                run_key,
                valid_sources(descriptor.relays),
                settings.state / "shardcast",
                keep=descriptor.spec.batch.max_async + 2,  # one more than it is leased: to send what is stale
            )
        )
        arrived = asyncio.Event()
        feed = PolicyFeed(broadcast, backoff=Backoff(), arrived=arrived)
        workshop = Workshop(descriptor.spec, run_id=settings.run_id, feed=feed, folder=settings.state / "workshop")
        stack.push_async_callback(workshop.close)
        raid = Raid(settings, descriptor.spec, door, feed, arrived, workshop, journal)
        await stack.enter_async_context(_background([feed.follow(), raid.follow_relays()]))
        yield raid
