"""Signed requests: verified once; the nonce is used up in the transaction of the request (docs/protocol.md, 3.2)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from fastapi import Request

from coordinator.http.load_shedding import STRANGERS_WAITING, LoadShedder, RequestClass, class_of
from coordinator.http.rate_limits import RateLimiter
from coordinator.http.write_queue import ReadQueue, WriteQueue
from coordinator.run.service import Coordinator
from coordinator.storage.database import Connection
from node.protocol.messages import MAX_MESSAGE_BYTES, RequestClaim
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import open_claim, read_authorization
from shardcast.errors import PeerFault
from shardcast.wire import decode

BODY_DEADLINE_SECONDS = 30.0

T = TypeVar("T")


class SignedRequests:
    """Accepts the signed requests of a run's nodes, rate-limited per node."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        limiter: RateLimiter,
        writes: WriteQueue,
        reads: ReadQueue,
        shedder: LoadShedder,
    ) -> None:
        self._coordinator, self._limiter, self._shedder = coordinator, limiter, shedder
        self._writes, self._reads = writes, reads

    async def execute(self, request: Request, node: str, claim: RequestClaim, act: Callable[[Connection], T]) -> T:
        """Return `act(transaction)`, called in the transaction that uses up the nonce; raises Refusal.

        A refused replay takes no token of the node's. While writes wait, a request that can only be refused does not
        join them: keys are free, and strangers would hold up the leases and deliveries of everybody else.
        """
        request.state.node = node  # for the log
        method, path = request.method, request.scope["path"]
        self._limiter.peek(node, now=time.monotonic())
        kind, is_counted = class_of(method, path), False
        if self._shedder.is_waited_for(STRANGERS_WAITING) and kind is not RequestClass.JOIN:
            lease_id = request.path_params.get("lease_id")
            await self._reads.run(partial(self._coordinator.refuse_stranger, node, lease_id, now=time.time()))

        def execute() -> T:  # again where it would have waited for a lock, and counted once
            nonlocal is_counted
            with self._coordinator.accept(node, claim, method=method, path=path, now=time.time()) as connection:
                if not is_counted:
                    self._limiter.check(node, now=time.monotonic())
                    is_counted = True
                return act(connection)

        self._shedder.check(method, path)
        return await self._writes.run(execute, leasing=kind is not RequestClass.DELIVERY)


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Return the whole body; raises Refusal past `max_bytes` or the deadline."""
    pieces, size = [], 0
    try:
        async with asyncio.timeout(BODY_DEADLINE_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > max_bytes:
                    raise Refusal(Reason.OVERSIZED_BODY, f"More than {max_bytes} bytes.")
                pieces.append(piece)
    except TimeoutError as error:
        raise Refusal(Reason.BAD_REQUEST, "The body did not arrive in time.") from error
    return b"".join(pieces)


def read_envelope(request: Request) -> bytes:
    """Return the envelope in the Authorization header; raises Refusal."""
    return read_authorization(request.headers.get("authorization", ""))


def open_request(envelope: bytes) -> tuple[str, RequestClaim]:
    """Verify the signature and return the node that signed and its claim; raises Refusal."""
    signer, claim = open_claim(envelope)
    return signer.hex(), claim


def read_message(cls: type[T], body: bytes) -> T:
    """Decode the message in a body; raises Refusal."""
    try:
        return decode(cls, body, max_bytes=MAX_MESSAGE_BYTES)
    except PeerFault as error:
        raise Refusal(Reason.BAD_REQUEST, f"{error}.") from error


def check_body(claim: RequestClaim, body_digest: str, body_bytes: int) -> None:
    """Raise Refusal if the body differs from the signed digest or size."""
    if claim.body_digest != body_digest or claim.body_bytes != body_bytes:
        raise Refusal(Reason.BODY_MISMATCH, f"{body_bytes} bytes arrived, {claim.body_bytes} were signed.")
