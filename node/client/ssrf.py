"""How far from this machine the addresses are that somebody else has named, and names that resolve to near ones.

A hostile server would like this machine to call others for it: a service that listens on loopback, the address at which
a cloud tells its machines their secrets. What it names is therefore called only where that is as far away as it is
itself: a server on the Internet names nothing on this network, one on this network nothing on this machine. What
counts is what was called, not what a name resolves to later, which its owner decides.
"""

from __future__ import annotations

import enum
import ipaddress
import socket

from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import DefaultResolver


class Reach(enum.IntEnum):
    """From the nearest to the farthest."""

    NOWHERE = 0
    THIS_MACHINE = 1
    THIS_LINK = 2
    THIS_NETWORK = 3
    INTERNET = 4


class TooNear(Exception):
    """A host has no address that is far enough away; says which."""


def reach_of(host: str) -> Reach | None:
    """The reach of an IP address; None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_unspecified or address.is_multicast:
        return Reach.NOWHERE
    if address.is_loopback:
        return Reach.THIS_MACHINE
    if address.is_link_local:
        return Reach.THIS_LINK
    return Reach.INTERNET if address.is_global else Reach.THIS_NETWORK


class RememberingResolver(AbstractResolver):
    """Resolves names as usual; `farthest` is the farthest address that it gave, of which one may have been called."""

    def __init__(self) -> None:
        self.farthest: Reach | None = None
        self._resolver = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            reach = reach_of(each["host"]) or Reach.NOWHERE
            self.farthest = reach if self.farthest is None else max(self.farthest, reach)
        return found

    async def close(self) -> None:
        await self._resolver.close()


class FarResolver(AbstractResolver):
    """Gives only those addresses that are `least` away or farther; raises TooNear where there is none."""

    def __init__(self, least: Reach) -> None:
        self._least = least
        self._resolver = DefaultResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        far = [each for each in found if (reach_of(each["host"]) or Reach.NOWHERE) >= self._least]
        if not far:
            raise TooNear(host)
        return far

    async def close(self) -> None:
        await self._resolver.close()
