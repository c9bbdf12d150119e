"""Active slots: one task each, from the lease to a stored group of rollouts.

They share the engine's batch. A slot ends with its group on disk, with its lease, by cancellation, or with a failure
that is everybody's: the engine's, or a dataset that changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from node.environments.base import DatasetChanged, EnvironmentFault
from node.errors import EngineFailed
from node.protocol.messages import Lease
from node.protocol.submission import Rollout
from node.runtime.logs import bound
from node.sandbox.errors import SandboxFailed
from node.submission.writer import write_rollouts
from node.worker.engine import EngineHost
from node.worker.events import NO_OBSERVER, EventKind, Observer
from node.worker.speed import Mark, Speed
from node.worker.state import PendingDelivery, WorkerState

log = logging.getLogger(__name__)

MOST_OPEN: Final = 2
"""Active slots for each of the engine's batch at most, where most completions of each have ended."""


@dataclass(slots=True, eq=False)
class _Slot:
    """An active slot with `left` unfinished completions; once `is_stored`, it is not cancelled any more."""

    lease: Lease
    mark: Mark
    left: int
    task: asyncio.Task[None] | None = None
    is_stored: bool = False


class ActiveSlots:
    """Runs slots and passes each finished one to `deliver`; sets `changed` whenever one ends.

    `now` is the coordinator's clock in Unix seconds. `failure` ends all slots, which stay here until `hand_back`.
    """

    def __init__(
        self,
        host: EngineHost,
        state: WorkerState,
        *,
        group_size: int,
        deliver: Callable[[PendingDelivery], None],
        give_back: Callable[[Sequence[Lease]], Awaitable[None]],
        now: Callable[[], float],
        changed: asyncio.Event,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        self.speed = Speed()
        self.failure: EngineFailed | DatasetChanged | None = None
        self.finished = 0
        self.expired = 0
        self._host = host
        self._group_size = group_size
        self._state = state
        self._deliver = deliver
        self._give_back = give_back
        self._now = now
        self._changed = changed
        self._observer = observer
        self._slots: dict[str, _Slot] = {}

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def versions(self) -> list[int]:
        """The leased policy of each active slot."""
        return [slot.lease.version for slot in self._slots.values()]

    def room(self, most: int, *, lease_seconds: float) -> int:
        """Return how many more slots may be leased, where `most` fill the engine's batch.

        Finished completions make room, not finished slots: a slot's last completion may take many times as long as
        its first, and the batch is to stay full.
        """
        most = self.speed.slots_in_time(most, lease_seconds=lease_seconds)
        if most == 1:  # as long as the speed is unknown, too
            return most - len(self)
        load = -(-sum(slot.left for slot in self._slots.values()) // self._group_size)
        return min(most - load, MOST_OPEN * most - len(self))

    def status(self) -> list[dict[str, Any]]:
        """Return each active slot, ready for JSON."""
        now = time.monotonic()
        return [
            {"version": slot.lease.version, "slot": slot.lease.slot, "seconds": round(now - slot.mark.at, 1)}
            for slot in self._slots.values()
        ]

    def start(self, lease: Lease, group: asyncio.TaskGroup) -> None:
        """Generate a slot in the background."""
        slot = _Slot(lease, self.speed.begin(), left=self._group_size)
        self._slots[lease.lease_id] = slot
        self._observer.notify(
            EventKind.LEASED, policy=lease.version, slot=lease.slot, lease=lease.lease_id, expires_at=lease.expires_at
        )
        with bound(policy=lease.version, slot=lease.slot, lease=lease.lease_id):
            slot.task = group.create_task(self._run(slot))

    async def hand_back(self) -> None:
        """Abort every active slot and return its lease."""
        await self._give_up(list(self._slots.values()))

    async def finish(self, *, grace_seconds: float) -> None:
        """Wait up to `grace_seconds` for slots expected to finish by then; abort the others."""
        slow = []
        for slot in self._slots.values():
            left = self.speed.seconds_left(slot.mark)
            if left is not None and left > grace_seconds:
                slow.append(slot)
        await self._give_up(slow)
        tasks = [slot.task for slot in self._slots.values() if slot.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_seconds)
        await self.hand_back()

    async def _give_up(self, slots: Iterable[_Slot]) -> None:
        slots = list(slots)
        for slot in slots:
            if slot.task is not None and not slot.is_stored:
                slot.task.cancel()
        tasks = [slot.task for slot in slots if slot.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        unfinished = [slot for slot in slots if not slot.is_stored]
        for slot in slots:
            self._slots.pop(slot.lease.lease_id, None)
        await self._give_back([slot.lease for slot in unfinished if slot.lease.expires_at > self._now()])

    async def _run(self, slot: _Slot) -> None:
        lease, ended = slot.lease, False
        try:
            async with asyncio.timeout(max(0.0, lease.expires_at - self._now())):
                rollouts = await self._host.group(lease, ended=partial(self._one_ended, slot))
            slot.is_stored = ended = True
            self._note(slot, rollouts)
            self._deliver(await asyncio.to_thread(self._store, lease, rollouts))
        except TimeoutError:
            self.expired += 1
            seconds = time.monotonic() - slot.mark.at
            log.warning(
                "slot %d of policy %d dropped: its lease expired after %.0f s, before it was generated",
                lease.slot,
                lease.version,
                seconds,
            )
            self._observer.notify(EventKind.EXPIRED, policy=lease.version, slot=lease.slot, seconds=round(seconds, 3))
        except (EngineFailed, DatasetChanged) as error:
            self.failure = self.failure or error
            return
        except (EnvironmentFault, SandboxFailed) as error:
            # It would fail here again: the lease is left to expire, so that the slot goes to another node.
            log.error("slot %d of policy %d dropped: %s", lease.slot, lease.version, error)  # noqa: TRY400
        finally:
            if not ended:
                self.speed.give_up()
            if self.failure is None:
                self._slots.pop(lease.lease_id, None)
            self._changed.set()

    def _one_ended(self, slot: _Slot) -> None:
        slot.left -= 1
        self._changed.set()

    def _note(self, slot: _Slot, rollouts: Sequence[Rollout]) -> None:
        self.finished += 1
        tokens = sum(len(rollout.completion_ids) for rollout in rollouts)
        seconds = self.speed.finish(slot.mark, tokens=tokens)
        log.debug(
            "policy %d, slot %d: %d tokens in %.1f s, %.0f tokens/s in all",
            slot.lease.version,
            slot.lease.slot,
            tokens,
            seconds,
            self.speed.tokens_per_second,
        )
        self._observer.notify(
            EventKind.GENERATED,
            policy=slot.lease.version,
            slot=slot.lease.slot,
            tokens=tokens,
            seconds=round(seconds, 3),
        )

    def _store(self, lease: Lease, group: Sequence[Rollout]) -> PendingDelivery:
        tokens = sum(len(rollout.completion_ids) for rollout in group)
        return self._state.keep(lease, write_rollouts(group), tokens=tokens)
