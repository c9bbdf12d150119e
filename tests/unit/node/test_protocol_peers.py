"""Names and addresses of peers: who gets one wrong calls a stranger, or tells thousands to.

Everything here is read from strangers. PeerIds are compared with libp2p's own, and with values that it gave.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.protocol.peers import (
    JOIN_SCHEME,
    MAX_ADDRESSES,
    MAX_JOIN_PEERS,
    MAX_SKEW_SECONDS,
    MAX_VALID_SECONDS,
    PEER_DOMAIN,
    PEER_VERSION,
    Address,
    Invitation,
    PeerRecord,
    open_peer,
    parse_address,
    parse_join,
    peer_id_of,
    public_key_of,
    sign_peer,
)
from node.protocol.run import DESCRIPTOR_DOMAIN
from shardcast.envelope import seal
from shardcast.errors import BadSignature, Malformed, PeerFault, Stale
from shardcast.wire import encode

RUN = "5f" * 32
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
NODE = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
ID = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
OTHER_NODE = OTHER.public_key().public_bytes_raw()
OTHER_ID = peer_id_of(OTHER_NODE)
AT = f"/ip4/192.0.2.1/tcp/8701/p2p/{ID}"
NOW = 1_760_000_000.0

KNOWN_IDS = {
    # The key of the specification's own example (libp2p specs, peer-ids, "Test vectors").
    "1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e": (
        "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    ),
    NODE.hex(): ID,
    "00" * 32: "12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw",
    "ff" * 32: "12D3KooWT3gYEvLJyx1FyyHqrmvdy1tMjpgxmu9aSeKMEuafQtyC",
}


# -- PeerIds


@pytest.mark.parametrize(("key", "peer_id"), KNOWN_IDS.items(), ids=KNOWN_IDS.values())
def test_a_peer_id_is_the_one_that_libp2p_gives_the_key(key: str, peer_id: str) -> None:
    assert peer_id_of(bytes.fromhex(key)) == peer_id
    assert public_key_of(peer_id) == bytes.fromhex(key)


@pytest.mark.system
def test_peer_ids_are_those_of_the_installed_libp2p() -> None:
    ed25519, peer = pytest.importorskip("libp2p.crypto.ed25519"), pytest.importorskip("libp2p.peer.id")
    for number in range(50):
        seed = number.to_bytes(32)
        pair = ed25519.create_new_key_pair(seed)
        node = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
        assert pair.public_key.to_bytes() == node, "one seed would be two nodes"
        assert str(peer.ID.from_pubkey(pair.public_key)) == peer_id_of(node)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        ID[:-1],
        ID + "1",
        " " + ID[1:],
        ID[:-1] + "0",
        ID[:-1] + "l",
        ID[:-1] + "\n",
        ID.lower(),
        "2" + ID[1:],
        "1" + "z" * 51,
        "1" * 52,
        "12D3KooX" + ID[8:],
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "16Uiu2HAmLhLvBoYaoZfaMUKuibM6ac163GwKY74c5kiSLg5KvLpY",
        ID.replace("D", "\u0501", 1),
    ],
)
def test_what_is_no_peer_id_of_an_ed25519_key_is_refused(text: str) -> None:
    """RSA and secp256k1 peers could never sign a record: whoever named one would waste everybody's calls."""
    with pytest.raises(Malformed) as caught:
        public_key_of(text)
    assert caught.value.code == "bad_peer_id"


def test_no_two_spellings_are_one_key() -> None:
    """One changed character is another key or none: a book keyed by keys cannot be filled with aliases."""
    alphabet = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
    for at in range(0, len(ID), 3):
        for character in alphabet:
            text = ID[:at] + character + ID[at + 1 :]
            try:
                assert (public_key_of(text) == NODE) == (text == ID)
            except Malformed:
                continue


# -- addresses


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (AT, Address("ip4", "192.0.2.1", 8701, NODE)),
        (f"/ip6/2001:db8::7/tcp/1/p2p/{ID}", Address("ip6", "2001:db8::7", 1, NODE)),
        (f"/dns/relay-1.example.org/tcp/65535/p2p/{ID}", Address("dns", "relay-1.example.org", 65535, NODE)),
        (f"/dns4/localhost/tcp/8701/p2p/{ID}", Address("dns4", "localhost", 8701, NODE)),
        (f"/dns6/5f3c/tcp/8701/p2p/{ID}", Address("dns6", "5f3c", 8701, NODE)),
        (f"{AT}/p2p-circuit/p2p/{OTHER_ID}", Address("ip4", "192.0.2.1", 8701, OTHER_NODE, relay=NODE)),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


HOSTS = [
    "/ip4/192.0.2.01",
    "/ip4/192.0.2",
    "/ip4/192.0.2.256",
    "/ip4/192.0.2.1 ",
    "/ip4/\u0661.2.3.4",
    "/ip4/0.0.0.0",
    "/ip4/224.0.0.1",
    "/ip4/localhost",
    "/ip6/192.0.2.1",
    "/ip6/2001:DB8::7",
    "/ip6/2001:0db8::7",
    "/ip6/::",
    "/ip6/ff02::1",
    "/ip6/fe80::1%eth0",
    "/ip6/::ffff:192.0.2.1",
    "/ip6/::ffff:c000:201",
    "/ip6/[::1]",
    "/dns/",
    "/dns/-a.example",
    "/dns/a-.example",
    "/dns/a..example",
    "/dns/a.example.",
    "/dns/a_b.example",
    "/dns/a b",
    "/dns/a\n",
    "/dns/b\u00fccher.example",
    "/dns/" + "a" * 64,
    "/dns/" + ".".join(["a" * 63] * 4) + ".aa",
    "/dns/192.0.2.1",
    "/dns/127.1",
    "/dns/2130706433",
    "/dns/0x7f000001",
    "/dnsaddr/example.org",
    "/unix/tmp",
    "/IP4/192.0.2.1",
    "//192.0.2.1",
]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_cannot_be_called_or_is_spelled_otherwise_is_refused(host: str) -> None:
    """Resolvers take 127.1 for an address: a peer could have thousands call themselves, under a thousand names."""
    with pytest.raises(Malformed):
        parse_address(f"{host}/tcp/8701/p2p/{ID}")


@pytest.mark.parametrize("port", ["0", "65536", "08701", "-1", "+1", "1e3", "", " 1", "1\n", "\u0661", "9" * 40])
def test_a_port_that_is_none_is_refused(port: str) -> None:
    with pytest.raises(Malformed):
        parse_address(f"/ip4/192.0.2.1/tcp/{port}/p2p/{ID}")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "/" * 6,
        "/" * 9,
        AT[1:],
        " " + AT,
        AT + "/",
        AT + "\n",
        AT.rsplit("/", 2)[0],
        AT.rsplit("/", 1)[0] + "/",
        AT.replace("/tcp/", "/udp/"),
        AT.replace("/tcp/", "/TCP/"),
        AT.replace("/p2p/", "/ipfs/"),
        AT.replace("/p2p/", "/ws/p2p/"),
        AT.replace(ID, NODE.hex()),
        AT + "/p2p-circuit",
        AT + "/p2p-circuit/p2p/",
        AT + f"/p2p-circuit/p2p/{ID}",
        AT + f"/p2p-circuit/p2p/{OTHER_ID}/p2p-circuit/p2p/{OTHER_ID}",
        AT + f"/ws/x/{OTHER_ID}",
        AT + f"/p2p-circuit/ipfs/{OTHER_ID}",
        f"/p2p-circuit/p2p/{ID}",
        "a" * 301,
        f"/dns/{'a.' * 110}aa/tcp/8701/p2p/{ID}/p2p-circuit/p2p/{OTHER_ID}",
    ],
)
def test_what_is_no_address_of_a_peer_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        parse_address(text)


# -- what a person copies to join


def test_an_invitation_is_read_and_written_alike() -> None:
    invitation = Invitation(RUN, (parse_address(AT), parse_address(f"/dns/a.example/tcp/2/p2p/{OTHER_ID}")))
    assert str(invitation) == f"{JOIN_SCHEME}{RUN}{AT},/dns/a.example/tcp/2/p2p/{OTHER_ID}"
    assert parse_join(str(invitation)) == invitation


def test_who_is_named_twice_is_called_once() -> None:
    assert parse_join(f"{JOIN_SCHEME}{RUN}{AT},{AT}").peers == (parse_address(AT),)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://192.0.2.1:8700",
        AT,
        JOIN_SCHEME,
        JOIN_SCHEME + RUN,
        JOIN_SCHEME + RUN + "/",
        JOIN_SCHEME + RUN[:-1] + AT,
        JOIN_SCHEME + RUN + "0" + AT,
        JOIN_SCHEME + RUN.upper() + AT,
        JOIN_SCHEME + RUN + AT + ",",
        JOIN_SCHEME + RUN + "," + AT,
        JOIN_SCHEME + RUN + AT + ", " + AT,
        JOIN_SCHEME + RUN + AT + "\n",
        JOIN_SCHEME.upper() + RUN + AT,
        JOIN_SCHEME + RUN + AT[:-5],
        JOIN_SCHEME + RUN + AT + "/ip4/192.0.2.2",
        JOIN_SCHEME + RUN + ",".join([AT] * (MAX_JOIN_PEERS + 1)),
        JOIN_SCHEME + RUN + AT + "a" * 5000,
    ],
)
def test_a_string_that_was_not_copied_whole_is_refused(text: str) -> None:
    with pytest.raises(Malformed):
        parse_join(text)


# -- what peers say about themselves


def record(**changes: object) -> PeerRecord:
    whole = PeerRecord(run_id=RUN, addresses=(AT,), issued_at=int(NOW), expires_at=int(NOW) + MAX_VALID_SECONDS)
    return msgspec.structs.replace(whole, **changes)


def opened(data: bytes, *, now: float = NOW) -> object:
    return open_peer(data, run_id=RUN, now=now)


def test_a_peer_is_whom_its_key_says_it_is_and_its_record_is_kept_as_it_came() -> None:
    data = sign_peer(record(), key=KEY)
    peer = open_peer(data, run_id=RUN, now=NOW)
    assert (peer.node, peer.addresses, peer.envelope) == (NODE, (parse_address(AT),), data)
    assert (peer.issued_at, peer.expires_at) == (int(NOW), int(NOW) + MAX_VALID_SECONDS)


def test_a_peer_that_cannot_be_called_may_say_so() -> None:
    assert open_peer(sign_peer(record(addresses=()), key=KEY), run_id=RUN, now=NOW).addresses == ()


def test_a_foreign_address_is_refused() -> None:
    """A liar that could name a victim's address as its own would have everybody call it there."""
    foreign = f"/ip4/192.0.2.1/tcp/8701/p2p/{OTHER_ID}"
    for addresses in ((foreign,), (AT, foreign), (f"{AT}/p2p-circuit/p2p/{OTHER_ID}",)):
        with pytest.raises(Malformed) as caught:
            opened(sign_peer(record(addresses=addresses), key=KEY))
        assert caught.value.code == "foreign_address"


def test_a_peer_behind_a_relay_names_the_relay_and_itself() -> None:
    address = f"/ip4/192.0.2.1/tcp/8701/p2p/{OTHER_ID}/p2p-circuit/p2p/{ID}"
    peer = open_peer(sign_peer(record(addresses=(address,)), key=KEY), run_id=RUN, now=NOW)
    assert peer.addresses == (Address("ip4", "192.0.2.1", 8701, NODE, relay=OTHER_NODE),)


def test_a_peer_of_another_run_is_refused() -> None:
    with pytest.raises(Malformed) as caught:
        opened(sign_peer(record(run_id="6a" * 32), key=KEY))
    assert caught.value.code == "wrong_run"


@pytest.mark.parametrize(
    ("changes", "now", "code"),
    [
        ({}, NOW + MAX_VALID_SECONDS, "expired"),
        ({}, NOW + 1e9, "expired"),
        ({"expires_at": int(NOW) + MAX_VALID_SECONDS + 1}, NOW, "expired"),
        ({"expires_at": 2**53 - 1}, NOW, "expired"),
        ({}, NOW - MAX_SKEW_SECONDS - 1, "clock_skew"),
        ({"issued_at": 2**53 - 1, "expires_at": 2**53 - 1}, NOW, "clock_skew"),
    ],
)
def test_a_replayed_or_postdated_record_is_stale(changes: dict[str, int], now: float, code: str) -> None:
    """An old record sends callers to whoever has that address by now. Stale is nobody's fault: a clock may be wrong."""
    with pytest.raises(Stale) as caught:
        opened(sign_peer(record(**changes), key=KEY), now=now)
    assert caught.value.code == code


def test_a_record_holds_until_it_expires_and_for_clocks_that_are_behind() -> None:
    data = sign_peer(record(), key=KEY)
    for now in (NOW - MAX_SKEW_SECONDS, NOW, NOW + MAX_VALID_SECONDS - 0.001):
        opened(data, now=now)


MALFORMED: dict[str, Callable[[], bytes]] = {
    "too many addresses": lambda: sign_peer(record(addresses=(AT,) * (MAX_ADDRESSES + 1)), key=KEY),
    "an address that is none": lambda: sign_peer(record(addresses=("/ip4/192.0.2.1/udp/1",)), key=KEY),
    "an address of control characters": lambda: sign_peer(record(addresses=("/\x1b[2J",)), key=KEY),
    "a long address": lambda: sign_peer(record(addresses=("/" + "a" * 300,)), key=KEY),
    "a negative time": lambda: sign_peer(record(issued_at=-1), key=KEY),
    "another domain": lambda: seal(encode(record()), domain=DESCRIPTOR_DOMAIN, version=PEER_VERSION, key=KEY),
    "another version": lambda: seal(encode(record()), domain=PEER_DOMAIN, version=PEER_VERSION + 1, key=KEY),
    "not canonical": lambda: seal(encode(record()) + b" ", domain=PEER_DOMAIN, version=PEER_VERSION, key=KEY),
    "an unknown field": lambda: seal(
        encode(record())[:-1] + b',"trust":1}', domain=PEER_DOMAIN, version=PEER_VERSION, key=KEY
    ),
    "something else": lambda: seal(b"null", domain=PEER_DOMAIN, version=PEER_VERSION, key=KEY),
    "a long payload": lambda: seal(bytes(4097), domain=PEER_DOMAIN, version=PEER_VERSION, key=KEY),
    "nothing": lambda: b"",
    "no envelope": lambda: b"\xff" * 300,
    "too much": lambda: b"VSW1" + bytes(10_000),
}


@pytest.mark.parametrize("make", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_record_is_refused(make: Callable[[], bytes]) -> None:
    with pytest.raises(Malformed):
        opened(make())


def test_a_forged_record_is_refused() -> None:
    data = sign_peer(record(), key=KEY)
    for at in range(0, len(data), 5):
        with pytest.raises(PeerFault):
            opened(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(BadSignature):
        opened(data[:-64] + OTHER.sign(data[:-64]))
