"""What a node tells the registry of relays, and what it makes of the answer."""

from __future__ import annotations

import contextlib
import ipaddress
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from node.errors import ConfigError
from node.protocol.messages import PlainUrl, ReceivedFrom, RelayAnnouncement, RelayList

ANNOUNCE_SECONDS = 15.0
"""The coordinator forgets a relay after 60 s."""

SPARE_RELAYS = 3
"""Relays to fall back on beside those that the trees name; drawn at random, so that they are not everybody's."""

MAX_RECEIVED = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Where a worker serves policies to others; `public_url` is how they reach it, if not by host and port."""

    host: str
    port: int
    public_url: str | None = None


def announcement(url: str, sources: Iterable[Mapping[str, Any]], *, version: int | None) -> RelayAnnouncement:
    """That this node serves at `url`, of which policy it has everything, and what it got from `sources` (rows of a
    client's or relay's status)."""
    known = [row for row in sources if row["bytes_per_s"] and _is_plain(row["url"])]
    received = [ReceivedFrom(url=row["url"], bytes_per_s=round(row["bytes_per_s"])) for row in known]
    return RelayAnnouncement(url=url, received=tuple(received[:MAX_RECEIVED]), version=version)


def sources_of(advice: RelayList, *, own: str | None = None) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Whom to ask, and for each stripe whom first: with trees a few more than they name, without them everybody."""
    others = [url for url in advice.relays if url != own]
    if not advice.stripes:
        return tuple(others), ()
    named = {url for each in advice.stripes for url in each}
    spare = [url for url in others if url not in named]
    return tuple(random.sample(spare, min(SPARE_RELAYS, len(spare)))), advice.stripes


def serving_url(host: str, port: int) -> str:
    """Where others on this network find what listens there. Raises ConfigError for an address that is none."""
    if _is_wildcard(host):
        raise ConfigError(
            f"Others cannot reach {host}; say with --public-url where they find this node.", code="no_public_url"
        )
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_wildcard(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == ""


def _is_plain(url: str) -> bool:
    try:
        msgspec.convert(url, PlainUrl)
    except msgspec.ValidationError:
        return False
    return True
