"""The peer book: known peer records, bounded per network and source; only verified-reachable ones are passed on.

Otherwise one attacker could fill every book with its own addresses (eclipse) or with victims (amplification).
"""

from __future__ import annotations

import ipaddress
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

from node.client.ssrf import Reach, reach_of
from node.protocol.peers import Address, Peer

K = TypeVar("K")
V = TypeVar("V")

MAX_PEERS: Final = 256
MAX_PER_NETWORK: Final = 16
"""Peers in one IPv4 /16 or IPv6 /32: whoever owns a network must not own the book."""

MAX_PER_SOURCE: Final = 48
"""Unreached peers from one source: invented records evict only records of the same source."""

FIRST_WAIT_SECONDS: Final = 1.0
MAX_WAIT_SECONDS: Final = 120.0
SHUNNED_SECONDS: Final = 600.0
MAX_FAILURES: Final = 6


@dataclass(slots=True)
class _Known:
    peer: Peer
    source: str
    answered: bool = False


@dataclass(slots=True)
class _Try:
    failures: int
    not_before: float


class PeerBook:
    """Verified records (`open_peer`) by node, with dial backoff. `clock` is Unix time."""

    def __init__(self, own: bytes, *, clock: Callable[[], float], max_peers: int = MAX_PEERS) -> None:
        self._own, self._clock, self._max = own, clock, max_peers
        self._known: dict[bytes, _Known] = {}
        self._tries: dict[bytes | str, _Try] = {}
        self._shunned: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, peer: Peer, *, source: str = "") -> bool:
        """Add a record if there is room; return whether it is new. `source` is the subnet that it came from."""
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
        if not self._has_room(peer, source):
            return False
        self._known[peer.node] = _Known(peer, source)
        return True

    def answered(self, node: bytes) -> None:
        """Mark it reached: it may be passed on, and its backoff is reset."""
        self._tries.pop(node, None)
        if node in self._known:
            self._tries.pop(_place_of(self._known[node].peer.addresses[0]), None)
            self._known[node].answered = True

    def calling(self, node: bytes, *, seconds: float) -> None:
        """Mark it as being dialled: no other dial to its host for `seconds` or until it answers or fails."""
        if node in self._known:
            place = _place_of(self._known[node].peer.addresses[0])
            failures = self._tries[place].failures if place in self._tries else 0
            self._tries[place] = _Try(failures, self._clock() + seconds)
            self._bound(self._tries)

    def failed(self, node: bytes) -> None:
        """Mark it unreachable: back off, and forget it after several failures."""
        known = self._known.get(node)
        if known is not None:
            # Otherwise a thousand keys that name one host would cause a thousand dials to it.
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
        """Return whether backoff allows dialling the node and its host."""
        known, now = self._known.get(node), self._clock()
        place = "" if known is None else _place_of(known.peer.addresses[0])
        waits = [self._tries[each].not_before for each in (node, place) if each in self._tries]
        return not self.is_shunned(node) and all(not_before <= now for not_before in waits)

    def addresses(self, node: bytes) -> tuple[Address, ...]:
        """Return the addresses that a peer announced; () if unknown."""
        known = self._known.get(node)
        return () if known is None else known.peer.addresses

    def sample(self, count: int, *, without: Collection[bytes] = ()) -> list[bytes]:
        """Draw the envelopes of at most `count` reached peers, for gossip."""
        self._forget_expired()
        fit = [known.peer.envelope for node, known in self._known.items() if known.answered and node not in without]
        return random.sample(fit, min(count, len(fit)))

    def to_call(self, count: int, *, without: Collection[bytes], networks: Iterable[str]) -> list[Peer]:
        """Choose at most `count` directly reachable peers to dial, preferring networks least used so far."""
        self._forget_expired()
        fit = [known.peer for node, known in self._known.items() if node not in without and self.may_call(node)]
        fit = [peer for peer in fit if all(address.relay is None for address in peer.addresses)]
        random.shuffle(fit)
        subnet = Counter(networks)
        chosen: list[Peer] = []
        while fit and len(chosen) < count:
            best = min(fit, key=lambda peer: subnet[network_of(peer.addresses[0])])
            place = _place_of(best.addresses[0])
            fit = [peer for peer in fit if _place_of(peer.addresses[0]) != place]
            subnet[network_of(best.addresses[0])] += 1
            chosen.append(best)
        return chosen

    def envelopes(self) -> list[bytes]:
        """Return all known envelopes, reached peers first, for persistence."""
        return [known.peer.envelope for known in sorted(self._known.values(), key=lambda known: not known.answered)]

    def _put_off(self, whom: bytes | str) -> int:
        """Count a failure, double the backoff, and return how often it has failed."""
        failures = self._tries[whom].failures + 1 if whom in self._tries else 1
        wait = min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
        self._tries[whom] = _Try(min(failures, 32), self._clock() + wait)
        self._bound(self._tries)
        return failures

    def _has_room(self, peer: Peer, source: str) -> bool:
        """Return whether it fits, after evicting one that never answered if need be."""
        told = [n for n, known in self._known.items() if known.source == source and not known.answered]
        if source and len(told) >= MAX_PER_SOURCE:
            return self._make_way(told)
        network = network_of(peer.addresses[0])
        crowded = [n for n, known in self._known.items() if network_of(known.peer.addresses[0]) == network]
        if len(crowded) >= MAX_PER_NETWORK:
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
    """Return the network that counts as one owner: an IPv4 /16, an IPv6 /32, a name's last two labels.

    On loopback and in private networks every host and port counts by itself.
    """
    if address.kind not in {"ip4", "ip6"}:
        return ".".join(address.host.lower().split(".")[-2:])
    subnet = subnet_of(address.host)
    return f"{subnet}:{address.port}" if subnet == address.host else subnet


def subnet_of(host: str) -> str:
    """Return the IPv4 /16 or IPv6 /32 of an IP address; on loopback and in private networks the host itself."""
    ip = ipaddress.ip_address(host)
    if ip.is_loopback or ip.is_private:
        return host
    return str(ipaddress.ip_network((ip, 16 if ip.version == 4 else 32), strict=False))


def is_plausible(peer: Peer, *, source: str) -> bool:
    """Return whether a neighbour at `source` (an IP address, or "" if unknown) may name the peer: the SSRF guard.

    A remote neighbour may not name addresses in this machine's network. Relayed addresses are never dialled on hearsay.
    """
    if any(address.relay is not None for address in peer.addresses):
        return True
    found = reach_of(source)
    least = Reach.INTERNET if found is None else found
    reaches = (reach_of(each.host) for each in peer.addresses)
    return all(reach is None or reach >= least for reach in reaches)


def _place_of(address: Address) -> str:
    """Return the dialled host; with its port on loopback and in private networks, where a host has many nodes."""
    network = network_of(address)
    return address.host if "/" in network else network
