"""Replay protection for signed requests: a nonce is used up even if its request fails and is rolled back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Final

from sqlalchemy import Connection, Integer, bindparam, delete, func, select, text
from sqlalchemy.exc import IntegrityError, OperationalError

from coordinator.storage.database import Database
from coordinator.storage.gaps import CLOCK_STEP_SECONDS
from coordinator.storage.prepared import Prepared, fence, insert_into
from coordinator.storage.schema import nonces
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS

FORGET_SECONDS = 1.0
"""Period of deleting expired nonces: deleting those of a minute at once blocks writers for 0.1 s."""

MOST_FORGOTTEN: Final = 5_000
"""Nonces that are deleted at once, and those that are over at the same time as the last: more than come in a period, so
that a start's many are done with in a while."""

CLOCKS_APART_SECONDS: Final = 180.0
"""By how much one clock may be behind another, or be set back, without a request being good again."""

KEPT_SECONDS: Final = 2.0 * MAX_CLOCK_SKEW_SECONDS + CLOCKS_APART_SECONDS
"""For how long a nonce is kept: as long as a request may be good by such a clock, its signer's being ahead."""

_INSERT = Prepared(insert_into(nonces, "nonce", "expires_at"))
_OLDEST = (
    select(nonces.c.expires_at)
    .where(nonces.c.expires_at < bindparam("now"))
    .order_by(nonces.c.expires_at)
    .limit(bindparam("most", type_=Integer))
    .subquery()
)
# By their time, which PostgreSQL finds once. By their names, it made a plan on the empty table that looked for each row
# of the table in all of these.
_UP_TO = select(func.max(_OLDEST.c.expires_at)).scalar_subquery()
_DELETE_EXPIRED = Prepared(delete(nonces).where(nonces.c.expires_at <= _UP_TO))
_SERVERS_CLOCK = Prepared(text("SELECT CAST(extract(epoch FROM clock_timestamp()) AS double precision)"))
_SAVEPOINT, _ROLL_BACK = Prepared(text("SAVEPOINT asked")), Prepared(text("ROLLBACK TO SAVEPOINT asked"))


class SignedRequestLog:
    """The nonces of the requests that a run has recently accepted."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._forgot_at = -math.inf
        self._behind: float | None = None
        self._clock_ahead = -math.inf  # a start counts as a step: the clock may be ahead already
        self._settled_at = -math.inf

    @contextmanager
    def consume(self, nonce: str, *, now: float) -> Iterator[Connection]:
        """Open the transaction of the request with this nonce; raises Refusal for a replay.

        An exception in the block rolls back its writes but not the nonce, or an eavesdropper could replay the request
        later. OperationalError, an unavailable database, rolls back both.
        """
        failure: Exception | None = None
        uptime = monotonic()  # beside `now`: what is waited for the database is no step of the clock
        with self._database.write(durable=False) as connection:
            self._insert(connection, nonce, now=now, uptime=uptime)
            _SAVEPOINT.send(connection)
            try:
                yield connection
            except OperationalError:
                raise
            except Exception as error:  # noqa: BLE001  (raised again below)
                fence(connection)
                _ROLL_BACK.run(connection)
                failure = error
        if failure is not None:
            raise failure

    def _insert(self, connection: Connection, nonce: str, *, now: float, uptime: float) -> None:
        if self._behind is None or not 0 <= now - self._forgot_at < FORGET_SECONDS:
            self._forgot_at = now  # at once, so that no two threads delete the same ones
            shared, uptime = shared_clock(connection, now=now, uptime=uptime)
            self._behind = shared - now
            if self._is_settled(shared, uptime=uptime):
                _DELETE_EXPIRED.run(connection, {"now": shared, "most": MOST_FORGOTTEN})
        try:
            _INSERT.run(connection, {"nonce": nonce, "expires_at": now + self._behind + KEPT_SECONDS})
        except IntegrityError as error:
            raise Refusal(Reason.REPLAYED_REQUEST, "Its nonce was used.") from error

    def _is_settled(self, now: float, *, uptime: float) -> bool:
        """Return whether the clock has not been set ahead for KEPT_SECONDS: set back, it makes good again what was.

        A process that ends sooner forgets none; the next one that lives for so long forgets them.
        """
        if now - uptime > self._clock_ahead + CLOCK_STEP_SECONDS:
            self._settled_at = uptime + KEPT_SECONDS
        self._clock_ahead = now - uptime
        return uptime >= self._settled_at


def shared_clock(connection: Connection, *, now: float, uptime: float) -> tuple[float, float]:
    """Return the clock by which nonces expire, and the uptime beside it: PostgreSQL's, as coordinators' may differ."""
    if connection.dialect.name != "postgresql":
        return now, uptime
    return float(_SERVERS_CLOCK.scalar(connection)), monotonic()
