"""Which of a run's coordinators a node asks: the one that answered last, for as long as it answers.

No network and no clock: what happened is told to it. One that fails goes behind all others, so that whoever
accepts requests and never answers them costs a node its deadline once, not once a call; and nobody goes back to
the first of the list before the one in use fails, so that two that come and go do not make a node flap.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

from node.client.http import checked_url, sound_urls
from node.errors import ConfigError

MAX_ENDPOINTS: Final = 16


class Endpoints:
    """URLs of one run's coordinators. Raises ConfigError for none, more than MAX_ENDPOINTS, or what is no URL."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        given = (urls,) if isinstance(urls, str) else urls
        self._order = list(dict.fromkeys(checked_url(url) for url in given))
        if not 1 <= len(self._order) <= MAX_ENDPOINTS:
            raise ConfigError(f"Give 1 to {MAX_ENDPOINTS} addresses of the run's coordinators, not {len(self._order)}.")
        self._failing: set[str] = set()

    @property
    def urls(self) -> tuple[str, ...]:
        """All of them, in the order in which they would be asked; the first is the one in use."""
        return tuple(self._order)

    @property
    def current(self) -> str:
        """The one in use."""
        return self._order[0]

    @property
    def away(self) -> bool:
        """Whether each of them has failed since one answered last."""
        return self._failing.issuperset(self._order)

    def next(self, tried: Container[str]) -> str | None:
        """The first that is not in `tried`, or None."""
        return next((url for url in self._order if url not in tried), None)

    def note_failure(self, url: str) -> str | None:
        """Put `url` behind the others, if it is in use; returns the one that is now, unless that failed as well.

        Requests that were under way when their endpoint fell behind fail late; that is no news.
        """
        if url != self.current:
            return None
        self._failing.add(url)
        self._order.append(self._order.pop(0))
        return None if self.current in self._failing else self.current

    def note_answer(self, url: str) -> None:
        """`url` answered: it is in use from now on, if the one in use did not; and the others get another chance."""
        if self.current in self._failing and url in self._order:
            self._order.remove(url)
            self._order.insert(0, url)
        self._failing.clear()

    def prefer(self, url: str) -> None:
        """Ask `url` next, if it is one of them."""
        if url in self._order:
            self._order.remove(url)
            self._order.insert(0, url)
            self._failing.discard(url)

    def replace(self, urls: Iterable[str]) -> None:
        """Ask these from now on; the one in use stays so if it is among them.

        At most MAX_ENDPOINTS are taken, without what is no URL. A list of which nothing is left changes nothing.
        """
        sound = list(sound_urls(urls))
        if self.current in sound:
            sound.remove(self.current)
            sound.insert(0, self.current)
        sound = sound[:MAX_ENDPOINTS]
        if not sound:
            return
        in_use = [url for url in self._order[:1] if url in sound and not self.away]
        others = [url for url in self._order if url in sound and url not in in_use]
        self._order = in_use + [url for url in sound if url not in self._order] + others
        self._failing.intersection_update(self._order)
