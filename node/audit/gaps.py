"""Check that every slot was trained on, set aside, or logged as a gap; count what each node withheld (section 7.7).

A coordinator can still keep silent about the last slots of a policy: nobody else knows how many it leased.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from node.protocol.admission import has_signal
from node.protocol.messages import BatchEntry, VerdictEntry
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
        self._done: dict[int, set[int]] = defaultdict(set)
        self._groups: dict[str, VerdictEntry] = {}
        self._gaps: set[Slot] = set()
        self._settled: dict[int, int] = {}

    def admit(self, entry: VerdictEntry) -> str | None:
        """Record an admission; return what is wrong with it, None if nothing is."""
        self._done[entry.version].add(entry.slot)
        if not self._spec.batch.only_signal or has_signal(entry.rewards or ()):  # others are never used
            self._groups[entry.submission] = entry
        if (entry.version, entry.slot) in self._gaps:
            return f"Slot {entry.version}/{entry.slot} was logged as missing before."
        return None

    def revoke(self, entry: VerdictEntry) -> None:
        """Record that an unused group is not trained on after all, so that its slot is open again."""
        if self._groups.pop(entry.submission, None) is not None:
            self._done[entry.version].discard(entry.slot)

    def check(self, entry: BatchEntry, manifests: dict[int, str]) -> Iterator[tuple[str, str]]:
        """Yield (code, detail) of everything that is wrong with the gaps of a batch."""
        last_chance = entry.step - self._spec.batch.max_async
        for gap in entry.gaps:
            settled = gap.slot < self._settled.get(gap.version, 0)
            if settled or gap.slot in self._done[gap.version] or gap.version > last_chance:
                yield "unfounded_gap", f"Slot {gap.version}/{gap.slot} is not missing, or not yet."
            self._gaps.add((gap.version, gap.slot))
            self._done[gap.version].add(gap.slot)
        used = {(one.version, one.slot): one for name in entry.submissions if (one := self._groups.pop(name, None))}
        missing = {(gap.version, gap.slot) for gap in entry.gaps}
        for miss in entry.missed:
            if (miss.version, miss.slot) not in used.keys() | missing:
                yield "unfounded_gap", f"Slot {miss.version}/{miss.slot} has no part in step {entry.step}."
        self._count(entry, used, manifests)
        for version in [version for version in self._done if version <= last_chance]:
            yield from self._unexplained(version, self._done.pop(version))

    def _unexplained(self, version: int, known: set[int]) -> Iterator[tuple[str, str]]:
        begin = self._settled.get(version, 0)
        known = {slot for slot in known if slot >= begin}
        # Counted, not listed: a hostile log may name slot 2^53.
        end = max(known, default=begin - 1) + 1
        absent = end - begin - len(known)
        self._settled[version] = end
        if absent:
            first = next(slot for slot in range(begin, begin + len(known) + 1) if slot not in known)
            detail = (
                f"{absent} slots of policy {version} from {first} on were neither trained on nor logged as missing."
            )
            yield "unexplained_gap", detail

    def _count(self, entry: BatchEntry, used: dict[Slot, VerdictEntry], manifests: dict[int, str]) -> None:
        counted = self.withholding
        counted.gaps += len(entry.gaps)
        for slot, verdict in used.items():
            if verdict.version not in manifests:
                continue
            counted.by_environment[verdict.node].delivered[self._environment(slot, manifests)] += 1
            counted.by_signal[verdict.node].delivered[has_signal(verdict.rewards or ())] += 1
        for miss in entry.missed:
            slot = (miss.version, miss.slot)
            if miss.version not in manifests:
                continue
            counted.by_environment[miss.node].missed[self._environment(slot, manifests)] += 1
            if (got := used.get(slot)) is not None:
                counted.by_signal[miss.node].missed[has_signal(got.rewards or ())] += 1

    def _environment(self, slot: Slot, manifests: dict[int, str]) -> int:
        version, number = slot
        drawn = slot_problem(self._spec, run_id=self._run_id, manifest_digest=manifests[version], slot=number)
        return drawn.environment
