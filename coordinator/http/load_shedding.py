"""Load shedding: which requests are refused while more writes wait than are done within a second.

In this order, each from a longer queue on: what only reads; new nodes and relays; leases, receipts and what a worker
needs before it has work; and last of all what hands in or gives back leased work. Refusals are made before anything is
read or verified, cost a tenth of an answer, and say when to come again: when all that waits now is done. They are 429
and not 503: a client takes a 503 to the run's next coordinator at once, which would carry the load of one to all.

Whoever was let in is looked at again when he joins the queue: of a thousand who come at once all find it short, and
their leases would leave no room for the uploads.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from coordinator.http.rate_limits import OverloadRefusal
from node.protocol import endpoints

if TYPE_CHECKING:
    from coordinator.http.write_queue import WriteQueue


class RequestClass(StrEnum):
    """Requests that are shed together, the first ones first."""

    READ = "read"
    JOIN = "join"
    WORK = "work"
    DELIVERY = "delivery"


MOST_WAITING: Final = {
    RequestClass.READ: 256,
    RequestClass.JOIN: 384,
    RequestClass.WORK: 512,
    RequestClass.DELIVERY: 768,
}
"""Unfinished writes (`WriteQueue`) from which a class is shed: at a quarter to 1 ms each, what a request waits at most.
A burst of a busy coordinator that nothing is wrong with reaches 128, and whoever only reads is not refused for that.

The last is less than the connections that there may be (`ConnectionLimits`), each of which asks for one at a time: who
finds all of them taken is closed unanswered, and not told when to come again.
"""

MOST_SECONDS: Final = 8.0
"""What all that may wait takes at most, by the measured time of each: on a slow machine fewer may wait. Whoever waits
for 30 s has gone (`node.client.http.ExchangeLimits`), and is answered to nobody's use."""

LEAST_SHARE: Final = 1 / 16
"""Of the limits, what is left of them however slow a write was: so many are still written together, and measured."""

STRANGERS_WAITING: Final = 64
"""Unfinished writes from which a signer is looked up, in a read of its own, before its request is one of them. A
quarter of what sheds the first class: nobody's free keys come near it."""

RETRY_SECONDS: Final = {
    RequestClass.READ: 5,
    RequestClass.JOIN: 20,
    RequestClass.WORK: 2,
    RequestClass.DELIVERY: 1,
}
"""The least that a refused request is told to stay away.

New nodes are let in last of all who come again, and each refusal of one costs a connection: while they came every 5 s,
a coordinator on PostgreSQL took 6.5 ms of processor time for a delivery at three times its capacity, and now 6.0."""

MOST_RETRY_SECONDS: Final = 60

_NEVER: Final = frozenset({endpoints.HEALTH.path, endpoints.METRICS.path, endpoints.RUN.path, "/health-line"})
"""What tells a balancer, an operator, open pages and the nodes that and where the run is: cached, and cheap."""
_WORK: Final = tuple(one.path.split("{")[0] for one in (endpoints.RECEIPT, endpoints.RELAYS, endpoints.POLICY))
_JOIN: Final = (endpoints.REGISTER.path, endpoints.ANNOUNCE_RELAY.path)


def class_of(method: str, path: str) -> RequestClass | None:
    """Return the class of a request, None for what is never shed."""
    if method == "GET":
        return None if path in _NEVER else RequestClass.WORK if path.startswith(_WORK) else RequestClass.READ
    if path in _JOIN:
        return RequestClass.JOIN
    return RequestClass.WORK if path == endpoints.LEASE.path else RequestClass.DELIVERY


class LoadShedder:
    """Refuses requests by class while `writes` is long."""

    def __init__(self, writes: WriteQueue) -> None:
        self._writes = writes

    def is_waited_for(self, limit: int) -> bool:
        """Whether `limit` unfinished writes wait, or as many as take as long as that many should."""
        waiting = len(self._writes)
        if waiting >= limit:
            return True
        seconds = self._writes.seconds_each * MOST_WAITING[RequestClass.DELIVERY]
        share = MOST_SECONDS / max(seconds, MOST_SECONDS)
        return waiting >= limit * max(share, LEAST_SHARE)

    def check(self, method: str, path: str) -> None:
        """Raise OverloadRefusal for a request that is shed now."""
        if not self.is_waited_for(MOST_WAITING[RequestClass.READ]):
            return
        kind = class_of(method, path)
        if kind is not None and self.is_waited_for(MOST_WAITING[kind]):
            wait = min(len(self._writes) * self._writes.seconds_each, MOST_RETRY_SECONDS)
            detail = "The coordinator has more requests than it can answer now; nothing was done."
            raise OverloadRefusal(detail, retry_after_seconds=max(RETRY_SECONDS[kind], math.ceil(wait)))
