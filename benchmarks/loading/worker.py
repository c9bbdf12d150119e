"""A worker as the coordinator sees it: signed requests from an address of its own, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.loading.http import Answer, Connection
from coordinator.lab.redteam.http_client import claim_of
from node.client.api import DEFAULT_BACKOFF
from node.protocol.messages import LeaseReply, LeaseRequest, Registration, SubmissionReply
from node.protocol.requests import sign_request
from shardcast.wire import decode, encode

MAX_REPLY_BYTES = 2**20
STATUS_EVERY = 10
WAIT_SECONDS = 20
AGAIN = (0, 429, 503)
"""What a worker keeps its group for: no answer, and to come again."""

INSTANCE = "0" * 32
"""Each of these workers has a key of its own, so all may say that they are the same machine."""

REGISTRATION = encode(Registration(software="load", engine="none", instance=INSTANCE, name="load"))
LEASE_REQUEST = encode(LeaseRequest(held_versions=(0,), slots=1, instance=INSTANCE))


@dataclass(slots=True)
class RequestSample:
    """One request: which, when it was due, how long it took from then on, and how it ended (0: no answer)."""

    kind: str
    due: float
    seconds: float
    status: int


@dataclass
class SimulatedWorker:
    """Registers, and then leases, submits, asks for the verdict, and every tenth time for the run's status."""

    run_id: str
    port: int
    source: str
    body_bytes: int
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    def __post_init__(self) -> None:
        self._connection = Connection(self.port, self.source)
        self._one_at_a_time = asyncio.Lock()
        self._lease: str | None = None
        self._submission: str | None = None
        self._rounds = random.randrange(STATUS_EVERY)
        self._next: Callable[[], Coroutine[Any, Any, Answer]] = self.register

    async def step(
        self,
        *,
        due: float,
        samples: list[RequestSample],
        request: Callable[[], Coroutine[Any, Any, Answer]] | None = None,
    ) -> tuple[str, Answer]:
        """Send `request`, or the next one of this worker's life; return its kind and the answer, of status 0 if none.

        It was due at `due`, by perf_counter.
        """
        async with self._one_at_a_time:
            send = request or self._next
            kind = send.__name__
            try:
                answer = await send()
            except OSError:
                answer = Answer(0, b"")
            samples.append(RequestSample(kind, due, time.perf_counter() - due, answer.status))
        return kind, answer

    async def persist(self, goal: str, *, samples: list[RequestSample], over: asyncio.Event | None = None) -> None:
        """Go on until a request of the kind `goal` is answered with 200, and pause after refusals as a worker does.

        Return after the request under way once `over` is set.
        """
        failures, over = 0, over or asyncio.Event()
        while not over.is_set():
            self.skip_status()
            kind, answer = await self.step(due=time.perf_counter(), samples=samples)
            if 200 <= answer.status < 300:
                failures = 0
                if kind == goal and answer.status == 200:
                    return
                continue
            failures += 1
            pause = answer.retry_after_seconds * random.uniform(1.0, 1.5)  # as in node.client.calls
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(DEFAULT_BACKOFF.delay(failures), pause))

    def close(self) -> None:
        """End its connection."""
        self._connection.close()

    def skip_status(self) -> None:
        """Go on to the next lease where the run's status would be asked for."""
        if self._next == self.status:
            self._next = self.lease

    async def register(self) -> Answer:
        answer = await self._signed("POST", "/v1/nodes", REGISTRATION)
        if answer.status == 200:
            self._next = self.lease
        return answer

    async def lease(self) -> Answer:
        answer = await self._signed("POST", "/v1/leases", LEASE_REQUEST)
        if answer.status == 200:
            leases = decode(LeaseReply, answer.body, max_bytes=MAX_REPLY_BYTES).leases
            if leases:
                self._lease, self._next = leases[0].lease_id, self.upload
        return answer

    async def upload(self) -> Answer:
        body = random.randbytes(self.body_bytes)
        answer = await self._signed("PUT", f"/v1/submissions/{self._lease}", body)
        if answer.status not in AGAIN:
            self._next = self.lease
        if answer.status == 202:
            self._submission = decode(SubmissionReply, answer.body, max_bytes=MAX_REPLY_BYTES).submission
            self._next = self.receipt
        return answer

    async def receipt(self) -> Answer:
        answer = await self._connection.send("GET", f"/v1/receipts/{self._submission}?wait={WAIT_SECONDS}")
        if answer.status == 200:
            self._rounds += 1
            self._next = self.lease if self._rounds % STATUS_EVERY else self.status
        return answer

    async def status(self) -> Answer:
        self._next = self.lease
        return await self._connection.send("GET", "/v1/status")

    async def _signed(self, method: str, path: str, body: bytes) -> Answer:
        header, _ = sign_request(claim_of(self.run_id, method, path, body), key=self.key)
        return await self._connection.send(method, path, body=body, authorization=header)
