"""`swarmproof audit`: anyone checks what the coordinator decided (docs/protocol.md, section 8.4).

The coordinator is untrusted: its log must extend the checkpoint seen before and keep its invariants, and sampled
verdicts must follow from their evidence. The sample is drawn here after the checkpoint is signed, so nobody can prepare
for it. An audit does not show that every submission was logged: for that, workers compare their receipts with the log.

`--json` prints one object with the keys

    run_id, url, seed, seconds
    outcome               "agree", "disagree", "incomplete" or "partial" (as "agree", but for what is expired);
                          exit_code 0, 1, 2 or 3
    checkpoint            null or {size, root}; previous_checkpoint: the last one remembered, likewise
    witnesses             null, or {quorum, has_quorum, of: [{name, key, size, signed_at, covers, detail}]}: what each
                          signed of this log, and whether that covers the checkpoint
    log                   {entries, policies, batches, admitted, rejected, indeterminate}
    newest_verdict_at     when the newest verdict was, by the log: null or seconds since 1970
    coordinator_indeterminate   log indexes of verdicts that the coordinator could not decide
    reached_training      [{log_index, submission, step}]: groups that a second verdict did not bear out, too late
    withholding           {gaps, nodes: [{node, delivered, missed, environment, environment_probability,
                          signal, signal_probability}]}: who had slots and did not deliver them, and how likely it is
                          that this has nothing to do with their environment, or with whether the group had signal:
                          corrected for the number of nodes (docs/protocol.md, section 7.7)
    accounts              [{node, credit, pending, void, verified, strikes, banned, full_rate}], summed up from the log
    results               {agree, disagree, indeterminate, unavailable, unseen, ungraded, expired}, counts of `verdicts`
    verdicts              [{log_index, submission, node, version, slot, logged: {outcome, reason},
                          derived: null or {outcome, reason}, result, detail}]
    problems              [{code, detail, log_index}]; any makes the outcome "disagree"
    error                 null or {code, message}: why the audit ended early
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
from msgspec import UNSET, UnsetType
from rich.console import Console

from node.audit.checkpoint_memory import CheckpointMemory
from node.audit.evidence import EvidenceAuditor
from node.audit.freshness import check_head, is_over
from node.audit.leaves import LOG_TOO_LARGE, MAX_LOG_ENTRIES, LeafFile, LeafTree, read_entries
from node.audit.log import LoggedVerdict, LogIndex, choose_verdicts, read_log
from node.audit.problems import AuditProblem
from node.audit.report import Report, render_json, show
from node.audit.witnesses import WitnessGathering, WitnessRule
from node.client.api import CoordinatorClient
from node.client.http import ExchangeLimits, printable
from node.client.ssrf import not_nearer
from node.datasets.fetching import dataset_feed
from node.datasets.folder import DATASETS, match_answers
from node.environments.dataset import load_rows
from node.errors import BadReply, ConfigError, DatasetFault, NodeError, StateError
from node.protocol.admission import Outcome
from node.protocol.checkpoints import Checkpoint, open_checkpoint
from node.protocol.endpoints import LOG_CONSISTENCY, LOG_ENTRIES
from node.protocol.merkle import ProofInvalid, verify_consistency
from node.protocol.messages import MAX_ENTRY_BYTES, VerdictEntry
from node.protocol.run import Descriptor, RunSpec
from node.verification.readings import MakePrefills, transformers_prefills
from node.verification.shelf import GIB
from shardcast.errors import PeerFault, ShardcastError
from shardcast.fetch.raw_http import MayConnect
from shardcast.urls import valid_sources
from shardcast.wire import decode, is_digest

DEFAULT_SAMPLE: Final = 20
PAGE_ENTRIES: Final = 1000
MAX_PAGE_BYTES: Final = LOG_ENTRIES.max_reply_bytes
PATIENCE_SECONDS: Final = 30.0
DATASETS_SECONDS: Final = 900.0
LIMITS: Final = ExchangeLimits(reply_seconds=120.0)
SIGNED_FAULTS: Final = frozenset({"answers_differ", "dataset_malformed"})
"""What is wrong with a file of answers that has the signed digest: whoever signed did it, and nobody on the way."""


async def run_audit(
    url: str,
    *,
    run_id: str,
    sample: int | None,
    all_: bool,
    seed: int | None,
    state_dir: Path,
    as_json: bool,
    sources: Sequence[str] = (),
    answers: Sequence[Path] = (),
    prefills: MakePrefills = transformers_prefills,
    policy_memory: int = 4 * GIB,
    witnesses: WitnessRule | None = None,
) -> int:
    """Audit the coordinator at `url`, print what was found, and return the exit code: 0 to 3.

    `sample` verdicts are derived again (None: 20), or all of them. `seed` repeats an earlier draw. `sources`
    are origins or relays to ask for policies, besides those that the coordinator names. `answers` are files of answers,
    which the operator keeps: without them, rewards of their datasets are not derived. `prefills` makes what measures,
    and policies take at most `policy_memory` bytes. `witnesses` have to have signed the log.
    """
    started = time.monotonic()
    report = Report(url=url, run_id=run_id, seed=secrets.randbits(32) if seed is None else seed)
    count = None if all_ else DEFAULT_SAMPLE if sample is None else sample
    try:
        if not is_digest(run_id):
            raise ConfigError("A run's id has 64 hexadecimal digits.")
        async with CoordinatorClient(url, run_id=run_id, limits=LIMITS) as coordinator:
            auditor = _Auditor(
                coordinator,
                report,
                state_dir=state_dir,
                sources=sources,
                answers=answers,
                prefills=prefills,
                policy_memory=policy_memory,
                witnesses=witnesses,
            )
            await auditor.run(count)
    except (NodeError, ShardcastError) as error:
        report.fault = report.fault or (error.code, printable(str(error)))
    except OSError as error:
        report.fault = report.fault or ("local_fault", printable(f"{state_dir}: {error.strerror or error}"))
    report.seconds = time.monotonic() - started
    if as_json:
        click.echo(render_json(report))
    else:
        show(report, Console())
    return report.exit_code


class _Auditor:
    """One audit, which fills its report as it goes."""

    def __init__(
        self,
        coordinator: CoordinatorClient,
        report: Report,
        *,
        state_dir: Path,
        sources: Sequence[str],
        answers: Sequence[Path],
        prefills: MakePrefills,
        policy_memory: int,
        witnesses: WitnessRule | None,
    ) -> None:
        self._coordinator = coordinator
        self._report = report
        self._state = state_dir
        self._sources = sources
        self._answers = answers
        self._prefills = prefills
        self._policy_memory = policy_memory
        self._witnesses = witnesses

    async def run(self, count: int | None) -> None:
        descriptor = await self._coordinator.descriptor(patience_seconds=PATIENCE_SECONDS)
        memory = CheckpointMemory(self._state, run_id=self._report.run_id)
        remembered = memory.load()
        checkpoint, note = await self._coordinator.checkpoint(patience_seconds=PATIENCE_SECONDS)
        self._report.checkpoint = checkpoint
        extends = remembered is None or await self._check_history(memory, remembered, note, checkpoint)
        if self._witnesses is not None:
            gathering = WitnessGathering(self._coordinator, self._witnesses, checkpoint)
            self._report.witnesses = gathering.found
            contradiction = await gathering.run(lambda other: memory.keep_evidence(note, other))
            if contradiction is not None:
                self._report.problems.append(contradiction)
                extends = False
        with LeafFile(self._state) as leaves:
            if not await self._fetch_leaves(checkpoint, leaves):
                return
            if extends:
                memory.keep(note)
            log = await asyncio.to_thread(self._check_entries, leaves, descriptor)
            await self._check_verdicts(leaves, log, descriptor, checkpoint, count)

    @property
    def _run_key(self) -> bytes:
        key = self._coordinator.run_key
        if key is None:
            raise RuntimeError("a verified descriptor leaves the run's key")
        return key

    async def _check_history(
        self, memory: CheckpointMemory, remembered: bytes, note: bytes, checkpoint: Checkpoint
    ) -> bool:
        """Return whether the log extends the stored checkpoint; if not, keep both as evidence."""
        try:
            before = self._report.previous = open_checkpoint(
                remembered, run_id=self._report.run_id, signer=self._run_key
            )
        except PeerFault as error:
            raise StateError(f"The remembered checkpoint is damaged ({error}); use another --state.") from error
        shrank = checkpoint.size < before.size
        query = {"first": str(before.size), "second": str(checkpoint.size)}
        proof = []
        if not shrank:
            proof = await self._coordinator.log_proof(LOG_CONSISTENCY, query, patience_seconds=PATIENCE_SECONDS)
        try:
            verify_consistency(
                first=before.size,
                first_root=before.root,
                second=checkpoint.size,
                second_root=checkpoint.root,
                proof=proof,
            )
        except ProofInvalid as error:
            folder = memory.keep_evidence(remembered, note)
            sizes = f"{before.size} entries were seen before, {checkpoint.size} are shown now"
            detail = f"{error} ({sizes}); both signed checkpoints are in {folder}."
            self._report.problems.append(AuditProblem("log_shrank" if shrank else "log_forked", detail))
            return False
        return True

    async def _fetch_leaves(self, checkpoint: Checkpoint, leaves: LeafFile) -> bool:
        """Fetch every entry's exact bytes; False, with a problem, if they do not match the checkpoint's root."""
        if checkpoint.size > MAX_LOG_ENTRIES:
            detail = f"The log has {checkpoint.size} entries; {MAX_LOG_ENTRIES} can be audited here."
            raise BadReply(detail, code=LOG_TOO_LARGE)
        tree = LeafTree()
        while len(leaves) < checkpoint.size:
            for leaf in await self._fetch_page(len(leaves), checkpoint.size):
                tree.append(leaf)
                leaves.append(leaf)
        if tree.root() != checkpoint.root:
            self._report.problems.append(AuditProblem("root_mismatch", "The entries are not those of the signed root."))
            return False
        return True

    async def _fetch_page(self, start: int, size: int) -> list[bytes]:
        end = min(size, start + PAGE_ENTRIES)
        body = await self._coordinator.fetch(
            LOG_ENTRIES,
            query={"start": str(start), "end": str(end)},
            max_bytes=MAX_PAGE_BYTES,
            patience_seconds=PATIENCE_SECONDS,
        )
        page = body.split(b"\n")
        if page.pop() != b"" or not 1 <= len(page) <= end - start:
            raise BadReply(f"The coordinator sent {len(page)} whole entries where {start} .. {end - 1} were asked for.")
        if max(map(len, page)) > MAX_ENTRY_BYTES:
            raise BadReply(f"The coordinator sent an entry of more than {MAX_ENTRY_BYTES} bytes.")
        return page

    def _check_entries(self, leaves: LeafFile, descriptor: Descriptor) -> LogIndex:
        reading = read_log(read_entries(leaves), run_id=self._report.run_id, spec=descriptor.spec)
        self._report.describe_log(reading.index)
        self._report.problems += reading.problems
        if reading.fault is not None:
            self._report.fault = (reading.fault.code, str(reading.fault))
        if len(reading.index.latest) == len(leaves):
            self._report.problems += check_head(reading.index, descriptor.head)
        self._report.is_over = is_over(reading.index, descriptor.spec)
        self._report.reached_training = reading.reached_training
        self._report.withholding = reading.withholding
        self._report.accounts, self._report.rules = reading.accounts, descriptor.spec.standing
        return reading.index

    async def _check_verdicts(
        self, leaves: LeafFile, log: LogIndex, descriptor: Descriptor, checkpoint: Checkpoint, count: int | None
    ) -> None:
        admitted, rejected = log.verdicts[Outcome.ADMITTED], log.verdicts[Outcome.REJECTED]
        drawn = choose_verdicts(admitted, rejected, count=count, rng=random.Random(self._report.seed))
        if not drawn:
            return
        await asyncio.to_thread(drawn.sort, key=lambda at: (_verdict_at(leaves, at).version, at))
        announced = await self._coordinator.relays(patience_seconds=PATIENCE_SECONDS)
        sources = valid_sources((*self._sources, *descriptor.relays, *announced.relays))
        may_connect = not_nearer(lambda: self._coordinator.reach, own=self._sources)
        datasets = await self._fetch_datasets(descriptor, sources, may_connect)
        async with EvidenceAuditor(
            self._coordinator,
            descriptor=descriptor,
            checkpoint=checkpoint,
            log=log,
            datasets=await asyncio.to_thread(self._check_answers, descriptor.spec, datasets),
            sources=sources,
            may_connect=may_connect,
            folder=self._state / "policies",
            prefills=self._prefills,
            policy_memory=self._policy_memory,
        ) as evidence:
            for index in drawn:
                checked, problem = await evidence.check(LoggedVerdict(index, _verdict_at(leaves, index)))
                self._report.checked.append(checked)
                if problem is not None:
                    self._report.problems.append(problem)

    def _check_answers(self, spec: RunSpec, datasets: Mapping[str, Path]) -> Mapping[str, Path]:
        """Return `datasets` without files of answers that are malformed or contradict the prompts: these are problems.

        The operator signed for both digests, so the file proves it, whoever gave it.
        """
        kept = dict(datasets)
        for one in spec.environments:
            answers = UNSET if isinstance(one.dataset, UnsetType) else one.dataset.answers
            if isinstance(answers, UnsetType) or answers.digest not in kept:
                continue
            try:
                load_rows(one, kept)
            except DatasetFault as error:
                if error.code not in SIGNED_FAULTS:
                    raise
                del kept[answers.digest]
                self._report.problems.append(AuditProblem(error.code, f"{error}."))
        return kept

    async def _fetch_datasets(
        self, descriptor: Descriptor, sources: Sequence[str], may_connect: MayConnect
    ) -> Mapping[str, Path]:
        """Return the files of the run's datasets, and of the answers that were given.

        Raises ShardcastError where a dataset cannot be had in time, ConfigError for answers that are not the run's.
        """
        answers = await asyncio.to_thread(match_answers, self._answers, descriptor.spec)
        async with dataset_feed(
            descriptor.spec,
            run_id=descriptor.run_id,
            publisher_key=self._run_key,
            sources=sources,
            folder=self._state / DATASETS,
            files=descriptor.spec.datasets,
            may_connect=may_connect,
        ) as feed:
            return {**await feed.fetch(timeout_s=DATASETS_SECONDS), **answers}


def _verdict_at(leaves: LeafFile, index: int) -> VerdictEntry:
    return decode(VerdictEntry, leaves[index], max_bytes=MAX_ENTRY_BYTES)
