"""Places: the networks that addresses belong to, each of which counts as one stranger."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=8192)
def place_of(address: str) -> str:
    """Return the network that stands for the location of an address, or of a network (of which `address` is then the
    first): its /24, or its /48 in IPv6 (RFC 6177); "" if none.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("/")[0])
    except ValueError:
        return ""
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return str(ipaddress.ip_network((parsed, 24 if parsed.version == 4 else 48), strict=False))
