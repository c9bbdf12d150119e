"""A node's page: its standing in words, its credit over time, and what it has sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.dashboard.formatting import minute, number
from coordinator.dashboard.listed import ROWS, SubmissionLine, lines_of
from coordinator.dashboard.series import Picture, picture_of
from coordinator.run.service import Coordinator
from coordinator.storage import counters, listings, nodes, profiles
from coordinator.storage.profiles import NodeProfile
from coordinator.storage.tallies import DAY
from node.commands.status_report import StatusLine
from node.commands.status_report import lines_of as standing_lines
from node.protocol.admission import Outcome
from node.protocol.messages import NodeStanding
from node.protocol.reasons import Reason
from node.protocol.standing import Standing

OUTCOMES: Final = tuple(one.value for one in Outcome)
MOST_POINTS: Final = 300


@dataclass(frozen=True, slots=True)
class NodeView:
    """The content of the page. `said` are the lines that `swarmproof status` prints, `before` is the log index of the
    next page's end, None on the last one.
    """

    standing: NodeStanding
    word: str
    said: Sequence[StatusLine]
    engine: str
    profile: NodeProfile
    registered_at: float
    seen_at: float
    credit: Picture | None
    reasons: Sequence[tuple[Reason, int]]
    outcome: str
    waiting: Sequence[SubmissionLine]
    judged: Sequence[SubmissionLine]
    before: int | None


def read_node(coordinator: Coordinator, node: str, *, outcome: str, before: int | None, now: float) -> NodeView | None:
    """Read the page of `node`, None if it is not registered; with the submissions of one `outcome`, "" for all."""
    home = coordinator.home
    with home.database.read() as connection:
        row = nodes.find(connection, node)
        if row is None:
            return None
        wanted = (Outcome(outcome),) if outcome else tuple(Outcome)
        judged = listings.judged_of_node(connection, node, outcomes=wanted, before=before, most=ROWS + 1)
        waiting = [] if outcome or before else listings.unjudged_of_node(connection, node, most=ROWS)
        counted = counters.rejections_of(connection, [node]).get(node, {}) if row.rejected else {}
        profile = profiles.list_of(connection, [node])[node]
        credit = listings.credit_of(connection, node)
        view_lines = lines_of(connection, judged[:ROWS], home=home), lines_of(connection, waiting, home=home)
    standing = coordinator.standing(node, now=now)
    return NodeView(
        standing=standing,
        word=Standing(standing.verified, standing.strikes).word(home.spec.standing),
        said=[one for one in standing_lines(standing, home.spec.standing) if one.name != "node"],
        engine=row.engine,
        profile=profile,
        registered_at=row.registered_at,
        seen_at=row.seen_at,
        credit=_credit_picture(credit, whole=row.tokens, now=now),
        reasons=sorted(((Reason(code), count) for code, count in counted.items()), key=lambda one: -one[1]),
        outcome=outcome,
        judged=view_lines[0],
        waiting=view_lines[1],
        before=judged[ROWS - 1].log_index if len(judged) > ROWS else None,
    )


def _credit_picture(credit: Sequence[tuple[float, int]], *, whole: int, now: float) -> Picture | None:
    """Draw the sum of a node's credit by time; it ends at `whole` tokens, and begins with the oldest group given."""
    if not credit:
        return None
    begun = credit[0][0]
    span = max(1.0, now - begun)
    held = float(max(0, whole - sum(tokens for _, tokens in credit)))
    values, following = [], 0
    for point in range(MOST_POINTS):
        until = begun + span * (point + 1) / MOST_POINTS
        while following < len(credit) and credit[following][0] <= until:
            held += credit[following][1]
            following += 1
        values.append(held)
    along = tuple(minute(at, days=span > 2 * DAY) for at in (begun, begun + span / 2, now))
    return picture_of(values, along, said="credit in tokens", shown=number)
