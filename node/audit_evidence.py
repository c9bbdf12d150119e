"""Deriving logged verdicts again from their evidence, as an auditor who trusts nobody.

Evidence is addressed by digest, so whoever serves it can only withhold it: that is `unavailable`, which is not
the same as a disagreement. Only what the run signed, or what follows from it, convicts.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Final, Self

from msgspec import Meta

from node.audit_log import LoggedVerdict, Problem, is_finding
from node.audit_report import Checked, Result
from node.coordinator_client import CoordinatorClient
from node.environments import load_environment
from node.errors import BadReply, Refused
from node.exchange import measure_body
from node.parquet_reader import ParquetReader
from node.policy import Blueprint
from node.policy_errors import PolicyError
from node.prefill import Prefill
from node.protocol.admission import DRIFT, EVIDENCE, GAIN, Figures, Finding, Outcome, limit_of
from node.protocol.evidence import STATISTICS, Totals, evidences
from node.protocol.merkle import MAX_PROOF_HASHES, ProofInvalid, leaf_hash, verify_inclusion
from node.protocol.messages import MAX_CLAIM_BYTES, MAX_MESSAGE_BYTES, Checkpoint, LogEntry, PolicyEntry, VerdictEntry
from node.protocol.reasons import Refusal
from node.protocol.requests import open_claim
from node.protocol.run import Descriptor, LimitsSpec, RunSpec
from node.readings import read_by_transformers
from node.second_look import always, never
from node.verification import PolicyAway, Rules, Verdict, measure_all, verify
from shardcast import Client
from shardcast.errors import PeerFault, ShardcastError
from shardcast.wire import Digest, Wire, decode, digest, encode

BORDERLINE_FACTOR: Final = 1.25
"""Machines round differently: a figure may be over its limit on one and not on another within this factor."""

TOTALS_APART: Final = 1.0
"""Standard deviations of one value by which the mean of a group's may differ between machines, at most."""

FAR_TOKENS_APART: Final = 2.0
"""So many tokens may be far from their sketches on one machine and not on another: a few of a group decide."""

FAR_FACTOR: Final = 4.0
"""As `BORDERLINE_FACTOR`, for what far tokens show: one more of them is many nats."""

POLICIES_IN_MEMORY: Final = 2
"""Verdicts come in policy order: theirs, and the next where a completion went on under it."""

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


def is_borderline(entry: VerdictEntry, derived: Verdict, *, limits: LimitsSpec) -> bool:
    """Whether rounding alone explains that one measurement of a group is over limits.

    So it is if there are figures that are over in only one, and each is near its limit in both.
    """
    ours, theirs = _figures(derived.figures, derived.totals, limits), _figures(entry.figures, entry.totals, limits)
    disputed = [
        (key[1], ours[key], theirs[key], limit)
        for key in ours.keys() & theirs.keys()
        for _, limit in [limit_of(key[1], limits)]
        if (ours[key] > limit) != (theirs[key] > limit)
    ]
    return bool(disputed) and all(_near(figure, limit, *pair) for figure, *pair, limit in disputed)


def _figures(figures: Figures | None, totals: Totals | None, limits: LimitsSpec) -> dict[tuple[str, str], float]:
    """The worst of each row's figures, and those of all rows together; nothing where nothing was measured."""
    if figures is None or totals is None:
        return {}
    rows = {("row", name): getattr(figures, name) for name in Figures.__struct_fields__}
    return rows | {("group", name + EVIDENCE): nats for name, nats in evidences(totals, limits=limits)}


def _near(figure: str, limit: float, *values: float) -> bool:
    factor = FAR_FACTOR if figure == f"far{EVIDENCE}" else BORDERLINE_FACTOR
    return all(limit / factor <= value <= limit * factor for value in values)


def compare(entry: VerdictEntry, derived: Verdict, *, spec: RunSpec) -> tuple[Result, str]:
    """How a logged verdict compares with the derived one, for which every row was measured, and why."""
    if derived.outcome is Outcome.INDETERMINATE:
        return Result.UNAVAILABLE, f"This machine could not verify it: {derived.detail}"
    result, detail = _compare_decisions(entry, derived, spec=spec)
    if result is Result.DISAGREE:
        return result, detail
    if entry.tokens != derived.tokens:
        return Result.DISAGREE, f"It has {derived.tokens} tokens, the log says {entry.tokens}."
    if entry.outcome is derived.outcome is Outcome.ADMITTED and entry.rewards != derived.rewards:
        return Result.DISAGREE, "The rewards are others."
    return result, detail


def _compare_decisions(entry: VerdictEntry, derived: Verdict, *, spec: RunSpec) -> tuple[Result, str]:
    if entry.finding is not None and derived.row_figures is not None:
        return _compare_finding(entry.finding, entry, derived, spec=spec)
    if (entry.outcome, entry.reason) != (derived.outcome, derived.reason):
        admitted = entry.outcome is Outcome.ADMITTED
        if admitted and is_borderline(entry, derived, limits=spec.limits):
            return Result.INDETERMINATE, f"Derived {_said(derived)}, but so close to a limit that rounding decides."
        return Result.DISAGREE, f"Derived {_said(derived)}. {derived.detail}"
    if (entry.finding is None) != (derived.finding is None):
        return Result.DISAGREE, f"Derived {_said(derived)}, but only one of the two names the row."
    if entry.totals is not None and derived.totals is not None:
        return _compare_totals(entry.totals, derived.totals, limits=spec.limits)
    return Result.AGREE, ""


def _compare_finding(finding: Finding, entry: VerdictEntry, derived: Verdict, *, spec: RunSpec) -> tuple[Result, str]:
    """Whether what a rejection names is over the limit here too; any row may be named that is."""
    if (entry.outcome, entry.reason) != (Outcome.REJECTED, finding.reason) or not is_finding(finding, spec=spec):
        return Result.DISAGREE, "What the log says was found is nothing that leads to its verdict."
    if derived.row_figures is None or derived.totals is None or entry.totals is None:
        return Result.DISAGREE, "What was measured was not logged."
    if finding.figure.endswith(DRIFT):
        # That the node's slots add up to it follows from the log alone; here, whether this slot's share is true.
        return _compare_totals(entry.totals, derived.totals, limits=spec.limits)
    if finding.figure.endswith(GAIN):
        return _compare_gain(finding, derived)
    return _compare_excess(finding, derived.row_figures, derived.totals, limits=spec.limits)


def _compare_gain(finding: Finding, derived: Verdict) -> tuple[Result, str]:
    """Whether a second look finds the same here; the group may as well be over another limit on this machine."""
    if derived.outcome is Outcome.REJECTED:
        return Result.AGREE, ""
    detail = f"No {finding.figure} over {finding.limit:g} was derived, the log says {finding.value:.6g}"
    if finding.value <= finding.limit * BORDERLINE_FACTOR:
        return Result.INDETERMINATE, f"{detail}, but so close to it that rounding decides."
    return Result.DISAGREE, f"{detail}."


def _compare_excess(
    finding: Finding, rows: Mapping[int, Figures], totals: Totals, *, limits: LimitsSpec
) -> tuple[Result, str]:
    if finding.row is None:
        whose = "All rows together"
        value = dict(evidences(totals, limits=limits))[finding.figure.removesuffix(EVIDENCE)]
    else:
        whose = f"Row {finding.row}"
        value = getattr(rows[finding.row], finding.figure)
    if value > finding.limit:
        return Result.AGREE, ""
    detail = f"{whose}: derived a {finding.figure} of {value:.6g}, the limit is {finding.limit:.6g}"
    if _near(finding.figure, finding.limit, value, finding.value):
        return Result.INDETERMINATE, f"{detail}, but so close to it that rounding decides."
    return Result.DISAGREE, f"{detail}."


def _compare_totals(theirs: Totals, ours: Totals, *, limits: LimitsSpec) -> tuple[Result, str]:
    """Whether what a group's rows sum up to is what the log says, as far as two machines round alike.

    A run judges a node by these sums, so a coordinator that inflates them could drive honest nodes out.
    """
    for name in STATISTICS:
        level, own, logged = getattr(limits.honest, name), getattr(ours, name), getattr(theirs, name)
        if own.count != logged.count:
            return Result.DISAGREE, f"{name}: {own.count} values were summed up, the log says {logged.count}."
        if level is None or own.count == 0:
            if logged.sum:
                return Result.DISAGREE, f"{name}: the log has a sum of nothing."
            continue
        apart = abs(own.sum - logged.sum) / own.count / math.sqrt(level.variance)
        detail = f"{name}: the mean is {apart:.2g} standard deviations from what the log says"
        few = name == "far" and abs(own.sum - logged.sum) <= FAR_TOKENS_APART
        if apart > TOTALS_APART and not few:
            return Result.DISAGREE, f"{detail}."
        if apart > TOTALS_APART / 4:
            return Result.INDETERMINATE, f"{detail}, which rounding may explain."
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
        self._published = [(at, entry) for at, entry in enumerate(entries) if isinstance(entry, PolicyEntry)]
        environments = [load_environment(environment) for environment in descriptor.spec.environments]
        self._rules = Rules(self._run_id, self._spec, environments)
        keep = self._spec.sampling.max_version_lead + POLICIES_IN_MEMORY
        broadcast = Client(self._run_id, coordinator.run_key, sources, folder, keep=keep)
        self._archive = _Archive(broadcast, spec=self._spec)
        self._reader = ParquetReader()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._archive.close()
        self._reader.close()

    async def check(self, verdict: LoggedVerdict) -> tuple[Checked, Problem | None]:
        """One verdict, derived again. Raises Unavailable when the coordinator is gone."""
        try:
            await self._check_inclusion(verdict)
            derived = await self._derive(verdict)
        except Disagreement as error:
            checked = Checked(verdict, Result.DISAGREE, str(error))
            return checked, Problem(error.code, str(error), verdict.log_index)
        except (Unobtainable, PolicyAway, Refused, BadReply) as error:
            return Checked(verdict, Result.UNAVAILABLE, str(error)), None
        result, detail = compare(verdict.entry, derived, spec=self._spec)
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

    async def _derive(self, verdict: LoggedVerdict) -> Verdict:
        entry = verdict.entry
        body_bytes = await self._check_request(entry)
        body = await self._blob(entry.body, max_bytes=self._spec.limits.max_submission_bytes)
        if len(body) != body_bytes:
            raise Disagreement("evidence_mismatch", f"The body has {len(body)} bytes, {body_bytes} were signed.")
        published = {policy.version: policy for at, policy in self._published if at < verdict.log_index}
        return await verify(
            body,
            reader=self._reader,
            version=entry.version,
            manifest_digest=entry.manifest_digest,
            slot=entry.slot,
            policies=_Logged(self._archive, entry, published),
            published=published,
            rules=self._rules,
            probe=measure_all,
            look=always if entry.finding is not None and entry.finding.figure.endswith(GAIN) else never,
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


class _Archive:
    """Policies by manifest digest; the last few are held, and failures to get one too."""

    def __init__(self, broadcast: Client, *, spec: RunSpec) -> None:
        self._broadcast = broadcast
        self._spec = spec
        self._held: OrderedDict[str, tuple[str, Prefill] | PolicyAway] = OrderedDict()

    async def close(self) -> None:
        await self._broadcast.close()

    async def get(self, version: int, manifest_digest: str) -> tuple[str, Prefill]:
        """The digest of the policy's file, and the policy; raises PolicyAway."""
        if manifest_digest not in self._held:
            try:
                self._held[manifest_digest] = await self._load(version, manifest_digest)
            except PolicyAway as error:
                self._held[manifest_digest] = error
            while len(self._held) > POLICIES_IN_MEMORY:
                self._held.popitem(last=False)
        self._held.move_to_end(manifest_digest)
        held = self._held[manifest_digest]
        if isinstance(held, PolicyAway):
            raise held
        return held

    async def _load(self, version: int, manifest_digest: str) -> tuple[str, Prefill]:
        try:
            path = await self._broadcast.fetch_archived(
                version, manifest_digest=manifest_digest, timeout_s=POLICY_SECONDS
            )
            result_digest, _ = await asyncio.to_thread(measure_body, path)
            prefill = await asyncio.to_thread(read_by_transformers, path, spec=self._spec)
        except (ShardcastError, PolicyError) as error:
            raise PolicyAway(f"Policy {version}: {error}") from error
        return result_digest, prefill


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
        logged = self.published.get(version)
        if version == self.entry.version:
            manifest_digest = self.entry.manifest_digest
        elif logged is not None:
            manifest_digest = logged.manifest_digest
        else:
            raise PolicyAway(f"Policy {version} is not in the log.")
        result_digest, prefill = await self.archive.get(version, manifest_digest)
        if logged is not None and logged.result_digest != result_digest:
            raise Disagreement("policy_differs", f"Policy {version} is not the file that the log names.")
        return prefill
