"""HTTP servers: the coordinator's and a relay's, over real sockets.

Budgets count the whole process, so the client's part of the exchange too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from benchmarks.fuzzing.http import http_mutator
from benchmarks.fuzzing.loopback import Faults, Loop, ReplyRefused, ask, judge_reply
from benchmarks.fuzzing.mutation import json_mutator
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.broadcast import head, manifest
from benchmarks.fuzzing.targets.messages import (
    ANNOUNCEMENTS,
    CLAIM,
    DIGEST,
    LEASE_REQUESTS,
    NODE_KEY,
    REGISTRATIONS,
    RUN_ID,
    RUN_KEY,
    SPEC,
)
from coordinator.app import create_app
from coordinator.http.connections import ConnectionLimits, server_config
from coordinator.http.service import RequestLimits
from coordinator.lab.redteam.http_client import claim_of
from coordinator.run.home import create_home
from coordinator.run.service import Coordinator
from coordinator.storage import training
from coordinator.storage.training import PolicyRecord
from node.protocol.requests import sign_request
from shardcast.manifest import seal_head, seal_manifest
from shardcast.serve.listener import ServerLimits, listen
from shardcast.serve.server import make_app
from shardcast.serve.state import Announced, ServedState
from shardcast.store.versions import Store
from shardcast.wire import Wire, encode

_ZEROS = "0" * 64
DOOR_PATHS = (
    *("/v1/run", "/v1/policy", "/v1/relays", "/v1/status", "/health", "/metrics", "/v1/log/checkpoint", "/docs"),
    *("/v1/log/entries?start=0&end=2", "/v1/log/inclusion?index=0&size=1", "/v1/log/consistency?first=1&second=1"),
    *(f"/v1/receipts/{_ZEROS}?wait=1.5", f"/v1/receipts/{DIGEST}", f"/v1/blobs/{SPEC.digest}", f"/v1/blobs/{_ZEROS}"),
    *(
        "/v1/nodes",
        f"/v1/nodes/{DIGEST}",
        "/v1/leases",
        f"/v1/leases/{DIGEST}/return",
        f"/v1/submissions/{DIGEST}",
        "/v1/../v1/run",
        "//v1/run",
    ),
)
RELAY_PATHS = (
    *("/v1/head", "/v1/head?after=4", "/v1/head?after=9&wait=0.001", "/v1/versions/5", f"/v1/manifests/{DIGEST}"),
    *(
        f"/v1/payloads/{DIGEST}/0?wait=0",
        "/v1/payloads/PAYLOAD/0",
        "/v1/status",
        "/health",
        "/metrics",
        "/v1/versions/0000000000000005",
    ),
)


def _request(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: run.example:8700", "User-Agent: swarmproof", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _signed(method: str, path: str, body: bytes, *, nonce: int, issued_at: float) -> bytes:
    claim = claim_of(RUN_ID, method, path, body, issued_at=int(issued_at), nonce=f"{nonce:032x}")
    header, _ = sign_request(claim, key=NODE_KEY)
    return _request(method, path, body, f"Authorization: {header}")


def _folder(stack: ExitStack) -> Path:
    memory = Path("/dev/shm")  # noqa: S108  (a folder of an unguessable name in it)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)))


def _faults(stack: ExitStack, *loggers: str) -> Faults:
    faults = Faults()
    for name in loggers:
        logging.getLogger(name).addHandler(faults)
        stack.callback(logging.getLogger(name).removeHandler, faults)
    return faults


class ServedCoordinator:
    """A coordinator that has one policy and knows one node, served by uvicorn as its command serves it."""

    def __init__(self, stack: ExitStack) -> None:
        self.faults = _faults(stack, "uvicorn.error")
        self._loop = Loop(stack)
        home = create_home(_folder(stack), public_key=RUN_KEY.public_key().public_bytes_raw(), spec=SPEC)
        stack.callback(home.database.close)
        signed = seal_manifest(manifest(version=0, previous=None), RUN_KEY)
        policy = PolicyRecord(version=0, manifest_digest=signed.digest, result_digest=DIGEST, manifest=signed.envelope)
        with home.database.write() as connection:
            training.record_policy(connection, policy, now=time.time())
        coordinator = Coordinator(home, key=RUN_KEY)
        with home.database.write() as connection:
            node = NODE_KEY.public_key().public_bytes_raw().hex()
            coordinator.register(connection, node, REGISTRATIONS[0], now=time.time())
        # All of it comes from one address.
        limits = RequestLimits(**dict.fromkeys(RequestLimits.__dataclass_fields__, 10**9))
        connections = ConnectionLimits(connections_per_address=ConnectionLimits().connections)
        config = server_config(create_app(coordinator, limits=limits), connections)
        config.load()
        self._state = ServerState()
        self._port = self._loop.run(self._serve(config, stack))

    async def _serve(self, config: uvicorn.Config, stack: ExitStack) -> int:
        protocol_class: Any = config.http_protocol_class
        protocol = partial(protocol_class, config=config, server_state=self._state, app_state={})
        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        stack.callback(server.close)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def exchange(self, data: bytes) -> str:
        reply = self._loop.run(ask(self._port, data, is_busy=lambda: bool(self._state.tasks)))
        return judge_reply(reply, self.faults)


def _door_http(stack: ExitStack) -> Harness:
    """Feed raw bytes to the coordinator's port."""
    door = ServedCoordinator(stack)
    gets = [_request("GET", path) for path in DOOR_PATHS[:5]]
    late = _signed("PUT", CLAIM.path, b"body", nonce=0, issued_at=0)
    others = [_request("GET", path) for path in DOOR_PATHS[5:]] + [late, _request("POST", "/v1/nodes", b"{}")]
    mutate = http_mutator(*(path.encode() for path in DOOR_PATHS))
    return Harness(gets, door.exchange, (ReplyRefused,), mutate, hostile=others)


def _door_message(path: str, *messages: Wire) -> Callable[[ExitStack], Harness]:
    """Feed bodies that are really signed to the served coordinator."""

    def prepare(stack: ExitStack) -> Harness:
        door, nonces = ServedCoordinator(stack), itertools.count()

        def run(data: bytes) -> str:
            return door.exchange(_signed("POST", path, data, nonce=next(nonces), issued_at=time.time()))

        return Harness([encode(message) for message in messages], run, (ReplyRefused,), json_mutator())

    return prepare


def _relay_http(stack: ExitStack) -> Harness:
    """Feed raw bytes to a relay's port, or an origin's, which is the same."""
    faults = _faults(stack, "shardcast.serve.listener.http", "aiohttp.server", "asyncio")
    loop = Loop(stack)
    store = Store(_folder(stack), run_id=RUN_ID)
    stack.callback(store.close)
    signed = seal_manifest(manifest(previous=None), RUN_KEY)
    store.add_manifest(signed)
    store.result(signed).write(0, b"\0")  # the first chunk's bytes, as `manifest` digests them
    announced = Announced(5, seal_head(head(), RUN_KEY))

    async def serve() -> int:
        served = ServedState(store=store, role="relay", run_id=RUN_ID, head=lambda: announced)
        limits = ServerLimits(max_wait_s=0.002)
        listener = await listen(make_app(served, limits), limits=limits)
        stack.callback(lambda: loop.run(listener.stop()))
        return listener.port

    port = loop.run(serve())

    def run(data: bytes) -> str:
        return judge_reply(loop.run(ask(port, data)), faults)

    paths = [path.replace("PAYLOAD", signed.manifest.full.digest) for path in RELAY_PATHS]
    requests = [_request("GET", path) for path in paths]
    mutate = http_mutator(*(path.encode() for path in paths))
    return Harness(requests[:2], run, (ReplyRefused,), mutate, hostile=requests[2:])


TARGETS = (
    Target("door.http", "anybody, to the coordinator", 20, _door_http),
    Target("door.registration", "any key, to the coordinator", 3, _door_message("/v1/nodes", *REGISTRATIONS)),
    Target("door.announcement", "any key, to the coordinator", 3, _door_message("/v1/relays", *ANNOUNCEMENTS)),
    Target("door.lease", "any key, to the coordinator", 3, _door_message("/v1/leases", *LEASE_REQUESTS)),
    Target("door.relay", "anybody, to a relay or origin", 15, _relay_http),
)
