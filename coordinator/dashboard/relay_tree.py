"""Drawing of the relay tree: who fetches from whom, and each relay's newest policy."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from coordinator.run.relays import RELAY_SECONDS, RelayRegistry
from coordinator.storage.database import Connection
from coordinator.storage.relays import relays_seen_since

MOST_LABELLED: Final = 24
"""Up to so many relays are drawn one per line with their names; more as a ring, with room for hundreds."""

LEVEL_WIDTH, LINE_HEIGHT, LABEL_WIDTH = 26.0, 22.0, 225.0
RING: Final = 170.0


@dataclass(frozen=True, slots=True)
class Dot:
    """A relay or the origin; `state` is "origin", "newest", "behind" (by one), "old" or "unknown"."""

    x: float
    y: float
    label: str
    state: str
    said: str


@dataclass(frozen=True, slots=True)
class Drawing:
    """A tree in its own units; `lines` are SVG paths between the dots."""

    width: float
    height: float
    dots: tuple[Dot, ...]
    lines: tuple[str, ...]
    labelled: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """How many relays announced that they hold a policy version completely, or a newer one."""

    version: int
    relays: int


@dataclass(frozen=True, slots=True)
class RelayView:
    """The relays on the page; `stripes` is the number of trees, of which the first is drawn.

    `has_sources` says that workers are told of somebody to fetch from: a relay, or else the trainer's origin.
    """

    drawing: Drawing | None
    count: int
    depth: int
    stripes: int
    spread: tuple[Spread, ...]
    has_sources: bool


@dataclass(slots=True)
class _Vertex:
    name: str
    url: str
    version: int | None
    level: int = 0
    place: float = 0.0


def relay_view(connection: Connection, registry: RelayRegistry, *, head: int, now: float) -> RelayView:
    """Lay out the relays that announced themselves recently, in the first of their trees."""
    rows = relays_seen_since(connection, now - RELAY_SECONDS)
    known = {row.node: _Vertex(row.node, row.url, row.version) for row in rows}
    versions = [min(row.version, head) for row in rows if row.version is not None]
    shown = range(head, max(-1, head - 4), -1)
    spread = tuple(Spread(version, sum(held >= version for held in versions)) for version in shown)
    plan, has_sources = registry.plan(now), bool(registry.urls(now=now))
    if not known or plan is None:
        flat = _draw(known, dict.fromkeys(known, ""), head) if known else None
        return RelayView(flat, len(known), min(1, len(known)), 1, spread, has_sources)
    parents = {}
    members = {member.url: member.id for member in registry.members(now) if member.id in known}
    for name in members.values():
        try:
            parents[name] = members.get(plan.parents(name)[0][0], "")
        except KeyError:  # announced after the plan was made
            parents[name] = ""
    tree = {name: known[name] for name in members.values()}
    return RelayView(_draw(tree, parents, head), len(known), plan.depth(), plan.stripes, spread, has_sources)


def _draw(tree: dict[str, _Vertex], parents: dict[str, str], head: int) -> Drawing:
    root = _Vertex("", "origin", head)
    children: defaultdict[str, list[str]] = defaultdict(list)
    for name, parent in parents.items():
        children[parent].append(name)
    labelled = len(tree) <= MOST_LABELLED
    lines_or_leaves = _place(root, tree, children, one_per_line=labelled)
    every = [root, *tree.values()]
    by_name = {vertex.name: vertex for vertex in every}
    depth = max(vertex.level for vertex in every)
    if labelled:
        width, height = depth * LEVEL_WIDTH + LABEL_WIDTH, lines_or_leaves * LINE_HEIGHT
        at = {v.name: (10 + v.level * LEVEL_WIDTH, (v.place + 0.5) * LINE_HEIGHT) for v in every}
    else:
        width = height = 2 * RING + 20
        at = {v.name: _on_ring(v, leaves=lines_or_leaves, depth=depth) for v in every}
    lines = tuple(
        _line(at[parent], at[name], bent=labelled) for name, parent in parents.items() if by_name[name].level > 0
    )
    dots = tuple(_dot(vertex, *at[vertex.name], head=head) for vertex in every)
    return Drawing(round(width, 1), round(height, 1), dots, lines, labelled)


def _place(root: _Vertex, tree: dict[str, _Vertex], children: dict[str, list[str]], *, one_per_line: bool) -> int:
    """Set every vertex's level and place: its line in a listing, or the middle of its children.

    Return the number of lines, or of leaves. Iterative, and safe for any parents: the root reaches no cycle.
    """
    order, stack = [], [root]
    while stack:
        vertex = stack.pop()
        order.append(vertex)
        for name in reversed(children.get(vertex.name, [])):
            tree[name].level = vertex.level + 1
            stack.append(tree[name])
    if one_per_line:
        for line, vertex in enumerate(order):
            vertex.place = float(line)
        return len(order)
    leaves = 0
    for vertex in order:
        if not children.get(vertex.name):
            vertex.place, leaves = float(leaves), leaves + 1
    for vertex in reversed(order):
        below = [tree[name].place for name in children.get(vertex.name, [])]
        if below:
            vertex.place = (min(below) + max(below)) / 2
    return leaves


def _on_ring(vertex: _Vertex, *, leaves: int, depth: int) -> tuple[float, float]:
    angle = 2 * math.pi * vertex.place / max(1, leaves)
    radius = RING * vertex.level / max(1, depth)
    return RING + 10 + radius * math.sin(angle), RING + 10 - radius * math.cos(angle)


def _line(start: tuple[float, float], end: tuple[float, float], *, bent: bool) -> str:
    (x1, y1), (x2, y2) = start, end
    if not bent:
        return f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"
    return f"M{x1:.1f} {y1:.1f}V{y2:.1f}H{x2:.1f}"


def _dot(vertex: _Vertex, x: float, y: float, *, head: int) -> Dot:
    if not vertex.name:
        return Dot(round(x, 1), round(y, 1), "origin", "origin", f"the origin has policy {head}" if head >= 0 else "")
    label = urlsplit(vertex.url).netloc or vertex.url
    if vertex.version is None:
        state, said = "unknown", "no policy yet"
    else:
        behind = head - vertex.version
        state = "newest" if behind <= 0 else "behind" if behind == 1 else "old"
        said = f"policy {vertex.version}"
    return Dot(round(x, 1), round(y, 1), label, state, f"{label}: {said}")
