"""The worker daemon: holds the newest policies, keeps slots under way, delivers them.

It trusts nobody. The run's rules come from a descriptor that matches the run's id, policies are checked by
shardcast, and what to generate is derived here from the worker's own verified manifest. What it cannot check is
whether its work is judged fairly; the signed receipts that it keeps are for that.

Slots share the engine's batch, and a new one is leased as soon as one ends. A new policy is loaded as soon as the
run's rules allow it for every slot under way; until then those slots go on under the one that they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.api import DEFAULT_BACKOFF
from node.client.http import Backoff, sound_urls
from node.engines.base import DoesNotFit, Engine, WrongEngine
from node.errors import BadReply, EngineFailed, Refused
from node.joining.entrance import Entrance, Entry, entered
from node.keys.identity import node_id
from node.protocol.control import FREE_PURPOSES, Purpose
from node.protocol.messages import Lease, RelayList
from node.protocol.pools import has_candidate
from node.protocol.run import RunSpec
from node.relay.advice import Serving, announcement
from node.runtime.signals import Stopped, first_of, race
from node.worker.complaints import Complaints
from node.worker.control import WorkerControl
from node.worker.delivery import FOR_EVER, Delivery
from node.worker.engine import EngineHost, UnusablePolicy
from node.worker.events import NOBODY, EventKind, Onlooker
from node.worker.instance import instance_of
from node.worker.leases import (
    HAND_BACK_SECONDS,
    REFUSED_PAUSE_SECONDS,
    UNSOUND_PAUSE_SECONDS,
    LeaseDesk,
)
from node.worker.policies import PolicyFeed
from node.worker.registration import Registrar, software
from node.worker.slots import SlotsUnderWay
from node.worker.standing import StandingDesk
from node.worker.state import WorkerState
from node.worker.status import figures, save_status
from shardcast import Client as BroadcastClient
from shardcast import ServerLimits

log = logging.getLogger(__name__)

REFRESH_SECONDS: Final = 15.0
STATUS_SECONDS: Final = 1.0
MAX_ENGINE_FAILURES: Final = 5
MOST_OPEN: Final = 2
"""How many times --slots slots may be open, where all but a few completions of each have ended."""

MakeEngine = Callable[[RunSpec], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker. `slots` is how many it has under way at most; `grace_seconds` what ending may take.

    `once` ends it after the receipts of the first slots. With `serving` it serves the policies that it fetches,
    within `server_limits`. `control` is what the run's operator may ask of it. `backoff` paces whatever is tried again.
    """

    entry: Entry
    state: Path
    slots: int = 4
    grace_seconds: float = 10.0
    once: bool = False
    serving: Serving | None = None
    server_limits: ServerLimits = field(default_factory=ServerLimits)
    control: frozenset[Purpose] = FREE_PURPOSES
    backoff: Backoff = DEFAULT_BACKOFF


async def run_worker(
    settings: WorkerSettings,
    *,
    key: Ed25519PrivateKey,
    make_engine: MakeEngine,
    stop: asyncio.Event,
    onlooker: Onlooker = NOBODY,
) -> None:
    """Work for a run until `stop` is set; raises NodeError or ShardcastError for what waiting does not heal."""
    onlooker.notice(EventKind.STARTED, software=software(), coordinators=list(settings.entry.coordinators))
    with WorkerState(settings.state) as state:
        log.info("node %s joins run %s…", node_id(key), settings.entry.run_id[:16])
        async with contextlib.AsyncExitStack() as stack:
            coming = entered(settings.entry, key=key, state=settings.state, backoff=settings.backoff)
            try:
                entrance = await race(stack.enter_async_context(coming), stop)
            except Stopped:
                return
            descriptor = entrance.descriptor
            state.bind(settings.entry.run_id, descriptor.spec.digest)
            broadcast = BroadcastClient(
                settings.entry.run_id,
                entrance.run_key,
                sound_urls(descriptor.relays),
                settings.state / "shardcast",
                keep=descriptor.spec.batch.max_async + 1,
            )
            worker = Worker(
                settings,
                entrance,
                key=key,
                state=state,
                broadcast=await stack.enter_async_context(broadcast),
                engine=make_engine(descriptor.spec),
                onlooker=onlooker,
            )
            await worker.run(stop)


class Worker:
    """One worker that has joined a run."""

    def __init__(
        self,
        settings: WorkerSettings,
        entrance: Entrance,
        *,
        key: Ed25519PrivateKey,
        state: WorkerState,
        broadcast: BroadcastClient,
        engine: Engine,
        onlooker: Onlooker = NOBODY,
    ) -> None:
        self._settings = settings
        self._entrance = entrance
        descriptor, client = entrance.descriptor, entrance.client
        self._spec = descriptor.spec
        self._known_relays = sound_urls(descriptor.relays)
        self._state = state
        self._client = client
        self._onlooker = onlooker
        self._changed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._feed = PolicyFeed(broadcast, backoff=settings.backoff, arrived=self._changed, onlooker=onlooker)
        self._host = EngineHost(
            engine, self._feed, spec=descriptor.spec, run_id=settings.entry.run_id, onlooker=onlooker
        )
        self._registrar = Registrar(
            client,
            engine=self._host.name,
            instance=instance_of(state.folder),
            backoff=settings.backoff,
            changed=self._changed,
        )
        self._desk = LeaseDesk(
            client,
            self._feed,
            registrar=self._registrar,
            last_step=descriptor.spec.training.steps,
            has_candidate=partial(has_candidate, descriptor.spec, run_id=settings.entry.run_id),
            evidence=state.folder,
            onlooker=onlooker,
        )
        self._delivery = Delivery(
            client, state, register=self._registrar.register, backoff=settings.backoff, onlooker=onlooker
        )
        self._slots = SlotsUnderWay(
            self._host,
            state,
            group_size=self._spec.sampling.group_size,
            deliver=lambda pending: self._delivery.start(pending, self._group),
            give_back=self._desk.give_back,
            now=client.now,
            changed=self._changed,
            onlooker=onlooker,
        )
        self._standing = StandingDesk(client, node=node_id(key), tally=state.tally)
        self._control = WorkerControl(
            entrance,
            key=key,
            allowed=settings.control,
            host=self._host,
            desk=self._desk,
            slots=self._slots,
            delivery=self._delivery,
            status=self.status,
            room=self._room,
            changed=self._changed,
        )
        self._started_at = time.time()
        self._doing = "joining"
        self._complaints = Complaints()
        self._failures = 0
        self._finished_before = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then hand back what is not done. Raises Refused where the node is dismissed."""
        try:
            async with self._group as group:
                for pending in self._state.recover():
                    self._delivery.start(pending, group)
                self._onlooker.meet(self.status)
                tasks = (
                    self._feed.follow(),
                    self._refresh(),
                    self._write_status(),
                    self._registrar.stay_known(),
                    self._entrance.follow(),
                )
                background = [group.create_task(task) for task in tasks]
                with contextlib.suppress(Stopped), self._control.listening():
                    self._doing = "introducing this node to the coordinator"
                    await race(self._registrar.register_until_known(), stop)
                    background.append(group.create_task(self._standing.follow()))
                    await self._work(stop)
                self._doing = "stopping"
                self._onlooker.notice(EventKind.STOPPING)
                await self._slots.finish(grace_seconds=self._settings.grace_seconds)
                await self._delivery.finish(upload_seconds=self._settings.grace_seconds)
                for task in background:
                    task.cancel()
            if self._registrar.dismissal is not None:
                raise self._registrar.dismissal
        except BaseExceptionGroup as failures:
            raise first_of(failures) from failures
        finally:
            await self._control.interrupt()
            await self._host.close()
            self._doing = "ended"
            save_status(self._state.folder, self.status())
            dismissal = self._registrar.dismissal
            self._onlooker.notice(EventKind.ENDED, dismissed=None if dismissal is None else str(dismissal))

    # -- policies and slots

    async def _work(self, stop: asyncio.Event) -> None:
        """Keep slots under way until the end, or until the coordinator wants no more of them; raises Stopped."""
        while self._registrar.dismissal is None:
            self._changed.clear()
            try:
                if self._slots.failure is not None:
                    raise self._slots.failure
                self._note_success()
                if self._control.take_restart():
                    await self._end_engine()
                if self._settings.once and self._slots.finished and not self._slots:
                    await race(self._delivery.settled(), stop)
                    return
                await race(self._follow_policy(), stop)
                if not await self._take_work(stop):
                    await self._rest(stop)
            except UnusablePolicy as error:
                self._count_failure(error)
                log.error("%s", error)  # noqa: TRY400  (a person reads this; the cause is in its sentence)
            except EngineFailed as error:
                await self._recover(error, stop)

    async def _follow_policy(self) -> None:
        """Load the newest policy if it is time: at the start, in flight, or while there is nothing else to do."""
        newest = max(self._feed.versions(), default=None)
        if newest is None or (self._host.version is not None and newest <= self._host.version):
            return
        if self._host.version is None:
            self._doing = f"starting the engine with policy {newest}"
        elif self._slots:
            if not self._host.may_take_over(newest, under_way=self._slots.versions):
                return
        elif not self._desk.came_empty:
            return  # what is leased next decides which policy is wanted
        await self._host.load(newest, slots=len(self._slots))

    async def _take_work(self, stop: asyncio.Event) -> bool:
        """Lease as many slots as there is room for, and start them; False if it is not time to ask."""
        held = [version for version in self._feed.versions() if not self._slots or self._host.serves(version)]
        room = self._room()
        if not held or room < 1 or self._host.version is None or self._desk.pause_seconds > 0 or self._control.draining:
            return False
        leases = await race(self._desk.ask(held, room), stop, linger_seconds=lambda: HAND_BACK_SECONDS)
        if leases:
            await self._begin(leases, stop)
        return True

    async def _begin(self, leases: list[Lease], stop: asyncio.Event) -> None:
        version, begun = leases[0].version, False
        try:
            if stop.is_set():
                raise Stopped
            if not self._host.serves(version) and not self._slots:
                self._doing = f"loading policy {version}"
                await race(self._host.load(self._host.best_for(version), slots=0), stop)
            if self._host.serves(version):
                for lease in leases:
                    self._slots.start(lease, self._group)
                begun = True
            else:
                self._desk.pause(UNSOUND_PAUSE_SECONDS)  # nothing that was asked for
        finally:
            if not begun:
                await self._desk.give_back(leases)

    def _room(self) -> int:
        """How many more slots may be leased now.

        The engine's batch is kept full: completions that have ended make room, not the slots that they are of,
        whose last completion may take many times as long as its first.
        """
        if self._settings.once and (self._slots or self._slots.finished):
            return 0
        most = self._slots.speed.slots_in_time(self._settings.slots, lease_seconds=self._spec.batch.lease_seconds)
        if most == 1:  # as long as the speed is unknown, too
            return most - len(self._slots)
        return min(most - self._slots.load, MOST_OPEN * most - len(self._slots))

    async def _rest(self, stop: asyncio.Event) -> None:
        """Wait until a slot ends, a policy arrives, or it is time to ask for work again."""
        self._doing = self._what()
        pause = self._desk.pause_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause if pause > 0 and self._room() > 0 else None):
                await race(self._changed.wait(), stop)

    def _what(self) -> str:
        if self._slots:
            slots = "1 slot" if len(self._slots) == 1 else f"{len(self._slots)} slots"
            return f"generating {slots} with policy {self._host.version}"
        if not self._feed.versions():
            return "waiting for a policy"
        if self._control.draining:
            return "drained: takes no more work until it is invited"
        return "done: the run is over" if self._desk.is_over else "waiting for work"

    # -- the engine's failures

    def _note_success(self) -> None:
        if self._slots.finished > self._finished_before:
            self._finished_before, self._failures = self._slots.finished, 0

    def _count_failure(self, error: EngineFailed) -> None:
        """Count a failure without a slot in between; raises it after too many to retry."""
        self._failures += 1
        if self._failures >= MAX_ENGINE_FAILURES or error.code in {DoesNotFit.code, WrongEngine.code}:
            raise error  # a machine does not grow by trying again

    async def _end_engine(self) -> None:
        """Hand every slot back and end the engine; it is started again by the next turn."""
        self._doing = "restarting the engine"
        await self._control.interrupt()
        await self._slots.hand_back()
        self._slots.failure = None
        await self._host.restart()

    async def _recover(self, error: EngineFailed, stop: asyncio.Event) -> None:
        slots = len(self._slots)
        await self._end_engine()
        self._count_failure(error)
        log.error(
            "%s %d slots went back; starting the engine again",
            error,
            slots,
            exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
        )
        self._onlooker.notice(EventKind.ENGINE_FAILED, why=str(error), slots=slots)
        await race(asyncio.sleep(self._settings.backoff.delay(self._failures)), stop)

    # -- the coordinator

    async def _refresh(self) -> None:
        """Keep the list of relays current; the descriptor's serve until the coordinator names others."""
        serving = self._settings.serving
        own = None if serving is None else await self._feed.serve(serving, self._settings.server_limits)
        while True:
            try:
                if own is None:
                    advice = await self._client.relays(patience_seconds=FOR_EVER)
                else:
                    said = announcement(own, self._feed.sources(), version=max(self._feed.versions(), default=None))
                    advice = await self._client.announce(said, patience_seconds=FOR_EVER)
                others = any(url != own for url in advice.relays)
                self._feed.take_advice(advice if others else RelayList(relays=self._known_relays), own=own)
            except (Refused, BadReply) as error:
                self._complaints.note("no list of relays", error)
            await asyncio.sleep(REFRESH_SECONDS if self._feed.versions() else REFUSED_PAUSE_SECONDS)

    # -- for observers

    def status(self) -> dict[str, Any]:
        """Return what the worker is doing now, ready for JSON."""
        return {
            "run_id": self._settings.entry.run_id,
            "run_name": self._spec.name,
            "coordinator": self._client.url,
            "coordinator_away": self._client.away,
            "doing": self._doing,
            "dismissed": None if self._registrar.dismissal is None else str(self._registrar.dismissal),
            "run_is_over": self._desk.is_over,
            "draining": self._control.draining,
            **figures(
                tally=self._state.tally, slots=self._slots, host=self._host, feed=self._feed, delivery=self._delivery
            ),
            "standing": self._standing.status(),
            **self._entrance.status(),
            "started_at": self._started_at,
            "updated_at": time.time(),
        }

    async def _write_status(self) -> None:
        """Write the status file, for programs."""
        while True:
            save_status(self._state.folder, self.status())
            await asyncio.sleep(STATUS_SECONDS)
