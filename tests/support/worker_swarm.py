"""A small swarm for tests: a real origin and a small coordinator over real HTTP, and a worker that joins it."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dated_origin import DatedOrigin
from msgspec import UNSET
from ports import free_port
from waiting import SECONDS, eventually

from node.client.http import Backoff
from node.engines.torch import TorchEngine
from node.joining.session import JoinSettings
from node.keys.identity import node_id
from node.protocol.admission import Outcome
from node.protocol.messages import (
    MESSAGE_VERSION,
    RECEIPT_DOMAIN,
    ErrorReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Receipt,
    Registration,
    RelayAnnouncement,
    RelayList,
    SubmissionReply,
)
from node.protocol.reasons import Reason
from node.protocol.requests import check_claim, open_claim, read_authorization
from node.protocol.run import (
    DESCRIPTOR_DOMAIN,
    DESCRIPTOR_VERSION,
    BatchSpec,
    Descriptor,
    EnvironmentSpec,
    RunSpec,
    SamplingSpec,
    run_id_of,
)
from node.worker import daemon, leases, relays
from node.worker.daemon import WorkerSettings, run_worker
from shardcast import OriginServer
from shardcast.envelope import seal
from shardcast.wire import decode, digest, encode

RUN_KEY = Ed25519PrivateKey.from_private_bytes(b"\1" * 32)
NODE_KEY = Ed25519PrivateKey.from_private_bytes(b"\2" * 32)
RUN_ID = run_id_of(RUN_KEY.public_key().public_bytes_raw())
SPEC = RunSpec(
    name="test",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=2, max_new_tokens=6),
    batch=BatchSpec(lease_seconds=30.0),
)


class SmallCoordinator:
    """Signs what a coordinator signs, checks what it checks, and misbehaves on request."""

    def __init__(self, relays, manifest_digest):
        self.relays, self.manifest_digest = relays, manifest_digest
        self.spec, self.version, self.key = SPEC, 0, RUN_KEY
        self.nodes, self.leases, self.submissions, self.returned = set(), {}, {}, []
        self.next_slot, self.most_slots = 0, 10**6
        self.candidate = UNSET
        self.outcome, self.reason, self.receipt_key = Outcome.ADMITTED, None, RUN_KEY
        self.receipts_withheld = False
        self.lease_seconds, self.head_version = 30, 0
        self.on_submission = None
        self.on_registration = None
        self.puzzle = None
        self.asked = []

    def app(self):
        app = web.Application(client_max_size=2**24)
        app.add_routes(
            [
                web.get("/v1/run", self.run),
                web.get("/v1/relays", self.list_relays),
                web.post("/v1/relays", self.announce),
                web.post("/v1/nodes", self.register),
                web.get("/v1/puzzle", self.tell_puzzle),
                web.post("/v1/leases", self.lease),
                web.post("/v1/leases/{lease}/return", self.give_back),
                web.put("/v1/submissions/{lease}", self.submit),
                web.get("/v1/receipts/{submission}", self.receipt),
            ]
        )
        return app

    async def authenticated(self, request):
        body = await request.read()
        envelope = read_authorization(request.headers["Authorization"])
        signer, claim = open_claim(envelope)
        check_claim(claim, run_id=RUN_ID, method=request.method, path=request.path, now=time.time())
        assert (claim.body_digest, claim.body_bytes) == (digest(body), len(body))
        return signer.hex(), body, digest(envelope)

    async def run(self, _request):
        now = int(time.time())
        descriptor = Descriptor(
            run_id=RUN_ID,
            version=time.time_ns() // 1000,
            spec=self.spec,
            endpoints=(),
            relays=self.relays,
            peers=(),
            head=None,
            revoked=(),
            issued_at=now,
            expires_at=now + 3600,
        )
        sealed = seal(encode(descriptor), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=self.key)
        return web.Response(body=sealed)

    async def list_relays(self, _request):
        return web.Response(body=encode(RelayList(relays=self.relays)))

    async def announce(self, request):
        _, body, _ = await self.authenticated(request)
        self.relays = (decode(RelayAnnouncement, body, max_bytes=65536).url,)
        return web.Response(body=encode(RelayList(relays=self.relays)))

    async def register(self, request):
        node, body, _ = await self.authenticated(request)
        registration = decode(Registration, body, max_bytes=65536)
        if self.on_registration is not None and (reason := self.on_registration(node, registration)):
            return refusal(reason.status, reason)
        self.nodes.add(node)
        return web.Response(body=b"{}")

    async def tell_puzzle(self, _request):
        return web.Response(body=encode(self.puzzle))

    async def lease(self, request):
        node, body, _ = await self.authenticated(request)
        if node not in self.nodes:
            return refusal(401, Reason.UNKNOWN_IDENTITY)
        asked = decode(LeaseRequest, body, max_bytes=65536)
        self.asked.append(asked)
        leases = []
        while len(leases) < asked.slots and self.next_slot < self.most_slots:
            lease = Lease(
                lease_id=os.urandom(32).hex(),
                version=self.version,
                manifest_digest=self.manifest_digest,
                slot=self.next_slot,
                expires_at=int(time.time()) + self.lease_seconds,
                candidate=self.candidate,
            )
            self.next_slot += 1
            self.leases[lease.lease_id] = lease
            leases.append(lease)
        reply = LeaseReply(leases=tuple(leases), head_version=self.head_version, retry_after_seconds=0.05)
        return web.Response(body=encode(reply))

    async def give_back(self, request):
        await self.authenticated(request)
        self.returned.append(request.match_info["lease"])
        return web.Response(body=b"{}")

    async def submit(self, request):
        node, body, submission = await self.authenticated(request)
        lease = self.leases[request.match_info["lease"]]
        for earlier, (owner, taken, _) in self.submissions.items():
            if taken == lease:
                assert owner == node
                return refusal(409, Reason.DUPLICATE_SUBMISSION, submission=earlier)
        if self.on_submission is not None and (answer := await self.on_submission(request, submission)):
            return answer
        self.submissions[submission] = (node, lease, body)
        return web.Response(status=202, body=encode(SubmissionReply(submission=submission)))

    async def receipt(self, request):
        submission = request.match_info["submission"]
        if submission not in self.submissions:
            return refusal(404, Reason.NOT_FOUND)
        if self.receipts_withheld:
            await asyncio.sleep(0.2)
            return web.Response(status=202, body=b'{"state":"queued"}')
        node, lease, _ = self.submissions[submission]
        receipt = Receipt(
            run_id=RUN_ID,
            submission=submission,
            node=node,
            version=lease.version,
            slot=lease.slot,
            outcome=self.outcome,
            reason=self.reason,
            detail="",
            tokens=7,
            log_index=1,
            leaf_hash="0" * 64,
        )
        sealed = seal(encode(receipt), domain=RECEIPT_DOMAIN, version=MESSAGE_VERSION, key=self.receipt_key)
        return web.Response(body=sealed)


def refusal(status, reason, *, submission=None):
    reply = ErrorReply(code=reason, message=Reason(reason).advice, server_time=int(time.time()), submission=submission)
    return web.Response(status=status, body=encode(reply))


class Serving:
    """A coordinator's HTTP server that can go away and come back at the same address."""

    def __init__(self, coordinator):
        self.coordinator, self.port, self._runner = coordinator, free_port(), None

    async def start(self):
        self._runner = web.AppRunner(self.coordinator.app(), shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def stop(self):
        await self._runner.cleanup()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"


def producing(produce):
    """Engines that answer `await produce(honest engine, requests)`."""

    class Engine(TorchEngine):
        async def generate(self, requests, **_):
            return await produce(super(), requests)

    return Engine


class Swarm(Serving):
    """What a test of the worker needs: the coordinator to misbehave, and workers to see what they do."""

    run_id, spec, node_key, node = RUN_ID, SPEC, NODE_KEY, node_id(NODE_KEY)
    refusal = staticmethod(refusal)

    def __init__(self, coordinator, state, origin_server, origin_url):
        super().__init__(coordinator)
        self.state, self.origin_server, self.origin_url = state, origin_server, origin_url

    def announce(self, path, *, version):
        """Publish a policy; the coordinator goes on leasing slots of the one before, until `lease_newest`."""
        digest = self.origin_server.publish(path, version=version)
        self.coordinator.head_version = version
        return digest

    def lease_newest(self, digest):
        """From now on lease slots of the newest policy, whose manifest has this digest."""
        self.coordinator.version, self.coordinator.manifest_digest = self.coordinator.head_version, digest

    async def work(self, stop, *, produce=None, make_engine=None, **changes):
        quick = Backoff(first_seconds=0.02, max_seconds=0.1)
        changes = {"slots": 2, "backoff": quick} | changes
        settings = WorkerSettings(
            join=JoinSettings(run_id=RUN_ID, coordinators=(self.url,)), state=self.state, **changes
        )
        if make_engine is None:
            make_engine = TorchEngine if produce is None else producing(produce)
        await run_worker(settings, key=NODE_KEY, make_engine=make_engine, stop=stop)

    async def work_once(self, **changes):
        """The first slots, with their receipts."""
        await asyncio.wait_for(self.work(asyncio.Event(), once=True, **changes), SECONDS)

    @asynccontextmanager
    async def working(self, **changes):
        """A worker in the background; yields its stop event and its task."""
        stop = asyncio.Event()
        task = asyncio.create_task(self.work(stop, **changes))
        try:
            yield stop, task
        finally:
            stop.set()
            await asyncio.wait({task}, timeout=60)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def until(self, condition, seconds=SECONDS):
        """Wait for `condition()`; fails the test if it does not come true."""
        await eventually(condition, seconds=seconds)

    def status(self):
        return json.loads((self.state / "status.json").read_text())


@pytest.fixture
async def swarm(tmp_path, tiny_policy_path, monkeypatch):
    """Serve a run, whose workers' pauses are a tenth as long as elsewhere."""
    for module in (daemon, leases):
        monkeypatch.setattr(module, "UNSOUND_PAUSE_SECONDS", 0.5)
    for module in (leases, relays):
        monkeypatch.setattr(module, "REFUSED_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(daemon, "STATUS_SECONDS", 0.1)
    origin = DatedOrigin(tmp_path / "origin", RUN_KEY, RUN_ID)
    server = OriginServer(origin)
    url = f"http://127.0.0.1:{server.start()}"
    manifest_digest = server.publish(tiny_policy_path, version=0)
    served = Swarm(SmallCoordinator((url,), manifest_digest), tmp_path / "state", server, url)
    await served.start()
    yield served
    await served.stop()
    server.stop()
    origin.close()
