"""Relay announcements, and the fetch plan in the replies."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from node.client.api import FOREVER, CoordinatorClient
from node.client.http import Backoff, printable
from node.errors import ConfigError, Refused, Unavailable
from node.protocol.messages import ReceivedFrom, RelayAnnouncement, RelayList
from shardcast.errors import LocalFault
from shardcast.urls import normalise_url

log = logging.getLogger(__name__)

ANNOUNCE_SECONDS = 15.0
"""The coordinator forgets a relay after 60 s."""

_RECONNECT_SECONDS = 2.0
"""Enough for a connection that was closed while idle; after a longer outage the next announcement is soon enough."""

_REFUSED = Backoff(first_seconds=ANNOUNCE_SECONDS, max_seconds=300.0)
"""Between announcements that are refused: those of a full list must not all come again at once."""

SPARE_RELAYS = 3
"""Fallback relays besides those of the trees, drawn at random to spread the load."""

MAX_RECEIVED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Where a worker serves policies; `public_url` overrides the URL of host and port."""

    host: str
    port: int
    public_url: str | None = None


class Announcer:
    """Announces a relay; `pause_seconds` is how long to wait at least before the next time, 0 unless it was refused."""

    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._refusals = 0
        self.pause_seconds = 0.0

    async def announce(self, said: RelayAnnouncement) -> RelayList:
        """Announce once and return whom to fetch from, which is known also where the list has no room for another one.

        Waits for a coordinator that is away. Raises Refused for anything but too many requests, and BadReply.
        """
        self.pause_seconds = 0.0
        try:
            advice = await self._client.announce(said, patience_seconds=_RECONNECT_SECONDS)
        except Unavailable:
            return await self._client.relays(patience_seconds=FOREVER)
        except Refused as error:
            if error.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
            self._refusals += 1
            least_s = (error.retry_after_seconds or 0.0) * random.uniform(1.0, 1.5)
            self.pause_seconds = max(min(least_s, _REFUSED.max_seconds), _REFUSED.delay(self._refusals))
            log.warning("this relay is not announced, trying again in %.0f s: %s", self.pause_seconds, error)
            return await self._client.relays(patience_seconds=FOREVER)
        self._refusals = 0
        return advice


def announcement(url: str, sources: Iterable[Mapping[str, Any]], *, version: int | None) -> RelayAnnouncement:
    """Build the announcement of this node at `url`; `sources` are the rows of a client's or relay's status."""
    known = [row for row in sources if row["bytes_per_s"]]
    received = [ReceivedFrom(url=row["url"], bytes_per_s=round(row["bytes_per_s"])) for row in known]
    return RelayAnnouncement(url=url, received=tuple(received[:MAX_RECEIVED]), version=version)


def sources_of(advice: RelayList, *, own: str | None = None) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return the sources (all relays, or a few spares beside the stripes' candidates), and each stripe's candidates."""
    others = [url for url in advice.relays if url != own]
    if not advice.stripes:
        return tuple(others), ()
    named = {url for each in advice.stripes for url in each}
    spare = [url for url in others if url not in named]
    return tuple(random.sample(spare, min(SPARE_RELAYS, len(spare)))), advice.stripes


def serving_url(host: str, port: int) -> str:
    """Return the URL of a listening address; raises ConfigError for a wildcard address."""
    if _is_wildcard(host):
        raise ConfigError(
            f"Others cannot reach {host}; say with --public-url where they find this node.", code="no_public_url"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def source_url(url: str) -> str:
    """Return `url` as others are told it; raises ConfigError unless it can be a source."""
    try:
        return normalise_url(url)
    except LocalFault as error:
        raise ConfigError(f"{printable(str(error))}.") from error


def _is_wildcard(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == ""
