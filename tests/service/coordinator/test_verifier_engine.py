"""A verifier whose engine or disk is away: slow work stays its own, and what it cannot do now it gives back."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from swarm import RUN_KEY, Swarm, publish, running, small_spec, verifying
from waiting import until

from coordinator.run.home import create_home
from coordinator.storage import verdicts
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.schema import submissions
from coordinator.training.groups import encode_group
from coordinator.verifier import daemon as verifier
from coordinator.verifier import deferrals
from coordinator.verifier.daemon import MAX_ENGINE_FAILURES, Verifier, VerifierSettings
from node.engines.base import EngineDied
from node.errors import EngineFailed
from node.policy.file import Policy
from node.protocol.admission import Outcome
from node.protocol.reasons import Refusal
from node.protocol.run import RunSpec
from node.submission.writer import write_rollouts
from node.verification import prefill as prefills
from node.verification.deviations import SpanMeasured
from node.verification.prefill import Prefill, TransformersPrefill, TransformersPrefills
from node.verification.spans import Span
from shardcast import Origin, OriginServer
from shardcast.wire import digest


class Dying(TransformersPrefills):
    """An engine whose process dies in the next `deaths` loads."""

    def __init__(self, spec: RunSpec, _share: float = 1.0, *, deaths: int) -> None:
        super().__init__(dtype=spec.model.dtype)
        self.deaths = deaths

    async def prefill(self, path: Path, *, version: int, streamed: bool = False) -> Prefill:
        if self.deaths:
            self.deaths -= 1
            raise EngineFailed("vLLM's engine process ended.", code=EngineDied.code)
        return await super().prefill(path, version=version, streamed=streamed)


class Slow(TransformersPrefill):
    """Measures in the time that a policy takes which is read from disk."""

    def measure(self, spans: Sequence[Span], *, spec: RunSpec) -> list[SpanMeasured | Refusal]:
        time.sleep(2.0 if spans else 0.0)
        return super().measure(spans, spec=spec)


class SlowPrefills(TransformersPrefills):
    def __init__(self, spec: RunSpec, _share: float = 1.0) -> None:
        super().__init__(dtype=spec.model.dtype)

    async def prefill(self, path: Path, *, version: int, streamed: bool = False) -> Slow:
        loaded = await super().prefill(path, version=version, streamed=streamed)
        assert isinstance(loaded, TransformersPrefill)
        return Slow(loaded.policy)


def claims_of(swarm: Swarm) -> int:
    """How often the only submission was claimed; putting it back does not count."""
    with swarm.home.database.read() as connection:
        return int(connection.execute(select(submissions.c.attempts)).scalar_one())


@pytest.mark.system
def test_work_that_takes_longer_than_a_claim_is_done_by_one_verifier(
    tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one would read the same tens of gigabytes, for the same verdict."""
    monkeypatch.setattr(verifier, "CLAIM_SECONDS", 1.0)
    with (
        running(tmp_path, tiny_policy_path, make_prefills=SlowPrefills) as swarm,
        verifying(
            swarm.home,
            source=swarm.origin_url,
            state=tmp_path / "second",
            name="verifier-2",
            make_prefills=SlowPrefills,
        ),
    ):
        peer = swarm.peer()
        lease = peer.lease()
        assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED
        assert claims_of(swarm) == 1


def test_an_engine_that_dies_while_it_loads_costs_its_claims_nothing(
    tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The verifier would end, and the work wait until its claims do."""
    monkeypatch.setattr(deferrals, "RETRY_SECONDS", 0.02)
    made: list[Dying] = []

    def make(spec: RunSpec, _share: float) -> Dying:
        made.append(Dying(spec, deaths=0))
        return made[0]

    with running(tmp_path, tiny_policy_path, make_prefills=make, policy_memory=0) as swarm:
        peer = swarm.peer()
        until(lambda: bool(made))
        swarm.publish(tiny_policy_path, version=1)
        asyncio.run(swarm.engine.load(tiny_policy_path, version=1))
        lease = peer.ask(held=(1,)).leases[0]
        made[0].deaths = MAX_ENGINE_FAILURES - 1
        receipt = swarm.judge(peer, swarm.honest(lease), lease)
        assert made[0].deaths == 0
        assert claims_of(swarm) == 1
    assert (receipt.version, receipt.outcome) == (1, Outcome.ADMITTED)
    assert caplog.text.count("vLLM's engine process ended. Trying again in") == MAX_ENGINE_FAILURES - 1


def test_an_engine_that_keeps_dying_ends_its_verifier_with_one_sentence(
    tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deferrals, "RETRY_SECONDS", 0.02)
    home = create_home(tmp_path / "run", public_key=RUN_KEY.public_key().public_bytes_raw(), spec=small_spec())
    origin = Origin(tmp_path / "origin", RUN_KEY, home.run_id)
    server = OriginServer(origin)
    url = f"http://127.0.0.1:{server.start()}"
    settings = VerifierSettings(
        name="verifier-1",
        state=tmp_path / "verifier",
        sources=(url,),
        make_prefills=lambda spec, _: Dying(spec, deaths=10**6),
    )
    try:
        publish(home, origin, server, tiny_policy_path, version=0)
        with pytest.raises(EngineFailed, match="failed 5 times in a row: vLLM's engine process ended") as caught:
            asyncio.run(asyncio.wait_for(Verifier(home, settings).run(asyncio.Event()), 120))
    finally:
        server.stop()
        origin.close()
        home.database.close()
    assert caught.value.code == EngineDied.code


def test_work_is_admitted_by_a_verifier_whose_memory_is_used_up(
    tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its --policy-memory says is free may be taken by others: an honest worker must not pay for it."""

    def full(*_: object, **__: object) -> Policy:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prefills, "load_once", full)
    with running(tmp_path, tiny_policy_path) as swarm:
        peer = swarm.peer()
        lease = peer.lease()
        assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED


def failing(function: Callable[..., Any], errors: list[Exception]) -> Callable[..., Any]:
    """`function`, but its next calls raise `errors`, one each."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("is_database_full", [False, True], ids=["disk", "disk and database"])
def test_a_full_disk_costs_its_claims_nothing(
    is_database_full: bool, tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest work was given up as indeterminate after six seconds of it."""
    monkeypatch.setattr(deferrals, "RETRY_SECONDS", 0.02)
    full: list[Exception] = [OSError(errno.ENOSPC, "No space left on device") for _ in range(verdicts.MAX_CLAIMS + 1)]
    monkeypatch.setattr(
        "coordinator.verifier.recording.encode_group", failing(encode_group, full)
    )  # what `_record` writes
    away = OperationalError("UPDATE", {}, sqlite3.OperationalError("full"))
    locked: list[Exception] = [away] * (3 * is_database_full)
    monkeypatch.setattr(verdicts, "defer", failing(verdicts.defer, locked))
    with running(tmp_path, tiny_policy_path) as swarm:
        peer = swarm.peer()
        lease = peer.lease()
        assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED
        assert claims_of(swarm) == 1
    assert full == locked == []


def test_an_error_that_a_submission_may_cause_counts_as_an_attempt(
    tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put back for nothing, one that nobody can judge would keep the whole queue waiting for ever."""
    monkeypatch.setattr(deferrals, "RETRY_SECONDS", 0.02)
    odd: list[Exception] = [OSError(errno.E2BIG, "Argument list too long")]
    monkeypatch.setattr("coordinator.verifier.recording.encode_group", failing(encode_group, odd))
    with running(tmp_path, tiny_policy_path) as swarm:
        peer = swarm.peer()
        lease = peer.lease()
        assert swarm.judge(peer, swarm.honest(lease), lease).outcome is Outcome.ADMITTED
        assert claims_of(swarm) == 2


def test_one_body_that_the_disk_does_not_give_keeps_no_other_waiting(
    tiny_policy_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferrals, "RETRY_SECONDS", 0.02)
    bad: set[str] = set()
    get = FolderBlobs.get

    def reading(blobs: FolderBlobs, name: str, *, max_bytes: int) -> bytes:
        if name in bad:
            raise OSError(errno.EIO, "Input/output error")
        return get(blobs, name, max_bytes=max_bytes)

    monkeypatch.setattr(FolderBlobs, "get", reading)
    with running(tmp_path, tiny_policy_path) as swarm:
        first, second = swarm.peer(), swarm.peer()
        lease, other = first.lease(), second.lease()
        body = write_rollouts(swarm.honest(lease))
        bad.add(digest(body))
        held = first.submit(lease.lease_id, body)
        assert swarm.judge(second, swarm.honest(other), other).outcome is Outcome.ADMITTED
        bad.clear()
        assert swarm.verdict(first, held).outcome is Outcome.ADMITTED
