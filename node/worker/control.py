"""The worker's side of control: requests of the run's operator, as far as the worker's owner allows.

No request gives anybody a choice of work or a signature on it: leases come from the coordinator alone, and an invite
only has the node request one now. A challenge's completions fit no slot (`node.protocol.challenge`), and are signed as
a reply to that challenge.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.client.http import printable, valid_urls
from node.control.authorization import ControlAuthorizer
from node.engines.base import EngineError
from node.joining.session import RunSession
from node.protocol.control import (
    FREE_PURPOSES,
    MAX_LOG_BYTES,
    MAX_LOG_LINE,
    MAX_LOG_LINES,
    AskChallenge,
    AskDrain,
    AskInvite,
    AskLogs,
    AskRestart,
    AskStatus,
    Body,
    ChallengeBody,
    ControlReason,
    ControlRefusal,
    ControlReply,
    ControlRequest,
    DrainBody,
    InviteBody,
    LogsBody,
    Purpose,
    RestartBody,
    StatusBody,
    purpose_of,
    sign_reply,
)
from node.protocol.peers import peer_id_of
from node.protocol.reasons import Reason
from node.runtime.logs import PACKAGES
from node.worker.delivery import Delivery
from node.worker.engine import ChallengeUnavailable, EngineHost
from node.worker.leases import LeaseClient
from node.worker.registration import software
from node.worker.slots import ActiveSlots
from shardcast.wire import digest

log = logging.getLogger(__name__)

CHALLENGE_SECONDS: Final = 90.0
CHALLENGE_GAP_SECONDS: Final = 60.0


class WorkerControl:
    """Handler of authorised control requests; while `draining`, the worker leases no slots.

    `allowed` are the purposes that the worker's owner permits, `room` returns how many slots it could take now.
    `changed` wakes the worker's loop.
    """

    def __init__(
        self,
        session: RunSession,
        *,
        key: Ed25519PrivateKey,
        allowed: Collection[Purpose] = FREE_PURPOSES,
        host: EngineHost,
        leases: LeaseClient,
        slots: ActiveSlots,
        delivery: Delivery,
        status: Callable[[], dict[str, Any]],
        room: Callable[[], int],
        changed: asyncio.Event,
    ) -> None:
        self.draining = False
        self._session, self._key, self._allowed = session, key, frozenset(allowed)
        self._host, self._leases, self._slots, self._delivery = host, leases, slots, delivery
        self._status, self._room, self._changed = status, room, changed
        self._node = key.public_key().public_bytes_raw()
        self._door = ControlAuthorizer(
            node=self._node,
            run_id=session.join.run_id,
            run_key=session.run_key,
            allowed=self._allowed,
            revoked=self._revoked,
        )
        self._restart_asked = False
        self._challenge: asyncio.Task[ChallengeBody | None] | None = None
        self._next_challenge = 0.0
        self._ring = LogRing()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Answer requests while the block is active, if there is a peer-to-peer network."""
        network = self._session.network
        if network is None:
            yield
            return
        with self._ring.attached() if "logs" in self._allowed else contextlib.nullcontext():
            network.set_handler(self.answer)
            try:
                yield
            finally:
                network.set_handler(None)

    def take_restart(self) -> bool:
        """Return whether a restart of the engine was requested since the last call."""
        asked, self._restart_asked = self._restart_asked, False
        return asked

    async def interrupt(self) -> None:
        """Cancel a running challenge, before the engine stops."""
        if self._challenge is not None:
            self._challenge.cancel()
            await asyncio.wait({self._challenge})

    async def answer(self, peer: bytes, data: bytes) -> bytes:
        """Return the signed reply to the request that `peer` (a public key) sent; never raises."""
        reason, detail, body = None, "", None
        try:
            body = await self._do(self._door.let_in(peer, data), asker=peer)
        except ControlRefusal as refusal:
            reason, detail = refusal.reason, refusal.detail
            log.debug("control: %s refused: %s", peer_id_of(peer), refusal.code)
        except Exception:
            log.exception("control: a request failed")
            reason = ControlReason.FAILED
        reply = ControlReply(
            run_id=self._session.join.run_id,
            request=digest(data),
            reason=reason,
            detail=printable(detail)[:200],
            answered_at=int(time.time()),
            body=body,
        )
        return sign_reply(reply, key=self._key)

    def _revoked(self) -> Collection[str] | None:
        verified = self._session.store.newest
        return None if verified is None else verified.descriptor.revoked

    async def _do(self, request: ControlRequest, *, asker: bytes) -> Body:
        level = logging.DEBUG if isinstance(request.ask, AskStatus) else logging.INFO
        log.log(level, "control: %s, asked by %s", purpose_of(request.ask), peer_id_of(asker))
        match request.ask:
            case AskStatus():
                return report(self._status(), engine=self._host.name)
            case AskInvite(endpoint=endpoint):
                return self._invite(endpoint)
            case AskChallenge() as ask:
                return await self._be_challenged(ask, request.nonce)
            case AskDrain():
                self.draining = True
                self._changed.set()
                return DrainBody(slots=len(self._slots), undelivered=len(self._delivery))
            case AskRestart():
                self._restart_asked = True
                self._changed.set()
                return RestartBody(slots=len(self._slots))
            case AskLogs(lines=lines):
                return LogsBody(lines=self._ring.last(lines))

    def _invite(self, endpoint: str | None) -> InviteBody:
        session, client = self._session, self._session.client
        if endpoint is not None:
            named = valid_urls(session.descriptor.endpoints)
            if endpoint.rstrip("/") not in named:
                raise ControlRefusal(ControlReason.UNKNOWN_ENDPOINT)
            client.set_urls(dict.fromkeys((*session.join.coordinators, *named)))
            client.prefer(endpoint.rstrip("/"))
        self.draining = False
        self._leases.pause(0)
        self._changed.set()
        return InviteBody(room=max(0, self._room()))

    async def _be_challenged(self, ask: AskChallenge, nonce: str) -> ChallengeBody:
        """Run one challenge at a time, and only if the engine's batch has room."""
        now = time.monotonic()
        if self._challenge is not None or self._room() < 1:
            raise ControlRefusal(ControlReason.BUSY)
        if now < self._next_challenge:
            raise ControlRefusal(ControlReason.BUSY, f"The next one in {self._next_challenge - now:.0f} s.")
        self._next_challenge = now + CHALLENGE_GAP_SECONDS
        self._challenge = asyncio.create_task(self._host.challenge(ask, node=self._node, nonce=nonce))
        try:
            async with asyncio.timeout(CHALLENGE_SECONDS):
                await asyncio.wait({self._challenge})
            body = self._challenge.result()
        except ChallengeUnavailable as error:
            self._next_challenge = 0.0
            raise ControlRefusal(ControlReason.UNAVAILABLE, str(error)) from error
        except TimeoutError as error:
            raise ControlRefusal(ControlReason.FAILED, f"Not done within {CHALLENGE_SECONDS:.0f} s.") from error
        except EngineError as error:
            raise ControlRefusal(ControlReason.FAILED, f"The engine: {error.code}.") from error
        except asyncio.CancelledError as error:
            if not self._challenge.cancelled():
                raise
            raise ControlRefusal(ControlReason.BUSY, "The engine was stopped meanwhile.") from error
        finally:
            self._challenge.cancel()
            self._challenge = None
        if body is None:
            raise ControlRefusal(ControlReason.BUSY, "A new policy was loaded meanwhile.")
        return body


def report(status: dict[str, Any], *, engine: str) -> StatusBody:
    """Return the public part of a worker's status: no paths, addresses, or text of third parties."""
    network = status["network"]
    return StatusBody(
        software=printable(software())[:200],
        engine=printable(engine)[:200],
        doing=printable(status["doing"])[:200],
        draining=status["draining"],
        run_is_over=status["run_is_over"],
        dismissed=status["dismissed"] is not None,
        coordinator_away=status["coordinator_away"],
        version=-1 if status["version"] is None else status["version"],
        held_versions=tuple(status["held_versions"])[:64],
        descriptor_version=status["descriptor_version"],
        head_version=status["head_version"],
        slots=len(status["slots"]),
        undelivered=status["undelivered"],
        neighbours=0 if network is None else len(network["neighbours"]),
        tokens=status["tokens"],
        tokens_per_s=float(status["tokens_per_s"]),
        switches=status["switches"],
        engine_restarts=status["engine_restarts"],
        admitted=status["admitted"],
        rejected=status["rejected"],
        indeterminate=status["indeterminate"],
        lost=status["lost"],
        expired=status["expired"],
        admitted_tokens=status["admitted_tokens"],
        reasons={reason: status["reasons"][reason] for reason in Reason if reason in status["reasons"]},
        seconds=max(0, int(status["updated_at"] - status["started_at"])),
    )


class LogRing(logging.Handler):
    """Ring buffer of the last lines that this project's packages log."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=MAX_LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record as one printable line, with its error but without the traceback."""
        said = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            said += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
        moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        line = f"{moment} {record.levelname} {' '.join(said.split())}"
        self._lines.append("".join(c if c.isprintable() else "?" for c in line[:MAX_LOG_LINE]))

    def last(self, count: int) -> tuple[str, ...]:
        """Return up to `count` of the newest lines, within MAX_LOG_BYTES, oldest first."""
        kept: deque[str] = deque()
        left = MAX_LOG_BYTES
        for line in reversed(list(self._lines)[-count:]):
            left -= len(line.encode())
            if left < 0:
                break
            kept.appendleft(line)
        return tuple(kept)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Collect records while the block is active."""
        loggers = [logging.getLogger(package) for package in PACKAGES]
        for logger in loggers:
            logger.addHandler(self)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(self)
