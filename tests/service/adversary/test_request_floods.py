"""Floods of requests: what one address and one node may ask for, and who cannot be made to pay for somebody else.

The coordinator is the operator's own command, in a process of its own, with small limits.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import INSTANCE, REGISTRATION, Peer

from benchmarks.loading.coordinator import Served, serving
from coordinator.http.connections import ConnectionLimits, ConnectionQuota, server_config
from coordinator.http.rate_limits import AddressLimiter, RateLimiter, TooManyRequests
from node.client.api import CoordinatorClient
from node.protocol.messages import LeaseRequest
from node.protocol.reasons import Reason
from node.protocol.requests import sign_request
from shardcast.rate_limit import MAX_BUCKETS, network_of
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


@pytest.mark.system
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


@pytest.mark.parametrize("seen", ["192.0.2.9", "::ffff:192.0.2.9"])
async def test_a_proxy_is_known_on_a_socket_for_both_kinds_of_addresses(seen: str) -> None:
    """With --host :: it comes as an IPv6 address; all who ask through it would else share what one address has."""
    found = list[str]()

    async def note(scope: Any, _receive: Any, _send: Any) -> None:
        found.append(scope["client"][0])

    app: Any = note
    app.state = SimpleNamespace()
    config = server_config(app, ConnectionLimits(proxies=("192.0.2.9",)))
    config.load()
    nothing: Any = None
    scope = {"type": "http", "client": (seen, 1), "headers": [(b"x-forwarded-for", b"203.0.113.7")]}
    await config.loaded_app(scope, nothing, nothing)
    assert found == ["203.0.113.7"]


def test_who_is_in_the_proxys_network_is_not_the_proxy() -> None:
    """In a rented /64 the neighbours are strangers, and without a bound they would take every connection."""
    quota = ConnectionQuota(ConnectionLimits(connections_per_address=2, proxies=("2001:db8::5", "192.0.2.9")))
    assert all(quota.acquire(proxy) for proxy in ("2001:db8::5", "2001:DB8:0::5", "::ffff:192.0.2.9") for _ in range(9))
    assert [quota.acquire(f"2001:db8::{n}") for n in (6, 7, 8)] == [True, True, False]
    for proxy in ("2001:db8::5", "2001:DB8:0::5", "::ffff:192.0.2.9"):
        for _ in range(9):
            quota.release(proxy)
    quota.release("2001:db8::6")
    assert [quota.acquire(f"2001:db8::{n}") for n in (9, 10)] == [True, False]


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


@pytest.mark.system
async def test_an_honest_worker_waits_as_it_is_told(served: Served) -> None:
    """A limit must slow an honest node, and not stop it."""
    key = Ed25519PrivateKey.generate()
    async with CoordinatorClient(f"http://127.0.0.1:{served.port}", run_id=served.home.run_id, key=key) as client:
        await client.register(REGISTRATION)
        began = time.monotonic()
        for _ in range(PER_NODE + 1):
            await client.lease(LeaseRequest(held_versions=(), slots=1, instance=INSTANCE), patience_seconds=120)
        assert 1 < time.monotonic() - began < 60


def test_addresses_of_one_network_have_one_share() -> None:
    """An IPv6 customer has 2^64 addresses at least, and takes a new one for each request."""
    limiter = AddressLimiter(per_minute=10)
    for n in range(10):
        limiter.check(f"2001:db8:1:2::{n:x}", now=0.0)
    with pytest.raises(TooManyRequests):
        limiter.check("2001:db8:1:2:ffff:ffff:ffff:ffff", now=0.0)
    limiter.check("2001:db8:1:3::1", now=0.0)
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")


def test_a_million_addresses_do_not_fill_the_memory() -> None:
    limiter = AddressLimiter(per_minute=10)
    for n in range(2 * MAX_BUCKETS):
        limiter.check(f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", now=n * 1e-6)
    assert len(limiter) <= MAX_BUCKETS


def test_who_asks_again_too_early_is_not_let_wait_longer() -> None:
    """Else two who share an address, and ask in turn, would both wait for ever."""
    limiter = RateLimiter(per_minute=60, who="node")
    for _ in range(60):
        limiter.check("a", now=0.0)
    for tenth in range(1, 10):
        with pytest.raises(TooManyRequests) as refusal:
            limiter.check("a", now=tenth / 10)
        assert refusal.value.retry_after_seconds == 1
    limiter.check("a", now=1.01)


def test_every_refused_request_has_a_status_and_no_verdict_has() -> None:
    """One without would be a 500."""
    first_verdict = list(Reason).index(Reason.WRONG_BODY)
    assert [reason.status is None for reason in Reason] == [place >= first_verdict for place in range(len(Reason))]
