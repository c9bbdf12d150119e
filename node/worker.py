"""The worker daemon: holds the newest policies, leases slots, generates them, delivers them.

It trusts nobody. The run's rules come from a descriptor that matches the run's id, policies are checked by
shardcast, and what to generate is derived here from the worker's own verified manifest: a lease that names
another manifest is not worked on, so a coordinator cannot tell two workers two stories unnoticed. What it
cannot check is whether its work is judged fairly; the signed receipts that it keeps are for that.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.coordinator_client import DEFAULT_BACKOFF, CoordinatorClient
from node.engines.base import Engine
from node.errors import BadReply, CoordinatorFault, EngineFailed, Refused
from node.exchange import Backoff, sound_urls
from node.identity import node_id
from node.parquet import write_rollouts
from node.protocol.messages import Lease, LeaseReply, LeaseRequest, Registration
from node.protocol.reasons import Reason
from node.protocol.run import Descriptor, RunSpec
from node.protocol.submission import Rollout
from node.signals import Stopped, race
from node.worker_delivery import FOR_EVER, Delivery
from node.worker_engine import SlotGenerator
from node.worker_policies import PolicyFeed
from node.worker_state import Pending, WorkerState
from shardcast import Client as BroadcastClient

log = logging.getLogger(__name__)

MAX_HELD_VERSIONS: Final = 64
REFRESH_SECONDS: Final = 15.0
STATUS_SECONDS: Final = 1.0
HAND_BACK_SECONDS: Final = 3.0
REFUSED_PAUSE_SECONDS: Final = 2.0
UNSOUND_PAUSE_SECONDS: Final = 5.0
MAX_ENGINE_FAILURES: Final = 5

MakeEngine = Callable[[RunSpec], Engine]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """One worker. `slots` is how many it leases at once at most; `grace_seconds` what ending may take.

    `once` ends it after the receipts of one batch. `backoff` paces whatever is tried again.
    """

    coordinator: str
    run_id: str
    state: Path
    slots: int = 4
    grace_seconds: float = 10.0
    once: bool = False
    backoff: Backoff = DEFAULT_BACKOFF


async def run_worker(
    settings: WorkerSettings,
    *,
    key: Ed25519PrivateKey,
    make_engine: MakeEngine,
    stop: asyncio.Event,
) -> None:
    """Work for a run until `stop` is set; raises NodeError or ShardcastError for what waiting does not heal."""
    with WorkerState(settings.state) as state:
        async with CoordinatorClient(
            settings.coordinator, run_id=settings.run_id, key=key, backoff=settings.backoff
        ) as client:
            log.info("node %s joins run %s…", node_id(key), settings.run_id[:16])
            try:
                descriptor = await race(client.descriptor(patience_seconds=FOR_EVER), stop)
            except Stopped:
                return
            state.bind(settings.run_id, descriptor.spec.digest)
            if client.run_key is None:
                raise RuntimeError("a verified descriptor leaves the run's key")
            async with BroadcastClient(
                settings.run_id,
                client.run_key,
                sound_urls(descriptor.relays),
                settings.state / "shardcast",
                keep=descriptor.spec.batch.max_async + 1,
            ) as broadcast:
                worker = Worker(
                    settings,
                    descriptor,
                    state=state,
                    client=client,
                    broadcast=broadcast,
                    engine=make_engine(descriptor.spec),
                )
                await worker.run(stop)


class Worker:
    """One worker that has joined a run."""

    def __init__(
        self,
        settings: WorkerSettings,
        descriptor: Descriptor,
        *,
        state: WorkerState,
        client: CoordinatorClient,
        broadcast: BroadcastClient,
        engine: Engine,
    ) -> None:
        self._settings = settings
        self._known_relays = sound_urls(descriptor.relays)
        self._state = state
        self._client = client
        self._feed = PolicyFeed(broadcast, backoff=settings.backoff)
        self._generator = SlotGenerator(engine, self._feed, spec=descriptor.spec, run_id=settings.run_id)
        self._delivery = Delivery(client, state, register=self._register, backoff=settings.backoff)
        self._started_at = time.time()
        self._doing = "joining"
        self._complaints: dict[str, str] = {}
        self._engine_failures = 0

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set, then hand back what is not done."""
        try:
            async with asyncio.TaskGroup() as group:
                for pending in self._state.recover():
                    self._delivery.start(pending, group)
                background = [
                    group.create_task(task) for task in (self._feed.follow(), self._refresh(), self._write_status())
                ]
                await self._work(stop, group)
                self._doing = "stopping"
                await self._delivery.finish(upload_seconds=self._settings.grace_seconds)
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as failures:
            raise _first(failures) from failures
        finally:
            self._save_status()

    async def _work(self, stop: asyncio.Event, group: asyncio.TaskGroup) -> None:
        try:
            await race(self._register_until_known(), stop)
            self._doing = "waiting for a policy"
            await race(self._feed.arrived.wait(), stop)
            while not stop.is_set():
                self._doing = "waiting for work"
                leases = await self._lease(stop)
                ready = await self._generate(leases, stop) if leases else []
                for pending in ready:
                    self._delivery.start(pending, group)
                if ready and self._settings.once:
                    await race(self._delivery.settled(), stop)
                    return
        except Stopped:
            return

    # -- leases

    async def _lease(self, stop: asyncio.Event) -> list[Lease]:
        """Sound leases of one held version; none after having waited as long as the coordinator asks for."""
        reply = await race(self._ask_for_work(), stop, linger_seconds=lambda: HAND_BACK_SECONDS)
        if reply is None:
            return []
        sound = [lease for lease in reply.leases if self._is_sound(lease, reply.leases[0].version)]
        if stop.is_set() or len(sound) < len(reply.leases):
            await self._give_back([lease for lease in reply.leases if stop.is_set() or lease not in sound])
        if not sound:
            pause = UNSOUND_PAUSE_SECONDS if reply.leases else min(max(reply.retry_after_seconds, 0.05), 60.0)
            await race(asyncio.sleep(pause), stop)
        if stop.is_set():
            raise Stopped
        return sound

    async def _ask_for_work(self) -> LeaseReply | None:
        """The coordinator's reply, or None after a pause if it makes no sense or refuses."""
        held = self._feed.versions()[:MAX_HELD_VERSIONS]
        request = LeaseRequest(held_versions=held, slots=self._generator.slots_in_time(self._settings.slots))
        try:
            reply = await self._client.lease(request, patience_seconds=FOR_EVER)
        except (Refused, BadReply) as error:
            self._complain("no work", error)
            if isinstance(error, Refused) and error.code == Reason.UNKNOWN_IDENTITY:
                await self._register_until_known()
            await asyncio.sleep(REFUSED_PAUSE_SECONDS)
            return None
        self._complaints.clear()
        return reply

    def _is_sound(self, lease: Lease, version: int) -> bool:
        """Whether a lease is of the batch's version and of the manifest that this worker itself verified."""
        held = self._feed.get(lease.version)
        if lease.version == version and held is not None and held.manifest_digest == lease.manifest_digest:
            return True
        log.error(
            "not working on slot %d: the coordinator names manifest %s… for policy %d, which is not the one that the "
            "run signed for this worker; ask the operator, and keep %s",
            lease.slot,
            lease.manifest_digest[:16],
            lease.version,
            self._state.folder,
        )
        return False

    async def _give_back(self, leases: Sequence[Lease]) -> None:
        """Hand leases back, so that their slots go on at once; if it fails they expire by themselves."""
        for lease in leases:
            try:
                await self._client.return_lease(lease.lease_id, patience_seconds=HAND_BACK_SECONDS)
                log.info("handed back slot %d of policy %d", lease.slot, lease.version)
            except CoordinatorFault as error:
                log.warning("slot %d of policy %d could not be handed back: %s", lease.slot, lease.version, error)

    # -- batches

    async def _generate(self, leases: Sequence[Lease], stop: asyncio.Event) -> list[Pending]:
        """Generate all slots in one batch and put them on disk; none if the engine failed, and then later."""
        self._doing = f"generating {len(leases)} slots of policy {leases[0].version}"
        try:
            groups = await race(self._generator.groups(leases), stop, linger_seconds=self._linger_seconds)
        except Stopped:
            await self._give_back(leases)
            raise
        except EngineFailed as error:
            await self._give_back(leases)
            await self._after_engine_failure(error, stop)
            return []
        self._engine_failures = 0
        return [await asyncio.to_thread(self._store, lease, group) for lease, group in zip(leases, groups, strict=True)]

    def _store(self, lease: Lease, group: Sequence[Rollout]) -> Pending:
        tokens = sum(len(rollout.completion_ids) for rollout in group)
        return self._state.keep(lease, write_rollouts(group), tokens=tokens)

    def _linger_seconds(self) -> float:
        """How long to wait for the batch after a stop: no time if judging by the last one it takes too long."""
        left = self._generator.seconds_left()
        return self._settings.grace_seconds if left is None or left <= self._settings.grace_seconds else 0.0

    async def _after_engine_failure(self, error: EngineFailed, stop: asyncio.Event) -> None:
        self._engine_failures += 1
        if self._engine_failures >= MAX_ENGINE_FAILURES:
            raise error
        log.error("%s The slots went back", error, exc_info=log.isEnabledFor(logging.DEBUG))
        await race(asyncio.sleep(self._settings.backoff.delay(self._engine_failures)), stop)

    # -- the coordinator

    async def _register(self) -> None:
        registration = Registration(software=_software(), engine=self._generator.engine.name)
        await self._client.register(registration, patience_seconds=FOR_EVER)

    async def _register_until_known(self) -> None:
        failures = 0
        while True:
            try:
                await self._register()
                return
            except (Refused, BadReply) as error:
                failures += 1
                self._complain("not registered", error)
                await asyncio.sleep(self._settings.backoff.delay(failures))

    async def _refresh(self) -> None:
        """Keep the list of relays current; the descriptor's serve until the coordinator names others."""
        while True:
            try:
                relays = await self._client.relays(patience_seconds=FOR_EVER)
                self._feed.set_sources(relays or self._known_relays)
            except (Refused, BadReply) as error:
                self._complain("no list of relays", error)
            await asyncio.sleep(REFRESH_SECONDS if self._feed.versions() else REFUSED_PAUSE_SECONDS)

    def _complain(self, topic: str, error: Exception) -> None:
        """Log what is said again and again only once."""
        if self._complaints.get(topic) != str(error):
            log.warning("%s: %s", topic, error)
        self._complaints[topic] = str(error)

    # -- for observers

    def status(self) -> dict[str, Any]:
        """The worker at this moment, ready for JSON."""
        tally, downloading = self._state.tally, self._feed.downloading
        progress = downloading[1] if downloading else None
        return {
            "run_id": self._settings.run_id,
            "coordinator": self._settings.coordinator,
            "coordinator_away": self._client.away,
            "doing": self._doing,
            "version": self._generator.engine.version,
            "held_versions": self._feed.versions(),
            "undelivered": len(self._delivery),
            "tokens": self._generator.tokens,
            "tokens_per_s": round(self._generator.tokens_per_second, 1),
            "admitted": tally.admitted,
            "rejected": tally.rejected,
            "indeterminate": tally.indeterminate,
            "lost": self._delivery.lost,
            "admitted_tokens": tally.tokens,
            "reasons": dict(tally.reasons),
            "broadcast": downloading
            and {
                "version": downloading[0],
                "done_bytes": progress.done_bytes if progress else 0,
                "total_bytes": progress.total_bytes if progress else None,
                "bytes_per_s": round(progress.bytes_per_s) if progress else 0,
            },
            "started_at": self._started_at,
            "updated_at": time.time(),
        }

    async def _write_status(self) -> None:
        while True:
            self._save_status()
            await asyncio.sleep(STATUS_SECONDS)

    def _save_status(self) -> None:
        path = self._state.folder / "status.json"
        temporary = path.with_suffix(".json.tmp")
        temporary.write_bytes(msgspec.json.encode(self.status()))
        temporary.rename(path)


def _software() -> str:
    try:
        return f"veriswarm/{metadata.version('veriswarm')}"
    except metadata.PackageNotFoundError:
        return "veriswarm/uninstalled"


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that the others followed from."""
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
