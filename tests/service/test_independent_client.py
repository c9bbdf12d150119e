"""A client that was written from docs/protocol.md alone, against the real parts over real HTTP.

What would break for whom: whoever implements a worker, a relay or an auditor from the page would be refused, or would
believe what is forged, although the project's own client is content.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dated_origin import DatedOrigin
from independent.broadcast import Publications, Sources, payload_name
from independent.client import Client
from independent.descriptor import run_id_of
from independent.envelope import seal
from independent.evidence import Judge
from independent.log import leaf_hash, root_of
from independent.measure import Model
from independent.messages import ENTRY, RECEIPT
from independent.notes import seal_checkpoint
from independent.submission import Row
from independent.values import Refused, decode, encode
from swarm import RUN_KEY, Swarm, learning, running, small_spec
from tampering import tampered
from waiting import until

from node.policy.file import load_policy
from node.protocol.run import ProofSpec, ThinkingSpec
from shardcast import OriginServer

HONEST_GROUPS = 3


def model_maker(folder: Path) -> Callable[[bytes], Model]:
    """What the client is handed: of a policy file, the project's forward pass over a sequence."""
    folder.mkdir()

    @functools.cache
    def model_of(file: bytes) -> Model:
        path = folder / "policy.safetensors"
        path.write_bytes(file)
        policy = load_policy(path, dtype=torch.float32)

        def states(tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
            with torch.inference_mode():
                ids = torch.tensor([list(tokens)])
                hidden = policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
                return hidden.numpy(), policy.logits(hidden).numpy()

        return states

    return model_of


@dataclass(frozen=True)
class Run:
    """A run that is being served, the client that worked in it, and what it saw on the way."""

    swarm: Swarm
    client: Client
    second_policy_bytes: int
    early_descriptor: bytes
    early_checkpoint: bytes

    def auditor(self, url: str | None = None) -> Client:
        """The client as it is now, which asks `url` from now on."""
        client = copy.copy(self.client)
        client.url = url or client.url
        client.descriptors = copy.copy(client.descriptors)
        client.receipts = list(client.receipts)
        return client


def work(client: Client, alter: Callable[[list[Row]], list[Row]] = list) -> dict[str, object]:
    """Lease, draw and submit one slot, altered; return the receipt."""
    (lease,) = until(client.lease)
    return client.receipt(client.submit(lease, alter(client.draw(lease))))


def with_other_seed(rows: list[Row]) -> list[Row]:
    return [*rows[:-1], replace(rows[-1], seed=bytes(16))]


def with_other_token(rows: list[Row]) -> list[Row]:
    """The last token of a row that no end mark ends: nothing is read after it, so no state changes."""
    at = max(range(len(rows)), key=lambda number: len(rows[number].completion_ids))
    *tokens, last = rows[at].completion_ids
    return [*rows[:at], replace(rows[at], completion_ids=(*tokens, last ^ 1)), *rows[at + 1 :]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Run]:
    """One step is trained on two groups of the client, which goes on with the policy that it made."""
    folder = tmp_path_factory.mktemp("independent")
    spec = small_spec(proofs=ProofSpec(chunk_tokens=5))
    sampling = msgspec.structs.replace(spec.sampling, group_size=2, max_new_tokens=12)
    recipe = msgspec.structs.replace(spec.training, steps=2, minibatches=2)
    spec = msgspec.structs.replace(spec, sampling=sampling, training=recipe)
    with running(folder / "run", tiny_policy_path, spec=spec) as swarm, learning(swarm, folder / "trainer"):
        client = Client(swarm.home.run_id, swarm.url, model_maker(folder / "model"))
        client.join()
        early_descriptor, early_checkpoint = client.descriptors.envelope, client.get("/v1/log/checkpoint").body
        assert early_descriptor is not None
        assert client.fetch_head(client.sources()) == 0
        for _ in range(2):
            work(client)
        sources = client.sources()
        until(lambda: client.fetch_head(sources) == 1)
        work(client)
        work(client, with_other_seed)
        work(client, with_other_token)
        client.see_checkpoint()
        yield Run(swarm, client, sources.fetched_bytes, early_descriptor, early_checkpoint)


def test_the_page_is_enough_to_join_work_and_be_paid(run: Run) -> None:
    client = run.client
    outcomes = [(receipt["outcome"], receipt["reason"]) for receipt in client.receipts]
    assert outcomes == [("admitted", None)] * HONEST_GROUPS + [("rejected", "wrong_seed"), ("rejected", "wrong_token")]
    assert client.files[0] == run.swarm.policy_path.read_bytes()
    # Random weights earn nothing, so the step changed nothing, and the delta says only that.
    assert client.files[0] == client.files[1]
    assert 0 < run.second_policy_bytes < 1024, "the second policy must have come by a delta"
    checkpoint = client.see_checkpoint()
    for receipt in client.receipts:
        client.check_inclusion(receipt, checkpoint)


def test_an_auditor_by_the_page_agrees_with_an_honest_run(run: Run) -> None:
    """With every verdict decided again from its evidence, rejections and measurements among them."""
    auditor = run.auditor()
    log, disagreements = auditor.audit()
    assert disagreements == []
    assert [entry["type"] for entry in log.entries if entry is not None].count("batch") == 1
    said, account = auditor.standing(), log.account(auditor.signer.node)
    assert (said["verified"], said["strikes"]) == (account.standing.verified, account.standing.strikes) == (0, 2)
    credit = account.vested, account.unvested, account.void
    assert (said["vested"], said["unvested"], said["void"]) == credit


def test_the_page_is_enough_where_environments_have_rules_of_their_own(tmp_path: Path, tiny_policy_path: Path) -> None:
    """Stop strings and ended thoughts: one token further or one earlier, and the client would be rejected."""
    spec = small_spec(proofs=ProofSpec(chunk_tokens=5))
    thinking = ThinkingSpec(tokens=7, end="</think>12")
    environment = msgspec.structs.replace(
        spec.environments[0], stop=tuple("abcdefgh"), thinking=thinking, max_new_tokens=16
    )
    sampling = msgspec.structs.replace(spec.sampling, group_size=4, max_new_tokens=40)
    spec = msgspec.structs.replace(spec, environments=(environment,), sampling=sampling)
    drawn = list[int]()

    def note(rows: list[Row]) -> list[Row]:
        drawn.extend(len(row.completion_ids) for row in rows)
        return rows

    with running(tmp_path / "run", tiny_policy_path, spec=spec) as swarm:
        client = Client(swarm.home.run_id, swarm.url, model_maker(tmp_path / "model"))
        client.join()
        client.fetch_head(client.sources())
        receipts = [work(client, note) for _ in range(3)]
        assert [receipt["outcome"] for receipt in receipts] == ["admitted"] * 3, receipts
        client.see_checkpoint()
        assert client.audit()[1] == []
    end_tokens = 3
    assert 16 - end_tokens in drawn, "no thought was ended"
    assert min(drawn) < 16 - end_tokens, "no turn was stopped"


def altered_leaf(number: int, before: bytes, after: bytes) -> Callable[[str, bytes], bytes]:
    """Alter one leaf of the log on its way."""

    def alter(path: str, body: bytes) -> bytes:
        if not path.startswith("/v1/log/entries"):
            return body
        leaves = body.split(b"\n")
        assert before in leaves[number], leaves[number]
        leaves[number] = leaves[number].replace(before, after, 1)
        return b"\n".join(leaves)

    return alter


@pytest.mark.parametrize(
    ("number", "before", "after", "rules"),
    [
        (0, b'"spec_digest":"', b'"spec_digest":"0', {"root", "encoding", "run"}),
        (1, b'"version":0', b'"version":1', {"root", "policy", "outcome"}),
        (2, b'"tokens":', b'"tokens":1', {"root", "receipt", "tokens"}),
        (2, b'"rewards":[0.0', b'"rewards":[1.0', {"root", "receipt", "rewards"}),
        (2, b'"token_margin":', b'"token_margin":9', {"root", "receipt", "contradiction"}),
        (2, b'"recheck":false', b'"recheck": false', {"root", "encoding", "receipt", "batch"}),
        (4, b'"submissions":["', b'"submissions":["00","', {"root", "encoding", "policy"}),
        (4, b'"step":0', b'"step":4', {"root", "batch", "gap"}),  # after whose last chance work goes on
    ],
)
def test_a_leaf_or_batch_that_was_altered_on_its_way_is_named(
    run: Run, number: int, before: bytes, after: bytes, rules: set[str]
) -> None:
    with tampered(run.swarm.url, altered_leaf(number, before, after)) as url:
        _, disagreements = run.auditor(url).audit()
    assert {one.rule for one in disagreements} == rules
    assert all(one.index is None or one.index >= number for one in disagreements), "what stands before is as it was"


def test_evidence_that_was_altered_is_named(run: Run) -> None:
    """A request or a file that is not what the log names convicts nobody but who serves it."""
    for kind in ("request", "body"):
        log, _ = run.auditor().audit()
        entry = log.entries[2]
        assert entry is not None
        name = entry[kind]

        def alter(path: str, body: bytes, name: str = name) -> bytes:
            return body[:-1] + bytes([body[-1] ^ 1]) if path == f"/v1/blobs/{name}" else body

        with tampered(run.swarm.url, alter) as url:
            _, disagreements = run.auditor(url).audit()
        assert [(one.rule, one.index) for one in disagreements] == [("evidence", 2)], kind


@pytest.mark.parametrize("other", [{"slot": 77}, {"candidate": 1}])
def test_honest_work_that_is_rejected_as_another_slots_is_named(run: Run, other: dict[str, int]) -> None:
    auditor = run.auditor()
    log, _ = auditor.audit()
    entry = log.entries[2]
    assert entry is not None
    wrong = {"outcome": "rejected", "reason": "wrong_prompt", "figures": None, "totals": None, "rewards": None}
    log.entries[2] = entry | wrong | other
    blob = lambda name: auditor.get(f"/v1/blobs/{name}", max_bytes=2**24).expect(200)  # noqa: E731
    (found,) = Judge(log, blob, auditor.policy, auditor.model).check(2)
    assert (found.rule, found.index) == ("evidence", 2)
    assert "another slot" in found.detail


def test_an_operator_who_signs_another_history_is_found_out_by_a_receipt(run: Run) -> None:
    """Here everything is signed and fits: only who was there before, or has the evidence, can tell."""
    auditor = run.auditor()
    leaves = auditor.leaves(auditor.see_checkpoint()["size"])
    entry = decode(ENTRY, leaves[2], max_bytes=2**20)
    leaves[2] = encode(ENTRY, entry | {"rewards": [1.0, 1.0]})
    signed = seal_checkpoint(RUN_KEY, auditor.run_id, len(leaves), root_of([leaf_hash(leaf) for leaf in leaves]))

    def alter(path: str, body: bytes) -> bytes:
        if path == "/v1/log/checkpoint":
            return signed
        return b"".join(leaf + b"\n" for leaf in leaves) if path.startswith("/v1/log/entries") else body

    with tampered(run.swarm.url, alter) as url:
        with pytest.raises(Refused, match="inconsistent"):
            run.auditor(url).audit()
        newcomer = run.auditor(url)
        newcomer.checkpoint = None
        _, disagreements = newcomer.audit()
        assert {(one.rule, one.index) for one in disagreements} == {("receipt", 2), ("rewards", 2)}
        newcomer.receipts = []
        _, disagreements = newcomer.audit()
        assert {(one.rule, one.index) for one in disagreements} == {("rewards", 2)}


def test_a_truncated_log_is_noticed(run: Run) -> None:
    def cut(path: str, body: bytes) -> bytes:
        return b"".join(body.splitlines(keepends=True)[:-1]) if path.startswith("/v1/log/entries") else body

    def earlier(path: str, body: bytes) -> bytes:
        return run.early_checkpoint if path == "/v1/log/checkpoint" else body

    for alter, code in ((cut, "truncated_log"), (earlier, "inconsistent")):
        with tampered(run.swarm.url, alter) as url, pytest.raises(Refused, match=code):
            run.auditor(url).audit()


def test_a_forged_receipt_is_refused(run: Run) -> None:
    client, receipts = run.auditor(), run.client.receipts
    first, second = receipts[0]["submission"], receipts[1]["submission"]
    genuine = client.get(f"/v1/receipts/{first}").body
    assert client.check_receipt(genuine, first) == receipts[0]
    paid_more = encode(RECEIPT, receipts[0] | {"tokens": 10**6})
    stranger = Ed25519PrivateKey.from_private_bytes(b"\7" * 32)
    forgeries = {
        "bad_signature": genuine.replace(b"admitted", b"rejected"),
        "bad_envelope": seal(stranger, "swarmproof/receipt", paid_more),
        "bad_receipt": client.get(f"/v1/receipts/{second}").body,
        "wrong_run": seal(RUN_KEY, "swarmproof/receipt", encode(RECEIPT, receipts[0] | {"run_id": "0" * 64})),
    }
    for code, forged in forgeries.items():
        with (
            tampered(run.swarm.url, lambda path, body, forged=forged: forged if "receipts" in path else body) as url,
            pytest.raises(Refused, match=code),
        ):
            run.auditor(url).receipt(first)


def test_a_receipt_that_the_log_does_not_keep_is_noticed(run: Run) -> None:
    """The run's key signed it, and the log says otherwise: that is what a worker keeps receipts for."""
    client = run.auditor()
    promised = client.receipts[0] | {"leaf_hash": leaf_hash(b"another entry").hex()}
    with pytest.raises(Refused, match="not_included"):
        client.check_inclusion(promised, client.see_checkpoint())
    client.receipts = [promised]
    _, disagreements = client.audit()
    assert [(one.rule, one.index) for one in disagreements] == [("receipt", promised["log_index"])]


def test_another_runs_an_expired_and_an_older_descriptor_are_refused(run: Run) -> None:
    stranger = Client("0" * 64, run.swarm.url, run.client.model_of)
    with pytest.raises(Refused, match="wrong_run"):
        stranger.join()
    late = run.auditor()
    late.clock = lambda: time.time() + 2 * 3600
    with pytest.raises(Refused, match="expired"):
        late.refresh()
    run.client.refresh()
    with (
        tampered(run.swarm.url, lambda path, body: run.early_descriptor if path == "/v1/run" else body) as url,
        pytest.raises(Refused, match="rollback"),
    ):
        run.auditor(url).refresh()


def test_wrong_chunks_are_taken_from_nobody_and_the_good_source_suffices(run: Run) -> None:
    counter = itertools.count()

    def alter(path: str, body: bytes) -> bytes:
        if not path.startswith("/v1/payloads/"):
            return body
        return (b"", body[:-1], body[:-1] + bytes([body[-1] ^ 1]), body + b"\0")[next(counter) % 4]

    client = run.auditor()
    client.files = {}
    with tampered(run.swarm.origin_url, alter) as bad:
        sources = Sources([bad, run.swarm.origin_url])
        assert client.fetch_head(sources) == 1
        assert client.files[1] == run.client.files[1]
        assert {code for url, code in sources.refused if url == bad} >= {"wrong_chunk", "oversized"}
        client.files = {}
        with pytest.raises(Refused, match="no_chunk"):
            client.fetch_head(Sources([bad]))
        assert client.files == {}


def test_a_policy_that_changed_comes_by_a_delta_and_whole_where_a_relay_spoils_that(tmp_path: Path) -> None:
    rng = np.random.default_rng(21)
    old = rng.normal(0, 0.02, 400_000).astype(np.float32)
    new = old.view(np.uint32) + rng.integers(-1, 2, old.size).astype(np.uint32) * (rng.random(old.size) < 0.1)
    files = old.tobytes(), new.astype(np.uint32).tobytes()
    public_key = RUN_KEY.public_key().public_bytes_raw().hex()
    origin = DatedOrigin(tmp_path / "origin", RUN_KEY, run_id_of(public_key))
    server = OriginServer(origin)
    url = f"http://127.0.0.1:{server.start()}"
    try:
        for version, data in enumerate(files):
            (tmp_path / "file").write_bytes(data)
            server.publish(tmp_path / "file", version=version)
        publications = Publications(run_id_of(public_key), public_key)
        head = Sources([url]).head(publications, now=time.time())
        manifest = Sources([url]).manifest(publications, head["manifest_digest"], now=time.time())
        (delta,) = manifest["deltas"]
        name = payload_name(delta["payload"])

        def spoil(path: str, body: bytes) -> bytes:
            return body[:-1] + bytes([body[-1] ^ 1]) if name in path else body

        held = {manifest["deltas"][0]["base"]: files[0]}
        with tampered(url, spoil) as bad:
            for source, most in ((url, len(files[1]) // 4), (bad, len(files[1]))):
                sources = Sources([source])
                assert sources.file(manifest, held) == files[1]
                assert sources.fetched_bytes <= most
        assert sources.refused[0] == (bad, "wrong_chunk")
    finally:
        server.stop()
        origin.close()
