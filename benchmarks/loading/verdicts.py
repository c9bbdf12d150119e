"""Verdicts per second where the engine costs nothing: real verifiers on groups that a stub calls perfect.

The submissions are files as workers send them: groups of 8, with the slot's own prompts and seeds, invented tokens and
proofs of invented states. All that a verifier does is done: claims, the reader of files, every check, the
environment's rewards, the stored group, the verdict with its log entry. Only instead of a prefill the numbers of a
perfect one come back. So this is what a verifier does beside its prefills, of completions of TOKENS tokens; longer ones
take longer to check and to store.

While they work, this process only asks the database five times a second how far they are: on two cores a verifier on
SQLite has a core to itself, and on PostgreSQL the server has the other one. Two verifiers share the two cores with it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import func, insert, select

from coordinator.run.history import KeptHistory
from coordinator.run.home import Home, create_home, open_home
from coordinator.storage import training, work
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.schema import nodes, submissions
from coordinator.storage.training import PolicyRecord
from coordinator.storage.work import StoredSubmission
from coordinator.verifier.daemon import Verifier, VerifierSettings
from coordinator.verifier.recording import VerdictRecorder
from node.environments import load_environments
from node.episodes.expected import expected_of
from node.policy.file import Blueprint, Policy, load_policy, save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.messages import LeaseRequest
from node.protocol.reasons import Refusal
from node.protocol.run import BatchSpec, EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout, chunk_count
from node.submission.writer import write_rollouts
from node.verification import verify
from node.verification.deviations import SpanMeasured
from node.verification.proofs import build_proofs
from node.verification.spans import Span
from shardcast import Origin, OriginServer
from shardcast.manifest import SignedManifest
from shardcast.wire import digest

TOKENS, LOGPROB = 32, -1.0
WARM = 16
"""Verdicts before the clock starts: the policy's fetch is among them."""

PATIENCE_SECONDS = 300.0
PHASES: Final[Mapping[str, tuple[Any, str]]] = {
    "claim": (Verifier, "_claim"),
    "decode": (Verifier, "_read"),
    "plan": (verify, "plan_claim"),
    "judge": (verify, "_take_rows"),
    "rewards": (verify, "_reward"),
    "groups_and_evidence": (VerdictRecorder, "_with_blobs"),
    "files": (FolderBlobs, "put_many"),
    "rows": (VerdictRecorder, "record"),
    "log_seen": (KeptHistory, "keep_current"),
}
"""What takes a verifier's time, beside its prefills, by function; what is in none is its event loop's and threads'."""

SPEC = RunSpec(
    name="verdicts",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(max_new_tokens=TOKENS),
    proofs=ProofSpec(scheme="toploc/1"),
    batch=BatchSpec(groups_per_step=1_000_000, max_leases_per_node=1_000_000),
)


class PerfectPrefill:
    """A `Prefill` that finds every span as it should be, and computes nothing."""

    def __init__(self, policy: Policy) -> None:
        self.blueprint: Blueprint = policy

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:  # noqa: ARG002
        return [
            SpanMeasured(
                exponent_mismatches=[0.0] * len(span.proofs),
                mantissa_means=[0.0] * len(span.proofs),
                mantissa_medians=[0.0] * len(span.proofs),
                sketch_errors=[],
                logprobs=[LOGPROB] * len(span.token_ids),
                margins=[0.0] * len(span.token_ids),
            )
            for span in spans
        ]


class PerfectPrefills:
    """`Prefills` of those."""

    device = torch.device("cpu")

    def memory_of(self, blueprint: Blueprint) -> int:
        return 4 * blueprint.parameters

    async def prefill(self, path: Path, *, version: int, streamed: bool = False) -> PerfectPrefill:  # noqa: ARG002
        return PerfectPrefill(load_policy(path, dtype=torch.float32))

    async def close(self) -> None:
        """Release nothing."""


def perfect_prefills(_spec: RunSpec, _share: float) -> PerfectPrefills:
    """Make prefills, as a `MakePrefills`."""
    return PerfectPrefills()


@dataclass(frozen=True)
class VerdictRate:
    """Verdicts per second, and the verifiers' processor time for each in milliseconds: all of it, and by phase."""

    per_s: float
    cpu_ms: float
    phases_ms: Mapping[str, float]


class PhaseTimes:
    """Processor time of this process's threads in the functions of `PHASES`, without those that they call.

    What other threads do for one of them, such as the syncs of files, is not in it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._inner = threading.local()
        for phase, (owner, name) in PHASES.items():
            setattr(owner, name, self._timed(phase, getattr(owner, name)))

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outside, self._inner.seconds = getattr(self._inner, "seconds", 0.0), 0.0
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.thread_time() - start
                self.seconds[phase] += taken - self._inner.seconds
                self._inner.seconds = outside + taken

        return timed


def verdicts_per_s(folder: Path, *, groups: int, verifiers: int = 1, database_url: str | None = None) -> VerdictRate:
    """Measure how many of `groups` waiting submissions `verifiers` processes judge in a second."""
    key = Ed25519PrivateKey.generate()
    home = create_home(
        folder / "data", public_key=key.public_key().public_bytes_raw(), spec=SPEC, database_url=database_url
    )
    origin = Origin(folder / "origin", key, home.run_id)
    server = OriginServer(origin, "127.0.0.1", 0)
    source = f"http://127.0.0.1:{server.start()}"
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    told: Any = context.Queue()
    started = [
        context.Process(target=_verify, args=(folder / f"verifier-{n}", source, database_url, stop, told), daemon=True)
        for n in range(verifiers)
    ]
    try:
        _submit(home, _published(home, server, folder), groups=groups)
        for process in started:
            process.start()
        per_s, cpu_ms = _rate(home, groups, [psutil.Process(process.pid) for process in started])
        stop.set()
        each = [told.get(timeout=PATIENCE_SECONDS) for _ in started]
        phases = {phase: 1000 * sum(one[phase] for one in each) / groups for phase in PHASES}
        return VerdictRate(per_s, cpu_ms, phases)
    finally:
        stop.set()
        for process in started:
            process.join(30)
        server.stop()
        origin.close()
        home.database.close()


def _published(home: Home, server: OriginServer, folder: Path) -> tuple[Policy, str]:
    path = folder / "policy.safetensors"
    save_policy(make_model(seed=1), make_tokenizer(), path)

    def record(signed: SignedManifest) -> None:
        policy = PolicyRecord(0, signed.digest, signed.manifest.result_digest, signed.envelope)
        with home.database.write() as connection:
            training.record_policy(connection, policy, now=time.time())
        digests.append(signed.digest)

    digests: list[str] = []
    server.publish(path, version=0, before_announcing=record)
    return load_policy(path, dtype=torch.float32), digests[0]


def _submit(home: Home, published: tuple[Policy, str], *, groups: int) -> None:
    policy, manifest_digest = published
    environments = load_environments(home.spec)
    node, now = digest(b"node"), time.time()
    with home.database.write() as connection:
        values = {"node": node, "software": "", "engine": "", "registered_at": now, "seen_at": now}
        # Of so many verified groups that all that it asks for is given.
        connection.execute(insert(nodes).values(**values, admitted=groups, verified=groups))
        asked = LeaseRequest(held_versions=(0,), slots=64, instance="0" * 32)
        leases = [
            lease
            for _ in range(-(-groups // asked.slots))
            for lease in work.lease(connection, node=node, request=asked, spec=home.spec, now=now).leases
        ][:groups]
    rng = random.Random(1)
    states = torch.randn(SPEC.proofs.chunk_tokens, policy.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    (proof,) = build_proofs([states], [bytes(16)], spec=SPEC.proofs)
    for lease in leases:
        wanted = expected_of(
            home.spec,
            policy,
            environments,
            run_id=home.run_id,
            version=0,
            manifest_digest=manifest_digest,
            slot=lease.slot,
            published=(0,),
        )
        allowed = [token for token in range(wanted.vocabulary) if token not in wanted.eos_ids]
        rollouts = [
            _rollout(seed, list(wanted.prompt_ids), rng.choices(allowed, k=TOKENS), proof) for seed in wanted.seeds
        ]
        body = home.blobs.put(write_rollouts(rollouts))
        arrival = StoredSubmission(lease.lease_id.encode(), body=body, body_bytes=1)
        with home.database.write(durable=False) as connection:
            work.submit(connection, arrival, node=node, lease_id=lease.lease_id, spec=home.spec, now=now)


def _rollout(seed: bytes, prompt: list[int], completion: list[int], proof: bytes) -> Rollout:
    chunks = chunk_count([TOKENS], chunk_tokens=SPEC.proofs.chunk_tokens)
    return Rollout(
        seed=seed,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[LOGPROB] * TOKENS,
        segment_versions=[0],
        segment_tokens=[TOKENS],
        proofs=[proof] * chunks,
    )


def _rate(home: Home, groups: int, verifiers: Sequence[psutil.Process]) -> tuple[float, float]:
    """Return verdicts per second after the warm-up, by the times in the database, and processor time of each in ms."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    done = select(func.count()).where(submissions.c.outcome.is_not(None))
    seen: list[tuple[int, float]] = []
    while time.monotonic() < deadline and (not seen or seen[-1][0] < groups):
        time.sleep(0.2)
        with home.database.read() as connection:
            judged = connection.execute(done).scalar_one()
        if judged >= WARM:
            times = [process.cpu_times() for process in verifiers]
            seen.append((judged, sum(one.user + one.system for one in times)))
    with home.database.read() as connection:
        at = list(connection.execute(select(submissions.c.decided_at).order_by(submissions.c.decided_at)).scalars())
        refused = select(submissions.c.detail).where(submissions.c.outcome != "admitted").limit(1)
        why = connection.execute(refused).scalar()
    if None in at or why is not None:
        raise SystemExit(f"not all of {groups} groups were admitted: {why}")
    (first, before), (last, after) = seen[0], seen[-1]
    return (groups - WARM) / (at[-1] - at[WARM - 1]), 1000 * (after - before) / max(1, last - first)


def _verify(state: Path, source: str, database_url: str | None, stop: Event, told: Any) -> None:
    """Verify with this `state` until `stop` is set, and put the time of each phase into `told`."""
    phases = PhaseTimes()
    home = open_home(state.parent / "data", database_url=database_url)
    settings = VerifierSettings(name=state.name, state=state, sources=(source,), make_prefills=perfect_prefills)

    async def work_until_told() -> None:
        stopped = asyncio.Event()
        working = asyncio.create_task(Verifier(home, settings).run(stopped))
        await asyncio.to_thread(stop.wait)
        stopped.set()
        await working

    asyncio.run(work_until_told())
    told.put(phases.seconds)
    home.database.close()
