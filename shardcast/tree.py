"""Who fetches from whom: interior-disjoint striped trees over the relays, planned by whoever keeps their registry.

    planned = plan([origin_url], [Member(id=key, url=url, bytes_per_s=median_reports(...), place=prefix), ...])
    planned.parents(key)                # for each stripe, the URLs to ask, in order
    planned.sources_for(worker_key)     # the same for a worker that serves nobody

Chunk i of a payload belongs to stripe i mod k, and each stripe flows down a tree of its own (SplitStream, Castro et
al., SOSP 2003). A relay is interior in at most one tree and a leaf in all others, so that every uplink carries its
share, and the origin sends each stripe once: S in all, for a payload of S bytes. How many children a relay has seats
for follows its uplink, by D'Hondt's highest averages, which make the least uplink per child as large as it can be.

What holds, whatever the members (each has its test):

- Every relay and stripe has two candidates, its parent in the tree and a backup from another branch where there is one.
  Candidates come before their child in an order of the tree, so no choice of candidates closes a cycle, and every
  choice leads to the origin. With any one relay gone, all others still reach it.
- The origin is a candidate of two relays in each stripe, the root and its first child: it sends S, and never more than
  2 S, however many relays and workers there are. With fewer than two relays workers get it as well.
- The strongest uplink of a tree is its root, and each level is as strong as the next or stronger. Depth is
  logarithmic. No relay has more than `fan_out` children, backups aside.
- The same members give the same plan in any order, and one member more or less moves few others: seats are given by
  consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018).

Nobody is trusted. A relay that is placed too high costs its children time, until they turn to their backups. Uplinks
come from other nodes' reports (`median_reports`). `salt`, kept secret, keeps strangers from searching for an id that
hashes next to a victim's. `place` must be what the registry sees of an address, not what a relay says.

Pure: no IO, no clock, no random numbers. Two plans at once, while a new one spreads, may close a cycle between them;
that costs a fetch its deadline, and the next candidate is asked.
"""

from __future__ import annotations

import heapq
import math
import statistics
import struct
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from shardcast.wire import derive

MIN_REPORTERS = 3
# Uplinks are rounded down to so many leading bits: classes 6 to 12 % apart, so that measuring anew moves few.
CLASS_BITS = 4
MAX_BYTES_PER_S = 2**50
# Of the mean uplink, which no trees can beat. Fewer stripes are taken only where more fall short of this share, as with
# very few relays or very unequal ones: a change of their number moves everybody.
GOOD_SHARE = 0.7
# Of a table that tells workers their relays. The cells are a power of 4, since a change of it moves most workers; seats
# that stay free keep one relay more or less from pushing many of them on.
CELLS_PER_RELAY, MAX_CELLS, SPARE_SEATS = 16, 2**16, 1 / 16
MAX_PROBES = 32
_ORIGIN = -1

Seat = tuple[int, int]
"""A point on the ring of 2**64, and the index of the relay whose seat it is."""


@dataclass(frozen=True, slots=True)
class Member:
    """A registered relay. `id` and `url` are unique; `bytes_per_s` is its uplink, None while unknown."""

    id: str
    url: str
    bytes_per_s: float | None = None
    place: str | None = None


def median_reports(reports: Mapping[str, float], *, subject: str, flows: int = 1) -> float | None:
    """Estimate the uplink of `subject` in bytes/s from what MIN_REPORTERS others or more received; else None.

    `reports` has one figure per reporter, over the same time span. A child sees one of several flows, so the median is
    multiplied by `flows`, the number of children the registry assigned to `subject`. The subject's own report is
    ignored. With at least three reporters one liar moves the median no further than to the next honest figure; half of
    them can move it anywhere, so reporter identities must cost something.
    """
    figures = sorted(
        figure for reporter, figure in reports.items() if reporter != subject and math.isfinite(figure) and figure >= 0
    )
    return statistics.median_low(figures) * flows if len(figures) >= MIN_REPORTERS else None


def plan(
    origins: Sequence[str], members: Iterable[Member], *, stripes: int = 4, fan_out: int = 16, salt: bytes = b""
) -> TreePlan:
    """Plan trees over `members` in at most `stripes` stripes; an unknown uplink counts as the median of the known.

    Raises ValueError without origins, for a duplicate id or URL, for an uplink that is negative or not finite, and for
    a `fan_out` below 2 * `stripes`, which could not seat every set of relays.
    """
    if not origins or stripes < 1 or fan_out < 2 * stripes:
        raise ValueError("a plan needs an origin, at least one stripe, and fan_out >= 2 * stripes")
    key = derive("shardcast tree", salt)
    nodes = _rank(members, key, stripes, fan_out)
    good = GOOD_SHARE * sum(node.weight for node in nodes) / max(1, len(nodes) - 1)
    best_rate, best = -1.0, [dict[int, int]()]
    for count in range(min(stripes, len(nodes)), 0, -1):
        dealt = _deal(nodes, count, fan_out)
        per_child = [nodes[index].weight / seats for given in dealt for index, seats in given.items() if seats]
        rate = count * min(per_child, default=math.inf)
        if rate > best_rate:
            best_rate, best = rate, dealt
        if rate >= good:
            break
    trees = [_Tree(nodes, seats, stripe) for stripe, seats in enumerate(best)]
    return TreePlan(tuple(origins), nodes, trees, key)


class TreePlan:
    """Striped trees over all members. Chunk i belongs to stripe i % `stripes` (at least 1)."""

    def __init__(self, origins: tuple[str, ...], nodes: list[_Node], trees: list[_Tree], key: bytes) -> None:
        self.origins, self.stripes = origins, len(trees)
        self._nodes, self._trees, self._key = nodes, trees, key
        self._index = {node.member.id: index for index, node in enumerate(nodes)}
        self._places: defaultdict[str | None, list[int]] = defaultdict(list)
        for index, node in enumerate(nodes):
            self._places[node.member.place].append(index)
        self._tables: dict[str | None, list[int]] = {}

    def parents(self, member_id: str) -> tuple[tuple[str, ...], ...]:
        """Return, per stripe, the URLs a relay polls: parent, then backup. Raises KeyError for an unknown id."""
        index = self._index[member_id]
        return tuple(
            tuple(url for parent in tree.candidates[index] for url in self._urls(parent, stripe))
            for stripe, tree in enumerate(self._trees)
        )

    def sources_for(self, worker_id: str, place: str | None = None) -> tuple[tuple[str, ...], ...]:
        """Return, per stripe, the URLs a worker polls; for a member, its parents.

        Two relays drawn by uplink, preceded by one of the same place if there is any, followed by the origins where
        there are fewer than two relays. The first call builds a table (milliseconds), later ones take microseconds.
        """
        if worker_id in self._index:
            return self.parents(worker_id)
        points = _points(self._key, "worker", worker_id, self.stripes)
        return tuple(self._sources(stripe, point, place) for stripe, point in enumerate(points))

    def depth(self) -> int:
        """Return the hops from the origin to the farthest relay; 0 without relays."""
        return max((level for tree in self._trees for level in tree.level), default=-1) + 1

    def _sources(self, stripe: int, point: int, place: str | None) -> tuple[str, ...]:
        chosen = _draw(self._table(place), point, 1) if place is not None and place in self._places else []
        chosen += [drawn for drawn in _draw(self._table(None), point, 2) if drawn not in chosen]
        if len(chosen) < 2:  # the strongest, where one relay has every cell
            chosen += [index for index in range(min(2, len(self._nodes))) if index not in chosen][:1]
        if len(chosen) < 2:
            chosen.append(_ORIGIN)
        return tuple(url for parent in chosen for url in self._urls(parent, stripe))

    def _urls(self, parent: int, stripe: int) -> tuple[str, ...]:
        if parent != _ORIGIN:
            return (self._nodes[parent].member.url,)
        first = stripe % len(self.origins)  # several origins share the stripes
        return self.origins[first:] + self.origins[:first]

    def _table(self, place: str | None) -> list[int]:
        """Return the relay of each cell, by uplink: of all relays (None) or of one place."""
        if place not in self._tables:
            members = list(range(len(self._nodes))) if place is None else self._places[place]
            self._tables[place] = _table(self._nodes, members, self._key)
        return self._tables[place]


# -- nodes and what hashing says of them


@dataclass(frozen=True, slots=True)
class _Node:
    """A member, its uplink class in bytes/s, its hash preference per stripe, and its ring points as child and of its
    seats.
    """

    member: Member
    weight: int
    favour: list[int]
    child_points: list[int]
    seat_points: list[int]


def _rank(members: Iterable[Member], key: bytes, stripes: int, fan_out: int) -> list[_Node]:
    """Sort nodes by uplink class, strongest first; among equals measured ones first, then by hash."""
    listed = list(members)
    if len({member.id for member in listed}) < len(listed) or len({member.url for member in listed}) < len(listed):
        raise ValueError("two members have the same id or URL")
    known = [member.bytes_per_s for member in listed if member.bytes_per_s is not None]
    if not all(math.isfinite(figure) and figure >= 0 for figure in known):
        raise ValueError("an uplink must be a finite, non-negative number of bytes per second")
    unknown = statistics.median_low(known) if known else 1.0
    keyed = []
    for member in listed:
        weight = _class(unknown if member.bytes_per_s is None else member.bytes_per_s)
        order, *points = _points(key, "member", member.id, 1 + 2 * stripes + fan_out)
        node = _Node(member, weight, points[:stripes], points[stripes : 2 * stripes], points[2 * stripes :])
        keyed.append(((-weight, member.bytes_per_s is None, order, member.id), node))
    return [node for _, node in sorted(keyed, key=lambda pair: pair[0])]


def _class(bytes_per_s: float) -> int:
    """Round an uplink down to its class: the CLASS_BITS leading bits."""
    whole = max(1, int(min(bytes_per_s, MAX_BYTES_PER_S)))
    dropped = max(0, whole.bit_length() - CLASS_BITS)
    return whole >> dropped << dropped


def _points(key: bytes, kind: str, name: str, count: int) -> tuple[int, ...]:
    """Derive `count` uniform 64-bit integers."""
    data = f"{kind}:{name}".encode(errors="surrogatepass")
    return struct.unpack(f"<{count}Q", blake3(data, key=key).digest(length=8 * count))


# -- seats and stripes


def _deal(nodes: list[_Node], count: int, fan_out: int) -> list[dict[int, int]]:
    """Assign interior relays to each of `count` stripes; return per stripe their seats, the strongest first.

    Stripes get nearly equal capacity. The strongest choose first, by hash where there is room, and each stripe gets
    enough relays to seat everybody within `fan_out`.
    """
    others = max(1, len(nodes) - 1)
    usable = sum(node.weight for node in nodes) * fan_out // (count * others)
    capacity = [min(node.weight, usable) for node in nodes]
    quota, least = sum(capacity) / count, math.ceil(others / fan_out)
    load, members = [0] * count, [list[int]() for _ in range(count)]
    for index, node in enumerate(nodes):
        short = [stripe for stripe in range(count) if len(members[stripe]) < least]
        if sum(least - len(members[stripe]) for stripe in short) >= len(nodes) - index:
            free = short
        else:
            free = [stripe for stripe in range(count) if load[stripe] + capacity[index] / 2 <= quota]
            free = free or [stripe for stripe in range(count) if load[stripe] == min(load)]
        chosen = max(free, key=node.favour.__getitem__)
        load[chosen] += capacity[index]
        members[chosen].append(index)
    # A chain has the rate of a broad tree and no end: a single tree is binary at least.
    smallest = 2 if count == 1 else 1
    seats = [_apportion([nodes[index].weight for index in own], len(nodes) - 1, fan_out, smallest) for own in members]
    return [dict(zip(own, given, strict=True)) for own, given in zip(members, seats, strict=True)]


def _apportion(weights: Sequence[int], seats: int, max_seats: int, min_seats: int = 1) -> list[int]:
    """Apportion `seats` by D'Hondt's highest averages: each gets 0, or `min_seats` to `max_seats`.

    Ties go to the first. Stops short once all have `max_seats`.
    """
    given = [0] * len(weights)
    heap = [(-weight / min_seats, index) for index, weight in enumerate(weights)]
    heapq.heapify(heap)
    while seats > 0 and heap:
        index = heap[0][1]
        added = 1 if given[index] else min_seats
        given[index] += added
        seats -= added
        if given[index] < max_seats:
            heapq.heapreplace(heap, (-weights[index] / (given[index] + 1), index))
        else:
            heapq.heappop(heap)
    return given


# -- one tree


class _Tree:
    """One stripe's tree: for every node its candidates and its level, the root's being 0.

    Levels are filled from the root with the strongest relays, each level until the one above has no seat left; leaves
    take what remains. A backup stands on the parent's level, so it comes before the child and is not below the parent.
    """

    def __init__(self, nodes: list[_Node], seats: dict[int, int], stripe: int) -> None:
        self._nodes, self._seats = nodes, seats
        self._points = [node.child_points[stripe] for node in nodes]
        self.candidates: list[tuple[int, ...]] = [(_ORIGIN,)] * len(nodes)
        self.level = [0] * len(nodes)
        self._rings: list[list[Seat]] = []
        self._first_children: list[int] = []
        if nodes:
            self._grow(list(seats))

    def _grow(self, members: list[int]) -> None:
        interior = [index for index in members[1:] if self._seats[index]]
        leaves = set(range(len(self._nodes))) - {members[0], *interior}
        above, free = members[:1], list[Seat]()
        while True:
            self._rings.append(ring := self._ring(above))
            if not interior:
                break
            above, interior = interior[: len(ring)], interior[len(ring) :]
            free = self._settle(above, ring)
        # All levels but the last two are full, so what is free is at the bottom.
        self._settle(sorted(leaves, key=self._points.__getitem__), sorted(free + ring))

    def _ring(self, owners: list[int]) -> list[Seat]:
        return sorted(
            (point, index) for index in owners for point in self._nodes[index].seat_points[: self._seats[index]]
        )

    def _settle(self, children: list[int], ring: list[Seat]) -> list[Seat]:
        """Seat `children`, first next to parents of the same place; return the free seats. Seats must suffice."""
        own, waiting = defaultdict(list), defaultdict(list)
        for seat in ring:
            own[self._nodes[seat[1]].member.place].append(seat)
        for child in children:
            waiting[self._nodes[child].member.place].append((self._points[child], child))
        free, settled = own.pop(None, []), dict[int, int]()
        for place, seats in own.items():
            found, left = _match(waiting[place], seats)
            settled |= found
            free += left
        found, free = _match([(self._points[child], child) for child in children if child not in settled], sorted(free))
        settled |= found
        for child in children:
            self._adopt(child, settled[child])
        return free

    def _adopt(self, child: int, parent: int) -> None:
        self.level[child] = self.level[parent] + 1
        self.candidates[child] = (parent, self._backup(child, parent))

    def _backup(self, child: int, parent: int) -> int:
        """Choose a backup parent: another node of the parent's level; the grandparent if there is none; below the root
        an elder sibling.
        """
        point = self._points[child]
        if self.level[parent] == 0:
            elder = self._first_children
            chosen = elder[point % len(elder)] if elder else _ORIGIN
            elder.append(child)
            return chosen
        ring = self._rings[self.level[parent]]
        start = bisect_left(ring, (point, 0))
        for step in range(len(ring)):
            if (other := ring[(start + step) % len(ring)][1]) != parent:
                return other
        return self.candidates[parent][0]


# -- consistent hashing with bounded loads


def _match(children: Sequence[tuple[int, int]], seats: Sequence[Seat]) -> tuple[dict[int, int], list[Seat]]:
    """Match children (point, child) to seats; earlier children choose first.

    `seats` must be sorted. Returns seat owner by child, without those that got none, and the free seats.
    """
    taken = bytearray(len(seats))
    owners: dict[int, int] = {}
    for point, child in children[: len(seats)]:
        at = _free_seat(point, seats, taken)
        taken[at] = True
        owners[child] = seats[at][1]
    return owners, [seat for seat, gone in zip(seats, taken, strict=True) if not gone]


def _free_seat(point: int, seats: Sequence[Seat], taken: bytearray) -> int:
    """Probe unrelated points of the ring for a free seat: neighbouring seats would fill up in clusters."""
    for _ in range(MAX_PROBES):
        at = bisect_left(seats, (point, 0)) % len(seats)
        if not taken[at]:
            return at
        point = (point * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX generator
    at = taken.find(0, at)
    return at if at >= 0 else taken.find(0)


def _table(nodes: Sequence[_Node], members: list[int], key: bytes) -> list[int]:
    """Assign each of 4**n cells to the index of a member, in proportion to uplinks; [] without members."""
    cells = 16 if members else 0
    while cells < min(MAX_CELLS, CELLS_PER_RELAY * len(members)):
        cells *= 4
    wanted = cells + math.ceil(SPARE_SEATS * cells)
    counts = _apportion([nodes[index].weight for index in members], wanted, wanted)
    seats = sorted(
        (point, index)
        for index, count in zip(members, counts, strict=True)
        for point in _points(key, "cells", nodes[index].member.id, count)
    )
    owners, _ = _match([(point, cell) for cell, point in enumerate(_points(key, "table", "", cells))], seats)
    return [owners[cell] for cell in range(cells)]


def _draw(table: list[int], point: int, wanted: int) -> list[int]:
    """Return the first `wanted` distinct relays from the cell of `point` on, or all there are."""
    drawn: list[int] = []
    for step in range(len(table)):
        if (owner := table[(point + step) % len(table)]) not in drawn:
            drawn.append(owner)
            if len(drawn) == wanted:
                break
    return drawn
