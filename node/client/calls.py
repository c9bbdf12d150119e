"""Calls to a run's coordinators: signing, retries with backoff, failover and clock correction.

Only transient faults are retried: network errors, 5xx, 429. For a fault of the endpoint itself (network, 5xx, a reply
that no coordinator of this run sends) the next endpoint is tried at once, and the backoff starts when all have failed.
A 429 limits this node, so failing over would evade it. Every attempt is signed anew, so it is valid at any endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET, UnsetType, structs

from node.client.endpoints import Endpoints
from node.client.http import Backoff, Exchange, ExchangeLimits, Reply, Request, measure_body, printable
from node.client.ssrf import Reach, reach_of
from node.errors import BadReply, ConfigError, CoordinatorFault, Refused, Unavailable
from node.protocol.endpoints import Endpoint
from node.protocol.messages import MAX_MESSAGE_BYTES, ErrorReply, RequestClaim, SlotName
from node.protocol.reasons import Reason
from node.protocol.requests import sign_request
from shardcast.errors import PeerFault
from shardcast.wire import Wire, decode, digest, encode

log = logging.getLogger(__name__)

T = TypeVar("T")

_CODE = re.compile(r"[a-z0-9_]{1,64}")
_NO_REASON: Final = "http_"
_NOT_THERE: Final = (404, 405)
_FOREIGN_REASONS: Final = frozenset({Reason.WRONG_RUN, Reason.CLOCK_SKEW})


@dataclass(frozen=True, slots=True)
class CoordinatorReply:
    """A 2xx reply. `request_id` is the digest of the signed request that it answers, "" for an unsigned one."""

    url: str
    status: int
    body: bytes
    request_id: str


class CoordinatorTransport:
    """Transport to the coordinators of one run under one key; without a key, unsigned requests only.

    `endpoints` holds the URLs in failover order. Each has its own connection pool and clock offset.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        run_id: str,
        key: Ed25519PrivateKey | None,
        limits: ExchangeLimits,
        backoff: Backoff,
        clock: Callable[[], float],
    ) -> None:
        self.endpoints = Endpoints(urls)
        self._run_id = run_id
        self._key = key
        self._limits = limits
        self._backoff = backoff
        self._clock = clock
        self._exchanges: dict[str, Exchange] = {}
        self._is_closed = False
        self._clock_offsets: dict[str, float] = {}
        self._away_since: float | None = None
        self._outage_logged = False

    async def close(self) -> None:
        """Close every connection; nothing can be sent afterwards."""
        self._is_closed = True
        for exchange in list(self._exchanges.values()):
            await exchange.close()

    def now(self) -> float:
        """Return the estimated clock of the coordinator in use, in Unix seconds."""
        return self._now_at(self.endpoints.current)

    def reach(self, url: str) -> Reach:
        """Return the reach of the coordinator at `url`; INTERNET if it is no longer connected."""
        return self._exchanges[url].reach if url in self._exchanges else Reach.INTERNET

    @property
    def current_reach(self) -> Reach:
        """The reach of the coordinator in use; INTERNET while its address is not known."""
        url = self.endpoints.current
        literal = reach_of(urlsplit(url).hostname or "")
        return self.reach(url) if literal is None else literal

    def set_urls(self, urls: Iterable[str]) -> None:
        """Replace the endpoints (`Endpoints.replace`); requests in flight complete where they are."""
        self.endpoints.replace(urls)

    async def call(self, request: Request, parse: Callable[[CoordinatorReply], T], *, patience_seconds: float) -> T:
        """Send with retries for up to `patience_seconds`; return what `parse` makes of the reply.

        `parse` raises BadReply for an invalid reply; an unsigned request then fails over, while a signed one
        may already have taken effect. Raises Unavailable, Refused or BadReply.
        """
        await self._close_unused()
        measured = await asyncio.to_thread(measure_body, request.body) if request.signed else None
        started = time.monotonic()
        give_up_at = started + patience_seconds
        failover_until = max(give_up_at, started + self._limits.connect_seconds)  # failover is not a retry
        attempts, corrected = _Attempts(self.endpoints, signed=request.signed), set[str]()
        failures = 0
        while True:
            url = attempts.next()
            try:
                return await self._attempt(url, request, measured, parse)
            except CoordinatorFault as error:
                if url not in corrected and self._correct_clock(url, error):
                    corrected.add(url)
                    continue
                self._note(url, error)
                fault = error
            if attempts.should_fail_over(url, fault) and time.monotonic() < failover_until:
                continue
            failures += 1
            pause = min(attempts.take_pause(fault), self._limits.max_retry_after_seconds)
            delay = max(self._backoff.delay(failures), pause)
            if time.monotonic() + delay > give_up_at:
                raise self._given_up(fault)
            await asyncio.sleep(delay)

    async def _attempt(
        self, url: str, request: Request, measured: tuple[str, int] | None, parse: Callable[[CoordinatorReply], T]
    ) -> T:
        headers, request_id, body_bytes = {}, "", 0
        if measured is not None:
            headers["Authorization"], envelope = self._sign(url, request, *measured)
            request_id, body_bytes = digest(envelope), 0 if request.elsewhere else measured[1]
        if self._is_closed:  # a task that outlives its client would open connections that nobody closes
            raise Unavailable("the client is closed", code="closed")
        if url not in self._exchanges:
            self._exchanges[url] = Exchange(url, limits=self._limits)
        reply = await self._exchanges[url].send(request, body_bytes=body_bytes, headers=headers)
        _raise_for_status(url, reply)
        parsed = parse(CoordinatorReply(url, reply.status, reply.body, request_id))
        self._note_answer(url)
        return parsed

    async def _close_unused(self) -> None:
        """Close connections to endpoints that were removed, once nothing is in flight there."""
        known = self.endpoints.urls
        urls = [url for url, each in self._exchanges.items() if url not in known and not each.in_flight]
        unused = [self._exchanges.pop(url) for url in urls]  # before the first await: calls run concurrently
        for exchange in unused:
            self._clock_offsets.pop(exchange.url, None)
            await exchange.close()

    def _given_up(self, fault: CoordinatorFault) -> CoordinatorFault:
        if not isinstance(fault, Unavailable):
            return fault
        urls = self.endpoints.urls
        who = (
            f"The coordinator {urls[0]} cannot" if len(urls) == 1 else f"None of the coordinators {', '.join(urls)} can"
        )
        said = f"{who} be reached ({fault}); check the address, or try again later."
        return Unavailable(said, code=fault.code, retry_after_seconds=fault.retry_after_seconds)

    def _sign(self, url: str, request: Request, body_digest: str, body_bytes: int) -> tuple[str, bytes]:
        if self._key is None:
            raise ConfigError("This request must be signed, and no key was given.")
        claim = RequestClaim(
            run_id=self._run_id,
            method=request.method,
            path=request.path,
            body_digest=body_digest,
            body_bytes=body_bytes,
            issued_at=int(self._now_at(url)),
            nonce=secrets.token_hex(16),
            slot=request.slot,
        )
        return sign_request(claim, key=self._key)

    def _now_at(self, url: str) -> float:
        return self._clock() + self._clock_offsets.get(url, 0.0)

    def _correct_clock(self, url: str, fault: CoordinatorFault) -> bool:
        """Adopt the coordinator's clock for requests to it after a `clock_skew` refusal; return whether it did."""
        if not isinstance(fault, Refused) or fault.code != Reason.CLOCK_SKEW or fault.server_time is None:
            return False
        self._clock_offsets[url] = fault.server_time - self._clock()
        log.warning(
            "this machine's clock is %.0f s off the coordinator's; set it (NTP). Signing by the coordinator's clock",
            abs(self._clock_offsets[url]),
        )
        return True

    # -- availability

    def _note(self, url: str, fault: CoordinatorFault) -> None:
        if isinstance(fault, Unavailable):
            self._note_failure(url, "away", fault)
        elif not _is_foreign(fault):
            self._note_answer(url)
        elif len(self.endpoints.urls) > 1:  # a lone endpoint's fault is reported by the caller
            self._note_failure(url, "unusable", fault)

    def _note_failure(self, url: str, state: str, fault: CoordinatorFault) -> None:
        """Log failovers and outages. A lone endpoint's first failure may be a closed idle connection: not logged."""
        was_away, urls = self.endpoints.away, self.endpoints.urls
        fallback = self.endpoints.note_failure(url)
        if fallback is not None:
            log.warning("the coordinator %s is %s (%s); failing over to %s", url, state, fault, fallback)
        if not self.endpoints.away:
            return
        self._away_since = self._away_since or time.monotonic()
        if self._outage_logged or not (was_away or len(urls) > 1):
            return
        self._outage_logged = True
        if len(urls) == 1:
            log.warning("the coordinator %s is %s (%s); retrying until it answers", url, state, fault)
        else:
            log.warning("the coordinators %s are away (%s); retrying until one answers", ", ".join(urls), fault)

    def _note_answer(self, url: str) -> None:
        if self._outage_logged and self._away_since is not None:
            log.warning("the coordinator %s is back after %.0f s", url, time.monotonic() - self._away_since)
        self._away_since, self._outage_logged = None, False
        self.endpoints.note_answer(url)


class _Attempts:
    """Endpoints that one call has tried since its last backoff, with their faults."""

    def __init__(self, endpoints: Endpoints, *, signed: bool) -> None:
        self._endpoints = endpoints
        self._signed = signed
        self._faults: dict[str, CoordinatorFault] = {}

    def next(self) -> str:
        """Return the endpoint to try next."""
        return self._endpoints.next(self._faults) or self._endpoints.current

    def should_fail_over(self, url: str, fault: CoordinatorFault) -> bool:
        """Return whether to try another endpoint at once rather than back off; raises a fault that is final."""
        if isinstance(fault, Refused) and fault.status == 429:
            return False
        self._faults[url] = fault
        if self._is_final(fault):
            raise fault
        if self._endpoints.next(self._faults) is not None:
            return True
        for said in self._faults.values():
            if isinstance(said, Refused) and not _is_foreign(said):
                raise said
        if not any(isinstance(said, Unavailable) for said in self._faults.values()):
            raise fault
        return False

    def take_pause(self, fault: CoordinatorFault) -> float:
        """Return the shortest Retry-After of the endpoints worth retrying, up to half longer, and reset the tried ones.

        Those who were refused together would else come again together.
        """
        limited = [fault] if isinstance(fault, Refused) else []
        away = [said for said in self._faults.values() if isinstance(said, Unavailable)]
        self._faults.clear()
        shortest = min((said.retry_after_seconds or 0.0 for said in limited or away), default=0.0)
        return shortest * random.uniform(1.0, 1.5)

    def _is_final(self, fault: CoordinatorFault) -> bool:
        """Return whether failover is useless or unsafe: a signed request may already have taken effect."""
        if isinstance(fault, Refused):
            return self._signed and not _is_foreign(fault)
        return self._signed and isinstance(fault, BadReply)


def _is_foreign(fault: CoordinatorFault) -> bool:
    """Return whether the reply is not from a coordinator of this run: a captive portal, another run."""
    if isinstance(fault, Refused):
        return fault.status != 429 and (fault.code in _FOREIGN_REASONS or fault.code.startswith(_NO_REASON))
    return isinstance(fault, BadReply)


def request_to(
    endpoint: Endpoint[Any, Any],
    *,
    names: Mapping[str, str] | None = None,
    body: Wire | Path | None = None,
    query: Mapping[str, str] | None = None,
    wait_seconds: float = 0.0,
    max_reply_bytes: int | None = None,
    elsewhere: bool = False,
    slot: SlotName | UnsetType = UNSET,
) -> Request:
    """Build the request to a declared endpoint; `names` fill in the path parameters.

    `max_reply_bytes` overrides the endpoint's limit; see `Request` for `wait_seconds`, `elsewhere` and `slot`.
    """
    return Request(
        method=endpoint.method,
        path=endpoint.at(**(names or {})),
        query=query,
        body=body if isinstance(body, Path) else b"" if body is None else encode(body),
        max_reply_bytes=endpoint.max_reply_bytes if max_reply_bytes is None else max_reply_bytes,
        wait_seconds=wait_seconds,
        elsewhere=elsewhere,
        signed=endpoint.signed,
        slot=slot,
    )


def decoded(endpoint: Endpoint[Any, T], answer: CoordinatorReply) -> T:
    """Decode a reply of `endpoint`; raises BadReply."""
    try:
        return decode(endpoint.reply, answer.body, max_bytes=endpoint.max_reply_bytes)
    except PeerFault as error:
        said, name = printable(str(error)), endpoint.reply.__name__
        raise BadReply(f"{answer.url} sent something else than a {name}: {said}.", code=error.code) from error


def _raise_for_status(url: str, reply: Reply) -> None:
    status = reply.status
    if 200 <= status < 300:
        return
    if 300 <= status < 400:
        raise BadReply(f"{url} redirects (HTTP {status}); give the address that it redirects to.")
    said = _error_reply(url, reply)
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


def _error_reply(url: str, reply: Reply) -> ErrorReply:
    """Parse the error of a coordinator or a proxy in front of it; the text is safe to print."""
    message = f"{url} answers HTTP {reply.status}"
    if reply.status in _NOT_THERE:
        message += (
            " and no reason, as no coordinator does: its port is 8700 by default, an origin's 8710, a relay's 8720"
        )
    fallback = ErrorReply(code=f"{_NO_REASON}{reply.status}", message=message, server_time=0)
    try:
        said = decode(ErrorReply, reply.body, max_bytes=MAX_MESSAGE_BYTES)
    except PeerFault:
        return fallback
    code = said.code if _CODE.fullmatch(said.code) else fallback.code
    return structs.replace(said, code=code, message=printable(said.message))
