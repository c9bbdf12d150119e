"""Whether a run works: one list of rules for the pages, `/v1/status`, `swarmproof status` and the operator's terminal.

Where a rule is one of deploy/prometheus/alerts.yml, it has its name there, and a test holds the two together.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from coordinator.run.home import Home
from coordinator.storage.database import Connection
from coordinator.storage.heartbeats import Heartbeat, Role, read_heartbeats
from coordinator.storage.progress import Progress, progress
from coordinator.storage.steps import newest_finished_step
from coordinator.storage.submissions import QUEUED, count_waiting
from node.protocol.run import RunSpec

AWAY_SECONDS: Final = 30.0
"""A process that has written no heartbeat for so long has stopped: it writes one every 5 s."""

OLD_SECONDS: Final = 600.0
STEP_SECONDS: Final = 3600.0
LEAST_FREE_SHARE: Final = 0.1
LEAST_FREE_BYTES: Final = 1e10
"""A disk is nearly full below both: a tenth of a large one lasts for weeks, and a small one never has so much."""


class State(StrEnum):
    """How a run is, the worst last."""

    OVER = "over"
    WORKS = "works"
    SLOW = "slow"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Rule:
    """What can be wrong: how bad it is, the alert of the same meaning, and what mends it."""

    code: str
    state: State
    todo: str
    alert: str = ""


NO_TRAINER: Final = Rule(
    "no_trainer", State.STOPPED, "swarmproof trainer --data DATA --key KEY --state STATE", "SwarmproofNoTrainer"
)
TRAINER_WAITS: Final = Rule(
    "trainer_waits", State.STOPPED, "the trainer's log names the file; it goes on by itself once that is mended"
)
NO_VERIFIER: Final = Rule(
    "no_verifier", State.STOPPED, "swarmproof verifier --data DATA --state STATE", "SwarmproofNoVerifier"
)
VERIFIER_WAITS: Final = Rule(
    "verifier_waits", State.SLOW, "the verifier's log names the file or address; it goes on by itself once that serves"
)
NO_RELAY: Final = Rule("no_relay", State.STOPPED, "swarmproof coordinator ... --relay http://TRAINER:8710")
NO_LEADER: Final = Rule("no_leader", State.SLOW, "swarmproof coordinator --role leader", "SwarmproofNoLeader")
QUEUE_TOO_OLD: Final = Rule(
    "queue_too_old", State.SLOW, "start another verifier, with a --name and --state of its own",
    "SwarmproofQueueTooOld",
)  # fmt: skip
NO_STEP: Final = Rule("no_step", State.SLOW, "look at the trainer's log, and at the verdicts below", "SwarmproofNoStep")
DISK: Final = Rule("disk_nearly_full", State.SLOW, "give the run's --data more room", "SwarmproofDiskNearlyFull")
RULES: Final = (
    NO_TRAINER, TRAINER_WAITS, NO_VERIFIER, VERIFIER_WAITS, NO_RELAY, NO_LEADER, QUEUE_TOO_OLD, NO_STEP, DISK,
)  # fmt: skip
_TROUBLES: Final[Mapping[str, str]] = {
    "disk_full": "its disk is full",
    "read_only": "its disk is read-only",
    "no_access": "it may not use one of its files",
    "disk_fails": "its disk fails",
    "database_away": "it cannot use the database",
    "store_away": "it cannot reach the object store",
    "no_source": "none of its --source addresses serves policies",
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """A rule that is broken, in a sentence with its figures."""

    rule: Rule
    text: str


@dataclass(frozen=True, slots=True)
class HealthFigures:
    """What the rules look at, for people to see that it moves: ages in seconds, None where there was nothing yet."""

    last_step: float | None
    oldest_waiting: float | None
    free_share: float
    seen: Mapping[str, float]
    """How long ago the last sign of life of each role was."""

    def __str__(self) -> str:
        step = "No step yet" if self.last_step is None else f"Last step {_minutes(self.last_step)} ago"
        waiting = "nothing waits for a verdict"
        if self.oldest_waiting is not None:
            waiting = f"the oldest submission has waited {_minutes(self.oldest_waiting)}"
        return f"{step}, {waiting}, {self.free_share:.0%} of the disk free."


@dataclass(frozen=True, slots=True)
class Health:
    """The state of a run, with what is wrong, the worst first."""

    state: State
    problems: Sequence[Complaint]
    figures: HealthFigures

    @property
    def headline(self) -> str:
        """One sentence for a line."""
        if self.state is State.OVER:
            return "The run is over."
        return self.problems[0].text if self.problems else "Everything works."

    def as_json(self) -> dict[str, Any]:
        """Return the values of `/v1/status`."""
        return {
            "state": self.state.value,
            "problems": [{"code": one.rule.code, "text": one.text, "todo": one.rule.todo} for one in self.problems],
            "last_step_seconds": self.figures.last_step,
            "oldest_waiting_seconds": self.figures.oldest_waiting,
            "disk_free_share": self.figures.free_share,
            "seen_seconds": self.figures.seen,
        }


@dataclass(frozen=True, slots=True)
class Signs:
    """What health is judged by; times are in Unix seconds, None where there was nothing yet."""

    at: Progress
    heartbeats: Sequence[Heartbeat]
    waiting_since: float | None
    last_step_at: float | None
    has_sources: bool
    free_share: float
    free_bytes: int


def read_health(home: Home, *, has_sources: bool, now: float) -> Health:
    """Read how the run is at `now`; `has_sources` says whether workers are told of a relay to fetch from."""
    with home.database.read() as connection:
        signs = _signs(connection, home.folder, has_sources=has_sources)
    return judge_health(signs, spec=home.spec, now=now)


def _signs(connection: Connection, folder: Path, *, has_sources: bool) -> Signs:
    since = [at for at in (count_waiting(connection, state)[1] for state in QUEUED) if at is not None]
    usage = shutil.disk_usage(folder)
    last = newest_finished_step(connection)
    return Signs(
        at=progress(connection),
        heartbeats=read_heartbeats(connection),
        waiting_since=min(since, default=None),
        last_step_at=None if last is None else last.finished_at,
        has_sources=has_sources,
        free_share=usage.free / max(1, usage.total),
        free_bytes=usage.free,
    )


def judge_health(signs: Signs, *, spec: RunSpec, now: float) -> Health:
    """Return the health that follows from `signs`."""
    figures = HealthFigures(
        last_step=None if signs.last_step_at is None else now - signs.last_step_at,
        oldest_waiting=None if signs.waiting_since is None else now - signs.waiting_since,
        free_share=signs.free_share,
        seen={one.role.value: now - one.seen_at for one in reversed(signs.heartbeats)},
    )
    if signs.at.is_over(spec) and signs.waiting_since is None:
        return Health(State.OVER, (), figures)
    problems = sorted(_problems(signs, now=now), key=lambda one: list(State).index(one.rule.state), reverse=True)
    return Health(problems[0].rule.state if problems else State.WORKS, problems, figures)


def _problems(signs: Signs, *, now: float) -> Iterator[Complaint]:
    for role, rule in ((Role.TRAINER, NO_TRAINER), (Role.VERIFIER, NO_VERIFIER), (Role.LEADER, NO_LEADER)):
        seen = next((one.seen_at for one in signs.heartbeats if one.role is role), None)
        if seen is None:
            yield Complaint(rule, f"No {role.value} has been started.")
        elif now - seen > AWAY_SECONDS:
            yield Complaint(rule, f"The {role.value} stopped {_ago(now - seen)} ago.")
    for role, rule, one in ((Role.TRAINER, TRAINER_WAITS, "The"), (Role.VERIFIER, VERIFIER_WAITS, "A")):
        there = (each for each in signs.heartbeats if each.role is role and now - each.seen_at <= AWAY_SECONDS)
        if (trouble := next((each.trouble for each in there if each.trouble), None)) is not None:
            yield Complaint(rule, f"{one} {role.value} waits: {_TROUBLES.get(trouble, trouble)}.")
    if not signs.has_sources:
        yield Complaint(NO_RELAY, "There is no relay: workers cannot fetch policies.")
    if signs.waiting_since is not None and now - signs.waiting_since > OLD_SECONDS:
        yield Complaint(QUEUE_TOO_OLD, f"A submission has waited {_ago(now - signs.waiting_since)} for a verdict.")
    if signs.last_step_at is not None and now - signs.last_step_at > STEP_SECONDS:
        yield Complaint(NO_STEP, f"No training step has ended for {_ago(now - signs.last_step_at)}.")
    if signs.free_share < LEAST_FREE_SHARE and signs.free_bytes < LEAST_FREE_BYTES:
        free = f"{signs.free_bytes / 1e9:.1f} GB"
        yield Complaint(DISK, f"{free} of the disk of the run's data are free, {signs.free_share:.0%} of it.")


def _minutes(seconds: float) -> str:
    """Format an age for a line that is sent anew whenever it changes."""
    if seconds < 60:
        return "less than a minute"
    return f"{seconds // 60:.0f} min" if seconds < 7200 else _ago(seconds)


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
