"""Failover order of a run's coordinators: sticky to the one that answered last.

Without IO or clock. A failed endpoint moves to the back, so that one which accepts requests and never answers costs a
node its deadline once, not once a call; and there is no failback before the current one fails, so that two flapping
endpoints do not make a node flap.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Final

from node.client.http import checked_url, valid_urls
from node.errors import ConfigError

MAX_ENDPOINTS: Final = 16


class Endpoints:
    """URLs of one run's coordinators; raises ConfigError for none, more than MAX_ENDPOINTS, or an invalid URL."""

    def __init__(self, urls: str | Sequence[str]) -> None:
        given = (urls,) if isinstance(urls, str) else urls
        self._order = list(dict.fromkeys(checked_url(url) for url in given))
        if not 1 <= len(self._order) <= MAX_ENDPOINTS:
            raise ConfigError(f"Give 1 to {MAX_ENDPOINTS} addresses of the run's coordinators, not {len(self._order)}.")
        self._failing: set[str] = set()

    @property
    def urls(self) -> tuple[str, ...]:
        """All URLs in failover order; the first is in use."""
        return tuple(self._order)

    @property
    def current(self) -> str:
        """The URL in use."""
        return self._order[0]

    @property
    def away(self) -> bool:
        """Whether every URL has failed since the last answer."""
        return self._failing.issuperset(self._order)

    def next(self, tried: Container[str]) -> str | None:
        """Return the first URL that is not in `tried`, or None."""
        return next((url for url in self._order if url not in tried), None)

    def note_failure(self, url: str) -> str | None:
        """Move `url` to the back if it is in use; return the new one in use, None if that has failed as well.

        Late failures of requests in flight at a former endpoint change nothing.
        """
        if url != self.current:
            return None
        self._failing.add(url)
        self._order.append(self._order.pop(0))
        return None if self.current in self._failing else self.current

    def note_answer(self, url: str) -> None:
        """Use `url` from now on if the one in use had failed; forget all failures."""
        if self.current in self._failing and url in self._order:
            self._order.remove(url)
            self._order.insert(0, url)
        self._failing.clear()

    def prefer(self, url: str) -> None:
        """Use `url` next, if it is known."""
        if url in self._order:
            self._order.remove(url)
            self._order.insert(0, url)
            self._failing.discard(url)

    def replace(self, urls: Iterable[str]) -> None:
        """Replace the URLs, dropping invalid ones and those after MAX_ENDPOINTS; the one in use stays in use if listed.

        Without a valid URL, nothing changes.
        """
        sound = list(valid_urls(urls))
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
