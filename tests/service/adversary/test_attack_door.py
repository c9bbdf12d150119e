"""Attacks on the coordinator's door that need no work: odd targets, odd headers, numbers that are none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from swarm import INSTANCE, REGISTRATION, Peer, serve, small_spec

from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from node.protocol.messages import LeaseRequest
from node.protocol.requests import sign_request
from shardcast.wire import encode


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, str]]:
    """A coordinator without a policy, a verifier or a trainer."""
    key = Ed25519PrivateKey.generate()
    folder = tmp_path_factory.mktemp("run")
    home = create_home(folder, public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    with serve(Coordinator(home, key=key)) as url:
        yield home, url
    home.database.close()


def exchange(url: str, head: bytes) -> bytes:
    """Everything that comes back for bytes that no HTTP library would send."""
    where = urlsplit(url)
    answer = b""
    with socket.create_connection((where.hostname, where.port), timeout=60) as connection:
        connection.sendall(head + b"\r\nConnection: close\r\n\r\n")
        while piece := connection.recv(65536):
            answer += piece
    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/nothing HTTP/1.1\r\nHost: [",
        b"GET /v1/nothing HTTP/1.1\r\nHost: a/v1/run?",
        b"GET /v1/receipts/%00 HTTP/1.1\r\nHost: x",
        b"GET /v1/receipts/%ff%fe HTTP/1.1\r\nHost: x",
        b"GET /v1/nothing/%ed%a0%80 HTTP/1.1\r\nHost: x",
        b"GET //[x/v1 HTTP/1.1\r\nHost: x",
        b"GET http://[::1/v1/run HTTP/1.1\r\nHost: x",
        b"OPTIONS * HTTP/1.1\r\nHost: x",
        b"GET /v1/receipts/\xff?\xff HTTP/1.1\r\nHost: x",
        b"GET /v1/log/entries?start=%ff&end=%00 HTTP/1.1\r\nHost: x",
        b"GET /v1/log/entries?end=1&start=" + b"9" * 5000 + b" HTTP/1.1\r\nHost: x",
        b"POST /v1/leases HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nAuthorization: Swarmproof \xff\xfe",
    ],
    ids=lambda head: head[:40].decode("latin-1"),
)
def test_targets_and_headers_made_to_break_a_parser_are_refused(home: tuple[Home, str], head: bytes) -> None:
    """A 5xx here is an exception that anybody can raise in the coordinator, with a traceback in its log."""
    status = int(exchange(home[1], head).split()[1])
    assert 400 <= status < 500


@pytest.mark.parametrize("wait", ["nan", "inf", "-inf", "1e400", "30.1"])
def test_a_wait_that_never_ends_is_refused(home: tuple[Home, str], wait: str) -> None:
    """NaN compares false with every deadline: each such request would hold its connection for good."""
    answer = exchange(home[1], f"GET /v1/receipts/{'0' * 64}?wait={wait} HTTP/1.1\r\nHost: x".encode())
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_host_header_does_not_change_what_a_signature_is_for(home: tuple[Home, str]) -> None:
    """Whoever relays plain HTTP could else move a signed request to another endpoint by its Host header."""
    peer = Peer(home[1], home[0].run_id)
    body = encode(REGISTRATION)
    for host in ("a/v1/leases?", "a/v1/leases#", "x@a/v1/leases?"):
        header, _ = sign_request(peer.claim("POST", "/v1/leases", body), key=peer.key)
        reply = peer.send("POST", "/v1/nodes", body, {"Authorization": header, "Host": host})
        assert (reply.status, reply.code) == (401, "bad_signature"), host


def test_thousands_of_byte_ranges_of_a_blob_cost_one_read(home: tuple[Home, str]) -> None:
    ranges = ",".join(f"{start}-{start}" for start in range(0, 3000, 2))
    answer = exchange(
        home[1], f"GET /v1/blobs/{home[0].spec.digest} HTTP/1.1\r\nHost: x\r\nRange: bytes={ranges}".encode()
    )
    assert len(answer) < 2**16


def test_a_query_of_thousands_of_fields_is_not_taken_apart(home: tuple[Home, str]) -> None:
    """Those of one head cost as much as ten requests, of which each address has a hundred a second."""
    target = b"/v1/log/entries?start=0&end=1&" + b"a&" * 7000
    assert exchange(home[1], b"GET " + target + b" HTTP/1.1\r\nHost: x").startswith(b"HTTP/1.1 400 ")


def test_an_upload_without_a_lease_leaves_nothing_on_disk(home: tuple[Home, str]) -> None:
    """Neither an unknown key nor a known one without a lease gets a byte stored."""
    folder = home[0].folder / "blobs"
    before = sum(len(files) for _, _, files in os.walk(folder))
    peer = Peer(home[1], home[0].run_id)
    assert peer.submit("0" * 64, b"x" * 1000).code == "unknown_identity"
    assert peer.register().status == 200
    assert peer.submit("0" * 64, b"x" * 1000).code == "unknown_lease"
    assert sum(len(files) for _, _, files in os.walk(folder)) == before


def test_a_lease_asked_for_policies_that_do_not_exist_gives_no_work(home: tuple[Home, str]) -> None:
    peer = Peer(home[1], home[0].run_id)
    peer.register()
    ask = LeaseRequest(held_versions=(0, 2**53 - 1), slots=1024, instance=INSTANCE)
    reply = peer.signed("POST", "/v1/leases", encode(ask))
    assert reply.status == 200
    assert b'"leases":[]' in reply.body
