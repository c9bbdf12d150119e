"""SSRF guard: a URL from a server may not be nearer to this machine than the server itself.

A hostile server could otherwise have this machine call services on loopback or a cloud's metadata address. A server on
the Internet may name nothing on this network, one on this network nothing on this machine. The addresses connected to
count, not what a name resolves to later (DNS rebinding).
"""

from __future__ import annotations

import enum
import ipaddress
import socket
from collections.abc import Callable, Iterable
from typing import Final

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver

from shardcast.urls import split_url, valid_sources


class Reach(enum.IntEnum):
    """Distance classes of addresses, nearest first."""

    NOWHERE = 0
    THIS_MACHINE = 1
    THIS_LINK = 2
    THIS_NETWORK = 3
    INTERNET = 4


_EMBEDDING: Final = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("::/96"))
"""NAT64, and IPv4-compatible addresses: a gateway may lead on to the IPv4 address at their end."""


def _embedded(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address that an IPv6 address stands for, if any."""
    if any(address in network for network in _EMBEDDING) and int(address) > 1:  # not :: and ::1
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


class SsrfBlocked(Exception):
    """No address of the named host is far enough away."""


def reach_of(host: str) -> Reach | None:
    """Return the reach of an IP address; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        address = _embedded(address) or address
    if address.is_unspecified or address.is_multicast:
        return Reach.NOWHERE
    if address.is_loopback:
        return Reach.THIS_MACHINE
    if address.is_link_local:
        return Reach.THIS_LINK
    is_site_local = isinstance(address, ipaddress.IPv6Address) and address.is_site_local
    return Reach.INTERNET if address.is_global and not is_site_local else Reach.THIS_NETWORK


def not_nearer(least: Callable[[], Reach], *, own: Iterable[str] = ()) -> Callable[[str, int, str], bool]:
    """Return a guard (host, port, address) that allows addresses at `least()` or farther, and `own` URLs anywhere.

    For `shardcast.Client` and the like, where somebody else names the sources. `own` are those that this machine's
    operator named: another port of the same host is not theirs.
    """
    parts = [split_url(f"{url}/v1/head") for url in valid_sources(own)]
    exempt = {(each.host.lower(), each.port) for each in parts if each is not None}

    def may_connect(host: str, port: int, address: str) -> bool:
        return (host.lower(), port) in exempt or (reach_of(address) or Reach.NOWHERE) >= least()

    return may_connect


class SsrfGuardResolver(AbstractResolver):
    """Resolver of addresses at `least` or farther, else SsrfBlocked; `farthest` is the farthest one returned so far."""

    def __init__(self, least: Reach = Reach.NOWHERE) -> None:
        self.farthest: Reach | None = None
        self._least = least
        self._resolver = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        allowed = []
        for each in found:
            reach = reach_of(each["host"]) or Reach.NOWHERE
            if reach >= self._least:
                allowed.append(each)
                self.farthest = reach if self.farthest is None else max(self.farthest, reach)
        if not allowed:
            raise SsrfBlocked(host)
        return allowed

    async def close(self) -> None:
        await self._resolver.close()
