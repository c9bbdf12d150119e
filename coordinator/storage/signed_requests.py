"""Signed requests, of which each is good once: their nonces, and undoing what a request that fails has written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, bindparam, delete, insert
from sqlalchemy.exc import IntegrityError, OperationalError

from coordinator.storage.database import Database
from coordinator.storage.schema import nonces
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS

FORGET_SECONDS = 1.0
"""How often expired nonces are forgotten: those of a minute would keep all who write waiting for 0.1 s."""

# Built once, as in `work_statements`.
_REMEMBER, _FORGET = insert(nonces), delete(nonces).where(nonces.c.expires_at < bindparam("now"))


class SignedRequestLog:
    """The signed requests that one run has accepted lately."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._forgot_at = -math.inf

    @contextmanager
    def using_up(self, nonce: str, *, now: float) -> Iterator[Connection]:
        """Open the transaction of the request with this nonce; raises Refusal for one that was used.

        What fails in the block is undone, and the nonce is used up all the same: else whoever read the request on its
        way could have it done later. Only while the database is away is it forgotten with the rest.
        """
        failure: Exception | None = None
        with self._database.write(durable=False) as connection:
            self._use_up(connection, nonce, now=now)
            connection.exec_driver_sql("SAVEPOINT asked")
            try:
                yield connection
            except OperationalError:
                raise
            except Exception as error:  # noqa: BLE001  (raised again below)
                connection.exec_driver_sql("ROLLBACK TO SAVEPOINT asked")
                failure = error
        if failure is not None:
            raise failure

    def _use_up(self, connection: Connection, nonce: str, *, now: float) -> None:
        if not 0 <= now - self._forgot_at < FORGET_SECONDS:
            connection.execute(_FORGET, {"now": now})
            self._forgot_at = now
        try:
            connection.execute(_REMEMBER, {"nonce": nonce, "expires_at": now + 2 * MAX_CLOCK_SKEW_SECONDS})
        except IntegrityError as error:
            raise Refusal(Reason.REPLAYED_REQUEST, "Its nonce was used.") from error
