"""Whom a node remembers: whoever could fill the book would decide whom the node meets after its next start."""

from __future__ import annotations

import random

import pytest

from node.discovery.peer_book import (
    FIRST_WAIT_SECONDS,
    MAX_FAILURES,
    MAX_PER_NETWORK,
    MAX_PER_SOURCE,
    MAX_WAIT_SECONDS,
    SHUNNED_SECONDS,
    PeerBook,
    is_plausible,
    network_of,
)
from node.protocol.peers import Address, Peer

OWN = b"\xff" * 32
HOUR = 3600


class Clock:
    def __init__(self) -> None:
        self.now = 1_760_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> PeerBook:
    random.seed(7)
    return PeerBook(OWN, clock=clock, max_peers=64)


def node_of(number: int) -> bytes:
    return number.to_bytes(32)


def spread(number: int) -> str:
    """A host in a network of its own."""
    return f"{11 + number // 256}.{number % 256}.0.1"


def peer(number: int, host: str | None = None, *, at: float = 1_760_000_000.0, port: int = 8701) -> Peer:
    node = node_of(number)
    text = spread(number) if host is None else host
    kind = "ip6" if ":" in text else "ip4" if text[-1].isdigit() else "dns"
    return Peer(node, (Address(kind, text, port, node),), int(at), int(at) + HOUR, f"{number} {at}".encode())


def known(book: PeerBook) -> set[bytes]:
    return {peer.node for peer in book.to_call(1000, without=(), networks=())}


# -- bounds


def test_a_flood_of_peers_fills_no_more_than_the_book(book: PeerBook) -> None:
    for number in range(500):
        book.add(peer(number))
    assert len(book) == 64


def test_a_flood_of_hearsay_displaces_nobody_who_answered(book: PeerBook) -> None:
    """An eclipse: a liar sends records of thousands of keys until the honest peers have been pushed out."""
    for number in range(20):
        book.add(peer(number))
        book.answered(node_of(number))
    for number in range(20, 500):
        book.add(peer(number))
    assert {node_of(number) for number in range(20)} <= known(book)
    assert len(book) == 64


def test_a_book_full_of_those_who_answered_takes_nobody(book: PeerBook) -> None:
    for number in range(64):
        book.add(peer(number))
        book.answered(node_of(number))
    assert not book.add(peer(64))
    assert len(book) == 64


def test_by_one_network_s_word_only_a_part_of_the_book_is_filled(book: PeerBook) -> None:
    """A liar makes up peers everywhere; those whom honest neighbours name must find room beside them."""
    for number in range(100):
        book.add(peer(number), source="8.8.0.0/16")
    assert len(book) == MAX_PER_SOURCE
    for number in range(200, 200 + 64 - MAX_PER_SOURCE):
        assert book.add(peer(number), source="9.9.0.0/16")
    for number in range(300, 400):
        book.add(peer(number), source="8.8.0.0/16")
    honest = {node_of(number) for number in range(200, 200 + 64 - MAX_PER_SOURCE)}
    assert honest <= known(book), "it pushes out what it has made up itself"


@pytest.mark.parametrize("host", ["8.8.{}.{}", "2001:db9::{}:{}"], ids=["a /16 of IPv4", "a /32 of IPv6"])
def test_one_network_cannot_own_the_book(book: PeerBook, host: str) -> None:
    """A data centre rents out any number of machines, all of which answer."""
    for number in range(60):
        book.add(peer(number, host.format(number, 1)))
        book.answered(node_of(number))
    assert len(book) == MAX_PER_NETWORK
    for number in range(100, 140):
        assert book.add(peer(number)), "others still find room"


def test_networks_are_those_of_owners() -> None:
    def network(host: str, port: int = 1) -> str:
        return network_of(peer(1, host, port=port).addresses[0])

    assert network("8.8.8.8") == network("8.8.200.1") != network("8.9.8.8")
    assert network("2001:db9::1") == network("2001:db9:ffff::1") != network("2001:dba::1")
    assert network("127.0.0.1", 1) != network("127.0.0.1", 2), "one's own machines are no eclipse"
    assert network("10.0.0.1") != network("10.0.0.2")


@pytest.mark.parametrize(
    ("source", "host", "plausible"),
    [
        ("8.8.8.8", "9.9.9.9", True),
        ("8.8.8.8", "a.example", True),
        ("8.8.8.8", "10.0.0.1", False),
        ("8.8.8.8", "127.0.0.1", False),
        ("8.8.8.8", "::1", False),
        ("10.0.0.2", "10.0.0.1", True),
        ("10.0.0.2", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", True),
        ("", "127.0.0.1", False),
        ("", "9.9.9.9", True),
    ],
)
def test_nobody_has_addresses_called_that_are_nearer_than_itself(source: str, host: str, plausible: bool) -> None:
    """From outside, a stranger would have the machine try the doors of its own network."""
    assert is_plausible(peer(1, host), source=source) is plausible


def test_whoever_is_reached_through_a_relay_is_not_called_for_a_link(book: PeerBook, clock: Clock) -> None:
    node = node_of(1)
    address = Address("ip4", "8.8.8.8", 8701, node, relay=node_of(2))
    book.add(Peer(node, (address,), int(clock.now), int(clock.now) + HOUR, b""))
    assert book.to_call(10, without=(), networks=()) == []
    assert book.addresses(node) == (address,)


def test_a_thousand_keys_at_one_host_have_it_called_once(book: PeerBook) -> None:
    """A victim would be called by each node for each of them."""
    for number in range(10):
        book.add(peer(number, "8.8.8.8", port=1 + number))
    book.failed(node_of(0))
    assert [number for number in range(10) if book.may_call(node_of(number))] == []


def test_neighbours_are_called_in_networks_that_are_not_taken_yet(book: PeerBook) -> None:
    for number in range(10):
        book.add(peer(number, f"8.8.0.{number + 1}"))
    book.add(peer(50, "9.9.9.9"))
    book.add(peer(51, "7.7.7.7"))
    chosen = book.to_call(3, without=(), networks=["7.7.0.0/16"])
    assert {network_of(one.addresses[0]) for one in chosen[:2]} == {"8.8.0.0/16", "9.9.0.0/16"}


def test_what_is_kept_of_failures_and_of_the_shunned_is_bounded(book: PeerBook, clock: Clock) -> None:
    for number in range(1000):
        book.failed(node_of(number))
        book.shun(node_of(number))
    remembered = [number for number in range(1000) if book.is_shunned(node_of(number))]
    assert len(remembered) <= 4 * 64
    assert 999 in remembered, "the latest"


# -- what is passed on


def test_hearsay_is_not_passed_on(book: PeerBook) -> None:
    """Else one liar would have thousands call a victim, each of whom tells others to."""
    book.add(peer(1))
    assert book.sample(10) == []
    book.answered(node_of(1))
    assert book.sample(10) == [peer(1).envelope]
    assert book.sample(10, without=(node_of(1),)) == []


def test_a_new_address_is_hearsay_until_it_was_reached(book: PeerBook, clock: Clock) -> None:
    book.add(peer(1, "8.8.8.8"))
    book.answered(node_of(1))
    assert book.add(peer(1, "9.9.9.9", at=clock.now + 1))
    assert book.sample(10) == []


def test_a_fresh_record_of_a_known_address_is_passed_on(book: PeerBook, clock: Clock) -> None:
    book.add(peer(1))
    book.answered(node_of(1))
    fresh = peer(1, at=clock.now + 1)
    assert book.add(fresh)
    assert book.sample(10) == [fresh.envelope]


def test_an_older_or_repeated_record_is_no_news(book: PeerBook, clock: Clock) -> None:
    """A replay would send callers back to an address that somebody else may have by now."""
    assert book.add(peer(1, "8.8.8.8", at=clock.now))
    assert not book.add(peer(1, "8.8.8.8", at=clock.now))
    assert not book.add(peer(1, "9.9.9.9", at=clock.now - 1))
    (only,) = book.to_call(10, without=(), networks=())
    assert only.addresses[0].host == "8.8.8.8"


def test_a_sample_is_as_large_as_asked(book: PeerBook) -> None:
    for number in range(30):
        book.add(peer(number))
        book.answered(node_of(number))
    assert len(set(book.sample(8))) == 8


# -- who is not remembered


def test_a_node_is_not_in_its_own_book_nor_is_who_cannot_be_called(book: PeerBook, clock: Clock) -> None:
    own = Peer(OWN, peer(1).addresses, int(clock.now), int(clock.now) + HOUR, b"")
    nowhere = Peer(node_of(2), (), int(clock.now), int(clock.now) + HOUR, b"")
    assert not book.add(own)
    assert not book.add(nowhere)
    assert len(book) == 0


def test_an_expired_peer_is_forgotten(book: PeerBook, clock: Clock) -> None:
    book.add(peer(1))
    book.answered(node_of(1))
    clock.now += HOUR
    assert known(book) == set()
    assert book.sample(10) == []
    assert len(book) == 0


def test_expired_peers_make_room(book: PeerBook, clock: Clock) -> None:
    for number in range(64):
        book.add(peer(number))
        book.answered(node_of(number))
    clock.now += HOUR
    assert book.add(peer(100, at=clock.now))


def test_whoever_misbehaved_is_shunned_for_a_while(book: PeerBook, clock: Clock) -> None:
    book.add(peer(1))
    book.shun(node_of(1))
    assert known(book) == set()
    assert not book.add(peer(1, at=clock.now + 1)), "others' word does not bring it back"
    assert not book.may_call(node_of(1))
    clock.now += SHUNNED_SECONDS
    assert book.add(peer(1, at=clock.now))
    assert book.may_call(node_of(1))


# -- whom to call when


def test_who_does_not_answer_is_called_less_and_less_and_then_forgotten(book: PeerBook, clock: Clock) -> None:
    book.add(peer(1))
    waits = []
    for _ in range(MAX_FAILURES - 1):
        book.failed(node_of(1))
        assert not book.may_call(node_of(1))
        began = clock.now
        while not book.may_call(node_of(1)):
            clock.now += 0.1
        waits.append(clock.now - began)
    for doublings, wait in enumerate(waits):
        longest = FIRST_WAIT_SECONDS * 2.0**doublings
        assert 0.5 * longest <= wait <= longest + 0.2
    book.failed(node_of(1))
    assert len(book) == 0


def test_who_is_no_peer_of_the_book_is_never_waited_for_longer_than_the_most(book: PeerBook, clock: Clock) -> None:
    """Those to begin with are called by address, and are in no book before they have answered."""
    for _ in range(2000):
        book.failed(node_of(1))
    clock.now += MAX_WAIT_SECONDS
    assert book.may_call(node_of(1))


def test_who_answers_may_be_called_at_once(book: PeerBook) -> None:
    book.add(peer(1))
    book.failed(node_of(1))
    book.answered(node_of(1))
    assert book.may_call(node_of(1))


def test_neighbours_are_not_called_again(book: PeerBook) -> None:
    for number in range(4):
        book.add(peer(number))
    chosen = book.to_call(10, without={node_of(0), node_of(1)}, networks=())
    assert {one.node for one in chosen} == {node_of(2), node_of(3)}
    assert len(book.to_call(1, without=(), networks=())) == 1


def test_a_restart_begins_with_those_who_answered(book: PeerBook) -> None:
    for number in range(10):
        book.add(peer(number))
    book.answered(node_of(7))
    assert book.envelopes()[0] == peer(7).envelope
    assert len(book.envelopes()) == 10
