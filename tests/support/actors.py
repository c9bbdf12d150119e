"""Workers, a verifier and a trainer of a run without any process, for tests of its state."""

from __future__ import annotations

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import UNSET
from msgspec.structs import replace
from sqlalchemy import insert, update

from coordinator.run.home import Home
from coordinator.storage import log, training, verdicts, work
from coordinator.storage.progress import progress
from coordinator.storage.schema import nodes, submissions
from coordinator.storage.work import StoredSubmission
from node.audit.log import LogReading, read_log
from node.protocol.admission import Figures, Outcome, Verdict
from node.protocol.evidence import Totals
from node.protocol.messages import LeaseRequest, LogEntry
from node.protocol.reasons import Reason
from node.protocol.run import EnvironmentSpec, RunSpec, StandingSpec
from shardcast.wire import decode, digest

PATIENT = StandingSpec(ban_after=1000)
ZERO = Figures(**dict.fromkeys(Figures.__struct_fields__, 0.0))
PUBLIC_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key().public_bytes_raw()


def spec_of(
    *, groups_per_step: int = 3, max_async: int = 2, steps: int = 12, standing: StandingSpec = PATIENT
) -> RunSpec:
    spec = RunSpec(name="test", environments=(EnvironmentSpec(name="arithmetic"),))
    return msgspec.structs.replace(
        spec,
        batch=msgspec.structs.replace(
            spec.batch,
            groups_per_step=groups_per_step,
            max_async=max_async,
            lease_seconds=50.0,
            max_leases_per_node=3,
            rejection_backoff_seconds=4.0,
            rejection_backoff_max_seconds=10.0,
        ),
        standing=standing,
        training=msgspec.structs.replace(spec.training, steps=steps),
    )


def who(name: str) -> str:
    """A node's id for a short name."""
    return digest(name.encode())


class Actors:
    """Workers, verifier and trainer of a run, with the clock in the test's hand."""

    def __init__(self, home: Home) -> None:
        self.home, self.now, self.files = home, 1000.0, 0

    def register(self, *names: str, admitted: int = 100) -> None:
        """Nodes whose work was admitted before; with 0, new ones."""
        with self.home.database.write() as connection:
            for name in names:
                values = {"node": who(name), "software": "", "engine": "", "registered_at": 0.0, "seen_at": 0.0}
                connection.execute(insert(nodes).values(**values, admitted=admitted, verified=admitted))

    def publish(self, version: int) -> None:
        policy = training.PolicyRecord(
            version=version, manifest_digest=f"{version:064x}", result_digest="0" * 64, manifest=b""
        )
        with self.home.database.write() as connection:
            training.record_policy(connection, policy, now=self.now)
            training.finish_step(connection, version - 1, stats={}, now=self.now)

    def lease(
        self,
        node: str,
        *,
        held: tuple[int, ...],
        count: int = 1,
        address: str = "",
        most: int = 0,
        lacks: tuple[int, ...] = (),
    ) -> list[work.Lease]:
        with self.home.database.write() as connection:
            request = LeaseRequest(held_versions=held, slots=count, instance="0" * 32, lacks=lacks or UNSET)
            quota, spec = work.AddressQuota(address, most), self.home.spec
            reply = work.lease(connection, node=who(node), request=request, spec=spec, now=self.now, quota=quota)
            return list(reply.leases)

    def give_back(self, node: str, lease: work.Lease) -> None:
        with self.home.database.write() as connection:
            name = lease.lease_id
            work.return_lease(connection, node=who(node), lease_id=name, spec=self.home.spec, now=self.now)

    def submit(self, node: str, lease_id: str, *, draw: float | None = None) -> str:
        """A file of its own; `draw` is in place of chance."""
        self.files += 1
        envelope = str(self.files).encode()
        arrival = StoredSubmission(envelope, body=digest(envelope), body_bytes=1)
        with self.home.database.write() as connection:
            spec, now = self.home.spec, self.now
            name = work.submit(connection, arrival, node=who(node), lease_id=lease_id, spec=spec, now=now)
            if draw is not None:
                connection.execute(update(submissions).where(submissions.c.submission == name).values(draw=draw))
        return name

    def claim(self, verifier: str = "v", seconds: float = 30.0) -> verdicts.QueueItem | None:
        with self.home.database.write() as connection:
            taken = verdicts.claim(connection, verifier=verifier, spec=self.home.spec, now=self.now, seconds=seconds)
        return taken[0] if taken else None

    def decide(self, claimed: verdicts.QueueItem, outcome: Outcome, *, best: float = 0.5) -> bool:
        """A verdict; admitted is what the claim asks for: all rows, or the first as the only one that was measured.

        Rewards are 0.5, and `best` for one of the rows.
        """
        reason = {Outcome.REJECTED: Reason.WRONG_SEED, Outcome.INDETERMINATE: Reason.VERIFIER_FAILED}.get(outcome)
        verdict = Verdict(outcome=outcome, reason=reason, tokens=5)
        if outcome is Outcome.ADMITTED:
            spot = None if claimed.full else 0
            rewards = (best, *[0.5] * (self.home.spec.sampling.group_size - 1))
            measured = {"figures": ZERO, "totals": Totals(), "rewards": rewards}
            verdict = replace(verdict, **measured, spot=spot)
        with self.home.database.write() as connection:
            return verdicts.record(connection, claimed, verdict, spec=self.home.spec, now=self.now, group=claimed.body)

    def assign(self, *, trained: int = -1) -> int | None:
        with self.home.database.write() as connection:
            return training.assign_batch(connection, spec=self.home.spec, now=self.now, trained=trained)

    def work(self, node: str, outcome: Outcome = Outcome.ADMITTED, *, draw: float = 0.0) -> str:
        """One slot of the newest policy, from lease to verdict; `draw` is in place of chance (0: measured in full)."""
        with self.home.database.read() as connection:
            head = progress(connection).head
        for _ in range(1000):
            if leases := self.lease(node, held=(head,)):
                break
            self.now += 1
        name = self.submit(node, leases[0].lease_id, draw=draw)
        claimed = self.claim()
        assert claimed is not None
        assert claimed.submission == name
        assert self.decide(claimed, outcome)
        return name

    def reading(self) -> LogReading:
        """What an auditor makes of the log."""
        return read_log(self.entries(), run_id=self.home.run_id, spec=self.home.spec)

    def entries(self) -> list[LogEntry]:
        with self.home.database.read() as connection:
            leaves = log.leaves(connection, 0, log.size(connection))
        return [decode(LogEntry, leaf, max_bytes=2**20) for leaf in leaves]  # type: ignore[arg-type]
