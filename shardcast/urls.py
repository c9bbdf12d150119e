"""URLs of sources, most of which strangers supply: one check for whoever stores, signs, lists or calls one.

What this accepts every client accepts. Hosts are IP addresses in their usual form, or names: software differs in what
else it takes for an address, so that a URL could be harmless where it is checked and point elsewhere where it is used.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardcast.errors import LocalFault

_MAX_PORT = 65535
_MAX_NAME = 253
_URL = re.compile(
    r"(http|https)://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?((?:/[A-Za-z0-9._~-]+)+(?:\?[a-z0-9.=&]*)?)"
)
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}\.?")
_ENDS_IN_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0[xX][0-9A-Fa-f]*)\.?")
"""2130706433, 0x7f.1 and 127.1 are all 127.0.0.1 to who follows the URL standard (WHATWG), and names to others."""


@dataclass(frozen=True, slots=True)
class UrlParts:
    """A URL taken apart: `host` without brackets, `authority` as it was written, `target` from the path on."""

    tls: bool
    host: str
    port: int
    authority: str
    target: str


def split_url(url: str) -> UrlParts | None:
    """Take apart an http(s) URL with a path; None unless it can be sent as it is and its host is valid."""
    found = _URL.fullmatch(url)
    if found is None or not _is_host(found[2]):
        return None
    tls, host, port = found[1] == "https", found[2], found[3] or ""
    number = int(port[1:]) if port else 443 if tls else 80
    if not 0 < number <= _MAX_PORT:
        return None
    return UrlParts(tls, host.strip("[]"), number, host + port, found[4])


def normalise_url(url: str) -> str:
    """Strip space and a trailing slash from the URL of a source.

    Raises LocalFault "bad_url" for anything but http(s)://host[:port][/path] of letters, digits and . _ ~ -.
    """
    stripped = url.strip().rstrip("/")
    if split_url(f"{stripped}/v1/head") is None:
        raise LocalFault(f"{url!r} is not a valid source URL: use http://host:port", code="bad_url")
    return stripped


def valid_sources(urls: Iterable[str]) -> tuple[str, ...]:
    """Return those of an untrusted list of URLs that can be sources, without duplicates."""
    valid = []
    for url in urls:
        with contextlib.suppress(LocalFault):
            valid.append(normalise_url(url))
    return tuple(dict.fromkeys(valid))


def _is_host(host: str) -> bool:
    if host.startswith("[") or _ENDS_IN_NUMBER.fullmatch(host):
        try:
            address = ipaddress.ip_address(host.strip("[]"))
        except ValueError:
            return False
        return (address.version == 6) == host.startswith("[")
    return len(host) <= _MAX_NAME and _NAME.fullmatch(host) is not None
