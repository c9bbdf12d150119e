"""Whether witnesses have signed the log that an auditor is shown (docs/protocol.md, section 8.4).

The auditor takes a checkpoint first, and then waits until enough witnesses have signed one at least as large that
extends it. A coordinator that shows this log to one auditor alone cannot bring their signatures. Where a witness's
address is known, it is asked itself: what it signed of another history is proof against the operator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from node.audit.problems import AuditProblem
from node.client.api import CoordinatorClient
from node.client.http import printable
from node.client.witness import WitnessAddress, WitnessClient
from node.errors import ConfigError, NodeError, Refused
from node.protocol.checkpoints import Checkpoint, WitnessedCheckpoint, log_key, open_witnessed, origin_of
from node.protocol.endpoints import LOG_CONSISTENCY, LOG_WITNESSED
from node.protocol.merkle import ProofInvalid, verify_consistency
from node.protocol.notes import VerifierKey
from shardcast.errors import PeerFault

PATIENCE_SECONDS: Final = 30.0
"""Checkpoints are offered to witnesses every few seconds."""
POLL_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True)
class WitnessRule:
    """Of which witnesses how many have to sign, within `patience_seconds`; raises ConfigError for too many."""

    witnesses: tuple[WitnessAddress, ...]
    quorum: int
    patience_seconds: float = PATIENCE_SECONDS

    def __post_init__(self) -> None:
        if not 1 <= self.quorum <= len(self.witnesses):
            raise ConfigError(f"--quorum {self.quorum} of {len(self.witnesses)} witnesses cannot be had.")


@dataclass(slots=True)
class Witnesses:
    """What witnesses have signed of a log: for each the largest size and the time; `lacking` says why others did not.

    `covered` are those whose size is at least that of the audited checkpoint.
    """

    rule: WitnessRule
    signed: dict[VerifierKey, tuple[int, int]] = field(default_factory=dict)
    covered: set[VerifierKey] = field(default_factory=set)
    lacking: dict[VerifierKey, str] = field(default_factory=dict)

    @property
    def has_quorum(self) -> bool:
        return len(self.covered) >= self.rule.quorum

    @property
    def missing(self) -> list[str]:
        """The names of witnesses that have not signed the audited checkpoint or a later one."""
        return [one.key.name for one in self.rule.witnesses if one.key not in self.covered]


class _Contradicted(Exception):
    """The run signed two histories: `note` is the one that the auditor was not shown."""

    def __init__(self, detail: str, note: bytes) -> None:
        super().__init__(detail)
        self.note = note


class WitnessGathering:
    """Gathers signatures of witnesses for one checkpoint of the run that `coordinator` serves."""

    def __init__(self, coordinator: CoordinatorClient, rule: WitnessRule, checkpoint: Checkpoint) -> None:
        if coordinator.run_key is None:
            raise RuntimeError("a verified descriptor leaves the run's key")
        self._coordinator, self._checkpoint = coordinator, checkpoint
        self._log = log_key(coordinator.run_id, coordinator.run_key)
        self._consistent = {(checkpoint.size, checkpoint.root)}
        self.found = Witnesses(rule)

    async def run(self, keep_evidence: Callable[[bytes], Path]) -> AuditProblem | None:
        """Gather until there is a quorum or patience ends; return the problem if another history was signed.

        `keep_evidence` stores a contradicting note beside that of the checkpoint.
        """
        deadline = time.monotonic() + self.found.rule.patience_seconds
        try:
            while True:
                async for data in self._notes():
                    await self._take(data)
                if self.found.has_quorum or time.monotonic() >= deadline:
                    return None
                await asyncio.sleep(POLL_SECONDS)
        except _Contradicted as error:
            folder = keep_evidence(error.note)
            return AuditProblem("log_forked", f"{error}; both signed checkpoints are in {folder}.")

    async def _notes(self) -> AsyncIterator[bytes]:
        """Yield what the coordinator shows, and what each witness with an address does, as they come."""
        try:
            yield await self._coordinator.fetch(LOG_WITNESSED, patience_seconds=POLL_SECONDS)
        except NodeError as error:
            self._lacks([one.key for one in self.found.rule.witnesses], str(error))
        for one in self.found.rule.witnesses:
            if one.url is None:
                continue
            try:
                async with WitnessClient(one.url) as client:
                    data = await client.newest(origin_of(self._coordinator.run_id))
            except NodeError as error:
                self._lacks([one.key], str(error))
                continue
            if data is not None:
                yield data

    def _lacks(self, keys: list[VerifierKey], why: str) -> None:
        self.found.lacking |= {key: printable(why) for key in keys}

    async def _take(self, data: bytes) -> None:
        keys = [one.key for one in self.found.rule.witnesses]
        try:
            opened = open_witnessed(data, log=self._log, witnesses=keys)
        except PeerFault as error:
            self._lacks(keys, f"what was shown is no checkpoint of this run: {error}")
            return
        if opened.witnesses:
            await self._check_consistent(opened)
        size = opened.checkpoint.size
        for key, at in opened.witnesses.items():
            self.found.signed[key] = max(self.found.signed.get(key, (-1, 0)), (size, at))
            if size >= self._checkpoint.size:
                self.found.covered.add(key)

    async def _check_consistent(self, opened: WitnessedCheckpoint) -> None:
        """Raise _Contradicted unless one of both checkpoints extends the other."""
        other = opened.checkpoint
        if (other.size, other.root) in self._consistent:
            return
        first, second = sorted((self._checkpoint, other), key=lambda one: one.size)
        query, proof = {"first": str(first.size), "second": str(second.size)}, list[bytes]()
        try:
            if first.size not in (0, second.size):
                proof = await self._coordinator.log_proof(LOG_CONSISTENCY, query, patience_seconds=PATIENCE_SECONDS)
            verify_consistency(
                first=first.size, first_root=first.root, second=second.size, second_root=second.root, proof=proof
            )
        except (ProofInvalid, Refused) as error:
            if isinstance(error, Refused) and error.code != "not_found":
                raise
            names = ", ".join(key.name for key in opened.witnesses)
            raise _Contradicted(
                f"{names} signed {other.size} entries of another history than the {self._checkpoint.size} shown here: "
                f"{printable(str(error))}",
                opened.note.encode(),
            ) from error
        self._consistent.add((other.size, other.root))
