"""The auditor against a real coordinator over HTTP, a real log and real policies: whom it convicts, and whom not."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest
import torch
import uvicorn
from announced_relays import hanging
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dated_origin import DatedOrigin
from msgspec import UNSET, UnsetType
from sqlalchemy import delete, insert, update
from verifying import InMemory, Part, drawn
from witnessing import witnessing

from coordinator.app import create_app
from coordinator.lab.redteam.http_client import claim_of
from coordinator.run.history import PUBLISHED
from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.run.witnesses import witnessing_thread
from coordinator.storage import log
from coordinator.storage.blobs import BlobStore
from coordinator.storage.folder_blobs import FolderBlobs
from coordinator.storage.relays import RegisteredRelay, put_relay
from coordinator.storage.schema import log_entries, log_nodes, policies
from node.audit.auditor import run_audit
from node.audit.evidence import EvidenceAuditor, Expired
from node.audit.witnesses import WitnessRule
from node.client.witness import WitnessAddress
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.environments import load_environment
from node.episodes.expected import expected_of
from node.keys.identity import node_id
from node.policy.file import Policy, load_policy, save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.admission import Figures, Finding, Outcome, judge_drift, judge_group
from node.protocol.checkpoints import log_key, open_witnessed
from node.protocol.evidence import Drift, Total, Totals, follow
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry, SlotName, VerdictEntry
from node.protocol.reasons import Reason
from node.protocol.requests import sign_request
from node.protocol.run import (
    BatchSpec,
    EnvironmentSpec,
    HonestSpec,
    LevelSpec,
    LimitsSpec,
    ProofSpec,
    RunSpec,
    SamplingSpec,
    run_id_of,
)
from node.protocol.submission import Rollout
from node.submission.writer import write_rollouts
from node.verification.plan import Rules
from node.verification.verify import verify
from shardcast import OriginServer
from shardcast.wire import decode, digest

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NODE = Ed25519PrivateKey.from_private_bytes(bytes(range(32, 64)))
RUN = run_id_of(KEY.public_key().public_bytes_raw())
SPEC = RunSpec(
    name="audited",
    environments=(EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse")),
    sampling=SamplingSpec(group_size=2, max_new_tokens=12, max_version_lead=1),
    batch=BatchSpec(groups_per_step=1),
    proofs=ProofSpec(scheme="toploc/1"),
    limits=LimitsSpec(
        exponent_mismatches=4.0,
        mantissa_mean=1.0,
        mantissa_median=1.0,
        token_margin=0.001,
        rollout_margin_mean=0.0001,
        logprob_error=0.001,
        honest=HonestSpec(
            margin=LevelSpec(mean=1e-5, variance=1e-8, largest=0.001),
            logprob=LevelSpec(mean=1e-5, variance=1e-8, largest=0.001),
        ),
    ),
)
replace = msgspec.structs.replace


@dataclass
class Audited:
    """A finished run on disk, the origin of its policy, and where each kind of entry stands in its log."""

    home: Path
    origin_url: str
    second_manifest: str

    ADMITTED, ALSO_ADMITTED, WRONG_TOKEN, UNREADABLE, UNDECIDED, BATCH, SECOND_POLICY, SWITCHED = range(2, 10)


def evidence(
    blobs: BlobStore, body: bytes, *, sha256: str | None = None, slot: SlotName | UnsetType = UNSET
) -> dict[str, str]:
    """Store what a node sent, as the coordinator does, and return what the log says of it.

    With `sha256` the node put the body into the run's object store. Without `slot` it is of an older release.
    """
    path = f"/v1/submissions/{secrets.token_hex(32)}" + ("" if sha256 is None else f"/{sha256}")
    _, envelope = sign_request(claim_of(RUN, "PUT", path, body, slot=slot), key=NODE)
    request = blobs.put(envelope)
    return {"submission": request, "request": request, "body": blobs.put(body), "node": node_id(NODE)}


def next_policy(path: Path) -> None:
    """Write the policy after the tiny one: a small step away from it."""
    model = make_model(seed=20)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(2e-3 * torch.sign(torch.randn(weight.shape, generator=generator)))
    save_policy(model, make_tokenizer(), path)


def switched(policies: dict[int, Policy], manifest_digest: str, slot: int) -> list[Rollout]:
    """Completions of a lease of policy 0 that go on under policy 1."""
    environments = [load_environment(spec) for spec in SPEC.environments]
    expected = expected_of(
        SPEC, policies[0], environments, run_id=RUN, version=0, manifest_digest=manifest_digest, slot=slot
    )
    parts: list[Part] = [(0, policies[0], 4), (1, policies[1], None)]
    rollouts = [drawn(parts, expected, seed, spec=SPEC) for seed in expected.seeds]
    assert any(one.segment_versions == [0, 1] for one in rollouts)
    return rollouts


def generate(policy: Policy, engine: TorchEngine, manifest_digest: str, slot: int) -> list[Rollout]:
    environments = [load_environment(spec) for spec in SPEC.environments]
    expected = expected_of(
        SPEC, policy, environments, run_id=RUN, version=0, manifest_digest=manifest_digest, slot=slot
    )
    requests = [SampleRequest(prompt_ids=tuple(expected.prompt_ids), seed=seed) for seed in expected.seeds]
    return asyncio.run(engine.generate(requests))


def other_token(rollout: Rollout) -> Rollout:
    """A worker that prefers another first token than the forced one."""
    tokens = list(rollout.completion_ids)
    tokens[0] = 40 if tokens[0] != 40 else 41
    return replace(rollout, completion_ids=tokens)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Audited]:
    folder = tmp_path_factory.mktemp("audited")
    origin = DatedOrigin(folder / "origin", KEY, RUN, chunk_bytes=64 * 1024)
    server = OriginServer(origin, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.start()}"
    manifest_digest = server.publish(tiny_policy_path, version=0)
    home = create_home(folder / "home", public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    engine = TorchEngine(SPEC)
    asyncio.run(engine.load(tiny_policy_path, version=0))
    groups = [generate(engine.policy, engine, manifest_digest, slot) for slot in range(3)]
    bodies = [write_rollouts(group) for group in groups[:2]]
    bodies += [
        write_rollouts([groups[2][0], other_token(groups[2][1])]),
        b"PAR1 garbage PAR1",
        write_rollouts(groups[2]),
    ]
    entries: list[LogEntry] = [
        PolicyEntry(version=0, manifest_digest=manifest_digest, result_digest=digest(tiny_policy_path.read_bytes()))
    ]
    environments = [load_environment(spec) for spec in SPEC.environments]
    next_policy(folder / "second.safetensors")
    policies = {0: engine.policy, 1: load_policy(folder / "second.safetensors", dtype=torch.float32)}
    bodies.append(write_rollouts(switched(policies, manifest_digest, slot=len(bodies))))
    for slot, body in enumerate(bodies):
        verdict = asyncio.run(
            verify(
                body,
                version=0,
                manifest_digest=manifest_digest,
                slot=slot,
                policies=InMemory(policies),
                published=[0, 1],
                rules=Rules(RUN, SPEC, environments),
            )
        ).verdict
        own = SlotName(manifest_digest=manifest_digest, slot=slot)
        entry = VerdictEntry(
            **evidence(home.blobs, body, slot=UNSET if body is bodies[-1] else own),
            version=0,
            manifest_digest=manifest_digest,
            slot=slot,
            decided_at=int(time.time()),
            **msgspec.structs.asdict(verdict),
        )
        entries.append(entry)
    last = entries.pop()
    undecided = {"outcome": Outcome.INDETERMINATE, "reason": Reason.VERIFIER_FAILED, "detail": "MemoryError."}
    entries[-1] = replace(entries[-1], **undecided, finding=None, figures=None, totals=None, rewards=None)
    entries.append(BatchEntry(step=0, submissions=(entries[1].submission,)))
    second_manifest = server.publish(folder / "second.safetensors", version=1)
    entries.append(
        PolicyEntry(
            version=1,
            manifest_digest=second_manifest,
            result_digest=digest((folder / "second.safetensors").read_bytes()),
        )
    )
    entries.append(last)
    with home.database.write() as connection:
        for entry in entries:
            log.append(connection, entry)
    home.database.close()
    yield Audited(folder / "home", url, second_manifest)
    server.stop()
    origin.close()


@pytest.fixture(autouse=True)
def own_contacts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each coordinator over the run publish its own relays at once, and not those of the one before it for 10 s."""
    monkeypatch.setattr("coordinator.run.descriptors.SETTLE_SECONDS", 0.0)


@contextmanager
def serving(folder: Path, *relays: str, witnesses: Sequence[WitnessAddress] = ()) -> Iterator[str]:
    """The real service over the run in `folder`, which asks its witnesses."""
    home = create_home(folder, public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    coordinator = Coordinator(home, key=KEY, relay_urls=relays)
    app = create_app(coordinator)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        with witnessing_thread(coordinator, witnesses):
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        home.database.close()


Edit = Callable[[list[LogEntry]], list[LogEntry]]


def forged(run: Audited, to: Path, edit: Edit) -> Path:
    """A copy of the run whose operator, who has the run's key, wrote another log over the same evidence."""
    shutil.copytree(run.home, to, ignore=shutil.ignore_patterns(PUBLISHED))  # by which an honest operator would notice
    home = create_home(to, public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    with home.database.write() as connection:
        old = [decode(LogEntry, leaf, max_bytes=10_000) for leaf in log.leaves(connection, 0, 1000)]
        connection.execute(delete(log_entries))
        connection.execute(delete(log_nodes))
        for entry in edit(old):
            log.append(connection, entry)
    home.database.close()
    return to


def with_entry(index: int, **changes: object) -> Edit:
    return lambda entries: [*entries[:index], replace(entries[index], **changes), *entries[index + 1 :]]


def second_step(entries: list[LogEntry]) -> BatchEntry:
    """The step after those of the log, with the group whose turn it is."""
    return BatchEntry(step=1, submissions=(entries[Audited.ALSO_ADMITTED].submission,))


@dataclass
class Outcomes:
    code: int
    report: dict

    @property
    def problems(self) -> list[tuple[str, int | None]]:
        return [(problem["code"], problem["log_index"]) for problem in self.report["problems"]]

    def result(self, index: int) -> str:
        (verdict,) = [v for v in self.report["verdicts"] if v["log_index"] == index]
        return verdict["result"]


@pytest.fixture
def audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcomes]:
    def audit(url: str, **changes: object) -> Outcomes:
        settings = {"run_id": RUN, "sample": None, "all_": True, "seed": None, "state_dir": tmp_path / "auditor"}
        code = asyncio.run(run_audit(url, as_json=True, **(settings | changes)))
        report = json.loads(capsys.readouterr().out)
        assert report["exit_code"] == code
        return Outcomes(code, report)

    return audit


# -- an honest coordinator


def test_an_honest_run_agrees_and_is_remembered(run: Audited, audit: Callable[..., Outcomes], tmp_path: Path) -> None:
    with serving(run.home, run.origin_url) as url:
        first = audit(url)
        again = audit(url, all_=False, sample=2, seed=5)
        repeated = audit(url, all_=False, sample=2, seed=5)
        nothing = audit(url, all_=False, sample=0)
    assert (first.code, first.report["outcome"], first.problems, first.report["error"]) == (0, "agree", [], None)
    assert first.report["log"] == {
        "entries": 10,
        "policies": 2,
        "batches": 1,
        "admitted": 3,
        "rejected": 2,
        "indeterminate": 1,
    }
    assert first.report["results"] == {
        "agree": 5,
        "disagree": 0,
        "indeterminate": 0,
        "unavailable": 0,
        "unseen": 0,
        "ungraded": 0,
        "expired": 0,
    }
    assert first.report["coordinator_indeterminate"] == [run.UNDECIDED]
    assert first.report["previous_checkpoint"] is None
    logged = {v["log_index"]: (v["logged"], v["derived"]) for v in first.report["verdicts"]}
    assert logged[run.WRONG_TOKEN][0] == logged[run.WRONG_TOKEN][1]
    assert logged[run.UNREADABLE][1] == {"outcome": "rejected", "reason": "malformed_submission"}
    assert again.report["previous_checkpoint"]["size"] == 10
    assert {v["logged"]["outcome"] for v in again.report["verdicts"]} == {"admitted", "rejected"}
    assert [v["log_index"] for v in again.report["verdicts"]] == [v["log_index"] for v in repeated.report["verdicts"]]
    assert (nothing.code, nothing.report["verdicts"]) == (0, [])
    assert (tmp_path / "auditor" / f"{RUN}.checkpoint").is_file()


def test_two_audits_draw_differently_unless_told(run: Audited, audit: Callable[..., Outcomes]) -> None:
    """A draw that the coordinator could predict would be a list of the verdicts that it has to get right."""
    with serving(run.home, run.origin_url) as url:
        seeds = {audit(url, all_=False, sample=0).report["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_person_reads_tables_without_the_strangers_control_characters(
    run: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker chooses part of a detail's text; it must not clear the auditor's screen or paint a green tick."""
    hostile = {
        "detail": "\x1b[2J\x1b[32magree[/bold][link=x]",
        "outcome": Outcome.REJECTED,
        "reason": Reason.WRONG_SEED,
    }
    edit = with_entry(run.ADMITTED, **hostile, finding=None, figures=None, totals=None, rewards=None)
    with serving(forged(run, tmp_path / "forged", edit), run.origin_url) as url:
        arguments = {"run_id": RUN, "sample": None, "all_": True, "seed": 1, "state_dir": tmp_path / "auditor"}
        code = asyncio.run(run_audit(url, as_json=False, **arguments))
    shown = capsys.readouterr().out
    assert code == 1
    assert "disagree" in shown
    assert "verdict_differs" in shown
    assert "\x1b" not in shown


# -- a lying operator, who has the run's key

LIES: dict[str, tuple[int, dict[str, object], str]] = {
    "junk admitted": (
        Audited.WRONG_TOKEN,
        {
            "outcome": Outcome.ADMITTED,
            "reason": None,
            "finding": None,
            "figures": Figures(**dict.fromkeys(Figures.__struct_fields__, 0.0)),
            "rewards": (1.0, 1.0),
        },
        "verdict_differs",
    ),
    "an honest worker rejected": (
        Audited.ALSO_ADMITTED,
        {"outcome": Outcome.REJECTED, "reason": Reason.WRONG_SEED, "figures": None, "totals": None, "rewards": None},
        "verdict_differs",
    ),
    "an honest worker rejected for what its rows are said to show together": (
        Audited.ALSO_ADMITTED,
        {
            "outcome": Outcome.REJECTED,
            "reason": Reason.WRONG_TOKEN,
            "finding": judge_group(Totals(margin=Total(count=24, sum=0.02)), limits=SPEC.limits),
            "totals": Totals(margin=Total(count=24, sum=0.02)),
            "rewards": None,
        },
        "verdict_differs",
    ),
    "junk admitted as if nothing had been summed up": (Audited.ADMITTED, {"totals": Totals()}, "verdict_differs"),
    "an honest worker rejected under invented figures": (
        Audited.ALSO_ADMITTED,
        {
            "outcome": Outcome.REJECTED,
            "reason": Reason.WRONG_TOKEN,
            "finding": Finding(reason=Reason.WRONG_TOKEN, row=1, figure="token_margin", value=3.0, limit=0.001),
            "figures": Figures(**(dict.fromkeys(Figures.__struct_fields__, 0.0) | {"token_margin": 3.0})),
            "rewards": None,
        },
        "verdict_differs",
    ),
    "a finding invented for the honest row of bad work": (
        Audited.WRONG_TOKEN,
        {
            "reason": Reason.WRONG_TOKEN,
            "finding": Finding(reason=Reason.WRONG_TOKEN, row=0, figure="token_margin", value=3.0, limit=0.001),
            "figures": Figures(**(dict.fromkeys(Figures.__struct_fields__, 0.0) | {"token_margin": 3.0})),
        },
        "verdict_differs",
    ),
    "another reason": (Audited.UNREADABLE, {"reason": Reason.WRONG_SCHEMA}, "verdict_differs"),
    "rewards for the wrong answers": (Audited.ADMITTED, {"rewards": (1.0, 1.0)}, "verdict_differs"),
    "tokens that were not generated": (Audited.ADMITTED, {"tokens": 9999}, "verdict_differs"),
    "work credited to another node": (Audited.ADMITTED, {"node": "ab" * 32}, "evidence_signature"),
    "work moved to another slot": (Audited.ADMITTED, {"slot": 77}, "evidence_slot"),
    "work of a node that names no slot moved to another": (Audited.SWITCHED, {"slot": 77}, "verdict_differs"),
    "honest work rejected as another slot's": (
        Audited.ALSO_ADMITTED,
        {
            "slot": 77,
            "outcome": Outcome.REJECTED,
            "reason": Reason.WRONG_PROMPT,
            "figures": None,
            "totals": None,
            "rewards": None,
        },
        "evidence_slot",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_a_verdict_is_found(lie: str, run: Audited, audit: Callable[..., Outcomes], tmp_path: Path) -> None:
    index, changes, code = LIES[lie]
    with serving(forged(run, tmp_path / "forged", with_entry(index, **changes)), run.origin_url) as url:
        outcome = audit(url)
    assert outcome.code == 1
    assert (code, index) in outcome.problems
    assert outcome.result(index) == "disagree"


def test_any_finding_that_is_there_agrees(run: Audited, audit: Callable[..., Outcomes], tmp_path: Path) -> None:
    """The verifier drew which row to measure first, and the auditor cannot know which: both orders must agree."""

    def other_finding(entries: list[LogEntry]) -> list[LogEntry]:
        entry = entries[run.WRONG_TOKEN]
        assert isinstance(entry, VerdictEntry)
        assert entry.figures is not None
        assert entry.reason is not Reason.WRONG_LOGPROB
        finding = Finding(
            reason=Reason.WRONG_LOGPROB,
            row=1,
            figure="logprob_error",
            value=entry.figures.logprob_error,
            limit=SPEC.limits.logprob_error,
        )
        return with_entry(run.WRONG_TOKEN, reason=finding.reason, finding=finding)(entries)

    with serving(forged(run, tmp_path / "other", other_finding), run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems, outcome.result(run.WRONG_TOKEN)) == (0, [], "agree")


def inflated(entries: list[LogEntry]) -> list[LogEntry]:
    """What an operator logs who wants to be rid of a node: of each good slot a little too much, until it is out.

    The log is sound in itself: no slot is over a limit, and the drift follows from the slots.
    """
    drift, told = Drift(), list(entries)
    for at, entry in enumerate(entries):
        if isinstance(entry, VerdictEntry) and entry.outcome is Outcome.ADMITTED:
            seen = entry.totals.logprob
            totals = replace(entry.totals, logprob=replace(seen, sum=seen.count * 2.5e-4))
            assert judge_group(totals, limits=SPEC.limits) is None
            drift = follow(drift, totals, limits=SPEC.limits)
            finding = judge_drift(drift, limits=SPEC.limits)
            told[at] = replace(entry, totals=totals)
            if finding is not None:
                changes = {"outcome": Outcome.REJECTED, "reason": finding.reason, "rewards": None}
                told[at] = replace(told[at], finding=finding, **changes)
    return told


def test_a_coordinator_that_inflates_totals_to_drive_a_node_out_is_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    def lie(entries: list[LogEntry]) -> list[LogEntry]:
        told = inflated(entries)
        last = told[run.SWITCHED]
        assert isinstance(last, VerdictEntry)
        assert last.finding is not None
        assert last.finding.figure == "logprob_drift"
        return told

    with serving(forged(run, tmp_path / "forged", lie), run.origin_url) as url:
        unseen = audit(url, all_=False, sample=0)
        outcome = audit(url)
    assert (unseen.code, unseen.problems) == (0, []), "the log alone does not show it"
    caught = [("verdict_differs", index) for index in (run.ADMITTED, run.ALSO_ADMITTED, run.SWITCHED)]
    assert (outcome.code, outcome.problems) == (1, caught)


def test_a_body_the_node_did_not_sign_is_found(run: Audited, audit: Callable[..., Outcomes], tmp_path: Path) -> None:
    """The operator swaps a good file for a bad one, to get rid of a worker."""

    def swap(entries: list[LogEntry]) -> list[LogEntry]:
        return with_entry(run.UNREADABLE, body=entries[run.ADMITTED].body)(entries)

    with serving(forged(run, tmp_path / "forged", swap), run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems) == (1, [("evidence_mismatch", run.UNREADABLE)])


@pytest.mark.parametrize("by_store", [True, False])
@pytest.mark.parametrize("swapped", [True, False])
def test_a_rejection_for_signing_for_two_files_that_the_node_did_not_sign_for_is_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path, *, by_store: bool, swapped: bool
) -> None:
    """The operator says that a file came with another BLAKE3 than was signed, with a file of his own or without."""
    signed, other = b"what the node sent", b"what nobody signed"

    def frame(entries: list[LogEntry]) -> list[LogEntry]:
        blobs = FolderBlobs(tmp_path / "forged" / "blobs")
        said = evidence(blobs, signed, sha256=hashlib.sha256(signed).hexdigest() if by_store else None)
        if swapped:
            said["body"] = blobs.put(other)
        return with_entry(run.UNREADABLE, **said, reason=Reason.WRONG_BODY)(entries)

    with serving(forged(run, tmp_path / "forged", frame), run.origin_url) as url:
        outcome = audit(url)
    code = "evidence_mismatch" if swapped else "verdict_differs"
    assert (outcome.code, outcome.problems) == (1, [(code, run.UNREADABLE)])


def test_a_policy_file_other_than_the_logged_one_is_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    lie = with_entry(1, result_digest="ab" * 32)
    with serving(forged(run, tmp_path / "forged", lie), run.origin_url) as url:
        outcome = audit(url)
    assert outcome.code == 1
    assert set(outcome.problems) == {
        ("policy_differs", index) for index in (run.ADMITTED, run.ALSO_ADMITTED, run.WRONG_TOKEN, run.SWITCHED)
    }


def test_tokens_of_a_policy_that_was_published_only_after_the_verdict_are_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """An operator who lets a friend draw from policies that nobody else has yet."""

    def swap(entries: list[LogEntry]) -> list[LogEntry]:
        return [*entries[: run.SECOND_POLICY], entries[run.SWITCHED], entries[run.SECOND_POLICY]]

    with serving(forged(run, tmp_path / "forged", swap), run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems) == (1, [("verdict_differs", run.SECOND_POLICY)])


def test_naming_a_policy_before_it_is_in_the_log_is_a_lie_and_afterwards_is_not(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """What was published is what the log has before the verdict; an operator who denies more than that is found."""

    def deny(entries: list[LogEntry]) -> list[LogEntry]:
        changes = {"outcome": Outcome.REJECTED, "reason": Reason.WRONG_SEGMENTS}
        return with_entry(run.SWITCHED, **changes, figures=None, totals=None, rewards=None)(entries)

    def deny_early(entries: list[LogEntry]) -> list[LogEntry]:
        denied = deny(entries)
        return [*denied[: run.SECOND_POLICY], denied[run.SWITCHED], denied[run.SECOND_POLICY]]

    with serving(forged(run, tmp_path / "before", deny_early), run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems, outcome.result(run.SECOND_POLICY)) == (0, [], "agree")
    with serving(forged(run, tmp_path / "after", deny), run.origin_url) as url:
        outcome = audit(url, state_dir=tmp_path / "another auditor")
    assert (outcome.code, outcome.problems) == (1, [("verdict_differs", run.SWITCHED)])


def test_a_later_policys_file_other_than_the_logged_one_is_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    lie = with_entry(run.SECOND_POLICY, result_digest="ab" * 32)
    with serving(forged(run, tmp_path / "forged", lie), run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems) == (1, [("policy_differs", run.SWITCHED)])


def test_an_entry_that_cannot_be_proved_to_a_worker_is_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """A worker checks its receipt by such a proof; the root of ten entries does not depend on these nodes."""
    shutil.copytree(run.home, tmp_path / "forged")
    home = create_home(tmp_path / "forged", public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    with home.database.write() as connection:
        connection.execute(
            update(log_nodes).where(log_nodes.c.level == 1, log_nodes.c.index < 4).values(hash=bytes(32))
        )
    home.database.close()
    with serving(tmp_path / "forged", run.origin_url) as url:
        outcome = audit(url)
    assert outcome.code == 1
    assert {code for code, _ in outcome.problems} == {"inclusion_proof"}


def test_training_on_rejected_work_is_found_without_any_policy(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    def train(entries: list[LogEntry]) -> list[LogEntry]:
        return with_entry(run.BATCH, submissions=(entries[run.WRONG_TOKEN].submission,))(entries)

    with serving(forged(run, tmp_path / "forged", train)) as url:
        outcome = audit(url, all_=False, sample=0)
    assert (outcome.code, outcome.problems) == (1, [("batch_not_admitted", run.BATCH)])


def test_attack_invented_nodes_after_a_lie_turn_no_disagreement_into_a_failure(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.audit.log.MAX_NODES", 15)

    def crowded(entries: list[LogEntry]) -> list[LogEntry]:
        names = [f"{at:064x}" for at in range(20)]
        return entries + [replace(entries[run.UNREADABLE], submission=name, node=name) for name in names]

    def lie(entries: list[LogEntry]) -> list[LogEntry]:
        return crowded(with_entry(run.BATCH, submissions=(entries[run.WRONG_TOKEN].submission,))(entries))

    for edit, wanted in ((crowded, (2, [])), (lie, (1, [("batch_not_admitted", run.BATCH)]))):
        with serving(forged(run, tmp_path / edit.__name__, edit)) as url:
            outcome = audit(url, all_=False, sample=0, state_dir=tmp_path / f"auditor-{edit.__name__}")
        assert (outcome.code, outcome.problems) == wanted
        assert outcome.report["error"]["code"] == "log_too_large"


def remember_then_audit(run: Audited, audit: Callable[..., Outcomes], forged_home: Path) -> Outcomes:
    with serving(run.home) as url:
        assert audit(url, all_=False, sample=0).code == 0
    with serving(forged_home) as url:
        return audit(url, all_=False, sample=0)


def kept_evidence(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "auditor").glob("evidence-*/*"))


def test_a_log_that_forgot_its_last_entries_is_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    outcome = remember_then_audit(run, audit, forged(run, tmp_path / "forged", lambda entries: entries[:-1]))
    assert (outcome.code, outcome.problems) == (1, [("log_shrank", None)])
    assert kept_evidence(tmp_path) == ["first.checkpoint", "second.checkpoint"]


def test_a_log_without_its_end_is_found_by_the_policy_that_the_run_goes_on_with(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """An operator could show auditors the log of last week, which is sound in itself, and everybody else the run."""
    for hidden, wanted in ((0, []), (2, [("unlogged_policy", None)])):
        folder = forged(run, tmp_path / str(hidden), lambda entries, hidden=hidden: entries[: len(entries) - hidden])
        home = create_home(folder, public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
        named = {"version": 1, "manifest_digest": run.second_manifest, "result_digest": "0" * 64}
        with home.database.write() as connection:
            connection.execute(insert(policies).values(**named, manifest=b"", published_at=0.0))
        home.database.close()
        with serving(folder) as url:
            outcome = audit(url, all_=False, sample=0, state_dir=tmp_path / f"auditor-{hidden}")
        assert (outcome.code, outcome.problems) == (len(wanted), wanted)


def test_a_log_that_has_had_no_verdict_for_days_is_said_to_be_quiet_until_the_run_is_over(
    run: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing in an old log contradicts itself: a validator that reads `agree` would take it for the newest."""
    then = int(time.time() - 3 * 86400)
    last = BatchEntry(step=SPEC.training.steps - 1, submissions=())

    def old(entries: list[LogEntry]) -> list[LogEntry]:
        return [replace(one, decided_at=then) if isinstance(one, VerdictEntry) else one for one in entries]

    asked = {"run_id": RUN, "sample": 0, "all_": False, "seed": 1, "as_json": False}
    edits = {"now": (list, False), "old": (old, True), "over": (lambda entries: [*old(entries), last], False)}
    for name, (edit, quiet) in edits.items():
        with serving(forged(run, tmp_path / name, edit)) as url:
            code = asyncio.run(run_audit(url, state_dir=tmp_path / f"auditor-{name}", **asked))
        assert code == 0 or name == "over", "standing still is no fault"
        said = " ".join(capsys.readouterr().out.split())
        assert ("the newest verdict is 3 days old, and the run is not over" in said) == quiet


@pytest.mark.parametrize("more", [0, 1])
def test_a_rewritten_history_is_found(more: int, run: Audited, audit: Callable[..., Outcomes], tmp_path: Path) -> None:
    """With as many entries as before or more: the new log is sound in itself, it is only not the old one."""

    def rewrite(entries: list[LogEntry]) -> list[LogEntry]:
        return with_entry(run.UNREADABLE, detail="It never was.")(entries) + [second_step(entries)] * more

    remembered = tmp_path / "auditor" / f"{RUN}.checkpoint"
    outcome = remember_then_audit(run, audit, forged(run, tmp_path / "forged", rewrite))
    assert (outcome.code, outcome.problems) == (1, [("log_forked", None)])
    assert kept_evidence(tmp_path) == ["first.checkpoint", "second.checkpoint"]
    (first,) = (tmp_path / "auditor").glob("evidence-*/first.checkpoint")
    assert remembered.read_bytes() == first.read_bytes(), "the lie must not replace what is remembered"


def test_a_log_that_grew_agrees(run: Audited, audit: Callable[..., Outcomes], tmp_path: Path) -> None:
    grown = forged(run, tmp_path / "forged", lambda entries: [*entries, second_step(entries)])
    outcome = remember_then_audit(run, audit, grown)
    assert (outcome.code, outcome.problems) == (0, [])
    assert (outcome.report["previous_checkpoint"]["size"], outcome.report["checkpoint"]["size"]) == (10, 11)


LOG_KEY = log_key(RUN, KEY.public_key().public_bytes_raw())


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.run.witnesses.ROUND_SECONDS", 0.05)
    monkeypatch.setattr("node.audit.witnesses.POLL_SECONDS", 0.1)


@pytest.mark.usefixtures("often")
def test_a_log_is_audited_as_far_as_witnesses_have_signed_it(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """Two of three sign; the third is away, and holds up neither the run nor an auditor who can do without it."""
    with (
        witnessing(tmp_path / "w1", [LOG_KEY], name="w1") as first,
        witnessing(tmp_path / "w2", [LOG_KEY], name="w2") as second,
        witnessing(tmp_path / "w3", [], name="w3") as strange,
        serving(run.home, witnesses=[first, second, strange]) as url,
    ):
        known = tuple(WitnessAddress(one.key, None) for one in (first, second, strange))
        enough = audit(url, all_=False, sample=0, witnesses=WitnessRule(known, 2))
        lacking = audit(url, all_=False, sample=0, witnesses=WitnessRule(known, 3, patience_seconds=0.5))
        with urlopen(f"{url}/v1/log/witnessed") as reply:
            note = open_witnessed(reply.read(), log=LOG_KEY, witnesses=[one.key for one in known])
    assert (enough.code, enough.problems) == (0, [])
    assert [one["covers"] for one in enough.report["witnesses"]["of"]] == [True, True, False]
    assert (lacking.code, lacking.report["outcome"], lacking.problems) == (2, "incomplete", [])
    assert [one["name"] for one in lacking.report["witnesses"]["of"] if not one["covers"]] == ["w3"]
    assert (note.checkpoint.size, set(note.witnesses)) == (10, {first.key, second.key})


@pytest.mark.usefixtures("often")
def test_two_auditors_who_share_a_witness_catch_an_operator_of_two_histories(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """Neither has audited before, and each log is sound in itself. One may not know where the witness is."""
    alter = with_entry(run.UNREADABLE, detail="It never was.")
    other = forged(run, tmp_path / "forged", lambda entries: [*alter(entries), second_step(entries)])
    settings = {"all_": False, "sample": 0}
    with witnessing(tmp_path / "w1", [LOG_KEY]) as witness:
        away = WitnessRule((WitnessAddress(witness.key, None),), 1, patience_seconds=1.0)
        with serving(run.home, witnesses=[witness]) as url:
            first = audit(url, state_dir=tmp_path / "first", witnesses=WitnessRule((witness,), 1), **settings)
        with serving(other, witnesses=[witness]) as url:
            second = audit(url, state_dir=tmp_path / "second", witnesses=WitnessRule((witness,), 1), **settings)
            alone = audit(url, state_dir=tmp_path / "third", witnesses=away, **settings)
            trusting = audit(url, state_dir=tmp_path / "fourth", **settings)
    assert (first.code, first.problems) == (0, [])
    assert (second.code, second.problems) == (1, [("log_forked", None)])
    assert (alone.code, alone.problems, alone.report["witnesses"]["has_quorum"]) == (2, [], False)
    assert trusting.code == 0, "without a witness nothing is amiss: the test would prove nothing"
    (evidence,) = (tmp_path / "second").glob("evidence-*")
    sizes = [
        open_witnessed((evidence / f"{name}.checkpoint").read_bytes(), log=LOG_KEY).checkpoint.size
        for name in ("first", "second")
    ]
    assert sizes == [11, 10], "both are signed by the run"
    assert not list((tmp_path / "second").glob("*.checkpoint")), "the lie is not what is remembered"


@pytest.mark.usefixtures("often")
def test_a_log_that_is_behind_its_witness_is_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """A database restored from an older copy, which goes on: its operator can no longer prove what it signed."""
    short = forged(run, tmp_path / "forged", lambda entries: entries[:-1])
    with witnessing(tmp_path / "w1", [LOG_KEY]) as witness:
        rule = WitnessRule((witness,), 1)
        with serving(run.home, witnesses=[witness]) as url:
            assert audit(url, all_=False, sample=0, witnesses=rule, state_dir=tmp_path / "first").code == 0
        with serving(short) as url:
            outcome = audit(url, all_=False, sample=0, witnesses=rule, state_dir=tmp_path / "second")
    assert (outcome.code, outcome.problems) == (1, [("log_forked", None)])


def test_entries_that_the_checkpoint_does_not_sign_are_found(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    shutil.copytree(run.home, tmp_path / "forged")
    home = create_home(tmp_path / "forged", public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    with home.database.write() as connection:
        leaf = log.leaves(connection, 3, 4)[0].replace(b'"tokens":', b'"tokens":1')
        connection.execute(update(log_entries).where(log_entries.c.index == 3).values(leaf=leaf))
    home.database.close()
    with serving(tmp_path / "forged", run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems) == (1, [("root_mismatch", None)])
    assert outcome.report["verdicts"] == [], "nothing is derived from entries that nobody signed"


# -- what cannot be checked is said to be unchecked


def test_withheld_evidence_is_neither_agreement_nor_guilt(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    shutil.copytree(run.home, tmp_path / "lossy")
    home = create_home(tmp_path / "lossy", public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    with home.database.read() as connection:
        leaf = log.leaves(connection, run.ADMITTED, run.ADMITTED + 1)[0]
    home.blobs.path(decode(VerdictEntry, leaf, max_bytes=10_000).body).unlink()
    home.database.close()
    with serving(tmp_path / "lossy", run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.report["outcome"], outcome.problems) == (2, "incomplete", [])
    assert outcome.result(run.ADMITTED) == "unavailable"
    assert outcome.report["results"]["agree"] == 4


def test_damaged_evidence_does_not_convict(run: Audited, audit: Callable[..., Outcomes], tmp_path: Path) -> None:
    shutil.copytree(run.home, tmp_path / "damaged")
    for path in (tmp_path / "damaged" / "blobs").glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with serving(tmp_path / "damaged", run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems) == (2, [])
    assert outcome.report["results"]["unavailable"] == 5


def test_without_the_policy_only_cheap_verdicts_are_derived(run: Audited, audit: Callable[..., Outcomes]) -> None:
    with serving(run.home) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.problems) == (2, [])
    assert outcome.result(run.UNREADABLE) == "agree"
    measured = (run.ADMITTED, run.ALSO_ADMITTED, run.WRONG_TOKEN, run.SWITCHED)
    assert [outcome.result(index) for index in measured] == ["unavailable"] * 4


def test_the_auditor_may_bring_its_own_source_of_policies(run: Audited, audit: Callable[..., Outcomes]) -> None:
    with serving(run.home) as url:
        assert audit(url, sources=(run.origin_url,)).code == 0


def test_twelve_hanging_relays_that_served_the_probes_hold_up_no_audit(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """Where one source was asked after the other, `--sample 4` took 249 s instead of 10, and 12 keys cost nothing."""
    shutil.copytree(run.home, tmp_path / "run")
    home = create_home(tmp_path / "run", public_key=KEY.public_key().public_bytes_raw(), spec=SPEC)
    seconds = dict[str, float]()
    with hanging() as (hung, _), serving(tmp_path / "run", run.origin_url) as url:
        for name in ("alone", "among hanging relays"):
            began = time.monotonic()
            outcome = audit(url, all_=False, sample=4, seed=5, state_dir=tmp_path / name)
            seconds[name] = time.monotonic() - began
            assert (outcome.code, outcome.report["results"]["agree"]) == (0, 4)
            for number in range(12):
                relay = RegisteredRelay(
                    node=f"{number:064x}",
                    url=f"{hung}/{number}",
                    received="[]",
                    place="192.0.2.0/24",
                    version=0,
                    seen_at=time.time(),
                    good_at=time.time(),
                )
                with home.database.write() as connection:
                    put_relay(connection, relay, forget_before=0.0, most=256)
        assert len(json.loads(urlopen(f"{url}/v1/relays", timeout=10).read())["relays"]) == 13
    home.database.close()
    assert seconds["among hanging relays"] < 3 * seconds["alone"] + 2


def test_a_coordinator_that_is_away_or_another_run_could_not_be_audited(
    run: Audited, audit: Callable[..., Outcomes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.audit.auditor.PATIENCE_SECONDS", 0.1)
    with serving(run.home, run.origin_url) as url:
        other = audit(url, run_id="ab" * 32)
    away = audit(url)
    nonsense = audit("ftp://x")
    unnamed = audit(url, run_id="../../etc")
    assert [outcome.code for outcome in (other, away, nonsense, unnamed)] == [2, 2, 2, 2]
    assert other.report["error"]["code"] == "wrong_run"
    assert nonsense.report["error"]["code"] == unnamed.report["error"]["code"] == "config_error"
    assert away.report["checkpoint"] is None


def test_a_damaged_memory_is_not_forgotten_silently(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path
) -> None:
    """Forgetting would let a fork through: whoever can damage one file could then show another history."""
    (tmp_path / "auditor").mkdir()
    (tmp_path / "auditor" / f"{RUN}.checkpoint").write_bytes(b"VSW1 damaged")
    with serving(run.home, run.origin_url) as url:
        outcome = audit(url)
    assert (outcome.code, outcome.report["error"]["code"]) == (2, "state_error")


def test_a_verdict_that_is_dated_back_is_withheld_and_not_expired(
    run: Audited, audit: Callable[..., Outcomes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would pass an audit by dating back what it admitted today, and saying that the files are removed."""

    def dated_back(entries: list[LogEntry]) -> list[LogEntry]:
        first = next(at for at, entry in enumerate(entries) if isinstance(entry, VerdictEntry))
        return [
            replace(entry, decided_at=entry.decided_at - 10 * 86400)
            if isinstance(entry, VerdictEntry) and at > first
            else entry
            for at, entry in enumerate(entries)
        ]

    async def removed(*_args: object, **_changes: object) -> bytes:
        raise Expired("The operator has removed its files.")

    monkeypatch.setattr(EvidenceAuditor, "_blob", removed)
    with serving(forged(run, tmp_path / "forged", dated_back), run.origin_url) as url:
        results = audit(url).report["results"]
    assert {name: count for name, count in results.items() if count} == {"unavailable": 5}
