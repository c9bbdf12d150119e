"""Deriving logged verdicts again from their evidence, as an auditor who trusts nobody.

Evidence is addressed by digest, so whoever serves it can only withhold it: that is `unavailable`, which is not
the same as a disagreement. Only what the run signed, or what follows from it, convicts.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, Self

import torch
from msgspec import Meta

from node.audit_log import LoggedVerdict, Problem
from node.audit_report import Checked, Result
from node.coordinator_client import CoordinatorClient
from node.environments import Environment, load_environment
from node.errors import BadReply, Refused
from node.exchange import measure_body
from node.parquet_reader import ParquetReader
from node.policy import Policy, PolicyError, load_policy
from node.protocol.admission import Figures, Outcome
from node.protocol.merkle import MAX_PROOF_HASHES, ProofInvalid, leaf_hash, verify_inclusion
from node.protocol.messages import MAX_CLAIM_BYTES, MAX_MESSAGE_BYTES, Checkpoint, LogEntry, PolicyEntry, VerdictEntry
from node.protocol.reasons import Refusal
from node.protocol.requests import open_claim
from node.protocol.run import Descriptor, LimitsSpec
from node.verification import Verdict, decide, read_claim
from shardcast import Client
from shardcast.errors import PeerFault, ShardcastError
from shardcast.wire import Digest, Wire, decode, digest, encode

BORDERLINE_FACTOR: Final = 1.25
"""Machines round differently: a figure may be over its limit on one and not on another within this factor."""

POLICIES_ON_DISK: Final = 2
POLICY_SECONDS: Final = 900.0
PATIENCE_SECONDS: Final = 30.0
MAX_REQUEST_BYTES: Final = MAX_CLAIM_BYTES + 512
_SUBMISSION_PATH: Final = re.compile(r"/v1/submissions/[0-9a-f]{64}")


class Hashes(Wire, frozen=True):
    """A Merkle proof as the coordinator sends it."""

    hashes: Annotated[tuple[Digest, ...], Meta(max_length=MAX_PROOF_HASHES)]


class Disagreement(Exception):
    """What the run signed does not bear out what its log says; `code` is the problem's."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Unobtainable(Exception):
    """Evidence or a policy that nobody serves, or that this machine cannot use."""


async def fetch_hashes(coordinator: CoordinatorClient, kind: str, query: Mapping[str, str]) -> list[bytes]:
    """The `inclusion` or `consistency` proof for `query`; raises CoordinatorFault."""
    body = await coordinator.fetch(
        f"/v1/log/{kind}", query=query, max_bytes=MAX_MESSAGE_BYTES, patience_seconds=PATIENCE_SECONDS
    )
    try:
        return [bytes.fromhex(value) for value in decode(Hashes, body, max_bytes=MAX_MESSAGE_BYTES).hashes]
    except PeerFault as error:
        raise BadReply(f"The coordinator sent something else than a proof: {error}.", code=error.code) from error


def is_borderline(ours: Figures | None, theirs: Figures | None, *, limits: LimitsSpec) -> bool:
    """Whether two measurements of one group (None: not measured) lead to different findings by rounding alone.

    The figures are walked in the order of section 7.2, up to the first that is over its limit in both. Up to
    there each that is over in only one must be within BORDERLINE_FACTOR of its limit in both.
    """
    if ours is None or theirs is None:
        return False
    found = False
    for figure in Figures.__struct_fields__:
        limit = getattr(limits, "rollout_margin_mean" if figure == "margin_mean" else figure)
        pair = (getattr(ours, figure), getattr(theirs, figure))
        over = [value > limit for value in pair]
        if all(over):
            return found
        if any(over):
            if not all(limit / BORDERLINE_FACTOR <= value <= limit * BORDERLINE_FACTOR for value in pair):
                return False
            found = True
    return found


def compare(entry: VerdictEntry, derived: Verdict, *, limits: LimitsSpec) -> tuple[Result, str]:
    """How a logged verdict compares with the derived one, and why."""
    if derived.outcome is Outcome.INDETERMINATE:
        return Result.UNAVAILABLE, f"This machine could not verify it: {derived.detail}"
    if (entry.outcome, entry.reason) != (derived.outcome, derived.reason):
        if is_borderline(derived.figures, entry.figures, limits=limits):
            return Result.INDETERMINATE, f"Derived {_said(derived)}, but so close to a limit that rounding decides."
        return Result.DISAGREE, f"Derived {_said(derived)}. {derived.detail}"
    if entry.tokens != derived.tokens:
        return Result.DISAGREE, f"It has {derived.tokens} tokens, the log says {entry.tokens}."
    if entry.rewards != derived.rewards:
        return Result.DISAGREE, "The rewards are others."
    return Result.AGREE, ""


def _said(verdict: Verdict) -> str:
    return verdict.outcome if verdict.reason is None else f"{verdict.outcome} as {verdict.reason}"


class EvidenceAuditor:
    """Fetches evidence and policies, and derives verdicts; use as an async context manager."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        *,
        descriptor: Descriptor,
        checkpoint: Checkpoint,
        entries: Sequence[LogEntry | None],
        sources: Sequence[str],
        folder: Path,
    ) -> None:
        if coordinator.run_key is None:
            raise RuntimeError("a verified descriptor leaves the run's key")
        self._coordinator = coordinator
        self._run_id, self._spec = descriptor.run_id, descriptor.spec
        self._checkpoint = checkpoint
        self._published = {entry.version: entry for entry in entries if isinstance(entry, PolicyEntry)}
        self._environments: list[Environment] = [load_environment(e) for e in descriptor.spec.environments]
        self._broadcast = Client(self._run_id, coordinator.run_key, sources, folder, keep=POLICIES_ON_DISK)
        self._reader = ParquetReader()
        self._policy: tuple[str, Policy | Unobtainable] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._broadcast.close()
        self._reader.close()

    async def check(self, verdict: LoggedVerdict) -> tuple[Checked, Problem | None]:
        """One verdict, derived again. Raises Unavailable when the coordinator is gone."""
        try:
            await self._check_inclusion(verdict)
            derived = await self._derive(verdict.entry)
        except Disagreement as error:
            checked = Checked(verdict, Result.DISAGREE, str(error))
            return checked, Problem(error.code, str(error), verdict.log_index)
        except (Unobtainable, Refused, BadReply) as error:
            return Checked(verdict, Result.UNAVAILABLE, str(error)), None
        result, detail = compare(verdict.entry, derived, limits=self._spec.limits)
        problem = Problem("verdict_differs", detail, verdict.log_index) if result is Result.DISAGREE else None
        return Checked(verdict, result, detail, derived), problem

    async def _check_inclusion(self, verdict: LoggedVerdict) -> None:
        size = self._checkpoint.size
        query = {"index": str(verdict.log_index), "size": str(size)}
        try:
            verify_inclusion(
                leaf_hash(encode(verdict.entry)),
                index=verdict.log_index,
                size=size,
                proof=await fetch_hashes(self._coordinator, "inclusion", query),
                root_hash=bytes.fromhex(self._checkpoint.root),
            )
        except ProofInvalid as error:
            raise Disagreement("inclusion_proof", f"{error}.") from error

    async def _derive(self, entry: VerdictEntry) -> Verdict:
        body_bytes = await self._check_request(entry)
        body = await self._blob(entry.body, max_bytes=self._spec.limits.max_submission_bytes)
        if len(body) != body_bytes:
            raise Disagreement("evidence_mismatch", f"The body has {len(body)} bytes, {body_bytes} were signed.")
        claim = await asyncio.to_thread(read_claim, body, reader=self._reader, slot=entry.slot, spec=self._spec)
        if isinstance(claim, Verdict):
            return claim
        return await asyncio.to_thread(
            decide,
            claim.rollouts,
            run_id=self._run_id,
            manifest_digest=entry.manifest_digest,
            slot=entry.slot,
            policy=await self._policy_of(entry),
            environments=self._environments,
            spec=self._spec,
        )

    async def _check_request(self, entry: VerdictEntry) -> int:
        """The size of the body that the node signed for, if it did sign for this submission."""
        if entry.request != entry.submission:
            raise Disagreement("evidence_mismatch", "The submission's id is not its request's digest.")
        try:
            signer, claim = open_claim(await self._blob(entry.request, max_bytes=MAX_REQUEST_BYTES))
        except Refusal as refusal:
            raise Disagreement("evidence_signature", refusal.detail) from refusal
        if signer.hex() != entry.node:
            raise Disagreement("evidence_signature", f"The request is signed by {signer.hex()[:16]}…, not by the node.")
        if claim.run_id != self._run_id or claim.method != "PUT" or not _SUBMISSION_PATH.fullmatch(claim.path):
            raise Disagreement("evidence_mismatch", "The request is not a submission to this run.")
        if claim.body_digest != entry.body:
            raise Disagreement("evidence_mismatch", "The node signed for another body.")
        return claim.body_bytes

    async def _blob(self, name: str, *, max_bytes: int) -> bytes:
        try:
            data = await self._coordinator.fetch(
                f"/v1/blobs/{name}", max_bytes=max_bytes, patience_seconds=PATIENCE_SECONDS
            )
        except (Refused, BadReply) as error:
            raise Unobtainable(f"Blob {name[:16]}… is not served: {error}") from error
        if digest(data) != name:
            raise Unobtainable(f"Blob {name[:16]}… is not what is served under its name.")
        return data

    async def _policy_of(self, entry: VerdictEntry) -> Policy:
        """The policy that the entry names; only the last one is held, because verdicts come in policy order."""
        if self._policy is None or self._policy[0] != entry.manifest_digest:
            try:
                self._policy = entry.manifest_digest, await self._load_policy(entry)
            except Unobtainable as error:
                self._policy = entry.manifest_digest, error
        if isinstance(self._policy[1], Unobtainable):
            raise self._policy[1]
        return self._policy[1]

    async def _load_policy(self, entry: VerdictEntry) -> Policy:
        try:
            path = await self._broadcast.fetch_archived(
                entry.version, manifest_digest=entry.manifest_digest, timeout_s=POLICY_SECONDS
            )
            result_digest, _ = await asyncio.to_thread(measure_body, path)
            published = self._published.get(entry.version)
            if published is not None and published.result_digest != result_digest:
                raise Disagreement("policy_differs", f"Policy {entry.version} is not the file that the log names.")
            return await asyncio.to_thread(load_policy, path, dtype=getattr(torch, self._spec.model.dtype))
        except (ShardcastError, PolicyError) as error:
            raise Unobtainable(f"Policy {entry.version}: {error}") from error
