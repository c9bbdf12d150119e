"""Limits on requests: who shares one, whom a proxy speaks for, and what counting costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.http.connections import ConnectionLimits, ConnectionQuota, server_config
from coordinator.http.rate_limits import AddressLimiter, RateLimiter, TooManyRequests
from shardcast.rate_limit import network_of


@pytest.mark.parametrize("seen", ["192.0.2.9", "::ffff:192.0.2.9"])
async def test_a_proxy_is_known_on_a_socket_for_both_kinds_of_addresses(seen: str) -> None:
    """With --host :: it comes as an IPv6 address; all who ask through it would else share what one address has."""
    found = list[str]()

    async def note(scope: Any, _receive: Any, _send: Any) -> None:
        found.append(scope["client"][0])

    app: Any = note
    app.state = SimpleNamespace()
    config = server_config(app, ConnectionLimits(proxies=("192.0.2.9",)))
    config.load()
    nothing: Any = None
    scope = {"type": "http", "client": (seen, 1), "headers": [(b"x-forwarded-for", b"203.0.113.7")]}
    await config.loaded_app(scope, nothing, nothing)
    assert found == ["203.0.113.7"]


def test_who_is_in_the_proxys_network_is_not_the_proxy() -> None:
    """In a rented /64 the neighbours are strangers, and without a bound they would take every connection."""
    quota = ConnectionQuota(ConnectionLimits(connections_per_address=2, proxies=("2001:db8::5", "192.0.2.9")))
    assert all(quota.acquire(proxy) for proxy in ("2001:db8::5", "2001:DB8:0::5", "::ffff:192.0.2.9") for _ in range(9))
    assert [quota.acquire(f"2001:db8::{n}") for n in (6, 7, 8)] == [True, True, False]
    for proxy in ("2001:db8::5", "2001:DB8:0::5", "::ffff:192.0.2.9"):
        for _ in range(9):
            quota.release(proxy)
    quota.release("2001:db8::6")
    assert [quota.acquire(f"2001:db8::{n}") for n in (9, 10)] == [True, False]


def test_addresses_of_one_network_have_one_share() -> None:
    """An IPv6 customer has 2^64 addresses at least, and takes a new one for each request."""
    limiter = AddressLimiter(per_minute=10)
    for n in range(10):
        limiter.check(f"2001:db8:1:2::{n:x}", now=0.0)
    with pytest.raises(TooManyRequests):
        limiter.check("2001:db8:1:2:ffff:ffff:ffff:ffff", now=0.0)
    limiter.check("2001:db8:1:3::1", now=0.0)
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1")
    assert network_of("fe80::1%eth0") == network_of("fe80::2")


def test_a_million_addresses_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardcast.rate_limit.MAX_BUCKETS", 500)
    limiter = AddressLimiter(per_minute=10)
    for n in range(1_000):
        limiter.check(f"10.0.{n >> 8}.{n & 255}", now=n * 1e-6)
    assert len(limiter) <= 500


def test_who_asks_again_too_early_is_not_let_wait_longer() -> None:
    """Else two who share an address, and ask in turn, would both wait for ever."""
    limiter = RateLimiter(per_minute=60, who="node")
    for _ in range(60):
        limiter.check("a", now=0.0)
    for tenth in range(1, 10):
        with pytest.raises(TooManyRequests) as refusal:
            limiter.check("a", now=tenth / 10)
        assert refusal.value.retry_after_seconds == 1
    limiter.check("a", now=1.01)
