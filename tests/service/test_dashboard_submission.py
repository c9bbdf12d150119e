"""What a real verifier saw in real submissions, on their pages."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from swarm import Peer, Swarm, running, small_spec

from coordinator.dashboard.submissions import SubmissionView, read_record, view_of
from node.protocol.admission import Outcome
from node.protocol.reasons import Reason
from node.protocol.run import ProofSpec


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Swarm]:
    folder = tmp_path_factory.mktemp("swarm")
    with running(folder, tiny_policy_path, spec=small_spec(proofs=ProofSpec())) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def peer(swarm: Swarm) -> Peer:
    return swarm.peer()


def view(swarm: Swarm, submission: str) -> SubmissionView:
    home = swarm.home
    with home.database.read() as connection:
        record = read_record(connection, submission, spec=home.spec, run_id=home.run_id)
    assert record is not None
    return view_of(record, home.blobs, spec=home.spec, row=None)


def test_an_admitted_group_shows_each_token_with_its_margin_and_each_chunk_within_the_limits(
    swarm: Swarm, peer: Peer
) -> None:
    lease = peer.lease()
    rollouts = swarm.honest(lease)
    receipt = swarm.judge(peer, rollouts, lease)
    assert receipt.outcome is Outcome.ADMITTED
    found = view(swarm, receipt.submission)
    assert "A:" in found.prompt
    terms = re.search(r"Q:(\d+)\+(\d+)=", found.prompt)
    assert found.environment == ("reverse" if terms is None else "arithmetic")
    assert terms is None or found.answer == str(int(terms[1]) + int(terms[2]))
    assert [row.count for row in found.rows] == [len(rollout.completion_ids) for rollout in rollouts]
    for row, rollout in zip(found.rows, rollouts, strict=True):
        assert [token.id for token in row.shown] == rollout.completion_ids
        assert {token.grade for token in row.shown} <= {0, 1, 2, 3, 4}
        assert len(row.chunks) == len(rollout.proofs)
        assert all(len(chunk.cells) == 4 and not any(cell.over for cell in chunk.cells[:3]) for chunk in row.chunks)
    assert found.judgements[0].why.startswith("All 4 completions were measured")


def test_a_changed_token_is_the_one_that_stands_out(swarm: Swarm, peer: Peer) -> None:
    lease = peer.lease()
    rollouts = swarm.honest(lease)
    row = max(range(4), key=lambda at: len(rollouts[at].completion_ids))
    tokens = list(rollouts[row].completion_ids)
    tokens[0] = 5 + (tokens[0] + 1) % 90
    rollouts[row] = msgspec.structs.replace(rollouts[row], completion_ids=tokens)
    receipt = swarm.judge(peer, rollouts, lease)
    assert receipt.outcome is Outcome.REJECTED
    found = view(swarm, receipt.submission)
    assert [one.number for one in found.rows if one.failed] == [row]
    assert found.chosen == row
    assert found.rows[row].shown[0].grade == 5
    assert f"Completion {row}:" in found.judgements[0].why


def test_a_file_that_cannot_be_read_has_a_page_that_says_so(swarm: Swarm, peer: Peer) -> None:
    lease = peer.lease()
    receipt = swarm.verdict(peer, peer.submit(lease.lease_id, b"PAR1 <script>alert(1)</script> PAR1"))
    assert receipt.reason is Reason.MALFORMED_SUBMISSION
    page = peer.send("GET", f"/submissions/{receipt.submission}").body.decode()
    words = html.unescape(re.sub(r"<[^>]+>", " ", page))
    assert "could not be read" in words
    assert "leaf hash" in words
