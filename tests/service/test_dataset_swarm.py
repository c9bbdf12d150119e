"""A run over the operator's own data: nodes that have never seen it fetch it, draw from it, and check each other.

What would break for whom: a dataset that had to be installed on strangers' machines would be used by nobody, and one
that a relay could change would let it choose everybody's problems.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zstandard
from aiohttp import web
from broadcast_scene import Between
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dataset_files import SALT, damage, environment_of, made, sums
from msgspec import structs
from swarm import Peer, running, small_spec, worker_thread
from waiting import until

from coordinator.storage import log
from coordinator.verifier.daemon import Verifier, VerifierSettings
from node.audit.auditor import run_audit
from node.audit.leaves import read_entry
from node.datasets.convert import Converted
from node.datasets.folder import dataset_file
from node.datasets.format import Dataset
from node.errors import DatasetFault
from node.joining.session import JoinSettings
from node.protocol.messages import VerdictEntry
from node.protocol.run import FileSpec
from node.relay.daemon import RelaySettings, run_relay
from node.submission.writer import write_rollouts
from shardcast.content import file_digest
from shardcast.wire import digest

SOON = 120.0


class SwapsDatasets(Between):
    """Serves policies as they are, and of every dataset asked for another file's chunks."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        answered = await self.honest(request.path_qs)
        if request.path.startswith("/content/") and "/payloads/" in request.path:
            answered.body = bytes(reversed(answered.body))
        return answered


@contextmanager
def in_a_thread(start: Callable[[], Awaitable[str]], stop: Callable[[], Awaitable[None]]) -> Iterator[str]:
    """A server with an event loop of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def relaying(url: str, run_id: str, *, upstream: str, state: Path) -> Iterator[None]:
    """A relay daemon in a thread, which announces itself."""
    stop, loop = asyncio.Event(), asyncio.new_event_loop()
    join = JoinSettings(run_id=run_id, coordinators=(url,))
    settings = RelaySettings(join=join, state=state, host="127.0.0.1", port=0, upstreams=(upstream,))
    work = run_relay(settings, key=Ed25519PrivateKey.generate(), stop=stop)
    thread = threading.Thread(target=loop.run_until_complete, args=(work,))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def audited(
    url: str, run_id: str, state: Path, capsys: pytest.CaptureFixture[str], *answers: Path
) -> dict[str, object]:
    """What an auditor finds who has nothing but the run's id, the coordinator's address, and perhaps `answers`."""
    capsys.readouterr()
    settings = {"sample": 3, "all_": False, "seed": 1, "state_dir": state, "as_json": True}
    asyncio.run(run_audit(url, run_id=run_id, answers=answers, **settings))
    return json.loads(capsys.readouterr().out)


def test_a_bare_worker_earns_in_a_run_whose_dataset_it_has_never_seen_and_is_audited(
    tmp_path: Path, tiny_policy_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = made(tmp_path / "data" / "datasets", held_out=0.2)
    spec = small_spec(environments=(environment_of(dataset),))
    worker = tmp_path / "worker"
    with running(tmp_path, tiny_policy_path, spec=spec) as swarm:
        with worker_thread(swarm.url, swarm.home.run_id, worker) as status:
            until(lambda: status().get("admitted", 0) >= 2, seconds=SOON)
            assert status()["rejected"] == 0
        told = json.loads(swarm.peer().send("GET", "/v1/status").body)["datasets"]
        named = {"environment": "dataset:sums", "digest": dataset.spec.digest, "bytes": dataset.spec.bytes}
        assert told == [named | {"rows": dataset.header.leased}]
        assert b'id="h-datasets"' in swarm.peer().send("GET", "/").body
        found = audited(swarm.url, swarm.home.run_id, tmp_path / "audit", capsys)
        assert found["outcome"] == "agree", found
        assert found["results"]["agree"] >= 2
    fetched = next((worker / "datasets" / dataset.spec.digest / "versions").glob("0-*.bin"))
    assert fetched.read_bytes() == dataset.path.read_bytes()


def told_rows(count: int) -> list[dict[str, object]]:
    """Sums whose answers can be found in a file, if they are there: a bare number is everywhere by chance."""
    return [{"question": f"Q:{10 + at}+{at % 7}=?\nA:", "answer": f"secret-{at}"} for at in range(count)]


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_worker_earns_without_a_single_answer_and_an_auditor_without_them_says_what_it_could_not_check(
    tmp_path: Path, tiny_policy_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = made(tmp_path / "data" / "datasets", told_rows(30), salt=SALT, held_out=0.2)
    spec = small_spec(environments=(environment_of(dataset),))
    worker = tmp_path / "worker"
    with running(tmp_path, tiny_policy_path, spec=spec) as swarm:
        with worker_thread(swarm.url, swarm.home.run_id, worker) as status:
            until(lambda: status().get("admitted", 0) >= 2, seconds=SOON)
            assert status()["rejected"] == 0
        stranger = Peer(swarm.origin_url, swarm.home.run_id)
        served = [stranger.send("GET", f"/content/{one.digest}/v1/versions/0").status for one in spec.dataset_files]
        assert served == [200, 404]
        bare = audited(swarm.url, swarm.home.run_id, tmp_path / "audit", capsys)
        assert (bare["outcome"], bare["results"]["agree"], bare["problems"]) == ("agree", 0, [])
        assert bare["results"]["ungraded"] >= 2
        told = audited(swarm.url, swarm.home.run_id, tmp_path / "audit", capsys, dataset.answers)
        assert (told["outcome"], told["results"]["ungraded"]) == ("agree", 0)
        assert told["results"]["agree"] >= 2
        other = audited(swarm.url, swarm.home.run_id, tmp_path / "audit", capsys, dataset.path)
        assert (other["outcome"], other["verdicts"]) == ("incomplete", [])
    assert b"secret-" in all_bytes(tmp_path / "data")
    for folder in (worker, tmp_path / "audit", tmp_path / "origin", tmp_path / "origin-datasets"):
        assert all_bytes(folder), folder
        assert b"secret-" not in all_bytes(folder), folder


def test_an_operator_who_invents_rewards_is_convicted_by_whoever_has_the_answers_and_by_nobody_else(
    tmp_path: Path, tiny_policy_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No completion of this policy is right: a reward of 1 is a lie."""
    dataset = made(tmp_path / "data" / "datasets", told_rows(30), salt=SALT)
    with running(tmp_path, tiny_policy_path, spec=small_spec(environments=(environment_of(dataset),))) as swarm:
        with monkeypatch.context() as lying:
            lying.setattr("node.verification.verify.measure_rewards", lambda plan: (1.0,) * len(plan.claim.rollouts))
            with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker") as status:
                until(lambda: status().get("admitted", 0) >= 1, seconds=SOON)
        bare = audited(swarm.url, swarm.home.run_id, tmp_path / "audit", capsys)
        told = audited(swarm.url, swarm.home.run_id, tmp_path / "audit", capsys, dataset.answers)
    assert (bare["outcome"], bare["results"]["agree"]) == ("agree", 0)
    assert (told["outcome"], told["problems"][0]["code"]) == ("disagree", "verdict_differs")


def other_prompts(folder: Path, _dataset: Converted) -> Path:
    other = made(folder, told_rows(31), salt=SALT)
    assert other.answers is not None
    return other.answers


def cut_short(folder: Path, dataset: Converted) -> Path:
    assert dataset.answers is not None
    data = dataset.answers.read_bytes()[:-1]
    path = folder / dataset_file(digest(data))
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(("forge", "code"), [(other_prompts, "answers_differ"), (cut_short, "dataset_malformed")])
def test_an_operator_who_signed_for_answers_that_are_none_is_convicted_and_the_audit_goes_on(
    *,
    forge: Callable[[Path, Converted], Path],
    code: str,
    tmp_path: Path,
    tiny_policy_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told "incomplete", whoever has the file would look for the fault at home."""
    dataset = made(tmp_path / "data" / "datasets", told_rows(30), salt=SALT)
    forged = forge(tmp_path / "data" / "datasets", dataset)
    answers = FileSpec(file_digest(forged), forged.stat().st_size)
    environment = environment_of(dataset)
    mixed = structs.replace(environment, dataset=structs.replace(dataset.spec, answers=answers))
    opened = Dataset.open

    def judging_by_others(path: Path, spec: FileSpec | None = None) -> Dataset:
        assert dataset.answers is not None
        return opened(dataset.answers) if spec == answers else opened(path, spec)

    with monkeypatch.context() as lying:
        lying.setattr(Dataset, "open", judging_by_others)
        with running(tmp_path, tiny_policy_path, spec=small_spec(environments=(mixed,))) as swarm:
            with worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker") as status:
                until(lambda: status().get("admitted", 0) >= 1, seconds=SOON)
            lying.undo()
            found = audited(swarm.url, swarm.home.run_id, tmp_path / "audit", capsys, forged)
    assert (found["outcome"], found["exit_code"], found["error"]) == ("disagree", 1, None)
    assert [one["code"] for one in found["problems"]] == [code]
    assert found["results"]["ungraded"] >= 1


def test_a_worker_that_guesses_its_rewards_is_not_believed(tmp_path: Path, tiny_policy_path: Path) -> None:
    """Where it knows no answer it may say that all is right: a submission has no place for that."""
    dataset = made(tmp_path / "data" / "datasets", told_rows(30), salt=SALT)
    with running(tmp_path, tiny_policy_path, spec=small_spec(environments=(environment_of(dataset),))) as swarm:
        peer = swarm.peer()
        lease = peer.lease()
        content = msgspec.msgpack.decode(zstandard.decompress(write_rollouts(swarm.honest(lease))))
        content["rows"] = [row | {"reward": 1.0} for row in content["rows"]]
        claimed = zstandard.compress(msgspec.msgpack.encode(content))
        receipt = swarm.verdict(peer, peer.submit(lease.lease_id, claimed))
        assert (receipt.outcome, receipt.reason) == ("rejected", "wrong_schema")
        again = peer.lease()
        assert swarm.judge(peer, swarm.honest(again), again).outcome == "admitted"
        with swarm.home.database.read() as connection:
            entries = [read_entry(leaf) for leaf in log.leaves(connection, 0, log.size(connection))]
        verdicts = [entry for entry in entries if isinstance(entry, VerdictEntry)]
        assert [entry.rewards for entry in verdicts] == [None, (0.0,) * 4]


def test_a_verifier_without_the_answers_does_not_begin(tmp_path: Path, tiny_policy_path: Path) -> None:
    """It fetches the prompts as workers do, and judges nothing: no reward of 0 is anybody's who was right."""
    dataset = made(tmp_path / "data" / "datasets", salt=SALT)
    with running(tmp_path, tiny_policy_path, spec=small_spec(environments=(environment_of(dataset),))) as swarm:
        far = replace(swarm.home, folder=tmp_path / "elsewhere")
        settings = VerifierSettings(name="far", state=tmp_path / "far", sources=(swarm.origin_url,))
        with pytest.raises(DatasetFault) as missing:
            asyncio.run(Verifier(far, settings).run(asyncio.Event()))
    assert missing.value.code == "answers_missing"


def test_a_verifier_on_a_machine_without_the_data_folders_datasets_fetches_them(
    tmp_path: Path, tiny_policy_path: Path
) -> None:
    dataset = made(tmp_path / "data" / "datasets")
    with running(tmp_path, tiny_policy_path, spec=small_spec(environments=(environment_of(dataset),))) as swarm:
        far = replace(swarm.home, folder=tmp_path / "elsewhere")
        settings = VerifierSettings(name="far", state=tmp_path / "far", sources=(swarm.origin_url,))
        found = asyncio.run(Verifier(far, settings)._datasets())
        assert found[dataset.spec.digest].is_relative_to(tmp_path / "far")
    assert Dataset.open(found[dataset.spec.digest], dataset.spec).header == dataset.header


def test_a_verifier_whose_dataset_is_damaged_fetches_it_before_it_judges_on(
    tmp_path: Path, tiny_policy_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All work that draws on the damaged rows was given up as indeterminate, slot after slot."""
    dataset = made(tmp_path / "data" / "datasets")
    sound, spec = dataset.path.read_bytes(), small_spec(environments=(environment_of(dataset),))
    spec = structs.replace(spec, batch=structs.replace(spec.batch, groups_per_step=1000))
    with (
        running(tmp_path, tiny_policy_path, spec=spec) as swarm,
        worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker") as status,
    ):
        until(lambda: status().get("admitted", 0) >= 1, seconds=SOON)
        damage(dataset.path)
        until(lambda: "Nothing is judged until" in caplog.text, seconds=SOON)
        before = int(str(status()["admitted"]))
        until(lambda: int(str(status()["admitted"])) >= before + 2, seconds=SOON)
        assert (status()["rejected"], status()["indeterminate"]) == (0, 0)
    fetched = next((tmp_path / "verifier" / "datasets" / dataset.spec.digest / "versions").glob("0-*.bin"))
    assert fetched.read_bytes() == sound


def test_relays_that_serve_another_dataset_cost_a_worker_time_alone(tmp_path: Path, tiny_policy_path: Path) -> None:
    """Two of its three sources lie."""
    dataset = made(tmp_path / "data" / "datasets", sums(200))
    with contextlib.ExitStack() as stack:

        def relays(origin_url: str) -> tuple[str, ...]:
            liars = (SwapsDatasets(origin_url), SwapsDatasets(origin_url))
            return (*(stack.enter_context(in_a_thread(liar.start, liar.stop)) for liar in liars), origin_url)

        spec = small_spec(environments=(environment_of(dataset),))
        swarm = stack.enter_context(running(tmp_path, tiny_policy_path, spec=spec, relays=relays))
        status = stack.enter_context(worker_thread(swarm.url, swarm.home.run_id, tmp_path / "worker"))
        until(lambda: status().get("admitted", 0) >= 1, seconds=SOON)
        assert status()["rejected"] == 0


def test_a_relay_passes_a_dataset_on_as_it_does_policies(tmp_path: Path, tiny_policy_path: Path) -> None:
    """Else every worker of a run would have it from the operator's own machine."""
    dataset = made(tmp_path / "data" / "datasets", sums(200))
    with (
        running(tmp_path, tiny_policy_path, spec=small_spec(environments=(environment_of(dataset),))) as swarm,
        relaying(swarm.url, swarm.home.run_id, upstream=swarm.origin_url, state=tmp_path / "relay"),
    ):
        held = tmp_path / "relay" / "datasets" / dataset.spec.digest / "versions"
        until(lambda: any(held.glob("0-*.bin")), seconds=SOON)
        assert next(held.glob("0-*.bin")).read_bytes() == dataset.path.read_bytes()


def test_a_changed_row_is_refused_by_its_digest(tmp_path: Path) -> None:
    """An operator who corrects an answer under way has begun another run, and is told."""
    dataset = made(tmp_path / "data" / "datasets")
    text = dataset.path.read_bytes()
    dataset.path.chmod(0o600)
    dataset.path.write_bytes(text.replace(b'"answer":"10"', b'"answer":"11"'))
    with pytest.raises(DatasetFault) as refused:
        Dataset.open(dataset.path, dataset.spec)
    assert refused.value.code == "dataset_changed"
