"""URLs that somebody else names: which of them this machine connects to."""

from __future__ import annotations

import pytest

from node.client.ssrf import Reach, not_nearer


def test_a_source_on_this_machine_opens_no_other_port_of_it_to_strangers() -> None:
    """An audit with --source http://localhost:8701 would otherwise ask a relay announced as http://localhost:22."""
    may_connect = not_nearer(lambda: Reach.INTERNET, own=["http://LocalHost:8701/base", "https://127.0.0.1"])
    assert may_connect("localhost", 8701, "127.0.0.1")
    assert may_connect("127.0.0.1", 443, "127.0.0.1")
    for host, port in (("localhost", 22), ("localhost", 443), ("127.0.0.1", 8701), ("127.0.0.1", 80)):
        assert not may_connect(host, port, "127.0.0.1")


@pytest.mark.parametrize("url", ["http://[::1]:8701", "http://[::1]:8701/"])
def test_an_own_source_by_its_ipv6_address_is_asked(url: str) -> None:
    assert not_nearer(lambda: Reach.INTERNET, own=[url])("::1", 8701, "::1")
