"""Check that every slot was trained on, set aside, or logged as a gap; count what each node withheld (section 7.7).

A coordinator can still keep silent about the last slots of a policy: nobody else knows how many it leased.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from node.audit.batches import LoggedGroup
from node.protocol.messages import MOST_MISSED, MOST_MISSED_OF_SLOT, BatchEntry, VerdictEntry
from node.protocol.run import RunSpec
from node.protocol.slots import slot_problem
from node.protocol.withholding import Deliveries, Unevenness, corrected

Slot = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WithheldRow:
    """Slots that one node delivered and did not, of those that training used or missed.

    The probabilities are of missing so much or more of one kind by chance, for any of the nodes that are compared: of
    the environment of that name, and of groups `with signal` or `without signal`.
    """

    node: str
    delivered: int
    missed: int
    environment: str
    environment_probability: float
    signal: str
    signal_probability: float


@dataclass(slots=True)
class Withholding:
    """What nodes had and did not deliver: gaps in all, and each node's slots by environment and by signal."""

    environments: tuple[str, ...] = ()
    gaps: int = 0
    by_environment: dict[str, Deliveries] = field(default_factory=lambda: defaultdict(Deliveries))
    by_signal: dict[str, Deliveries] = field(default_factory=lambda: defaultdict(Deliveries))

    def rows(self) -> list[WithheldRow]:
        """Return every node that missed a slot, the least likely to be chance first."""
        nodes = [node for node, of_node in self.by_environment.items() if of_node.missed]
        by_environment = {(node, "environment"): self.by_environment[node].unevenness() for node in nodes}
        by_signal = {(node, "signal"): self.by_signal.get(node, Deliveries()).unevenness() for node in nodes}
        found = corrected(by_environment | by_signal)
        rows = [self._row(node, environment=found[node, "environment"], signal=found[node, "signal"]) for node in nodes]
        return sorted(rows, key=lambda row: min(row.environment_probability, row.signal_probability))

    def _row(self, node: str, *, environment: Unevenness, signal: Unevenness) -> WithheldRow:
        of_node = self.by_environment[node]
        return WithheldRow(
            node=node,
            delivered=of_node.delivered.total(),
            missed=of_node.missed.total(),
            environment="" if environment.kind is None else self.environments[environment.kind],
            environment_probability=environment.probability,
            signal="" if signal.kind is None else "with signal" if signal.kind else "without signal",
            signal_probability=signal.probability,
        )


class GapChecker:
    """Follows slots from their admission to the batch that uses them, or names them as missing."""

    def __init__(self, *, run_id: str, spec: RunSpec) -> None:
        self.withholding = Withholding(tuple(one.name for one in spec.environments))
        self._run_id = run_id
        self._spec = spec
        self._done: dict[int, dict[int, bool]] = defaultdict(dict)  # whether it is taken, too, by version and slot
        self._closed = -1  # the newest policy whose last chance has come

    def admit(self, entry: VerdictEntry) -> tuple[str, str] | None:
        """Record an admission; return (code, detail) of what is wrong with it, None if nothing is."""
        where = f"Slot {entry.version}/{entry.slot}"
        if entry.version <= self._closed:
            return "late_admission", f"{where} was admitted after the last chance of its policy, or logged as missing."
        if self._done[entry.version].get(entry.slot):
            return "duplicate_admission", f"{where} was admitted before."
        self._done[entry.version][entry.slot] = True
        return None

    def revoke(self, entry: VerdictEntry, *, is_open: bool) -> None:
        """Record that an unused group was taken back, and whether its slot is open again or was set aside."""
        done = self._done.get(entry.version, {})
        if is_open:
            done.pop(entry.slot, None)
        elif entry.slot in done:
            done[entry.slot] = False

    def check(
        self, entry: BatchEntry, groups: Iterable[LoggedGroup], manifests: dict[int, str]
    ) -> Iterator[tuple[str, str]]:
        """Yield (code, detail) of everything that is wrong with the gaps of a batch that uses `groups`."""
        last_chance = entry.step - self._spec.batch.max_async
        for gap in entry.gaps:
            if not self._closed < gap.version <= last_chance or gap.slot in self._done[gap.version]:
                yield "unfounded_gap", f"Slot {gap.version}/{gap.slot} is not missing, or not yet."
            else:
                self._done[gap.version][gap.slot] = True
        used = {(one.version, one.slot): one for one in groups}
        missing = {(gap.version, gap.slot) for gap in entry.gaps}
        for miss in entry.missed:
            if (miss.version, miss.slot) not in used.keys() | missing:
                yield "unfounded_gap", f"Slot {miss.version}/{miss.slot} has no part in step {entry.step}."
        if self._names_too_many(entry):
            yield "unfounded_gap", f"Step {entry.step} names more nodes that missed a slot than an entry may."
        else:
            self._count(entry, used, manifests)
        for version in sorted(version for version in self._done if version <= last_chance):
            yield from self._unexplained(version, self._done.pop(version))
        self._closed = max(self._closed, last_chance)

    @staticmethod
    def _names_too_many(entry: BatchEntry) -> bool:
        of_slots = Counter((miss.version, miss.slot) for miss in entry.missed)
        return of_slots.total() > MOST_MISSED or max(of_slots.values(), default=0) > MOST_MISSED_OF_SLOT

    def _unexplained(self, version: int, known: Collection[int]) -> Iterator[tuple[str, str]]:
        # Counted, not listed: a hostile log may name slot 2^53.
        absent = max(known, default=-1) + 1 - len(known)
        if absent:
            first = next(slot for slot in range(len(known) + 1) if slot not in known)
            detail = (
                f"{absent} slots of policy {version} from {first} on were neither trained on nor logged as missing."
            )
            yield "unexplained_gap", detail

    def _count(self, entry: BatchEntry, used: dict[Slot, LoggedGroup], manifests: dict[int, str]) -> None:
        counted = self.withholding
        counted.gaps += len(entry.gaps)
        for slot, group in used.items():
            if group.version not in manifests:
                continue
            counted.by_environment[group.node].delivered[self._environment(slot, manifests)] += 1
            counted.by_signal[group.node].delivered[group.has_signal] += 1
        for miss in entry.missed:
            slot = (miss.version, miss.slot)
            if miss.version not in manifests:
                continue
            counted.by_environment[miss.node].missed[self._environment(slot, manifests)] += 1
            if (got := used.get(slot)) is not None:
                counted.by_signal[miss.node].missed[got.has_signal] += 1

    def _environment(self, slot: Slot, manifests: dict[int, str]) -> int:
        version, number = slot
        drawn = slot_problem(self._spec, run_id=self._run_id, manifest_digest=manifests[version], slot=number)
        return drawn.environment
