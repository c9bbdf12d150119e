"""One call to whichever coordinator of a run answers: signing, retries, failing over, the clock, and what is logged.

Only faults that time can heal are retried: the network, 5xx, 429. One that is the endpoint's own (the network, 5xx, a
reply that no coordinator of this run sends) has the next endpoint asked at once; the pause comes when all have failed
in a row. A 429 is a limit on this node, and asking elsewhere would be to evade it. Every attempt is signed anew, and
so is good wherever it goes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import structs

from node.client.endpoints import Endpoints
from node.client.http import Backoff, Exchange, ExchangeLimits, Reply, Request, measure_body, printable
from node.client.ssrf import Reach
from node.errors import BadReply, ConfigError, CoordinatorFault, Refused, Unavailable
from node.protocol.endpoints import Endpoint
from node.protocol.messages import MAX_MESSAGE_BYTES, ErrorReply, RequestClaim
from node.protocol.reasons import Reason
from node.protocol.requests import sign_request
from shardcast.errors import PeerFault
from shardcast.wire import Wire, decode, digest, encode

log = logging.getLogger(__name__)

T = TypeVar("T")

_CODE = re.compile(r"[a-z0-9_]{1,64}")
_NO_REASON: Final = "http_"
_OF_OTHERS: Final = frozenset({Reason.WRONG_RUN, Reason.CLOCK_SKEW})


@dataclass(frozen=True, slots=True)
class CoordinatorReply:
    """A reply of success: who gave it, and the id of the signed request that it answers ("" for an unsigned one)."""

    url: str
    status: int
    body: bytes
    request_id: str


class CoordinatorTransport:
    """Calls to the coordinators of one run, under one key. Without a key only unsigned ones are possible.

    `endpoints` says which are asked, and in which order. Each has its own connections, opened by the first request to
    it, and its own clock.
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
        self._clock_offsets: dict[str, float] = {}
        self._away_since: float | None = None
        self._outage_logged = False

    async def close(self) -> None:
        """End every connection."""
        for exchange in list(self._exchanges.values()):
            await exchange.close()

    def now(self) -> float:
        """The time of the coordinator in use as far as it is known, in Unix seconds."""
        return self._now_at(self.endpoints.current)

    def reach(self, url: str) -> Reach:
        """How far away the coordinator at `url` is; the farthest where that is not known any more."""
        return self._exchanges[url].reach if url in self._exchanges else Reach.INTERNET

    def set_urls(self, urls: Iterable[str]) -> None:
        """Ask these from now on, see `Endpoints.replace`; what is under way at others ends there."""
        self.endpoints.replace(urls)

    async def call(self, request: Request, parse: Callable[[CoordinatorReply], T], *, patience_seconds: float) -> T:
        """Send until it succeeds, is refused, or patience ends; what `parse` makes of the answer.

        `parse` raises BadReply for what no coordinator of this run answers; others are then asked too, unless the
        request was signed and so may have had its effect.
        """
        await self._close_unused()
        measured = await asyncio.to_thread(measure_body, request.body) if request.signed else None
        started = time.monotonic()
        give_up_at = started + patience_seconds
        turn_until = max(give_up_at, started + self._limits.connect_seconds)  # asking elsewhere is no second try
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
            if attempts.go_on_after(url, fault) and time.monotonic() < turn_until:
                continue
            failures += 1
            delay = max(self._backoff.delay(failures), attempts.take_pause(fault))
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
        if url not in self._exchanges:
            self._exchanges[url] = Exchange(url, limits=self._limits)
        reply = await self._exchanges[url].send(request, body_bytes=body_bytes, headers=headers)
        _raise_for_status(url, reply)
        parsed = parse(CoordinatorReply(url, reply.status, reply.body, request_id))
        self._note_answer(url)
        return parsed

    async def _close_unused(self) -> None:
        """End the connections to endpoints that are on the list no more, once nothing is under way there."""
        known = self.endpoints.urls
        urls = [url for url, each in self._exchanges.items() if url not in known and not each.in_flight]
        unused = [self._exchanges.pop(url) for url in urls]  # at once: another call may look while this one waits
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
        )
        return sign_request(claim, key=self._key)

    def _now_at(self, url: str) -> float:
        return self._clock() + self._clock_offsets.get(url, 0.0)

    def _correct_clock(self, url: str, fault: CoordinatorFault) -> bool:
        """Take a coordinator's time for what is signed to it, if it complains; only for that."""
        if not isinstance(fault, Refused) or fault.code != Reason.CLOCK_SKEW or fault.server_time is None:
            return False
        self._clock_offsets[url] = fault.server_time - self._clock()
        log.warning(
            "this machine's clock is %.0f s away from the coordinator's; set it (NTP). Signing by theirs for now",
            abs(self._clock_offsets[url]),
        )
        return True

    # -- who answers

    def _note(self, url: str, fault: CoordinatorFault) -> None:
        if isinstance(fault, Unavailable):
            self._note_failure(url, "away", fault)
        elif not _is_of_others(fault):
            self._note_answer(url)
        elif len(self.endpoints.urls) > 1:  # alone, it is its caller's to complain of: there is nobody to turn to
            self._note_failure(url, "of no use", fault)

    def _note_failure(self, url: str, state: str, fault: CoordinatorFault) -> None:
        """The first failure of a lone endpoint may be an idle connection that was closed; the next is an outage."""
        was_away, urls = self.endpoints.away, self.endpoints.urls
        turned_to = self.endpoints.note_failure(url)
        if turned_to is not None:
            log.warning("the coordinator %s is %s (%s); going on with %s", url, state, fault, turned_to)
        if not self.endpoints.away:
            return
        self._away_since = self._away_since or time.monotonic()
        if self._outage_logged or not (was_away or len(urls) > 1):
            return
        self._outage_logged = True
        if len(urls) == 1:
            log.warning("the coordinator %s is %s (%s); trying until it answers", url, state, fault)
        else:
            log.warning("the coordinators %s are away (%s); trying until one answers", ", ".join(urls), fault)

    def _note_answer(self, url: str) -> None:
        if self._outage_logged and self._away_since is not None:
            log.warning("the coordinator %s is back after %.0f s", url, time.monotonic() - self._away_since)
        self._away_since, self._outage_logged = None, False
        self.endpoints.note_answer(url)


class _Attempts:
    """Which endpoints one call has asked since its last pause, and what they said."""

    def __init__(self, endpoints: Endpoints, *, signed: bool) -> None:
        self._endpoints = endpoints
        self._signed = signed
        self._faults: dict[str, CoordinatorFault] = {}

    def next(self) -> str:
        """Whom to ask."""
        return self._endpoints.next(self._faults) or self._endpoints.current

    def go_on_after(self, url: str, fault: CoordinatorFault) -> bool:
        """Whether another endpoint is to be asked at once, rather than after a pause; raises what ends the call."""
        if isinstance(fault, Refused) and fault.status == 429:
            return False
        self._faults[url] = fault
        if self._is_final(fault):
            raise fault
        if self._endpoints.next(self._faults) is not None:
            return True
        for said in self._faults.values():
            if isinstance(said, Refused) and not _is_of_others(said):
                raise said
        if not any(isinstance(said, Unavailable) for said in self._faults.values()):
            raise fault
        return False

    def take_pause(self, fault: CoordinatorFault) -> float:
        """For how many seconds all asked to be left alone, of those that may answer then; all are asked again."""
        limited = [fault] if isinstance(fault, Refused) else []
        away = [said for said in self._faults.values() if isinstance(said, Unavailable)]
        self._faults.clear()
        return min((said.retry_after_seconds or 0.0 for said in limited or away), default=0.0)

    def _is_final(self, fault: CoordinatorFault) -> bool:
        """Whether others need not be asked: they would say the same, or a signed request may have had its effect."""
        if isinstance(fault, Refused):
            return self._signed and not _is_of_others(fault)
        return self._signed and isinstance(fault, BadReply)


def _is_of_others(fault: CoordinatorFault) -> bool:
    """Whether this is what no coordinator of this run says by whose clock was signed: a portal's, another run's."""
    if isinstance(fault, Refused):
        return fault.status != 429 and (fault.code in _OF_OTHERS or fault.code.startswith(_NO_REASON))
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
) -> Request:
    """Return the request to a declared endpoint; `names` fill in the variable parts of its path.

    `max_reply_bytes` replaces the endpoint's own limit; see `Request` for `wait_seconds` and `elsewhere`.
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
    )


def decoded(endpoint: Endpoint[Any, T], answer: CoordinatorReply) -> T:
    """Return the reply of `endpoint` that an answer holds; raises BadReply."""
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
    said = _error_reply(reply)
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


def _error_reply(reply: Reply) -> ErrorReply:
    """What the coordinator, or a proxy before it, says is wrong; safe to print."""
    fallback = ErrorReply(code=f"{_NO_REASON}{reply.status}", message=f"it answers HTTP {reply.status}", server_time=0)
    try:
        said = decode(ErrorReply, reply.body, max_bytes=MAX_MESSAGE_BYTES)
    except PeerFault:
        return fallback
    code = said.code if _CODE.fullmatch(said.code) else fallback.code
    return structs.replace(said, code=code, message=printable(said.message))
