"""The worker daemon: fetch policies, lease and generate slots, deliver submissions.

It trusts nobody: the rules come from a descriptor that matches the run id, policies are verified by shardcast, and each
slot's content is derived from the worker's own verified manifest. Signed receipts are kept as proof of its credit.

Slots share the engine's batch, and a new one is leased as soon as one ends. A new policy is loaded as soon as the
rules allow it for every active slot (`sampling.max_version_lead`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.api import DEFAULT_BACKOFF
from node.client.http import Backoff
from node.datasets.fetching import DatasetFeed
from node.engines.base import DoesNotFit, Engine, MakeEngine, WrongEngine
from node.environments.base import DatasetChanged
from node.errors import EngineFailed
from node.joining.session import JoinSettings, RunSession, join_run
from node.keys.identity import node_id
from node.policy.memory import share_heaps
from node.protocol.control import FREE_PURPOSES, Purpose
from node.protocol.messages import Lease
from node.relay.advice import Serving
from node.runtime.service_manager import report_serving
from node.runtime.signals import Stopped, race, root_failure
from node.worker.control import WorkerControl
from node.worker.datasets import fetch_changed, fetch_datasets, worker_datasets
from node.worker.delivery import Delivery
from node.worker.engine import EngineHost, UnusablePolicy
from node.worker.environments import prepare_environments
from node.worker.events import NO_OBSERVER, EventKind, Observer
from node.worker.leases import HAND_BACK_SECONDS, UNSOUND_PAUSE_SECONDS, LeaseClient
from node.worker.policies import PolicyFeed, policy_client
from node.worker.registration import Registrar, software
from node.worker.relays import RelayFollower
from node.worker.slots import ActiveSlots
from node.worker.standing import StandingPoller
from node.worker.state import WorkerState
from node.worker.status import figures, save_status
from shardcast import Client as BroadcastClient
from shardcast import ServerLimits

log = logging.getLogger(__name__)

STATUS_SECONDS: Final = 1.0
MAX_ENGINE_FAILURES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of one worker: at most `slots` active slots, `grace_seconds` for a shutdown.

    `threads` check and compute policies; None takes every core.
    `once` ends it after the receipts of the first slots. With `serving` it serves the policies that it fetches.
    `control` lists the purposes that the run's operator may use. `invite` is an invite's envelope, for a run that takes
    new nodes by invite. `allow_environments` installs the packages that the run's environments are in. The run's pages
    show `nickname`, and with `shows_hardware` what the engine computes on.
    """

    join: JoinSettings
    state: Path
    slots: int = 4
    threads: int | None = None
    grace_seconds: float = 10.0
    once: bool = False
    allow_environments: bool = False
    serving: Serving | None = None
    server_limits: ServerLimits = field(default_factory=ServerLimits)
    control: frozenset[Purpose] = FREE_PURPOSES
    backoff: Backoff = DEFAULT_BACKOFF
    invite: bytes | None = field(default=None, repr=False)
    nickname: str | None = None
    shows_hardware: bool = True


async def run_worker(
    settings: WorkerSettings,
    *,
    key: Ed25519PrivateKey,
    make_engine: MakeEngine,
    stop: asyncio.Event,
    observer: Observer = NO_OBSERVER,
) -> None:
    """Work for a run until `stop` is set; raises NodeError or ShardcastError for permanent failures."""
    share_heaps()
    observer.notify(EventKind.STARTED, software=software(), coordinators=list(settings.join.coordinators))
    with contextlib.suppress(Stopped), WorkerState(settings.state) as state:
        log.info("node %s joins run %s…", node_id(key), settings.join.run_id[:16])
        async with contextlib.AsyncExitStack() as stack:
            coming = join_run(settings.join, key=key, state=settings.state, backoff=settings.backoff)
            session = await race(stack.enter_async_context(coming), stop)
            descriptor = session.descriptor
            state.bind(settings.join.run_id, descriptor.spec.digest)
            feed = await stack.enter_async_context(
                worker_datasets(session, state=settings.state, threads=settings.threads)
            )
            datasets = await race(fetch_datasets(feed, session), stop)
            await asyncio.to_thread(
                prepare_environments, descriptor.spec, datasets, may_install=settings.allow_environments
            )
            broadcast = policy_client(session, folder=settings.state / "shardcast", threads=settings.threads)
            worker = Worker(
                settings,
                session,
                key=key,
                state=state,
                broadcast=await stack.enter_async_context(broadcast),
                engine=make_engine(descriptor.spec),
                datasets=datasets,
                feed=feed,
                observer=observer,
            )
            await worker.run(stop)


class Worker:
    """One worker that has joined a run."""

    def __init__(
        self,
        settings: WorkerSettings,
        session: RunSession,
        *,
        key: Ed25519PrivateKey,
        state: WorkerState,
        broadcast: BroadcastClient,
        engine: Engine,
        datasets: Mapping[str, Path],
        feed: DatasetFeed,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self._datasets, self._has_fetched_again = feed, False
        self._settings, self._session, self._state, self._observer = settings, session, state, observer
        self._client, self._spec = client, spec = session.client, session.descriptor.spec
        self._changed = changed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        backoff, run_id = settings.backoff, settings.join.run_id
        self._feed = PolicyFeed(broadcast, backoff=backoff, arrived=changed, observer=observer)
        self._host = EngineHost(engine, self._feed, spec=spec, run_id=run_id, datasets=datasets, observer=observer)
        self._relays = RelayFollower(
            session, self._feed, serving=settings.serving, limits=settings.server_limits, contents=feed.offer()
        )
        self._registrar = Registrar(
            session,
            key=key,
            engine=engine.name,
            folder=state.folder,
            nickname=settings.nickname,
            invite=settings.invite,
            backoff=backoff,
            changed=changed,
        )
        self._leases = LeaseClient(
            session, self._feed, registrar=self._registrar, evidence=state.folder, observer=observer
        )
        self._delivery = Delivery(client, state, register=self._registrar.register, backoff=backoff, observer=observer)
        self._slots = ActiveSlots(
            self._host,
            state,
            group_size=spec.sampling.group_size,
            deliver=lambda pending: self._delivery.start(pending, self._group),
            give_back=self._leases.give_back,
            now=client.now,
            changed=changed,
            observer=observer,
        )
        self._standing = StandingPoller(client, node=node_id(key), tally=state.tally)
        self._control = WorkerControl(
            session,
            key=key,
            allowed=settings.control,
            host=self._host,
            leases=self._leases,
            slots=self._slots,
            delivery=self._delivery,
            status=self.status,
            room=self._room,
            changed=changed,
        )
        self._started_at, self._doing = time.time(), "joining"
        self._failures = self._finished_before = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then return unfinished leases; raises Refused if the coordinator dismissed it."""
        try:
            async with self._group as group:
                for pending in self._state.recover():
                    self._delivery.start(pending, group)
                self._observer.attach(self.status)
                tasks = (
                    self._feed.follow(),
                    self._relays.follow(),
                    self._write_status(),
                    self._registrar.keep_registered(),
                    self._session.follow(),
                )
                background = [group.create_task(task) for task in tasks]
                with contextlib.suppress(Stopped), self._control.listening():
                    self._doing = "introducing this node to the coordinator"
                    if self._settings.shows_hardware:
                        self._registrar.hardware = await race(self._host.hardware(), stop)
                    await race(self._registrar.register_until_known(), stop)
                    background += map(group.create_task, (self._standing.follow(), report_serving()))
                    await self._work(stop)
                self._doing = "stopping"
                self._observer.notify(EventKind.STOPPING)
                await self._slots.finish(grace_seconds=self._settings.grace_seconds)
                await self._delivery.finish(upload_seconds=self._settings.grace_seconds)
                for task in background:
                    task.cancel()
            if self._registrar.dismissal is not None:
                raise self._registrar.dismissal
        except BaseExceptionGroup as failures:
            raise root_failure(failures) from failures
        finally:
            await self._control.interrupt()
            await self._host.close()
            self._doing = "ended"
            save_status(self._state.folder, self.status())
            dismissal = self._registrar.dismissal
            self._observer.notify(EventKind.ENDED, dismissed=None if dismissal is None else str(dismissal))

    # -- policies and slots

    async def _work(self, stop: asyncio.Event) -> None:
        """Keep leasing and generating until the run, `once` or the coordinator ends it; raises Stopped."""
        while self._registrar.dismissal is None:
            self._changed.clear()
            try:
                if self._slots.failure is not None:
                    raise self._slots.failure
                if self._slots.finished > self._finished_before:
                    self._finished_before, self._failures = self._slots.finished, 0
                if self._control.take_restart():
                    await self._end_engine()
                if self._settings.once and self._slots.finished and not self._slots:
                    await race(self._delivery.settled(), stop)
                    return
                await race(self._follow_policy(), stop)
                pause = self._leases.pause_seconds  # read once: it may end at any moment
                if pause > 0 or not await self._take_work(stop):
                    await self._wait_for_change(stop, pause=pause)
            except UnusablePolicy as error:
                self._count_failure(error)
                log.error("%s", error)  # noqa: TRY400  (a person reads this; the cause is in its sentence)
            except EngineFailed as error:
                await self._recover(error, stop)
            except DatasetChanged as error:
                await self._fetch_again(error, stop)

    async def _follow_policy(self) -> None:
        """Load the newest policy at the start, in flight where the rules allow it, or while idle."""
        newest = max(self._feed.versions(), default=None)
        if newest is None or (self._host.version is not None and newest <= self._host.version):
            return
        if self._host.version is None:
            self._doing = f"starting the engine with policy {newest}"
        elif self._slots:
            if not self._host.may_take_over(newest, under_way=self._slots.versions):
                return
        elif not self._leases.came_empty:
            return  # the next lease decides which policy is needed
        await self._host.load(newest, slots=len(self._slots))

    async def _take_work(self, stop: asyncio.Event) -> bool:
        """Lease as many slots as there is room for, and start them; return False if there is none, or no policy."""
        held = [version for version in self._feed.versions() if not self._slots or self._host.serves(version)]
        room = 0 if self._control.draining else self._room()
        if not held or room < 1 or self._host.version is None:
            return False
        leases = await race(
            self._leases.ask(held, room, lacks=self._host.lacks), stop, linger_seconds=lambda: HAND_BACK_SECONDS
        )
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
                self._leases.pause(UNSOUND_PAUSE_SECONDS)  # leases on a policy that was not requested
        finally:
            if not begun:
                await self._leases.give_back(leases)

    def _room(self) -> int:
        """Return how many more slots may be leased now."""
        if self._settings.once and (self._slots or self._slots.finished):
            return 0
        return self._slots.room(self._settings.slots, lease_seconds=self._spec.batch.lease_seconds)

    async def _wait_for_change(self, stop: asyncio.Event, *, pause: float) -> None:
        """Wait until a slot ends, a policy arrives, or a lease request is due after `pause` seconds."""
        self._doing = self._describe_activity()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause if pause > 0 and self._room() > 0 else None):
                await race(self._changed.wait(), stop)

    def _describe_activity(self) -> str:
        if self._slots:
            slots = "1 slot" if len(self._slots) == 1 else f"{len(self._slots)} slots"
            return f"generating {slots} with policy {self._host.version}"
        if not self._feed.versions():
            return "waiting for a policy"
        if self._control.draining:
            return "drained: takes no more work until it is invited"
        return "done: the run is over" if self._leases.is_over else "waiting for work"

    # -- the engine's failures

    def _count_failure(self, error: EngineFailed) -> None:
        """Count a consecutive failure; raises it if it is permanent or the last of MAX_ENGINE_FAILURES."""
        self._failures += 1
        if self._failures >= MAX_ENGINE_FAILURES or error.code in {DoesNotFit.code, WrongEngine.code}:
            raise error  # a machine does not grow by trying again

    async def _end_engine(self) -> None:
        """Return every lease and stop the engine; the next `load` starts it again."""
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
            "%s Returned %d leases; restarting the engine",
            error,
            slots,
            exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
        )
        self._observer.notify(EventKind.ENGINE_FAILED, why=str(error), slots=slots)
        await race(asyncio.sleep(self._settings.backoff.delay(self._failures)), stop)

    async def _fetch_again(self, error: DatasetChanged, stop: asyncio.Event) -> None:
        """Return every lease and fetch what was changed, the first time; raises `error` the second time."""
        self._doing = "fetching a dataset again"
        slots = len(self._slots)
        await self._slots.hand_back()
        self._slots.failure = None
        if self._has_fetched_again:
            raise error
        self._has_fetched_again = True
        log.error("%s. Returned %d leases; fetching it again", error, slots)
        await self._host.use_datasets(await race(fetch_changed(self._datasets, self._session), stop))

    # -- status

    def status(self) -> dict[str, Any]:
        """Return the worker's status, ready for JSON."""
        return {
            "run_id": self._settings.join.run_id,
            "run_name": self._spec.name,
            "coordinator": self._client.url,
            "coordinator_away": self._client.away,
            "doing": self._registrar.doing or self._doing,
            **self._registrar.status(),
            "run_is_over": self._leases.is_over,
            "draining": self._control.draining,
            **figures(
                tally=self._state.tally, slots=self._slots, host=self._host, feed=self._feed, delivery=self._delivery
            ),
            "standing": self._standing.status(),
            **self._session.status(),
            "started_at": self._started_at,
            "updated_at": time.time(),
        }

    async def _write_status(self) -> None:
        """Write status.json every second."""
        while True:
            save_status(self._state.folder, self.status())
            await asyncio.sleep(STATUS_SECONDS)
