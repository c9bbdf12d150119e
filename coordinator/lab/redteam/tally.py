"""What became of every attack: the attackers' journals, held against the coordinator's log."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from pathlib import Path

import msgspec

from coordinator.lab.processes.journal import ACCEPTED, HANDED_BACK, HELD, STORED, JournalEntry, read_journal
from coordinator.lab.processes.ledger import Ledger
from coordinator.lab.processes.summary import AuditRow
from coordinator.lab.redteam.attack import Attack
from coordinator.metrics.reward import END_STEPS
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason

SCHEMA = "swarmproof-redteam/1"
UNDECIDED = "undecided"
"""What a submission came to that has no verdict when the run ends."""
DONE_BY_OTHERS, LEFT_OVER, GAP = "done_by_others", "left_over", "gap"
"""What became of a slot that was handed back or held: somebody else did it, nobody until the run ended, or training
went on without it."""
_ANYBODYS: frozenset[str] = frozenset(
    (
        UNDECIDED,
        Reason.BANNED,
        Reason.DUPLICATE_SUBMISSION,
        Reason.EXPIRED_LEASE,
        Reason.STALE_POLICY,
        Reason.TOO_MANY_REQUESTS,
    )
)
"""What stops anybody who is slow, was caught before, or does what another attacker has done; whatever the attack."""


class AttackRow(msgspec.Struct, frozen=True):
    """One attack. `tries` are hostile slots or requests, `slots` those of them that got as far as a verdict.

    `succeeded` counts tries that got what they must not get, `admitted` those of them that are slots; `stopped` what
    stopped the others, by code.
    `unexpected` are codes of `stopped` that the attack does not name as what stops it. `honest` are slots that the
    attacker did honestly, for cover or because cheating would have changed nothing.
    """

    attack: str
    about: str
    stands_for: str
    tries: int
    slots: int
    admitted: int
    succeeded: int
    stopped: dict[str, int]
    unexpected: tuple[str, ...]
    honest: int


class AttackResult(msgspec.Struct, frozen=True):
    """A red team's run. Slots are submissions with a verdict; `honest_*` those of the released workers.

    `hostile_share` is of all slots, `hostile_admitted` counts hostile slots that were admitted or trained on, and
    `succeeded` those and requests that got what they must not get. `rewards` are the mean rewards of the steps.
    """

    schema: str
    run_id: str
    seconds: float
    steps: int
    slots: int
    hostile_slots: int
    hostile_share: float
    hostile_admitted: int
    succeeded: int
    honest_slots: int
    honest_rejected: int
    honest_by_attackers: int
    identities: int
    rewards: tuple[float, ...]
    attacks: tuple[AttackRow, ...]
    audit: AuditRow | None
    restarts: dict[str, int]

    def reward(self, *, steps: int = END_STEPS) -> float | None:
        """Return the mean reward of the last `steps` steps; None before the first."""
        return statistics.fmean(self.rewards[-steps:]) if self.rewards else None

    @property
    def is_sound(self) -> bool:
        """Whether nothing hostile got through, and the audit found no lie and no accident."""
        return self.succeeded == 0 and (self.audit is None or self.audit.exit_code == 0)


def attack_rows(
    attacks: Iterable[type[Attack]],
    entries: Sequence[JournalEntry],
    ledger: Ledger,
    *,
    elsewhere: Sequence[AttackRow] = (),
) -> tuple[AttackRow, ...]:
    """Return a row for each attack, and those in `elsewhere`, which are counted otherwise."""
    by_attack: dict[str, list[JournalEntry]] = {}
    for entry in entries:
        by_attack.setdefault(entry.attack, []).append(entry)
    admitted = {f"{v.version}/{v.slot}" for v in ledger.verdicts.values() if v.outcome is Outcome.ADMITTED}
    rows = (_row(attack, by_attack.get(attack.name, []), ledger, admitted=admitted) for attack in attacks)
    return (*rows, *elsewhere)


def _row(
    attack: type[Attack], entries: Sequence[JournalEntry], ledger: Ledger, *, admitted: Container[str | None]
) -> AttackRow:
    came_to: Counter[str] = Counter()
    slots = through = 0
    for entry in entries:
        if entry.hostile:
            code = outcome(entry, ledger, admitted=admitted)
            came_to[code] += entry.count
            slots += entry.submission in ledger.verdicts
            through += entry.code == STORED and code == ACCEPTED
    succeeded = came_to.pop(ACCEPTED, 0)
    return AttackRow(
        attack=attack.name,
        about=attack.about,
        stands_for=attack.stands_for,
        tries=succeeded + came_to.total(),
        slots=slots,
        admitted=through,
        succeeded=succeeded,
        stopped=dict(came_to.most_common()),
        unexpected=tuple(sorted(set(came_to) - attack.stopped_by - _ANYBODYS)),
        honest=sum(not entry.hostile and entry.code == STORED for entry in entries),
    )


def outcome(entry: JournalEntry, ledger: Ledger, *, admitted: Container[str | None]) -> str:
    """Return ACCEPTED, or the code of what stopped it; `admitted` are slots as version/number."""
    if entry.code in (HANDED_BACK, HELD):
        return GAP if entry.slot in ledger.gaps else DONE_BY_OTHERS if entry.slot in admitted else LEFT_OVER
    if entry.code != STORED:
        return entry.code
    verdict = ledger.verdicts.get(entry.submission or "")
    if verdict is None:
        return UNDECIDED
    # What training has used is not undone by a second verdict.
    if verdict.outcome is Outcome.ADMITTED or entry.submission in ledger.used:
        return ACCEPTED
    return str(verdict.reason)


def read_journals(folders: Iterable[Path]) -> list[JournalEntry]:
    """Read all entries of the attackers' journals, in order of time."""
    return sorted((entry for folder in folders for entry in read_journal(folder)), key=lambda entry: entry.at)
