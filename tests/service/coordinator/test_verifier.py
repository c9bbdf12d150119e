"""The verifier and policies that arrive while completions are drawn: what the log has is all there is."""

from __future__ import annotations

import asyncio
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from swarm import Swarm, running, small_spec
from verifying import Part, drawn
from waiting import eventually, until

from coordinator.run.history import KeptHistory
from coordinator.storage import log, verdicts
from coordinator.storage.verdicts import QueueItem
from coordinator.verifier import daemon as verifier
from coordinator.verifier import deferrals
from coordinator.verifier import policy_cache as policy_shelf
from coordinator.verifier.bodies import BodyReader
from coordinator.verifier.policy_cache import PolicyCache
from node.environments import load_environment
from node.episodes.expected import expected_of
from node.policy import file as policy_file
from node.policy import reading
from node.policy.arrival import ArrivingPolicies
from node.policy.file import Blueprint, Policy, load_policy, save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.policy.weights import StoredTensor
from node.protocol.admission import Outcome, Verdict
from node.protocol.messages import Lease
from node.protocol.reasons import Reason
from node.protocol.submission import Rollout
from node.submission.writer import write_rollouts
from node.verification.measure import EngineAway, PolicyUnavailable
from node.verification.plan import Claim
from node.verification.prefill import TransformersPrefills
from shardcast import Client
from shardcast.errors import LocalFault


@dataclass
class Run:
    """A run at policy 0, whose next policy lies ready to be published."""

    folder: Path
    swarm: Swarm
    policies: dict[int, Policy]

    def publish(self, version: int) -> None:
        self.swarm.publish(path_of(self.folder, version), version=version)

    def switched(self, lease: Lease, *, to: int = 1) -> bytes:
        """An honest submission that goes on under policy `to` after its second token."""
        home = self.swarm.home
        expected = expected_of(
            home.spec,
            self.policies[0],
            [load_environment(environment) for environment in home.spec.environments],
            run_id=home.run_id,
            version=lease.version,
            manifest_digest=lease.manifest_digest,
            slot=lease.slot,
        )
        parts: list[Part] = [(0, self.policies[0], 2), (to, self.policies[1], None)]
        return write_rollouts([drawn(parts, expected, seed, spec=home.spec) for seed in expected.seeds])


def path_of(folder: Path, version: int) -> Path:
    return folder / f"policy-{version}.safetensors"


def write_policies(folder: Path) -> dict[int, Policy]:
    """Two policies, a small step apart."""
    loaded = {}
    for version in (0, 1):
        model = make_model(seed=20)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(version * 2e-3 * torch.sign(torch.randn(weight.shape, generator=generator)))
        save_policy(model, make_tokenizer(), path_of(folder, version))
        loaded[version] = load_policy(path_of(folder, version), dtype=torch.float32)
    return loaded


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    policies = write_policies(tmp_path)
    spec = small_spec()
    sampling = msgspec.structs.replace(spec.sampling, max_new_tokens=12, max_version_lead=2)
    spec = msgspec.structs.replace(spec, sampling=sampling)
    with running(tmp_path, path_of(tmp_path, 0), spec=spec) as swarm:
        yield Run(tmp_path, swarm, policies)


def test_work_that_went_on_under_a_policy_of_the_run_is_admitted(run: Run) -> None:
    peer = run.swarm.peer()
    lease = peer.lease()
    run.publish(1)
    receipt = run.swarm.verdict(peer, peer.submit(lease.lease_id, run.switched(lease)))
    assert (receipt.outcome, receipt.version) == (Outcome.ADMITTED, 0), receipt.detail
    kept = KeptHistory(run.folder / "verifier", run_id=run.swarm.home.run_id)
    with run.swarm.home.database.read() as connection:
        size = log.size(connection)
    until(lambda: (seen := kept.load()) is not None and seen.size == size)  # or it would go on from an older database


def test_naming_a_policy_that_is_not_in_the_log_is_rejected_at_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy is logged before it is announced, so only a liar is ahead; waiting for it would keep others waiting."""
    readings = counted(monkeypatch)
    peer = run.swarm.peer()
    lease = peer.lease()
    receipt = run.swarm.verdict(peer, peer.submit(lease.lease_id, run.switched(lease)))
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.WRONG_SEGMENTS)
    assert receipt.detail == "Row 0: policy 1 was not published."
    assert len(readings) == 1


def test_a_policy_that_is_logged_during_the_verification_is_not_denied_after_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log would have the policy before the verdict that it was not published, and an audit would convict us."""
    readings = counted(monkeypatch, meanwhile=lambda: run.publish(1))
    peer = run.swarm.peer()
    lease = peer.lease()
    receipt = run.swarm.verdict(peer, peer.submit(lease.lease_id, run.switched(lease)))
    assert receipt.outcome is Outcome.ADMITTED, receipt.detail
    assert len(readings) == 2


def counted(monkeypatch: pytest.MonkeyPatch, *, meanwhile: Callable[[], None] = lambda: None) -> list[Path]:
    """What the verifier reads from now on; `meanwhile` happens once the first has been judged."""
    readings: list[Path] = []
    read, decide_many = verifier.read, verifier.decide_many

    def reading(body: Path, **arguments: Any) -> list[Rollout] | Verdict:
        readings.append(body)
        return read(body, **arguments)

    async def deciding(claims: Sequence[Claim], **arguments: Any) -> list[Verdict | PolicyUnavailable]:
        decided = await decide_many(claims, **arguments)
        if len(readings) == 1:
            await asyncio.to_thread(meanwhile)
        return decided

    monkeypatch.setattr(verifier, "read", reading)
    monkeypatch.setattr(verifier, "decide_many", deciding)
    return readings


def test_a_policy_beyond_the_lead_is_rejected(run: Run) -> None:
    peer = run.swarm.peer()
    lease = peer.lease()
    receipt = run.swarm.verdict(peer, peer.submit(lease.lease_id, run.switched(lease, to=3)))
    assert (receipt.outcome, receipt.reason) == (Outcome.REJECTED, Reason.WRONG_SEGMENTS)


def test_a_submission_that_no_verifier_survived_is_given_up_and_its_slot_is_leased_anew(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be measured again for ever, by one killed verifier after the other."""
    readings = counted(monkeypatch)
    monkeypatch.setattr(verdicts, "MAX_CLAIMS", 0)
    peer = run.swarm.peer()
    lease = peer.lease()
    receipt = run.swarm.verdict(peer, peer.submit(lease.lease_id, run.switched(lease)))
    assert (receipt.outcome, receipt.reason) == (Outcome.INDETERMINATE, Reason.VERIFIER_FAILED)
    assert "came to a verdict" in receipt.detail
    assert readings == []
    assert run.swarm.peer().lease().slot == lease.slot


def test_a_blob_folder_that_is_gone_for_a_while_uses_up_no_attempts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is not mounted for a minute would else cost everybody the work that waited, one after the other."""
    folder, attempts = run.folder / "data" / "blobs", list[int]()
    fetch = BodyReader._fetch

    def unmounted(reader: BodyReader, claimed: QueueItem) -> bytes | Verdict:
        if not attempts:
            folder.rename(run.folder / "unmounted")
        attempts.append(claimed.attempts)
        return fetch(reader, claimed)

    monkeypatch.setattr(deferrals, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(BodyReader, "_fetch", unmounted)
    peer = run.swarm.peer()
    lease = peer.lease()
    reply = peer.submit(lease.lease_id, write_rollouts(run.swarm.honest(lease)))
    until(lambda: len(attempts) > 3)
    assert set(attempts) == {0}
    (run.folder / "unmounted").rename(folder)
    assert run.swarm.verdict(peer, reply).outcome is Outcome.ADMITTED


def cache_of(run: Run, client: Client, folder: Path, *, memory: int = 2**30) -> PolicyCache:
    home = run.swarm.home
    prefills = TransformersPrefills(dtype=home.spec.model.dtype)
    return PolicyCache(home, client, prefills, memory=memory, folder=folder / "reading")


async def test_the_shelf_knows_policies_from_the_log_alone(run: Run, tmp_path: Path) -> None:
    """A version that somebody names, or that only the origin serves, is no policy of the run."""
    home = run.swarm.home
    run.swarm.origin_server.publish(path_of(run.folder, 1), version=1)
    async with Client(home.run_id, home.public_key, [run.swarm.origin_url], tmp_path / "shelf") as client:
        shelf = cache_of(run, client, tmp_path)
        with pytest.raises(PolicyUnavailable):
            await shelf.prefill(1)
        assert (await shelf.blueprint(0)).vocabulary == run.policies[0].vocabulary
        assert (await shelf.prefill(0)).blueprint.eos_ids == run.policies[0].eos_ids
        run.publish(1)
        assert (await shelf.prefill(1)).blueprint.vocabulary == run.policies[1].vocabulary


async def test_a_policy_that_no_source_serves_is_away(run: Run, tmp_path: Path) -> None:
    home = run.swarm.home
    async with Client(home.run_id, home.public_key, ["http://127.0.0.1:9"], tmp_path / "shelf") as client:
        shelf = cache_of(run, client, tmp_path)
        for ask in (shelf.blueprint, shelf.prefill):
            with pytest.raises(PolicyUnavailable):
                await ask(0)
        assert shelf.trouble == "", "a source may restart"


async def test_a_verifier_whose_sources_stay_away_says_once_what_to_do_until_one_serves(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy_shelf, "NO_SOURCE_SECONDS", 0.0)
    home = run.swarm.home
    async with Client(home.run_id, home.public_key, ["http://127.0.0.1:9"], tmp_path / "shelf") as client:
        cache = cache_of(run, client, tmp_path)
        for _ in range(2):
            with pytest.raises(PolicyUnavailable):
                await cache.prefill(0)
        assert cache.trouble == "no_source"
        assert caplog.text.count("start this verifier with --source") == 1
        client.set_sources([run.swarm.origin_url])
        await cache.prefill(0)
        assert cache.trouble == ""


async def test_an_old_policy_that_sources_no_longer_have_is_no_sign_that_they_are_away(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_shelf, "NO_SOURCE_SECONDS", 0.0)
    home = run.swarm.home
    async with Client(home.run_id, home.public_key, ["http://127.0.0.1:9"], tmp_path / "shelf") as client:
        cache = cache_of(run, client, tmp_path)
        cache._manifests = {0: "00" * 32, 1: "11" * 32}
        for _ in range(2):
            with pytest.raises(PolicyUnavailable):
                await cache.prefill(0)
        assert cache.trouble == ""


async def test_a_source_that_never_answers_holds_up_only_those_who_need_its_policy(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_shelf, "PATIENCE_SECONDS", 3.0)
    home = run.swarm.home
    with socket.create_server(("127.0.0.1", 0)) as silent:
        source = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with Client(home.run_id, home.public_key, [source], tmp_path / "shelf") as client:
            shelf = cache_of(run, client, tmp_path)
            for most in (60.0, 2.5):
                started = time.monotonic()
                with pytest.raises(PolicyUnavailable, match="being fetched"):
                    await shelf.prefill(0)
                assert time.monotonic() - started < most, "the second submission does not wait again"
            client.set_sources([run.swarm.origin_url])
            monkeypatch.setattr(policy_shelf, "PATIENCE_SECONDS", 60.0)
            await shelf.close()
            assert (await shelf.prefill(0)).blueprint.vocabulary == run.policies[0].vocabulary


@pytest.mark.parametrize("ask", ["prefill", "file", "streamed"])
async def test_a_policy_that_is_deleted_while_it_is_read_is_read_to_its_end(
    ask: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client deletes an old version when a newer one arrives; the verifier would begin a long load again."""
    home, folder = run.swarm.home, tmp_path / "shelf"
    read_header = reading.read_blueprint

    def deleting(path: Path) -> Blueprint:
        if path.resolve().parent == tmp_path / "reading":  # and not the other verifier's
            for brought in (folder / "versions").iterdir():
                brought.unlink()
        return read_header(path)

    monkeypatch.setattr(reading, "read_blueprint", deleting)
    async with Client(home.run_id, home.public_key, [run.swarm.origin_url], folder) as client:
        cache = cache_of(run, client, tmp_path, memory=0 if ask == "streamed" else 2**30)
        found = await (cache.file(0) if ask == "file" else cache.prefill(0))
        assert found.blueprint.vocabulary == run.policies[0].vocabulary
    assert list((tmp_path / "reading").iterdir()) == []


async def test_no_number_of_a_new_policy_is_read_from_disk_before_it_is_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether all are finite is seen while they arrive, in full or as a delta."""
    home, read_bytes = run.swarm.home, []
    read = policy_file.read_numbers

    def counted(tensor: StoredTensor, **part: Any) -> Iterator[torch.Tensor]:
        if tensor.file.resolve().is_relative_to(tmp_path / "shelf"):
            read_bytes.append(part["count"] * 4)
        return read(tensor, **part)

    monkeypatch.setattr(policy_file, "read_numbers", counted)
    run.publish(1)
    async with Client(
        home.run_id,
        home.public_key,
        [run.swarm.origin_url],
        tmp_path / "shelf",
        reader=ArrivingPolicies(home.spec.model.dtype),
    ) as client:
        cache = cache_of(run, client, tmp_path, memory=0)
        for version in (0, 1):
            read_bytes.clear()
            await cache.file(version)
            await cache.prefill(version)
            assert sum(read_bytes) < path_of(run.folder, version).stat().st_size / 4, (
                "what shares a chunk with the header"
            )


async def test_memory_that_is_used_up_while_a_policy_is_fetched_ends_no_verifier(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it claimed is put back, as where the engine has no room; and the next policy is prefetched all the same."""
    home, tries = run.swarm.home, []
    monkeypatch.setattr(policy_shelf, "PREFETCH_SECONDS", 0.01)
    async with Client(home.run_id, home.public_key, [run.swarm.origin_url], tmp_path / "shelf") as client:
        cache, fetch = cache_of(run, client, tmp_path), client.fetch_archived

        async def short(*told: Any, **given: Any) -> Path:
            tries.append(told)
            if len(tries) <= 2:
                raise MemoryError
            return await fetch(*told, **given)

        monkeypatch.setattr(client, "fetch_archived", short)
        with pytest.raises(EngineAway, match="no memory to read policy 0"):
            await cache.prefill(0)
        prefetching = asyncio.create_task(cache.prefetch())
        await eventually(lambda: len(tries) == 3)
        assert not prefetching.done()
        prefetching.cancel()
        assert (await cache.prefill(0)).blueprint.vocabulary == run.policies[0].vocabulary


async def test_a_full_disk_is_given_what_deleted_policies_keep_of_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = run.swarm.home
    run.publish(1)
    async with Client(home.run_id, home.public_key, [run.swarm.origin_url], tmp_path / "shelf") as client:
        cache = cache_of(run, client, tmp_path, memory=0)
        held = weakref.ref(await cache.prefill(0))
        gone = []

        async def full(*_: object, **__: object) -> Path:
            gone.append(held() is None)
            raise LocalFault("no space left", code="disk_full")

        with monkeypatch.context() as patched:
            patched.setattr(client, "fetch_archived", full)
            with pytest.raises(PolicyUnavailable, match="no space left"):
                await cache.prefill(1)
        assert (gone, cache.trouble) == ([False], "disk_full")
        await eventually(lambda: held() is None)
        await cache.prefill(1)
        assert cache.trouble == ""
