"""Who may come in: how many at once, how fast, and who has to go when it is full.

A flood from one network must not keep out who comes from another. So nobody is refused for being one of many while
there is room, and where there is none, the most crowded network makes way (after Bitcoin Core's eviction of peers).
This module decides and counts; it touches no connection.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from node.p2p.transport import Pace
from node.peer_book import crowd_of

HANDSHAKES_AT_ONCE: Final = 64
HANDSHAKES_OF_A_CROWD: Final = 16
HANDSHAKES_PER_SECOND: Final = 8.0
BURST_HANDSHAKES: Final = 128
"""Of one crowd. One takes about 10 ms of a core, so a crowd gets a tenth of it in the long run."""

MAX_PACES: Final = 4096


@dataclass(eq=False)
class Guest:
    """One connection from outside: whose, since when, and how to end it. `busy` says whether anything goes over it."""

    crowd: str
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    since: float = field(default_factory=trio.current_time)
    shaken: bool = False
    busy: Callable[[], bool] = lambda: False


class Door:
    """Lets `places` connections in."""

    def __init__(self, *, places: int) -> None:
        self._places = places
        self._guests: set[Guest] = set()
        self._paces: dict[str, Pace] = {}

    def __len__(self) -> int:
        return len(self._guests)

    def enter(self, host: str) -> Guest | None:
        """Somebody calls from `host`: who it is from now on, or None if it may not come in."""
        crowd = crowd_of(host)
        waiting = [guest.crowd for guest in self._guests if not guest.shaken]
        if len(waiting) >= HANDSHAKES_AT_ONCE or waiting.count(crowd) >= HANDSHAKES_OF_A_CROWD:
            return None
        if not self._pace(crowd).take_now() or not self._has_room(crowd):
            return None
        guest = Guest(crowd)
        self._guests.add(guest)
        return guest

    def leave(self, guest: Guest) -> None:
        """It has gone."""
        self._guests.discard(guest)

    def _has_room(self, crowd: str) -> bool:
        """Whether there is, once somebody else has been told to go if need be."""
        if len(self._guests) < self._places:
            return True
        crowds = Counter(guest.crowd for guest in self._guests)
        largest = max(crowds.values())
        among = [guest for guest in self._guests if crowds[guest.crowd] == largest]
        idle = [guest for guest in among if not guest.busy()]
        if idle:
            gone = min(idle, key=lambda guest: guest.since)
        elif crowds[crowd] < largest:
            gone = random.choice(among)
        else:
            return False
        self._guests.discard(gone)
        gone.scope.cancel()
        return True

    def _pace(self, crowd: str) -> Pace:
        pace = self._paces.pop(crowd, None) or Pace(rate=HANDSHAKES_PER_SECOND, burst=BURST_HANDSHAKES)
        self._paces[crowd] = pace
        if len(self._paces) > MAX_PACES:
            del self._paces[next(iter(self._paces))]
        return pace
