"""A worker that is right until it is trusted, and then cheats where it hopes that nobody looks; over real HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select, update
from swarm import Peer, Swarm, running, small_spec
from waiting import until

from coordinator.storage import log
from coordinator.storage.schema import groups, nodes
from coordinator.storage.totals import partly_measured
from node.engines.torch import TorchEngine
from node.errors import Refused
from node.joining.session import JoinSettings
from node.protocol.admission import Outcome
from node.protocol.messages import LogEntry, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.run import StandingSpec
from node.worker.daemon import WorkerSettings, run_worker
from shardcast.wire import decode

RIGHT_SLOTS = 5
KEYS = 12
SPEC = small_spec(standing=StandingSpec(probation=1, full_rate_floor=0.05, vesting=2, ban_after=100))
SPEC = msgspec.structs.replace(SPEC, batch=msgspec.structs.replace(SPEC.batch, groups_per_step=60))


def cheat_until_caught(swarm: Swarm) -> tuple[Peer, list[str]]:
    """A new key that earns trust and then changes one row of each group; the submissions that got through."""
    turncoat = swarm.peer()
    for _ in range(RIGHT_SLOTS):
        lease = turncoat.lease()
        assert swarm.judge(turncoat, swarm.honest(lease), lease).outcome is Outcome.ADMITTED
    unseen = []
    while True:
        lease = turncoat.lease()
        rows = swarm.honest(lease)
        rows[2] = msgspec.structs.replace(rows[2], logprobs=[value - 0.5 for value in rows[2].logprobs])
        receipt = swarm.judge(turncoat, rows, lease)
        if receipt.outcome is Outcome.REJECTED:
            assert receipt.reason is Reason.WRONG_LOGPROB
            return turncoat, unseen
        unseen.append(receipt.submission)


def settled(swarm: Swarm) -> None:
    """Wait until nothing is due for a second verdict."""

    def nothing_is_due() -> bool:
        with swarm.home.database.read() as connection:
            return not partly_measured(connection).get("due")

    until(nothing_is_due)


def entries(swarm: Swarm) -> list[VerdictEntry]:
    with swarm.home.database.read() as connection:
        leaves = [decode(LogEntry, leaf, max_bytes=10_000) for leaf in log.leaves(connection, 0, 10_000)]
    return [entry for entry in leaves if isinstance(entry, VerdictEntry)]


def test_what_a_turncoat_slipped_through_is_found_when_it_is_caught_and_is_not_trained_on(
    tmp_path: Path, tiny_policy_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path / "run", tiny_policy_path, spec=SPEC) as swarm:
        # Each slot is caught with about 2 in 5: of a dozen keys one gets something through.
        for _ in range(KEYS):
            turncoat, unseen = cheat_until_caught(swarm)
            if unseen:
                break
        assert unseen
        settled(swarm)
        again = {entry.submission: entry for entry in entries(swarm) if entry.recheck}
        assert {again[name].outcome for name in unseen} == {Outcome.REJECTED}
        assert {again[name].reason for name in unseen} == {Reason.WRONG_LOGPROB}
        with swarm.home.database.read() as connection:
            waiting = connection.execute(select(groups.c.submission)).scalars().all()
        assert not set(unseen) & set(waiting)
        swarm.audit(tmp_path / "auditor")
    report = json.loads(capsys.readouterr().out)
    assert (report["problems"], report["outcome"]) == ([], "agree")
    assert report["results"]["unseen"] == len(unseen), "an auditor sees what one row did not show"
    assert report["reached_training"] == []
    (account,) = [one for one in report["accounts"] if one["node"] == turncoat.node]
    assert account["void"] > 0
    assert account["pending"] == 0
    assert account["full_rate"] == 1.0
    assert account["strikes"] == 1 + len(unseen)


def test_a_banned_nodes_worker_ends_with_the_reason_and_does_not_knock_for_ever(
    tmp_path: Path, tiny_policy_path: Path
) -> None:
    with running(tmp_path / "run", tiny_policy_path, spec=SPEC) as swarm:
        peer = swarm.peer()
        with swarm.home.database.write() as connection:
            connection.execute(update(nodes).where(nodes.c.node == peer.node).values(strikes=100, instance=""))
        settings = WorkerSettings(
            join=JoinSettings(run_id=swarm.home.run_id, coordinators=(swarm.url,)), state=tmp_path / "worker"
        )
        joined = run_worker(settings, key=peer.key, make_engine=TorchEngine, stop=asyncio.Event())
        with pytest.raises(Refused, match="100 slots of node") as caught:
            asyncio.run(asyncio.wait_for(joined, 60))
    assert caught.value.code == Reason.BANNED
