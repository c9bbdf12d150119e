"""Re-derivation of logged verdicts from their evidence.

Evidence is content-addressed, so its server can only withhold it: `unavailable`, which is no disagreement, or `expired`
where it says so a day or more after the verdict. Only what the run signed, or what follows from it, is a problem.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from msgspec import UNSET

from node.audit.compare import compare
from node.audit.log import LoggedVerdict, LogIndex
from node.audit.problems import AuditProblem
from node.audit.report import AuditResult, Checked
from node.client.api import CoordinatorClient
from node.client.http import measure_body
from node.environments import load_environments
from node.errors import BadReply, Refused
from node.policy.errors import PolicyError
from node.policy.file import Blueprint
from node.policy.reading import OpenPolicy
from node.protocol.admission import GAIN, Outcome, Verdict
from node.protocol.checkpoints import Checkpoint
from node.protocol.endpoints import BLOB, LOG_INCLUSION, MAX_REQUEST_ENVELOPE_BYTES, MIN_KEPT_SECONDS, SUBMIT
from node.protocol.merkle import ProofInvalid, leaf_hash, verify_inclusion
from node.protocol.messages import PolicyEntry, RequestClaim, VerdictEntry, candidate_of, slot_name
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import open_claim
from node.protocol.run import Descriptor, RunSpec
from node.verification.judge import JudgedClaim
from node.verification.measure import PolicyUnavailable
from node.verification.plan import Rules, always, measure_all, never
from node.verification.prefill import Prefill, Prefills
from node.verification.readings import MakePrefills, make_prefills
from node.verification.shelf import PolicyShelf
from node.verification.verify import verify
from shardcast import Client
from shardcast.errors import ShardcastError
from shardcast.fetch.raw_http import MayConnect
from shardcast.wire import digest, encode

POLICIES_ON_DISK: Final = 2
"""Verdicts come in policy order; a completion may continue under the next policy."""

POLICIES_KNOWN: Final = 1024
POLICY_SECONDS: Final = 900.0
PATIENCE_SECONDS: Final = 30.0
_SUBMISSION_PATH: Final = re.compile(SUBMIT.at(lease_id="[0-9a-f]{64}") + "(?:/([0-9a-f]{64}))?")
"""The optional last part is the SHA-256 of a body in the run's object store."""


class Disagreement(Exception):
    """The log contradicts what the run signed; `code` is the problem's."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Unobtainable(Exception):
    """Evidence or a policy that is not served, or that this machine cannot use."""


class Expired(Exception):
    """Evidence that the operator removed, as it may after some days."""


class EvidenceAuditor:
    """Fetches evidence and policies, and derives verdicts; use as an async context manager."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        *,
        descriptor: Descriptor,
        checkpoint: Checkpoint,
        log: LogIndex,
        datasets: Mapping[str, Path],
        sources: Sequence[str],
        may_connect: MayConnect,
        folder: Path,
        prefills: MakePrefills,
        policy_memory: int,
    ) -> None:
        if coordinator.run_key is None:
            raise RuntimeError("a verified descriptor leaves the run's key")
        self._coordinator = coordinator
        self._run_id, self._spec = descriptor.run_id, descriptor.spec
        self._checkpoint = checkpoint
        # Its times never fall: an operator may date back what it admitted today, to withhold it at once.
        self._log = log
        environments = load_environments(descriptor.spec, datasets)
        self._rules = Rules(self._run_id, self._spec, environments, need_answers=False)
        keep = self._spec.sampling.max_version_lead + POLICIES_ON_DISK
        broadcast = Client(self._run_id, coordinator.run_key, sources, folder, keep=keep, may_connect=may_connect)
        self._archive = _Archive(broadcast, make_prefills(self._spec, prefills), spec=self._spec, memory=policy_memory)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._archive.close()

    async def check(self, verdict: LoggedVerdict) -> tuple[Checked, AuditProblem | None]:
        """Derive one verdict again and compare.

        Raises Unavailable when the coordinator is unreachable, and EngineFailed where no engine here holds the policy.
        """
        try:
            await self._check_inclusion(verdict)
            derived = await self._derive(verdict)
        except Disagreement as error:
            checked = Checked(verdict, AuditResult.DISAGREE, str(error))
            return checked, AuditProblem(error.code, str(error), verdict.log_index)
        except Expired as error:
            age = time.time() - self._log.latest[verdict.log_index]
            if age < MIN_KEPT_SECONDS:
                detail = f"{error} That is less than the day for which files are served at least."
                return Checked(verdict, AuditResult.UNAVAILABLE, detail), None
            return Checked(verdict, AuditResult.EXPIRED, f"{int(age // MIN_KEPT_SECONDS)} days old. {error}"), None
        except (Unobtainable, PolicyUnavailable, Refused, BadReply) as error:
            return Checked(verdict, AuditResult.UNAVAILABLE, str(error)), None
        result, detail = compare(verdict.entry, derived, spec=self._spec)
        problem = AuditProblem("verdict_differs", detail, verdict.log_index) if result is AuditResult.DISAGREE else None
        return Checked(verdict, result, detail, derived.verdict), problem

    async def _check_inclusion(self, verdict: LoggedVerdict) -> None:
        size = self._checkpoint.size
        query = {"index": str(verdict.log_index), "size": str(size)}
        try:
            verify_inclusion(
                leaf_hash(encode(verdict.entry)),
                index=verdict.log_index,
                size=size,
                proof=await self._coordinator.log_proof(LOG_INCLUSION, query, patience_seconds=PATIENCE_SECONDS),
                root_hash=self._checkpoint.root,
            )
        except ProofInvalid as error:
            raise Disagreement("inclusion_proof", f"{error}.") from error

    async def _derive(self, verdict: LoggedVerdict) -> JudgedClaim:
        entry = verdict.entry
        claim, sha256 = await self._signed_claim(entry)
        body = await self._blob(entry.body, max_bytes=self._spec.limits.max_submission_bytes)
        if len(body) != claim.body_bytes:
            raise Disagreement("evidence_mismatch", f"The body has {len(body)} bytes, {claim.body_bytes} were signed.")
        if claim.body_digest != entry.body:
            if sha256 is None or hashlib.sha256(body).hexdigest() != sha256:
                raise Disagreement("evidence_mismatch", "The node signed for another body.")
            return JudgedClaim(verdict=Verdict(outcome=Outcome.REJECTED, reason=Reason.WRONG_BODY))
        published = {policy.version: policy for at, policy in self._log.policies if at < verdict.log_index}
        return await verify(
            body,
            version=entry.version,
            manifest_digest=entry.manifest_digest,
            slot=entry.slot,
            candidate=candidate_of(entry),
            policies=_Logged(self._archive, entry, published),
            published=published,
            rules=self._rules,
            probe=measure_all,
            look=always if entry.finding is not None and entry.finding.figure.endswith(GAIN) else never,
        )

    async def _signed_claim(self, entry: VerdictEntry) -> tuple[RequestClaim, str | None]:
        """Return the signed claim of a submission and the SHA-256 in its path, if any; raises Disagreement."""
        if entry.request != entry.submission:
            raise Disagreement("evidence_mismatch", "The submission's id is not its request's digest.")
        try:
            signer, claim = open_claim(await self._blob(entry.request, max_bytes=MAX_REQUEST_ENVELOPE_BYTES))
        except Refusal as refusal:
            raise Disagreement("evidence_signature", refusal.detail) from refusal
        if signer.hex() != entry.node:
            raise Disagreement("evidence_signature", f"The request is signed by {signer.hex()[:16]}…, not by the node.")
        path = _SUBMISSION_PATH.fullmatch(claim.path)
        if claim.run_id != self._run_id or claim.method != "PUT" or path is None:
            raise Disagreement("evidence_mismatch", "The request is not a submission to this run.")
        if claim.slot not in (UNSET, slot_name(entry)):
            raise Disagreement("evidence_slot", "The node signed for work of another slot.")
        return claim, path[1]

    async def _blob(self, name: str, *, max_bytes: int) -> bytes:
        try:
            data = await self._coordinator.fetch(
                BLOB, names={"name": name}, max_bytes=max_bytes, patience_seconds=PATIENCE_SECONDS
            )
        except (Refused, BadReply) as error:
            if error.code == Reason.EVIDENCE_EXPIRED:
                raise Expired("The operator has removed its files.") from error
            raise Unobtainable(f"Blob {name[:16]}… is not served: {error}") from error
        if digest(data) != name:
            raise Unobtainable(f"Blob {name[:16]}… is not what is served under its name.")
        return data


class _Archive:
    """Policies by manifest digest, within `memory` bytes; what failed once is not tried again."""

    def __init__(self, broadcast: Client, prefills: Prefills, *, spec: RunSpec, memory: int) -> None:
        self._broadcast = broadcast
        self._prefills = prefills
        self._shelf = PolicyShelf(prefills, spec=spec, memory=memory)
        self._known: OrderedDict[str, str | PolicyUnavailable] = OrderedDict()

    async def close(self) -> None:
        await self._broadcast.close()
        await self._prefills.close()

    async def fetch(self, version: int, manifest_digest: str) -> tuple[str, Path]:
        """Return the digest of the policy's file, and the file; raises PolicyUnavailable."""
        known = self._known.get(manifest_digest)
        if isinstance(known, PolicyUnavailable):
            raise known
        with self._remembered_failure(version, manifest_digest):
            path = await self._broadcast.fetch_archived(
                version, manifest_digest=manifest_digest, timeout_s=POLICY_SECONDS
            )
            result_digest = known or (await asyncio.to_thread(measure_body, path))[0]
        self._remember(manifest_digest, result_digest)
        return result_digest, path

    async def prefill(self, version: int, manifest_digest: str, path: Path) -> Prefill:
        """Load a policy, if it is not at hand; raises PolicyUnavailable."""
        held = self._shelf.get(manifest_digest)
        if held is None:
            with self._remembered_failure(version, manifest_digest):
                held = await self._shelf.load(manifest_digest, path, version=version)
        return held

    async def open(self, version: int, manifest_digest: str, path: Path) -> OpenPolicy:
        """Open a policy's file for a second look; raises PolicyUnavailable."""
        with self._remembered_failure(version, manifest_digest):
            return await asyncio.to_thread(OpenPolicy, path, device=self._prefills.device)

    @contextlib.contextmanager
    def _remembered_failure(self, version: int, manifest_digest: str) -> Iterator[None]:
        try:
            yield
        except (ShardcastError, PolicyError) as error:
            unavailable = PolicyUnavailable(f"Policy {version}: {error}")
            self._remember(manifest_digest, unavailable)
            raise unavailable from error

    def _remember(self, manifest_digest: str, known: str | PolicyUnavailable) -> None:
        self._known[manifest_digest] = known
        while len(self._known) > POLICIES_KNOWN:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Logged:
    """The `Policies` of one verdict: the one that its entry names, and those that the log has before it."""

    archive: _Archive
    entry: VerdictEntry
    published: Mapping[int, PolicyEntry]

    async def blueprint(self, version: int) -> Blueprint:
        return (await self.prefill(version)).blueprint

    async def prefill(self, version: int) -> Prefill:
        """Raises Disagreement where the file is not the one that the log names."""
        return await self.archive.prefill(version, *await self._fetched(version))

    async def file(self, version: int) -> OpenPolicy:
        """Raises Disagreement as `prefill`."""
        return await self.archive.open(version, *await self._fetched(version))

    async def _fetched(self, version: int) -> tuple[str, Path]:
        """Return the digest of a policy's manifest, and its file."""
        logged = self.published.get(version)
        if version == self.entry.version:
            manifest_digest = self.entry.manifest_digest
        elif logged is not None:
            manifest_digest = logged.manifest_digest
        else:
            raise PolicyUnavailable(f"Policy {version} is not in the log.")
        result_digest, path = await self.archive.fetch(version, manifest_digest)
        if logged is not None and logged.result_digest != result_digest:
            raise Disagreement("policy_differs", f"Policy {version} is not the file that the log names.")
        return manifest_digest, path
