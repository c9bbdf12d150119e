"""A worker's receipts against the run's log, by `swarmproof receipt verify`: what it can hold the run to.

A run that forgets an entry, or says something else in its place, has signed both.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from actors import PUBLIC_KEY, Actors, spec_of
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import delete, select, update
from swarm import RUN_KEY, serve
from waiting import until
from witnessing import witnessing

from coordinator.run import witnesses
from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.run.witnesses import witnessing_thread
from coordinator.storage import log
from coordinator.storage.log_tree import LogTree
from coordinator.storage.schema import log_entries, log_nodes
from node import cli
from node.audit.witnesses import WitnessRule
from node.client.witness import parse_witnesses
from node.protocol.admission import Outcome
from node.protocol.checkpoints import log_key
from node.protocol.messages import MESSAGE_VERSION, RECEIPT_DOMAIN, KeptReceipt, Receipt
from node.protocol.receipts import open_receipt
from shardcast.envelope import seal
from shardcast.wire import encode


@dataclass(frozen=True)
class Scene:
    """A run with two verdicts, and their receipts as a worker has them."""

    actors: Actors
    url: str
    urls: list[str]
    envelopes: list[bytes]
    folder: Path

    def verify(self, *arguments: object) -> Result:
        command = ["receipt", "verify", "--run-id", self.actors.home.run_id, *map(str, arguments)]
        return CliRunner().invoke(cli.main, command)

    def report(self, *arguments: object) -> dict[str, Any]:
        return json.loads(self.verify("--json", *arguments).stdout)

    def file(self, data: bytes) -> Path:
        path = self.folder / "receipt"
        path.write_bytes(data)
        return path

    def rewrite_log(self, change: Any) -> None:
        """Change the leaves, and make a tree that fits them, as an operator can who wants another history."""
        with self.actors.home.database.write() as connection:
            connection.execute(change)
            every = connection.execute(select(log_entries.c.leaf).order_by(log_entries.c.index)).scalars().all()
            tree = LogTree()
            derived = [node for leaf in every for node in tree.append(bytes(leaf))]
            connection.execute(delete(log_nodes))
            log.add_nodes(connection, derived)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    actors = Actors(create_home(tmp_path / "run", public_key=PUBLIC_KEY, spec=spec_of()))
    actors.register("a", admitted=0)
    actors.publish(0)
    names = [actors.work("a"), actors.work("a", Outcome.REJECTED)]
    with serve(Coordinator(actors.home, key=RUN_KEY)) as url:
        urls = [f"{url}/v1/receipts/{name}" for name in names]
        envelopes = []
        for each in urls:
            with urllib.request.urlopen(each, timeout=60) as reply:
                envelopes.append(reply.read())
        yield Scene(actors, url, urls, envelopes, tmp_path)
    actors.home.database.close()


def opened(envelope: bytes) -> Receipt:
    return open_receipt(envelope, signer=None)


def sealed(receipt: Receipt, key: Ed25519PrivateKey = RUN_KEY) -> bytes:
    return seal(encode(receipt), domain=RECEIPT_DOMAIN, version=MESSAGE_VERSION, key=key)


def test_honest_receipts_agree_from_urls_a_file_and_a_workers_own_list(scene: Scene) -> None:
    kept = b"".join(encode(KeptReceipt(receipt=opened(one), envelope=one)) + b"\n" for one in scene.envelopes)
    lines = scene.folder / "receipts.ndjson"
    lines.write_bytes(kept)
    result = scene.verify(*scene.urls, scene.file(scene.envelopes[0]), lines)
    assert (result.exit_code, result.output.count(" agree\n")) == (0, 5), result.output
    report = scene.report(lines, "--coordinator", scene.url)
    assert (report["outcome"], report["exit_code"]) == ("agree", 0)
    assert [one["log_index"] for one in report["receipts"]] == [2, 3]


def found(scene: Scene, envelope: bytes) -> str:
    path = scene.file(envelope)
    report = scene.report(path, "--coordinator", scene.url)
    assert report["exit_code"] == scene.verify(path, "--coordinator", scene.url).exit_code == 1
    (one,) = report["receipts"]
    return str(one["code"])


def test_a_receipt_that_says_another_outcome_than_its_leaf_is_found_out(scene: Scene) -> None:
    forged = msgspec.structs.replace(opened(scene.envelopes[1]), outcome=Outcome.ADMITTED, reason=None)
    assert found(scene, sealed(forged)) == "receipt_differs"


def test_a_receipt_that_another_key_signed_is_not_the_runs(scene: Scene) -> None:
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    assert found(scene, sealed(opened(scene.envelopes[0]), other)) == "not_the_runs"
    damaged = bytearray(scene.envelopes[0])
    damaged[60] ^= 1
    assert found(scene, bytes(damaged)) == "not_the_runs"


def test_a_log_that_lost_the_entry_is_found_out(scene: Scene) -> None:
    """What a contributor sees of a database that was restored from an older copy."""
    scene.rewrite_log(delete(log_entries).where(log_entries.c.index == 3))
    assert found(scene, scene.envelopes[1]) == "entry_missing"


def test_a_log_that_says_otherwise_in_its_place_is_found_out(scene: Scene) -> None:
    with scene.actors.home.database.read() as connection:
        leaf = bytes(connection.execute(select(log_entries.c.leaf).where(log_entries.c.index == 2)).scalar_one())
    forged = leaf.replace(b'"tokens":5', b'"tokens":6')
    scene.rewrite_log(update(log_entries).where(log_entries.c.index == 2).values(leaf=forged))
    assert found(scene, scene.envelopes[0]) == "inclusion_proof"


def test_what_could_not_be_checked_is_neither(scene: Scene) -> None:
    unknown = f"{scene.url}/v1/receipts/{'ab' * 32}"
    assert scene.report(unknown)["outcome"] == "incomplete"
    assert scene.verify(unknown).exit_code == 2
    scene.actors.now += 60  # what a rejected node waits
    (lease,) = scene.actors.lease("a", held=(0,))
    waiting = scene.actors.submit("a", lease.lease_id)
    assert "no verdict yet" in scene.verify(f"{scene.url}/v1/receipts/{waiting}").output
    path = scene.file(scene.envelopes[0])
    assert "--coordinator" in scene.verify(path).stderr
    assert scene.verify(scene.file(b"not a receipt\n"), "--coordinator", scene.url).exit_code == 2


def test_a_log_is_believed_as_far_as_a_witness_has_signed_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of two logs could show a contributor one that holds its receipt, and everybody else the other."""
    monkeypatch.setattr(witnesses, "ROUND_SECONDS", 0.05)
    monkeypatch.setattr(
        "node.commands.receipt.witness_rule",
        lambda texts, quorum: WitnessRule(parse_witnesses(texts), quorum or len(texts), patience_seconds=0.0),
    )
    home = scene.actors.home
    with witnessing(scene.folder / "witness", [log_key(home.run_id, PUBLIC_KEY)]) as witness:
        asked = (scene.urls[0], "--witness", f"{witness.key}@{witness.url}", "--state", scene.folder / "mine")
        unsigned = scene.verify(*asked)
        assert (unsigned.exit_code, "witnessed by 0 of 1" in unsigned.output) == (2, True), unsigned.output
        with witnessing_thread(Coordinator(home, key=RUN_KEY), [witness]):
            until(lambda: scene.verify(*asked).exit_code == 0)
        with home.database.read() as connection:
            leaf = bytes(connection.execute(select(log_entries.c.leaf).where(log_entries.c.index == 3)).scalar_one())
        forged = leaf.replace(b'"tokens":5', b'"tokens":6')
        scene.rewrite_log(update(log_entries).where(log_entries.c.index == 3).values(leaf=forged))
        report = scene.report(*asked)
    assert (report["outcome"], report["receipts"][0]["result"]) == ("disagree", "agree")
    assert [one["code"] for one in report["problems"]] == ["log_forked"]
    assert len(list((scene.folder / "mine").glob("evidence-*/*.checkpoint"))) == 2
