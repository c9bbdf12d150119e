"""Floods of requests: what one address and one node may ask for, and who cannot be made to pay for somebody else.

The coordinator is the operator's own command, in a process of its own, with small limits.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import INSTANCE, REGISTRATION, Peer

from benchmarks.loading.coordinator import Served, serving
from node.client.api import CoordinatorClient
from node.protocol.messages import LeaseRequest
from node.protocol.requests import sign_request
from shardcast.wire import encode

PER_ADDRESS, PER_NODE = 60, 20
FLAGS = ("--requests-per-minute", str(PER_ADDRESS), "--node-requests-per-minute", str(PER_NODE))
PROXY = "127.0.99.1"
ASK = encode(LeaseRequest(held_versions=(), slots=1, instance=INSTANCE))


class Reply(NamedTuple):
    status: int
    code: str | None
    retry_after: str | None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("run"), *FLAGS, "--trust-proxy", PROXY) as served:
        yield served


def send(
    served: Served, method: str, path: str, *, source: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> Reply:
    """One request on a connection of its own from `source`."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60, source_address=(source, 0))
    connection.request(method, path, body=body, headers=headers or {})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    code = json.loads(text)["code"] if answer.status >= 400 else None
    return Reply(answer.status, code, answer.headers["Retry-After"])


def flood(served: Served, source: str, *, headers: list[dict[str, str]] | None = None) -> list[Reply]:
    """Half as many requests again as an address has, and the answers."""
    wanted = headers or [{}] * (PER_ADDRESS * 3 // 2)
    return [send(served, "GET", "/health", source=source, headers=each) for each in wanted]


def signed(served: Served, peer: Peer, path: str, body: bytes, *, source: str) -> Reply:
    header, _ = sign_request(peer.claim("POST", path, body), key=peer.key)
    return send(served, "POST", path, source=source, body=body, headers={"Authorization": header})


def registered(served: Served, *, source: str) -> Peer:
    peer = Peer("", served.home.run_id)
    body = encode(REGISTRATION)
    assert signed(served, peer, "/v1/nodes", body, source=source).status == 200
    return peer


def test_a_flood_from_one_address_is_told_when_to_come_again(served: Served) -> None:
    began = time.monotonic()
    replies = flood(served, "127.0.10.1")
    regained = (time.monotonic() - began) * PER_ADDRESS / 60
    assert replies[0].status == 200
    refused = [reply for reply in replies if reply.status != 200]
    assert {(reply.status, reply.code) for reply in refused} == {(429, "too_many_requests")}
    assert len(refused) >= max(1, PER_ADDRESS // 2 - regained - 1)
    assert 1 <= int(refused[-1].retry_after or 0) <= 60
    assert send(served, "GET", "/health", source="127.0.10.2").status == 200, "nobody else pays"
    time.sleep(float(refused[-1].retry_after or 0))
    assert send(served, "GET", "/health", source="127.0.10.1").status == 200, "Retry-After is true"


def test_a_forged_forwarded_address_buys_nothing(served: Served) -> None:
    """Whoever could name the address that pays could ask without end, and spend anybody else's share."""
    forged = [{"X-Forwarded-For": f"192.0.2.{n}", "X-Real-IP": f"192.0.2.{n}"} for n in range(PER_ADDRESS * 3 // 2)]
    assert "too_many_requests" in {reply.code for reply in flood(served, "127.0.11.1", headers=forged)}
    by_the_victim = {"X-Forwarded-For": "192.0.2.1"}
    assert send(served, "GET", "/health", source=PROXY, headers=by_the_victim).status == 200


def test_the_proxy_speaks_for_many_and_is_not_fooled_by_what_it_passes_on(served: Served) -> None:
    many = [{"X-Forwarded-For": f"198.51.100.{n}"} for n in range(PER_ADDRESS * 3 // 2)]
    assert {reply.status for reply in flood(served, PROXY, headers=many)} == {200}
    # A proxy appends whom it sees; what the client claimed stands before that.
    lies = [{"X-Forwarded-For": f"203.0.113.{n}, 198.51.100.200"} for n in range(PER_ADDRESS * 3 // 2)]
    assert "too_many_requests" in {reply.code for reply in flood(served, PROXY, headers=lies)}


@pytest.mark.parametrize("text", ["", ",", "not an address", "127.0.99.1", "::1%eth0", "é", "1" * 5000, "[::1"])
def test_nonsense_from_the_proxy_is_nobodys_address_and_no_fault(served: Served, text: str) -> None:
    headers = {"X-Forwarded-For": text.encode("utf-8").decode("latin-1")}
    assert send(served, "GET", "/v1/relays", source=PROXY, headers=headers).status in (200, 429)


def test_a_node_has_its_share_from_wherever_it_asks(served: Served) -> None:
    """One key behind a thousand addresses is still one node."""
    peer = registered(served, source="127.0.12.1")
    replies = [signed(served, peer, "/v1/leases", ASK, source=f"127.0.12.{n + 1}") for n in range(PER_NODE + 10)]
    assert (replies[-1].status, replies[-1].code) == (429, "too_many_requests")
    other = registered(served, source="127.0.12.200")
    assert signed(served, other, "/v1/leases", ASK, source="127.0.12.1").status == 200


def test_repeating_somebodys_requests_does_not_spend_their_share(served: Served) -> None:
    """Plain HTTP can be read on the way: what is read there must not be worth anything."""
    peer = registered(served, source="127.0.13.1")
    header, _ = sign_request(peer.claim("POST", "/v1/leases", ASK), key=peer.key)
    assert (
        send(served, "POST", "/v1/leases", source="127.0.13.1", body=ASK, headers={"Authorization": header}).status
        == 200
    )
    for n in range(PER_NODE * 2):
        reply = send(
            served, "POST", "/v1/leases", source=f"127.0.13.{n + 2}", body=ASK, headers={"Authorization": header}
        )
        assert reply.code == "replayed_request"
    assert signed(served, peer, "/v1/leases", ASK, source="127.0.13.1").status == 200


async def test_an_honest_worker_waits_as_it_is_told(served: Served) -> None:
    """A limit must slow an honest node, and not stop it."""
    key = Ed25519PrivateKey.generate()
    async with CoordinatorClient(f"http://127.0.0.1:{served.port}", run_id=served.home.run_id, key=key) as client:
        await client.register(REGISTRATION)
        began = time.monotonic()
        for _ in range(PER_NODE + 1):
            await client.lease(LeaseRequest(held_versions=(), slots=1, instance=INSTANCE), patience_seconds=120)
        assert 1 < time.monotonic() - began < 60
