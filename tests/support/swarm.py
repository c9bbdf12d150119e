"""A small run in one process, over real HTTP: what tests of the coordinator knock at.

The coordinator is served by uvicorn, the policy by a SHARDCAST origin, and a verifier works the queue, each in
a thread of its own. Nothing is replaced: an attacker's test sends bytes to the port and reads what comes back.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dated_origin import DatedOrigin

from coordinator.app import create_app
from coordinator.http.connections import (
    DEFAULT_CONNECTION_LIMITS,
    ConnectionLimits,
    listening_socket,
    server_config,
)
from coordinator.http.service import RequestLimits
from coordinator.lab.redteam.http_client import claim_of
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.storage import training
from coordinator.storage.counters import recount
from coordinator.storage.database import Connection
from coordinator.storage.training import PolicyRecord
from coordinator.training.trainer import Trainer, TrainerSettings
from coordinator.verifier.daemon import Verifier, VerifierSettings
from node.audit.auditor import run_audit
from node.client.http import Backoff
from node.engines.base import SampleRequest, requests_for
from node.engines.torch import TorchEngine
from node.environments import load_environments
from node.episodes.expected import expected_of
from node.joining.session import JoinSettings
from node.protocol.messages import (
    Lease,
    LeaseReply,
    LeaseRequest,
    Receipt,
    Registration,
    RequestClaim,
    candidate_of,
)
from node.protocol.receipts import open_receipt
from node.protocol.requests import sign_request
from node.protocol.run import EnvironmentSpec, LimitsSpec, ProofSpec, RunSpec, StandingSpec, run_id_of
from node.protocol.submission import Expected, Rollout
from node.submission.writer import write_rollouts
from node.verification.readings import MakePrefills, transformers_prefills
from node.verification.shelf import GIB
from node.worker.daemon import WorkerSettings, run_worker
from shardcast import Origin, OriginServer, publish_content
from shardcast.manifest import SignedManifest
from shardcast.wire import decode, encode

VERDICT_SECONDS = 120.0
INSTANCE = "0" * 32
"""The machine that every peer says it is on; each has a key of its own."""

RUN_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
"""Of every run here: problems and seeds of slots follow from the run's id, and a test draws the same each time."""

REGISTRATION = Registration(software="test", engine="torch", instance=INSTANCE, name="test")

TIGHT = LimitsSpec(
    exponent_mismatches=8.0,
    mantissa_mean=1.0,
    mantissa_median=1.0,
    token_margin=1e-3,
    rollout_margin_mean=1e-3,
    logprob_error=1e-3,
)
"""Limits between honest float32 and everything else, for the tiny policy."""


def small_spec(**changes: object) -> RunSpec:
    """A run of two groups of four a step, over both of the tiny policy's tasks."""
    spec = RunSpec(
        name="test",
        environments=(EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse")),
        proofs=ProofSpec(scheme="toploc/1"),
        limits=TIGHT,
        standing=StandingSpec(ban_after=1000),
    )
    spec = msgspec.structs.replace(
        spec,
        sampling=msgspec.structs.replace(spec.sampling, group_size=4, max_new_tokens=40),
        batch=msgspec.structs.replace(
            spec.batch, groups_per_step=2, rejection_backoff_seconds=0.0, max_leases_per_node=1000
        ),
    )
    return msgspec.structs.replace(spec, **changes)


@dataclass(frozen=True)
class Reply:
    """What the door said."""

    status: int
    body: bytes

    @property
    def code(self) -> str:
        """The reason code of a refusal."""
        return str(json.loads(self.body)["code"])


@dataclass
class Peer:
    """Somebody with a key who talks to the coordinator, as honestly as the test wants."""

    url: str
    run_id: str
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def node(self) -> str:
        return self.key.public_key().public_bytes_raw().hex()

    def claim(self, method: str, path: str, body: bytes, /, **changes: object) -> RequestClaim:
        """The claim an honest node would sign, with `changes`."""
        return claim_of(self.run_id, method, path, body, **changes)

    def signed(self, method: str, path: str, body: bytes, /, **changes: object) -> Reply:
        """Send a signed request."""
        header, _ = sign_request(self.claim(method, path, body, **changes), key=self.key)
        return self.send(method, path, body, {"Authorization": header})

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Reply:
        """Send bytes as they are."""
        request = urllib.request.Request(self.url + path, data=body, headers=headers or {}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return Reply(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, error.read())

    def register(self, **shown: object) -> Reply:
        """Register, with what a new key shows."""
        return self.signed("POST", "/v1/nodes", encode(msgspec.structs.replace(REGISTRATION, **shown)))

    def ask(self, *, held: tuple[int, ...] = (0,), slots: int = 1) -> LeaseReply:
        """Ask for leases, as a worker does."""
        body = encode(LeaseRequest(held_versions=held, slots=slots, instance=INSTANCE))
        reply = self.signed("POST", "/v1/leases", body)
        assert reply.status == 200, reply
        return decode(LeaseReply, reply.body, max_bytes=2**20)

    def lease(self) -> Lease:
        """One lease; waits while others hold everything."""
        deadline = time.monotonic() + VERDICT_SECONDS
        while time.monotonic() < deadline:
            leases = self.ask().leases
            if leases:
                return leases[0]
            time.sleep(0.1)
        raise AssertionError("no lease to be had")

    def submit(self, lease_id: str, body: bytes, /, **changes: object) -> Reply:
        return self.signed("PUT", f"/v1/submissions/{lease_id}", body, **changes)


def settle_slots(connection: Connection, state: str, final: str) -> None:
    """Bring all slots in `state` to a final one and count them anew, which makes room for others."""
    connection.exec_driver_sql(f"UPDATE slots SET state = '{final}' WHERE state = '{state}'")
    recount(connection)


@dataclass(frozen=True)
class Swarm:
    """A run that is being served."""

    home: Home
    url: str
    policy_path: Path
    engine: TorchEngine
    origin: Origin
    origin_server: OriginServer
    origin_url: str

    def publish(self, path: Path, *, version: int) -> None:
        """Publish a later policy, as the trainer does."""
        publish(self.home, self.origin, self.origin_server, path, version=version)

    def peer(self, *, registered: bool = True) -> Peer:
        """A new identity."""
        peer = Peer(self.url, self.home.run_id)
        if registered:
            assert peer.register().status == 200
        return peer

    def requests(self, lease: Lease) -> list[SampleRequest]:
        """What the slot of `lease` asks for."""
        return requests_for(self.expected(lease))

    def expected(self, lease: Lease) -> Expected:
        """What a submission for `lease` must contain."""
        return expected_of(
            self.home.spec,
            self.engine.policy,
            load_environments(self.home.spec, self.home.datasets),
            run_id=self.home.run_id,
            version=lease.version,
            manifest_digest=lease.manifest_digest,
            slot=lease.slot,
            candidate=candidate_of(lease),
        )

    def honest(self, lease: Lease) -> list[Rollout]:
        """What an honest worker generates for `lease`."""
        return asyncio.run(self.engine.generate(self.requests(lease)))

    def verdict(self, peer: Peer, reply: Reply) -> Receipt:
        """The receipt for a submission that was taken."""
        assert reply.status == 202, reply
        submission = json.loads(reply.body)["submission"]
        deadline = time.monotonic() + VERDICT_SECONDS
        while time.monotonic() < deadline:
            answer = peer.send("GET", f"/v1/receipts/{submission}?wait=10")
            if answer.status == 200:
                return open_receipt(answer.body, signer=self.home.public_key)
        raise AssertionError("no verdict in time")

    def audit(self, state: Path, **changes: Any) -> int:
        """Audit all verdicts over HTTP, print the report as JSON, and return the exit code; changes as in run_audit."""
        settings = {"sample": None, "all_": True, "seed": None, "as_json": True} | changes
        return asyncio.run(run_audit(self.url, run_id=self.home.run_id, state_dir=state, **settings))

    def judge(self, peer: Peer, rollouts: list[Rollout], lease: Lease) -> Receipt:
        """Submit `rollouts` through the door and wait for the verdict."""
        return self.verdict(peer, peer.submit(lease.lease_id, write_rollouts(rollouts)))


@contextmanager
def serve(
    coordinator: Coordinator,
    *,
    registrations_per_minute: int = 100_000,
    connections: ConnectionLimits = DEFAULT_CONNECTION_LIMITS,
) -> Iterator[str]:
    """The coordinator on a free port of loopback, where every peer has the same address."""
    limits = RequestLimits(registrations=registrations_per_minute, per_address=1_000_000)
    server = uvicorn.Server(server_config(create_app(coordinator, limits=limits), connections))
    listening = listening_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = listening.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def verifying(
    home: Home,
    *,
    source: str,
    state: Path,
    name: str = "verifier-1",
    make_prefills: MakePrefills = transformers_prefills,
    policy_memory: int = GIB,
) -> Iterator[None]:
    """A verifier at work in a thread."""
    stop = asyncio.Event()
    loop = asyncio.new_event_loop()
    settings = VerifierSettings(
        name=name,
        state=state,
        sources=(source,),
        make_prefills=make_prefills,
        policy_memory=policy_memory,
    )
    verifier = Verifier(home, settings)
    thread = threading.Thread(target=lambda: loop.run_until_complete(verifier.run(stop)), daemon=True)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def worker_thread(
    url: str, run_id: str, state: Path, *, key: Ed25519PrivateKey | None = None, **settings: Any
) -> Iterator[Callable[[], dict[str, object]]]:
    """A worker in a thread of its own; yields what reads its status. `settings` as in WorkerSettings."""
    key = key or Ed25519PrivateKey.generate()
    stop, loop = asyncio.Event(), asyncio.new_event_loop()
    settings = {"backoff": Backoff(first_seconds=0.02, max_seconds=0.1)} | settings
    joining = JoinSettings(run_id=run_id, coordinators=(url,))
    work = run_worker(
        WorkerSettings(join=joining, state=state, **settings), key=key, make_engine=TorchEngine, stop=stop
    )
    thread = threading.Thread(target=loop.run_until_complete, args=(work,))
    thread.start()

    def status() -> dict[str, object]:
        path = state / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    try:
        yield status
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@contextmanager
def running(
    folder: Path,
    policy_path: Path,
    *,
    spec: RunSpec | None = None,
    make_prefills: MakePrefills = transformers_prefills,
    key: Ed25519PrivateKey | None = None,
    blobs_url: str | None = None,
    policy_memory: int = GIB,
    relays: Callable[[str], tuple[str, ...]] = lambda origin_url: (origin_url,),
) -> Iterator[Swarm]:
    """A run whose version 0 is the policy in `policy_path`; the verifier's settings as in VerifierSettings.

    Its datasets are those in `folder`/data/datasets, and nodes are told of `relays` of the origin's URL.
    """
    key = key or RUN_KEY
    public_key = key.public_key().public_bytes_raw()
    home = create_home(folder / "data", public_key=public_key, spec=spec or small_spec(), blobs_url=blobs_url)
    origin = DatedOrigin(folder / "origin", key, home.run_id)
    contents = {
        digest: publish_content(path, digest=digest, folder=folder / "origin-datasets", key=key, run_id=home.run_id)
        for digest, path in home.datasets.items()
    }
    server = OriginServer(origin, contents=contents)
    origin_url = f"http://127.0.0.1:{server.start()}"
    publish(home, origin, server, policy_path, version=0)
    engine = TorchEngine(home.spec)
    asyncio.run(engine.load(policy_path, version=0))
    try:
        with (
            serve(Coordinator(home, key=key, relay_urls=relays(origin_url))) as url,
            verifying(
                home,
                source=origin_url,
                state=folder / "verifier",
                make_prefills=make_prefills,
                policy_memory=policy_memory,
            ),
        ):
            yield Swarm(
                home=home,
                url=url,
                policy_path=policy_path,
                engine=engine,
                origin=origin,
                origin_server=server,
                origin_url=origin_url,
            )
    finally:
        server.stop()
        for each in (origin, *contents.values()):
            each.close()
        home.database.close()


@contextmanager
def learning(swarm: Swarm, state: Path) -> Iterator[None]:
    """The run's trainer in a thread of its own, from the policy that is published."""
    state.mkdir()
    shutil.copyfile(swarm.policy_path, state / "policy-0.safetensors")
    settings = TrainerSettings(state=state)
    trainer = Trainer(swarm.home, origin=swarm.origin, server=swarm.origin_server, settings=settings)
    thread = threading.Thread(target=trainer.run)
    thread.start()
    try:
        yield
    finally:
        trainer.stop()
        thread.join()


def publish(home: Home, origin: Origin, server: OriginServer, path: Path, *, version: int) -> None:
    """Publish a policy as the trainer does: it is in the log before anybody hears of it."""

    def record(signed: SignedManifest) -> None:
        policy = PolicyRecord(
            version=version,
            manifest_digest=signed.digest,
            result_digest=signed.manifest.result_digest,
            manifest=signed.envelope,
        )
        with home.database.write() as connection:
            training.record_policy(connection, policy, now=time.time())

    server.publish(path, version=version, before_announcing=record)


__all__ = [
    "TIGHT",
    "Peer",
    "Reply",
    "Swarm",
    "learning",
    "publish",
    "run_id_of",
    "running",
    "serve",
    "small_spec",
    "verifying",
]
