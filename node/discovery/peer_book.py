"""The peers that a node has heard of: bounded, spread over networks, and passed on only where they were seen to answer.

What a peer says about others is hearsay until this node has reached them itself. Otherwise one liar could fill
everybody's book with addresses that are its own, or with victims to be called by thousands.
"""

from __future__ import annotations

import ipaddress
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from node.protocol.peers import Address, Peer

K = TypeVar("K")
V = TypeVar("V")

MAX_PEERS: Final = 256
MOST_PER_NETWORK: Final = 16
"""Of the book's peers, in one /16 of IPv4 or one /32 of IPv6: who owns one network must not own the book."""

MOST_PER_TELLER: Final = 48
"""Of those who never answered: whoever makes up peers pushes out those that it has made up before."""

FIRST_WAIT_SECONDS: Final = 1.0
MAX_WAIT_SECONDS: Final = 120.0
SHUNNED_SECONDS: Final = 600.0
MAX_FAILURES: Final = 6


@dataclass(slots=True)
class _Known:
    peer: Peer
    teller: str
    answered: bool = False


@dataclass(slots=True)
class _Try:
    failures: int
    not_before: float


class PeerBook:
    """Checked records (`open_peer`) by node, and whom to call when. `clock` is Unix time."""

    def __init__(self, own: bytes, *, clock: Callable[[], float], max_peers: int = MAX_PEERS) -> None:
        self._own, self._clock, self._max = own, clock, max_peers
        self._known: dict[bytes, _Known] = {}
        self._tries: dict[bytes | str, _Try] = {}
        self._shunned: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, peer: Peer, *, teller: str = "") -> bool:
        """Remember a record if there is room for it; True if it is news. `teller` is the network that it came from."""
        if peer.node == self._own or not peer.addresses or self.is_shunned(peer.node):
            return False
        known = self._known.get(peer.node)
        if known is not None:
            if peer.issued_at <= known.peer.issued_at:
                return False
            known.answered = known.answered and peer.addresses == known.peer.addresses
            known.peer = peer
            return True
        self._forget_expired()
        if not self._has_room(peer, teller):
            return False
        self._known[peer.node] = _Known(peer, teller)
        return True

    def answered(self, node: bytes) -> None:
        """Mark it reached: it may be passed on, and is called again without backoff."""
        self._tries.pop(node, None)
        if node in self._known:
            self._tries.pop(_place_of(self._known[node].peer.addresses[0]), None)
            self._known[node].answered = True

    def calling(self, node: bytes, *, seconds: float) -> None:
        """Mark it as being dialled: nobody else at the same place, for so long or until it has answered or failed."""
        if node in self._known:
            place = _place_of(self._known[node].peer.addresses[0])
            failures = self._tries[place].failures if place in self._tries else 0
            self._tries[place] = _Try(failures, self._clock() + seconds)
            self._bound(self._tries)

    def failed(self, node: bytes) -> None:
        """Mark it unreachable: back off, and forget it after several failures."""
        known = self._known.get(node)
        if known is not None:
            # Else a thousand keys that name one host would have it called a thousand times.
            self._put_off(_place_of(known.peer.addresses[0]))
        if self._put_off(node) >= MAX_FAILURES and known is not None:
            del self._known[node], self._tries[node]

    def shun(self, node: bytes) -> None:
        """Ban it for a while: it sent what no honest peer sends."""
        self._known.pop(node, None)
        self._shunned[node] = self._clock() + SHUNNED_SECONDS
        self._bound(self._shunned)

    def is_shunned(self, node: bytes) -> bool:
        """Return whether it is banned for now."""
        return self._shunned.get(node, 0.0) > self._clock()

    def may_call(self, node: bytes) -> bool:
        """Return whether backoff allows dialling it, and the place where it says that it is."""
        known, now = self._known.get(node), self._clock()
        place = "" if known is None else _place_of(known.peer.addresses[0])
        waits = [self._tries[each].not_before for each in (node, place) if each in self._tries]
        return not self.is_shunned(node) and all(not_before <= now for not_before in waits)

    def addresses(self, node: bytes) -> tuple[Address, ...]:
        """Return the addresses that a peer announced; none of an unknown one."""
        known = self._known.get(node)
        return () if known is None else known.peer.addresses

    def sample(self, count: int, *, without: Collection[bytes] = ()) -> list[bytes]:
        """Draw the envelopes of at most `count` peers that have answered, to be passed on."""
        self._forget_expired()
        fit = [known.peer.envelope for node, known in self._known.items() if known.answered and node not in without]
        return random.sample(fit, min(count, len(fit)))

    def to_call(self, count: int, *, without: Collection[bytes], networks: Iterable[str]) -> list[Peer]:
        """Choose at most `count` peers to dial, those first whose network is not among `networks` or chosen already.

        Whoever is reached through a relay says that nobody can call it.
        """
        self._forget_expired()
        fit = [known.peer for node, known in self._known.items() if node not in without and self.may_call(node)]
        fit = [peer for peer in fit if all(address.relay is None for address in peer.addresses)]
        random.shuffle(fit)
        crowd = Counter(networks)
        chosen: list[Peer] = []
        while fit and len(chosen) < count:
            best = min(fit, key=lambda peer: crowd[network_of(peer.addresses[0])])
            place = _place_of(best.addresses[0])
            fit = [peer for peer in fit if _place_of(peer.addresses[0]) != place]
            crowd[network_of(best.addresses[0])] += 1
            chosen.append(best)
        return chosen

    def envelopes(self) -> list[bytes]:
        """Return all known envelopes, those first that have answered: what a restart begins with."""
        return [known.peer.envelope for known in sorted(self._known.values(), key=lambda known: not known.answered)]

    def _put_off(self, whom: bytes | str) -> int:
        """Count a failure, double the backoff, and return how often it has failed."""
        failures = self._tries[whom].failures + 1 if whom in self._tries else 1
        wait = min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
        self._tries[whom] = _Try(min(failures, 32), self._clock() + wait)
        self._bound(self._tries)
        return failures

    def _has_room(self, peer: Peer, teller: str) -> bool:
        """Return whether it fits, after evicting one that never answered if need be."""
        told = [n for n, known in self._known.items() if known.teller == teller and not known.answered]
        if teller and len(told) >= MOST_PER_TELLER:
            return self._make_way(told)
        network = network_of(peer.addresses[0])
        crowded = [n for n, known in self._known.items() if network_of(known.peer.addresses[0]) == network]
        if len(crowded) >= MOST_PER_NETWORK:
            return self._make_way(crowded)
        return len(self._known) < self._max or self._make_way(self._known)

    def _make_way(self, among: Iterable[bytes]) -> bool:
        silent = [node for node in among if not self._known[node].answered]
        if silent:
            del self._known[random.choice(silent)]
        return bool(silent)

    def _forget_expired(self) -> None:
        now = self._clock()
        for node in [node for node, known in self._known.items() if known.peer.expires_at <= now]:
            del self._known[node]

    def _bound(self, table: dict[K, V]) -> None:
        while len(table) > 4 * self._max:
            del table[next(iter(table))]


def network_of(address: Address) -> str:
    """Return the network whose addresses count as one owner's: a /16 of IPv4, a /32 of IPv6, two labels of a name.

    On loopback and in private networks every host is its own, since those are somebody's own machines.
    """
    if address.kind not in {"ip4", "ip6"}:
        return ".".join(address.host.lower().split(".")[-2:])
    crowd = crowd_of(address.host)
    return f"{crowd}:{address.port}" if crowd == address.host else crowd


def crowd_of(host: str) -> str:
    """Return the network of a caller's IP address; on loopback and in private networks the host itself."""
    ip = ipaddress.ip_address(host)
    if ip.is_loopback or ip.is_private:
        return host
    return str(ipaddress.ip_network((ip, 16 if ip.version == 4 else 32), strict=False))


def reach_of(host: str) -> int:
    """Return from how far an IP address can be called: 0 this machine, 1 its network, 2 anywhere, -1 not at all."""
    ip = ipaddress.ip_address(host)
    if ip.is_unspecified or ip.is_multicast:
        return -1
    return 0 if ip.is_loopback else 2 if ip.is_global else 1


def is_plausible(peer: Peer, *, teller: str) -> bool:
    """Return whether somebody who called from `teller`, an IP address or unknown, can know the peer there.

    Who is far away has nothing to say of this machine's own network, where its word would have strangers' doors tried.
    Whoever is reached through a relay is called by nobody who was not told to.
    """
    if any(address.relay is not None for address in peer.addresses):
        return True
    near = reach_of(teller) if teller else 2
    return all(each.kind not in {"ip4", "ip6"} or reach_of(each.host) >= near for each in peer.addresses)


def _place_of(address: Address) -> str:
    """Return the host; on loopback and in private networks with its port, where one host has many nodes."""
    network = network_of(address)
    return address.host if "/" in network else network
