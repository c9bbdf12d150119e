"""Search: what somebody has copied from a page or a terminal leads to what it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.dashboard.formatting import name_of
from coordinator.dashboard.listed import ROWS, SubmissionLine, environments_of, lines_of
from coordinator.run.home import Home
from coordinator.storage import listings, profiles
from coordinator.storage.database import Connection
from coordinator.storage.listings import ListedSubmission
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason

MOST_QUERY: Final = 100
MOST_BY_ENVIRONMENT: Final = 1_000
"""Newest submissions among which those of one environment of several are looked for: each one's is derived."""

HOW: Final = (
    "An id or its beginning, as it is shown (7d82…fa65) or whole; a slot (3/17); step 12; a reason (wrong token); "
    "rejected or undecided; reward 0.5, reward > 0.8; an environment's name; or a node's nickname."
)
_ID: Final = re.compile(r"(?P<beginning>[0-9a-f]{1,64})(?:(?:…|\.{2,3})(?P<ending>[0-9a-f]{0,64}))?")
_SLOT: Final = re.compile(r"(?:slot )?(?P<version>[0-9]{1,9})/(?P<slot>[0-9]{1,15})")
_STEP: Final = re.compile(r"step (?P<step>[0-9]{1,9})")
_REWARD: Final = re.compile(r"reward ?(?P<sign><=|>=|<|>|=)? ?(?P<value>[0-9]{0,3}\.?[0-9]{1,6})")
_LEAST_DIGITS: Final = 4
"""Fewer hexadecimal digits name nothing, but may be part of a word."""

_TINY: Final = 1e-6
_SHOWN: Final = 0.005
"""Half of the last digit that pages show of a reward."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has found: nodes' nicknames by their ids, and submissions; `where` says what was looked at."""

    query: str
    nodes: Mapping[str, str]
    submissions: Sequence[SubmissionLine]
    where: str

    @property
    def only(self) -> str | None:
        """The path of the page that was meant, where only one can be."""
        if len(self.nodes) + len(self.submissions) != 1:
            return None
        if self.nodes:
            return f"/nodes/{next(iter(self.nodes))}"
        return f"/submissions/{self.submissions[0].row.submission}"


def find(connection: Connection, text: str, *, home: Home) -> Found:
    """Find what `text` names, at most ROWS of each kind; nothing is found for text that names nothing."""
    query = " ".join(text.lower().replace("_", " ").split())[:MOST_QUERY]
    rows, where, nodes = _named(connection, query, home=home)
    nodes = [*nodes, *profiles.nodes_called(connection, text[:MOST_QUERY], most=ROWS)]
    said = profiles.list_of(connection, list(dict.fromkeys(nodes))[:ROWS])
    called = {node: profile.nickname for node, profile in said.items()}
    return Found(query, called, lines_of(connection, rows, home=home), where)


def _named(connection: Connection, query: str, *, home: Home) -> tuple[list[ListedSubmission], str, list[str]]:
    """Return the submissions that the query names, where they were looked for, and the nodes whose ids it names."""
    kinds: Sequence[tuple[re.Pattern[str], str, Callable[[re.Match[str]], list[ListedSubmission]]]] = (
        (_SLOT, "all submissions for this slot", lambda it: _of_slot(connection, it)),
        (_STEP, "the submissions that the step was trained on", lambda it: _of_step(connection, it)),
        (_REWARD, "the newest submissions", lambda it: _by_reward(connection, it)),
    )
    for pattern, where, read in kinds:
        if (it := pattern.fullmatch(query)) is not None:
            return read(it), where, []
    it = _ID.fullmatch(query)
    if it is not None and len(it["beginning"]) + len(it["ending"] or "") >= _LEAST_DIGITS:
        ends = it["beginning"], it["ending"] or ""
        rows = listings.submissions_by_id(connection, *ends, most=ROWS)
        return rows, "the ids that begin or end so", listings.nodes_by_id(connection, *ends, most=ROWS)
    return *_by_name(connection, query, home=home), []


def _of_slot(connection: Connection, it: re.Match[str]) -> list[ListedSubmission]:
    return listings.of_slot(connection, int(it["version"]), int(it["slot"]), most=ROWS)


def _of_step(connection: Connection, it: re.Match[str]) -> list[ListedSubmission]:
    """Return the groups of a step as pages count them, from 1."""
    return listings.of_step(connection, int(it["step"]) - 1, most=ROWS)


def _by_reward(connection: Connection, it: re.Match[str]) -> list[ListedSubmission]:
    value = float(it["value"])
    bounds = {
        "<": (0.0, value - _TINY),
        "<=": (0.0, value),
        ">": (value + _TINY, 1.0),
        ">=": (value, 1.0),
    }.get(it["sign"] or "=", (value - _SHOWN, value + _SHOWN))
    return listings.newest_judged(connection, most=ROWS, reward=bounds)


def _by_name(connection: Connection, query: str, *, home: Home) -> tuple[list[ListedSubmission], str]:
    """Find by a reason, an outcome or an environment."""
    reasons: Mapping[str, Reason] = {name_of(reason): reason for reason in Reason}
    outcomes = {"admitted": Outcome.ADMITTED, "rejected": Outcome.REJECTED, "undecided": Outcome.INDETERMINATE}
    newest = f"the newest {listings.MOST_SEARCHED:,} submissions"
    if query in reasons:
        return listings.newest_judged(connection, most=ROWS, reason=reasons[query].value), newest
    if query in outcomes:
        return listings.newest_judged(connection, most=ROWS, outcome=outcomes[query].value), newest
    names = [one.name.lower().replace("_", " ") for one in home.spec.environments]
    wanted = {number for number, name in enumerate(names) if query and query in name}
    if not wanted:
        return [], ""
    rows = listings.newest_judged(connection, most=MOST_BY_ENVIRONMENT if len(names) > 1 else ROWS)
    numbers = environments_of(connection, rows, home=home)
    of_it = [row for row, number in zip(rows, numbers, strict=True) if number in wanted]
    return of_it[:ROWS], f"the newest {MOST_BY_ENVIRONMENT:,} submissions"
