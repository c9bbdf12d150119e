"""The coordinator's HTTP API as a node sees it: signed requests, bounded replies, typed errors.

The coordinator is trusted for nothing that is checked here or later: the run's descriptor and receipts must
carry the run's own signature, and its text is made harmless before it can reach a terminal. Only faults that
time can heal are retried: the network, 5xx, 429. One line is logged when the coordinator goes away and one
when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from node.errors import BadReply, ConfigError, CoordinatorFault, Refused, Unavailable
from node.exchange import Backoff, Exchange, ExchangeLimits, Reply, Request, measure_body, printable, sound_urls
from node.identity import node_id
from node.protocol.messages import (
    MAX_MESSAGE_BYTES,
    MESSAGE_VERSION,
    RECEIPT_DOMAIN,
    ErrorReply,
    LeaseReply,
    LeaseRequest,
    Receipt,
    Registration,
    RelayAnnouncement,
    RelayList,
    RequestClaim,
    SubmissionReply,
)
from node.protocol.reasons import Reason
from node.protocol.requests import sign_request
from node.protocol.run import MAX_DESCRIPTOR_BYTES, Descriptor, open_descriptor
from shardcast.envelope import open_envelope
from shardcast.errors import PeerFault
from shardcast.wire import Wire, decode, digest, encode

log = logging.getLogger(__name__)

MAX_LEASE_REPLY_BYTES: Final = 512 * 1024  # 1024 leases of about 300 bytes
MAX_RELAY_LIST_BYTES: Final = 256 * 1024
_ENVELOPE_OVERHEAD_BYTES: Final = 512
_CODE = re.compile(r"[a-z0-9_]{1,64}")

DEFAULT_LIMITS: Final = ExchangeLimits()
DEFAULT_BACKOFF: Final = Backoff()

T = TypeVar("T")


class CoordinatorClient:
    """One coordinator, one run, one key; use as an async context manager.

    Without a key only unsigned requests are possible. `patience_seconds` of each call says for how long
    faults that time can heal are retried; after that they are raised, as Unavailable or Refused.
    """

    def __init__(
        self,
        url: str,
        *,
        run_id: str,
        key: Ed25519PrivateKey | None = None,
        limits: ExchangeLimits = DEFAULT_LIMITS,
        backoff: Backoff = DEFAULT_BACKOFF,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_id = run_id
        self.run_key: bytes | None = None
        self._exchange = Exchange(url, limits=limits)
        self.url = self._exchange.url
        self._key = key
        self._backoff = backoff
        self._clock = clock
        self._clock_offset = 0.0
        self._away_since: float | None = None
        self._outage_logged = False

    async def __aenter__(self) -> Self:
        await self._exchange.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exchange.__aexit__(kind, error, trace)

    @property
    def away(self) -> bool:
        """Whether the last exchange failed for a reason that time may heal."""
        return self._away_since is not None

    def now(self) -> float:
        """The coordinator's time as far as it is known, in Unix seconds."""
        return self._clock() + self._clock_offset

    async def descriptor(self, *, patience_seconds: float = 60.0) -> Descriptor:
        """The run's descriptor, checked against the run's id and this machine's clock; keeps the run's key."""
        data = await self.fetch(
            "/v1/run",
            max_bytes=MAX_DESCRIPTOR_BYTES + _ENVELOPE_OVERHEAD_BYTES,
            patience_seconds=patience_seconds,
        )
        try:
            descriptor, self.run_key = open_descriptor(data, run_id=self.run_id, now=self._clock())
        except PeerFault as error:
            raise BadReply(
                f"{self.url} does not prove that it serves this run: {printable(str(error))}; "
                "check --coordinator and --run-id, and this machine's clock.",
                code=error.code,
            ) from error
        return descriptor

    async def relays(self, *, patience_seconds: float = 60.0) -> RelayList:
        """Relays that announced themselves lately and whom of them to ask, without URLs that are none."""
        asked = "/v1/relays" if self._key is None else f"/v1/relays?node={node_id(self._key)}"
        body = await self.fetch(asked, max_bytes=MAX_RELAY_LIST_BYTES, patience_seconds=patience_seconds)
        return _sound(self._decode(RelayList, body))

    async def register(self, registration: Registration, *, patience_seconds: float = 60.0) -> None:
        """Introduce this node, under its key."""
        await self._post("/v1/nodes", registration, patience_seconds=patience_seconds)

    async def announce(self, announcement: RelayAnnouncement, *, patience_seconds: float = 60.0) -> RelayList:
        """Say where this relay serves, worth a minute; whom it should fetch from itself."""
        body = await self._post(
            "/v1/relays", announcement, max_reply_bytes=MAX_RELAY_LIST_BYTES, patience_seconds=patience_seconds
        )
        return _sound(self._decode(RelayList, body))

    async def lease(self, request: LeaseRequest, *, patience_seconds: float = 60.0) -> LeaseReply:
        """Ask for work; more leases than were asked for are a BadReply."""
        body = await self._post(
            "/v1/leases", request, max_reply_bytes=MAX_LEASE_REPLY_BYTES, patience_seconds=patience_seconds
        )
        reply = self._decode(LeaseReply, body)
        if len(reply.leases) > request.slots:
            raise BadReply(f"{self.url} grants {len(reply.leases)} leases where {request.slots} were asked for.")
        return reply

    async def return_lease(self, lease_id: str, *, patience_seconds: float = 60.0) -> None:
        """Give a slot back, so that the next worker gets it at once."""
        await self._post(f"/v1/leases/{lease_id}/return", None, patience_seconds=patience_seconds)

    async def submit(self, lease_id: str, body: Path, *, patience_seconds: float = 60.0) -> str:
        """Upload a slot's Parquet file and return the submission's id.

        Every attempt is signed anew and so has another id. An attempt whose answer is lost may have been
        stored: the next one is then Refused as `duplicate_submission`, with the stored one's id.
        """
        path = f"/v1/submissions/{lease_id}"
        request = Request(method="PUT", path=path, body=body, max_reply_bytes=MAX_MESSAGE_BYTES)
        reply, submission = await self._call(request, patience_seconds)
        if self._decode(SubmissionReply, reply.body).submission != submission:
            raise BadReply(f"{self.url} acknowledges another submission than the one that was sent.")
        return submission

    async def receipt(
        self, submission: str, *, wait_seconds: float, patience_seconds: float = 60.0
    ) -> tuple[Receipt, bytes] | None:
        """The receipt and the envelope it came in, or None if there is no verdict after `wait_seconds`."""
        request = Request(
            method="GET",
            path=f"/v1/receipts/{submission}",
            query={"wait": f"{wait_seconds:g}"},
            max_reply_bytes=MAX_MESSAGE_BYTES + _ENVELOPE_OVERHEAD_BYTES,
            wait_seconds=wait_seconds,
        )
        reply, _ = await self._call(request, patience_seconds, signed=False)
        return None if reply.status == 202 else (self._open_receipt(reply.body, submission), reply.body)

    async def fetch(
        self, path: str, *, max_bytes: int, query: Mapping[str, str] | None = None, patience_seconds: float = 60.0
    ) -> bytes:
        """The body of an unsigned GET, at most `max_bytes`; what it is worth is the caller's to check."""
        request = Request(method="GET", path=path, query=query, max_reply_bytes=max_bytes)
        reply, _ = await self._call(request, patience_seconds, signed=False)
        return reply.body

    async def _post(
        self, path: str, body: Wire | None, *, max_reply_bytes: int = MAX_MESSAGE_BYTES, patience_seconds: float
    ) -> bytes:
        data = b"" if body is None else encode(body)
        request = Request(method="POST", path=path, body=data, max_reply_bytes=max_reply_bytes)
        reply, _ = await self._call(request, patience_seconds)
        return reply.body

    async def _call(self, request: Request, patience_seconds: float, *, signed: bool = True) -> tuple[Reply, str]:
        """Send until it succeeds, is refused, or patience ends; also the id of the request that succeeded."""
        measured = await asyncio.to_thread(measure_body, request.body) if signed else None
        give_up_at = time.monotonic() + patience_seconds
        failures, clock_was_corrected = 0, False
        while True:
            try:
                return await self._attempt(request, measured)
            except Refused as error:
                if error.code == Reason.CLOCK_SKEW and not clock_was_corrected and self._correct_clock(error):
                    clock_was_corrected = True
                    continue
                if error.status != 429:
                    raise
                fault: CoordinatorFault = error
            except Unavailable as error:
                fault = error
            failures += 1
            delay = max(self._backoff.delay(failures), fault.retry_after_seconds or 0.0)
            if time.monotonic() + delay > give_up_at:
                raise self._given_up(fault)
            await asyncio.sleep(delay)

    async def _attempt(self, request: Request, measured: tuple[str, int] | None) -> tuple[Reply, str]:
        headers, request_id, body_bytes = {}, "", 0
        if measured is not None:
            headers["Authorization"], envelope = self._sign(request, *measured)
            request_id, body_bytes = digest(envelope), measured[1]
        try:
            reply = await self._exchange.send(request, body_bytes=body_bytes, headers=headers)
            self._raise_for_status(reply)
        except Unavailable as error:
            self._note_away(error)
            raise
        except Refused:
            self._note_back()
            raise
        self._note_back()
        return reply, request_id

    def _given_up(self, fault: CoordinatorFault) -> CoordinatorFault:
        if isinstance(fault, Refused):
            return fault
        said = f"The coordinator {self.url} cannot be reached ({fault}); check the address, or try again later."
        return Unavailable(said, code=fault.code, retry_after_seconds=fault.retry_after_seconds)

    def _sign(self, request: Request, body_digest: str, body_bytes: int) -> tuple[str, bytes]:
        if self._key is None:
            raise ConfigError("This request must be signed, and no key was given.")
        claim = RequestClaim(
            run_id=self.run_id,
            method=request.method,
            path=request.path,
            body_digest=body_digest,
            body_bytes=body_bytes,
            issued_at=int(self.now()),
            nonce=secrets.token_hex(16),
        )
        return sign_request(claim, key=self._key)

    def _raise_for_status(self, reply: Reply) -> None:
        status = reply.status
        if 200 <= status < 300:
            return
        if 300 <= status < 400:
            raise BadReply(f"{self.url} redirects (HTTP {status}); give the address that it redirects to.")
        said = self._error_reply(reply)
        if status >= 500:
            raise Unavailable(said.message, code=said.code, retry_after_seconds=reply.retry_after_seconds)
        raise Refused(
            said.message,
            code=said.code,
            status=status,
            server_time=said.server_time or None,
            submission=said.submission,
            retry_after_seconds=reply.retry_after_seconds,
        )

    def _error_reply(self, reply: Reply) -> ErrorReply:
        """What the coordinator, or a proxy before it, says is wrong; safe to print."""
        fallback = ErrorReply(code=f"http_{reply.status}", message=f"it answers HTTP {reply.status}", server_time=0)
        try:
            said = decode(ErrorReply, reply.body, max_bytes=MAX_MESSAGE_BYTES)
        except PeerFault:
            return fallback
        code = said.code if _CODE.fullmatch(said.code) else fallback.code
        return structs.replace(said, code=code, message=printable(said.message))

    def _correct_clock(self, refusal: Refused) -> bool:
        """Take the coordinator's time for what is signed to it; only for that."""
        if refusal.server_time is None:
            return False
        self._clock_offset = refusal.server_time - self._clock()
        log.warning(
            "this machine's clock is %.0f s away from the coordinator's; set it (NTP). Signing by theirs for now",
            abs(self._clock_offset),
        )
        return True

    def _note_away(self, error: Unavailable) -> None:
        """The first failure may be an idle connection that was closed; the second is an outage."""
        if self._away_since is None:
            self._away_since = time.monotonic()
        elif not self._outage_logged:
            self._outage_logged = True
            log.warning("the coordinator %s is away (%s); trying until it answers", self.url, error)

    def _note_back(self) -> None:
        if self._outage_logged and self._away_since is not None:
            log.warning("the coordinator is back after %.0f s", time.monotonic() - self._away_since)
        self._away_since, self._outage_logged = None, False

    def _open_receipt(self, data: bytes, submission: str) -> Receipt:
        if self.run_key is None or self._key is None:
            raise ConfigError("A receipt can be checked only with a key, and after the run's descriptor.")
        try:
            opened = open_envelope(
                data,
                domain=RECEIPT_DOMAIN,
                versions=(MESSAGE_VERSION,),
                max_payload_bytes=MAX_MESSAGE_BYTES,
                signer=self.run_key,
            )
            receipt = decode(Receipt, opened.payload, max_bytes=MAX_MESSAGE_BYTES)
        except PeerFault as error:
            said = printable(str(error))
            raise BadReply(f"{self.url} sent a receipt that is not the run's: {said}.", code=error.code) from error
        if (receipt.run_id, receipt.submission, receipt.node) != (self.run_id, submission, node_id(self._key)):
            raise BadReply(f"{self.url} sent somebody else's receipt.", code="foreign_receipt")
        return receipt

    def _decode(self, cls: type[T], body: bytes) -> T:
        try:
            return decode(cls, body, max_bytes=MAX_LEASE_REPLY_BYTES)
        except PeerFault as error:
            said = printable(str(error))
            raise BadReply(f"{self.url} sent something else than a {cls.__name__}: {said}.", code=error.code) from error


def _sound(advice: RelayList) -> RelayList:
    """`advice` without what is no URL; a stripe that is left without candidates leaves none."""
    stripes = tuple(sound_urls(each) for each in advice.stripes)
    return RelayList(relays=sound_urls(advice.relays), stripes=stripes if all(stripes) else ())
