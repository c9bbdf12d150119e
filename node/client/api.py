"""Client of the coordinator's HTTP API: signed requests, bounded replies, typed errors.

The coordinator is trusted for nothing that is checked here or later: the run's descriptor and receipts must
carry the run's own signature, and its text is made harmless before it can reach a terminal. A run may have several
coordinators; each call fails over (`node.client.calls`). One line is logged when a coordinator
goes away and one when it is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.calls import CoordinatorReply, CoordinatorTransport, decoded, request_to
from node.client.http import Backoff, ExchangeLimits, printable
from node.client.ssrf import Reach
from node.client.submit import SubmissionUploader
from node.errors import BadReply, ConfigError
from node.keys.identity import node_id
from node.protocol import endpoints
from node.protocol.checkpoints import Checkpoint, open_checkpoint
from node.protocol.endpoints import Endpoint, LogProof
from node.protocol.membership import Puzzle
from node.protocol.messages import (
    Lease,
    LeaseReply,
    LeaseRequest,
    NodeStanding,
    Receipt,
    Registration,
    RelayAnnouncement,
    RelayList,
)
from node.protocol.receipts import open_receipt
from node.protocol.run import Descriptor, open_descriptor
from shardcast.errors import PeerFault
from shardcast.urls import valid_sources

FOREVER: Final = float("inf")
"""As `patience_seconds`: retry until it succeeds or is refused."""

DEFAULT_LIMITS: Final = ExchangeLimits()
DEFAULT_BACKOFF: Final = Backoff()

T = TypeVar("T")


class CoordinatorClient:
    """One run, one key, and the URLs of one coordinator or of several (at most 16); use as an async context manager.

    Without a key only unsigned requests are possible. `patience_seconds` of each call says for how long
    faults that time can heal are retried; after that they are raised, as Unavailable or Refused.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        run_id: str,
        key: Ed25519PrivateKey | None = None,
        limits: ExchangeLimits = DEFAULT_LIMITS,
        backoff: Backoff = DEFAULT_BACKOFF,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_id = run_id
        self.run_key: bytes | None = None
        self.descriptor_envelope: bytes | None = None
        self._key = key
        self._clock = clock
        self._caller = CoordinatorTransport(urls, run_id=run_id, key=key, limits=limits, backoff=backoff, clock=clock)
        self._submitting = SubmissionUploader(self._caller, limits=limits, backoff=backoff)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._caller.close()

    @property
    def url(self) -> str:
        """URL of the coordinator in use."""
        return self._caller.endpoints.current

    @property
    def urls(self) -> tuple[str, ...]:
        """URLs in failover order: the one in use first."""
        return self._caller.endpoints.urls

    def set_urls(self, urls: Iterable[str]) -> None:
        """Replace the URLs, dropping invalid ones and those after the 16th; the one in use stays in use if listed.

        Without a valid URL, nothing changes.
        """
        self._caller.set_urls(urls)

    def prefer(self, url: str) -> None:
        """Use `url` next, if it is among `urls`; others remain as fallback."""
        self._caller.endpoints.prefer(url)

    @property
    def away(self) -> bool:
        """Whether every coordinator has failed since the last answer."""
        return self._caller.endpoints.away

    @property
    def reach(self) -> Reach:
        """How far the coordinator in use is: what it names is called no nearer (`node.client.ssrf`)."""
        return self._caller.current_reach

    def now(self) -> float:
        """Return the estimated clock of the coordinator in use, in Unix seconds."""
        return self._caller.now()

    async def descriptor(
        self, *, after: int | None = None, wait_seconds: float = 0.0, patience_seconds: float = 60.0
    ) -> Descriptor:
        """Fetch the run's descriptor, verified against the run id and this machine's clock.

        Sets `run_key` and `descriptor_envelope`. With `after`, long-poll up to `wait_seconds` for a newer version.
        """
        query = None if after is None else {"after": str(after), "wait": f"{wait_seconds:g}"}
        request = request_to(endpoints.RUN, query=query, wait_seconds=wait_seconds)
        return await self._caller.call(request, self._open_descriptor, patience_seconds=patience_seconds)

    async def relays(self, *, patience_seconds: float = 60.0) -> RelayList:
        """Fetch the announced relays and the fetch plan, without invalid URLs."""
        request = request_to(endpoints.RELAYS, query=None if self._key is None else {"node": node_id(self._key)})
        return await self._caller.call(request, _relay_list, patience_seconds=patience_seconds)

    async def register(self, registration: Registration, *, patience_seconds: float = 60.0) -> None:
        """Register this node's key."""
        await self._caller.call(
            request_to(endpoints.REGISTER, body=registration), _nothing, patience_seconds=patience_seconds
        )

    async def puzzle(self, *, patience_seconds: float = 60.0) -> Puzzle:
        """Return what a new key solves to register; raises Refused in a run that asks for no work."""

        def puzzle_in(answer: CoordinatorReply) -> Puzzle:
            return decoded(endpoints.PUZZLE, answer)

        return await self._caller.call(request_to(endpoints.PUZZLE), puzzle_in, patience_seconds=patience_seconds)

    async def announce(self, announcement: RelayAnnouncement, *, patience_seconds: float = 60.0) -> RelayList:
        """Announce this relay for a minute; return the relays that it should fetch from."""
        return await self._caller.call(
            request_to(endpoints.ANNOUNCE_RELAY, body=announcement), _relay_list, patience_seconds=patience_seconds
        )

    async def lease(self, request: LeaseRequest, *, patience_seconds: float = 60.0) -> LeaseReply:
        """Request leases; raises BadReply if more are granted than requested."""

        def granted(answer: CoordinatorReply) -> LeaseReply:
            reply = decoded(endpoints.LEASE, answer)
            if len(reply.leases) > request.slots:
                raise BadReply(f"{answer.url} grants {len(reply.leases)} leases where {request.slots} were asked for.")
            return reply

        return await self._caller.call(
            request_to(endpoints.LEASE, body=request), granted, patience_seconds=patience_seconds
        )

    async def return_lease(self, lease_id: str, *, patience_seconds: float = 60.0) -> None:
        """Return a lease early, so that its slot can be leased again at once."""
        request = request_to(endpoints.RETURN_LEASE, names={"lease_id": lease_id})
        await self._caller.call(request, _nothing, patience_seconds=patience_seconds)

    async def submit(self, lease: Lease, body: Path, *, patience_seconds: float = 60.0) -> str:
        """Submit a slot's file, through the run's object store if it has one; return the submission's id.

        Every attempt is signed anew and so has another id. If the reply to a stored attempt is lost, the next
        one is Refused as `duplicate_submission`, with the stored one's id.
        """
        return await self._submitting.submit(lease, body, patience_seconds=patience_seconds)

    async def receipt(
        self, submission: str, *, wait_seconds: float, patience_seconds: float = 60.0
    ) -> tuple[Receipt, bytes] | None:
        """Return the receipt and its envelope; None without a verdict after `wait_seconds`."""
        names, query = {"submission": submission}, {"wait": f"{wait_seconds:g}"}
        request = request_to(endpoints.RECEIPT, names=names, query=query, wait_seconds=wait_seconds)

        def opened(answer: CoordinatorReply) -> tuple[Receipt, bytes] | None:
            return None if answer.status == 202 else (self._open_receipt(answer, submission), answer.body)

        return await self._caller.call(request, opened, patience_seconds=patience_seconds)

    async def standing(self, node: str, *, patience_seconds: float = 60.0) -> NodeStanding:
        """Return the standing of `node` (hexadecimal public key); raises BadReply for another node's."""

        def own(answer: CoordinatorReply) -> NodeStanding:
            standing = decoded(endpoints.STANDING, answer)
            if standing.node != node:
                raise BadReply(f"{answer.url} sent the standing of another node.")
            return standing

        request = request_to(endpoints.STANDING, names={"node": node})
        return await self._caller.call(request, own, patience_seconds=patience_seconds)

    async def checkpoint(self, *, patience_seconds: float = 60.0) -> tuple[Checkpoint, bytes]:
        """Return the log's newest checkpoint and its note, signed by the run; call `descriptor` before."""

        def opened(answer: CoordinatorReply) -> tuple[Checkpoint, bytes]:
            if self.run_key is None:
                raise ConfigError("A checkpoint can be checked only after the run's descriptor.")
            try:
                return open_checkpoint(answer.body, run_id=self.run_id, signer=self.run_key), answer.body
            except PeerFault as error:
                raise BadReply(f"The checkpoint is not the run's: {error}.", code=error.code) from error

        request = request_to(endpoints.LOG_CHECKPOINT)
        return await self._caller.call(request, opened, patience_seconds=patience_seconds)

    async def log_proof(
        self, endpoint: Endpoint[None, LogProof], query: Mapping[str, str], *, patience_seconds: float = 60.0
    ) -> list[bytes]:
        """Return the unverified hashes of the inclusion or consistency proof for `query`."""
        proof = await self._caller.call(
            request_to(endpoint, query=query),
            lambda answer: decoded(endpoint, answer),
            patience_seconds=patience_seconds,
        )
        return [bytes.fromhex(value) for value in proof.hashes]

    async def fetch(
        self,
        endpoint: Endpoint[None, bytes],
        *,
        names: Mapping[str, str] | None = None,
        max_bytes: int | None = None,
        query: Mapping[str, str] | None = None,
        wait_seconds: float = 0.0,
        patience_seconds: float = 60.0,
    ) -> bytes:
        """Return the unverified body of an unsigned GET: at most `max_bytes`, or the endpoint's limit.

        `wait_seconds` is the long-poll time that `query` asks for; it extends the deadline.
        """
        request = request_to(endpoint, names=names, query=query, max_reply_bytes=max_bytes, wait_seconds=wait_seconds)
        return await self._caller.call(request, lambda answer: answer.body, patience_seconds=patience_seconds)

    def _open_descriptor(self, answer: CoordinatorReply) -> Descriptor:
        try:
            descriptor, self.run_key = open_descriptor(answer.body, run_id=self.run_id, now=self._clock())
        except PeerFault as error:
            raise BadReply(
                f"{answer.url} does not prove that it serves this run: {printable(str(error))}; "
                "check --coordinator and --run-id, and this machine's clock.",
                code=error.code,
            ) from error
        self.descriptor_envelope = answer.body
        return descriptor

    def _open_receipt(self, answer: CoordinatorReply, submission: str) -> Receipt:
        if self.run_key is None or self._key is None:
            raise ConfigError("A receipt can be checked only with a key, and after the run's descriptor.")
        try:
            receipt = open_receipt(answer.body, signer=self.run_key)
        except PeerFault as error:
            said = printable(str(error))
            raise BadReply(f"{answer.url} sent a receipt that is not the run's: {said}.", code=error.code) from error
        if (receipt.run_id, receipt.submission, receipt.node) != (self.run_id, submission, node_id(self._key)):
            raise BadReply(f"{answer.url} sent somebody else's receipt.", code="foreign_receipt")
        return receipt


def _nothing(_answer: CoordinatorReply) -> None:
    """Parse nothing: the HTTP status is the answer."""


def _relay_list(answer: CoordinatorReply) -> RelayList:
    """Drop invalid URLs; drop all stripes if one is left without candidates."""
    advice = decoded(endpoints.RELAYS, answer)
    stripes = tuple(valid_sources(each) for each in advice.stripes)
    return RelayList(relays=valid_sources(advice.relays), stripes=stripes if all(stripes) else ())
