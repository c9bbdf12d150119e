"""A node's public account: standing, credit, and its last rejections, as the log has them.

What a node is told of its verdicts is a fold over the log's leaves, as an auditor makes it, and not what the tables
say, which can be changed. `LogAccounts` follows the log as it grows: the first question after a start reads all of it,
each later one what is new. Leases, waiting times, stakes and work without a verdict are not in the log, and come from
tables by index.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET
from sqlalchemy import Connection, select

from coordinator.errors import StorageFault
from coordinator.storage import derived_rows, profiles, stakes, standing, work
from coordinator.storage.progress import progress
from coordinator.storage.schema import nodes
from node.client.http import printable
from node.protocol.admission import Outcome
from node.protocol.messages import MAX_REJECTIONS, NodeStanding, Rejection
from node.protocol.reasons import Reason, Refusal
from node.protocol.run import RunSpec, StandingSpec
from node.protocol.standing import Account

MAX_DETAIL = 200
LOCK_SECONDS = 1.0
DAY_SECONDS = 86400
_VERDICT = b'{"type":"verdict",'


class _Verdict(msgspec.Struct, frozen=True):
    """The fields of a leaf that accounts need; the others are most of it."""

    submission: str
    node: str
    outcome: Outcome
    reason: Reason | None
    detail: str
    tokens: int
    decided_at: int
    spot: int | None
    recheck: bool


_decode = msgspec.json.Decoder(_Verdict).decode


@dataclass(slots=True)
class _LoggedNode:
    """What the log says of one node."""

    account: Account = field(default_factory=Account)
    admitted: int = 0
    rejected: int = 0
    indeterminate: int = 0
    banned_at: int | None = None
    rejections: deque[Rejection] = field(default_factory=lambda: deque(maxlen=MAX_REJECTIONS))
    spots: dict[str, int] = field(default_factory=dict)
    """Tokens of the groups that were admitted by one row and are pending."""
    voided: dict[str, int] = field(default_factory=dict)
    """Tokens of those that a rejection voided, unless a second verdict took their admission back."""

    def follow(self, index: int, entry: _Verdict, *, rules: StandingSpec) -> None:
        """Apply the node's next verdict."""
        owed = self.account.follow(entry, rules=rules)
        self.voided |= {name: self.spots[name] for name in owed if name in self.spots}
        if entry.outcome is Outcome.ADMITTED and entry.spot is not None:
            self.spots[entry.submission] = entry.tokens
        elif self.spots:
            pending = self.account.unvested
            self.spots = {name: tokens for name, tokens in self.spots.items() if name in pending}
        if entry.recheck and entry.outcome is not Outcome.ADMITTED:
            self.voided.pop(entry.submission, None)
            self.admitted -= 1
        self.admitted += entry.outcome is Outcome.ADMITTED and not entry.recheck
        self.indeterminate += entry.outcome is Outcome.INDETERMINATE and not entry.recheck
        if entry.outcome is Outcome.REJECTED:
            self.rejected += 1
            self.rejections.appendleft(_rejection(index, entry))
        if not self.account.standing.is_banned(rules):
            self.banned_at = None
        elif self.banned_at is None:
            self.banned_at = entry.decided_at


class LogAccounts:
    """Every node's account, followed along the log; thread-safe."""

    def __init__(self, *, rules: StandingSpec) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._size = 0
        self._nodes: dict[str, _LoggedNode] = {}
        self._day, self._of_day = 0, Counter[str]()
        """The newest day of the log (UTC), in days since 1970, and the tokens of each node that were admitted then."""

    def of(self, connection: Connection, node: str) -> _LoggedNode:
        """Return a node's account as of the log in `connection` or later.

        Raises StorageFault for a damaged log, and Refusal while another thread reads much of it for the first time.
        """
        with self._followed(connection):
            return self._nodes.get(node) or _LoggedNode()

    def best_of_day(self, connection: Connection, *, now: float, most: int) -> list[tuple[str, int]]:
        """Return at most `most` nodes with the tokens that were admitted of them today (UTC), the most first.

        Raises as `of`.
        """
        with self._followed(connection):
            return self._of_day.most_common(most) if self._day == int(now) // DAY_SECONDS else []

    @contextmanager
    def _followed(self, connection: Connection) -> Iterator[None]:
        """Context manager during which the accounts are those of the log's end."""
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            raise Refusal(Reason.TOO_MANY_REQUESTS, "The coordinator is reading its log; ask again.")
        try:
            while page := derived_rows.leaves_from(connection, self._size):
                for index, leaf in page:
                    self._follow(index, leaf)
            yield
        finally:
            self._lock.release()

    def _follow(self, index: int, leaf: bytes) -> None:
        if index != self._size:
            raise StorageFault(f"log entry {self._size} is missing")
        if leaf.startswith(_VERDICT):
            try:
                entry = _decode(leaf)
            except msgspec.DecodeError as error:
                raise StorageFault(f"log entry {index} is not a verdict: {error}") from error
            self._nodes.setdefault(entry.node, _LoggedNode()).follow(index, entry, rules=self._rules)
            if entry.outcome is Outcome.ADMITTED and not entry.recheck:
                if (day := entry.decided_at // DAY_SECONDS) > self._day:
                    self._day, self._of_day = day, Counter()
                self._of_day[entry.node] += entry.tokens
        self._size += 1


def _rejection(index: int, entry: _Verdict) -> Rejection:
    return Rejection(
        submission=entry.submission,
        reason=entry.reason or Reason.VERIFIER_FAILED,
        detail=printable(entry.detail)[:MAX_DETAIL],
        decided_at=entry.decided_at,
        log_index=index,
    )


def standing_report(
    connection: Connection, node: str, *, accounts: LogAccounts, spec: RunSpec, now: float
) -> NodeStanding:
    """Return the node's account at `now`; an unknown node's is a new one's. Raises StorageFault."""
    row = connection.execute(select(nodes.c.not_before).where(nodes.c.node == node)).first()
    logged = accounts.of(connection, node)
    account, of_slots = logged.account, logged.account.standing
    banned, over = of_slots.is_banned(spec.standing), progress(connection).is_over(spec)
    stake = stakes.held(connection, node)
    said = profiles.list_of(connection, [node])[node]
    in_part = stake >= spec.standing.stake and not over
    return NodeStanding(
        node=node,
        known=row is not None,
        banned=banned,
        banned_at=logged.banned_at,
        verified=of_slots.verified,
        strikes=of_slots.strikes,
        probation=spec.standing.probation,
        ban_after=spec.standing.ban_after,
        admitted=logged.admitted,
        rejected=logged.rejected,
        indeterminate=logged.indeterminate,
        vested=account.vested,
        unvested=account.pending,
        void=sum(logged.voided.values()),
        stake=max(0, stake),
        leases=work.held_leases(connection, node),
        unjudged=work.unjudged(connection, node),
        most_slots=0 if banned or over else standing.most_slots(of_slots, batch=spec.batch),
        wait_seconds=0.0 if row is None else standing.backoff_seconds(row.not_before, batch=spec.batch, now=now),
        full_rate=of_slots.full_rate(spec.standing) if in_part else 1.0,
        rejections=tuple(logged.rejections),
        nickname=said.nickname or UNSET,
        hardware=said.hardware or UNSET,
    )
