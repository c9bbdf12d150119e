"""The registry of relays: strangers write into it, and everybody is told by it whom to ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.run.relays import RELAY_SECONDS, RelayRegistry, place_of
from coordinator.storage.database import Database
from node.protocol.messages import ReceivedFrom, RelayAnnouncement

ORIGIN = "http://192.0.2.1:8700"
NOW = 1_000_000.0


def registry_at(folder: Path, *fixed: str) -> RelayRegistry:
    database = Database(f"sqlite:///{folder}/state.sqlite")
    database.migrate()
    return RelayRegistry(database, fixed=fixed, salt=b"s")


@pytest.fixture
def registry(tmp_path: Path) -> RelayRegistry:
    return registry_at(tmp_path, ORIGIN)


def node(number: int) -> str:
    return f"{number:064x}"


def url(number: int) -> str:
    return f"http://192.0.2.{number + 10}:8720"


def announce(
    registry: RelayRegistry, number: int, *received: ReceivedFrom, at: str | None = None, now: float = NOW
) -> None:
    message = RelayAnnouncement(url=at or url(number), received=received)
    registry.announce(node(number), message, address="192.0.2.9", now=now)


def test_every_relay_is_told_its_parents_and_every_worker_its_relays(registry: RelayRegistry) -> None:
    for number in range(8):
        announce(registry, number)
    advice = [registry.advice(node(number), address="192.0.2.9", now=NOW) for number in range(8)]
    assert {len(each.stripes) for each in advice} == {4}
    roots = sum(stripe[0] == ORIGIN for each in advice for stripe in each.stripes)
    assert roots == 4, "each stripe leaves the origin once"
    assert all(url(number) not in stripe for number, each in enumerate(advice) for stripe in each.stripes)
    worker = registry.advice("ab" * 32, address="198.51.100.7", now=NOW)
    assert all(len(stripe) >= 2 and ORIGIN not in stripe for stripe in worker.stripes)
    assert set(worker.relays) == {ORIGIN, *map(url, range(8))}


def test_without_an_origin_or_a_relay_or_a_name_there_is_only_the_list(tmp_path: Path, registry: RelayRegistry) -> None:
    assert registry.advice(node(0), address="", now=NOW).stripes == ()
    later = NOW + 60
    announce(registry, 0, now=later)
    assert registry.advice(None, address="", now=later).stripes == ()
    assert registry.advice(node(0), address="", now=later).stripes == ((ORIGIN,),)
    (tmp_path / "alone").mkdir()
    alone = registry_at(tmp_path / "alone")
    announce(alone, 0)
    assert alone.advice(node(0), address="", now=NOW).stripes == ()


def test_a_relay_that_falls_silent_loses_its_place(registry: RelayRegistry) -> None:
    announce(registry, 0)
    announce(registry, 1, now=NOW + RELAY_SECONDS)
    later = registry.advice("ab" * 32, address="", now=NOW + RELAY_SECONDS + 1)
    assert url(0) not in later.relays
    assert later.stripes == ((url(1), ORIGIN),)


def test_a_stranger_who_announces_anothers_url_gets_no_second_place(registry: RelayRegistry) -> None:
    """A second key for one URL would end the planning, or send a victim a double load."""
    for number in range(3):
        announce(registry, number, at=url(0))
    announce(registry, 3, at=ORIGIN)
    assert registry.urls(now=NOW) == [ORIGIN, url(0)]
    assert registry.advice("ab" * 32, address="", now=NOW).stripes == ((url(0), ORIGIN),)


def test_a_relay_does_not_rise_by_praising_itself(registry: RelayRegistry) -> None:
    """Nor by the praise of one friend: the median of three others or more counts."""
    praise = ReceivedFrom(url=url(0), bytes_per_s=10**12)
    honest = [ReceivedFrom(url=url(number), bytes_per_s=10**7) for number in range(6)]
    announce(registry, 0, praise)
    announce(registry, 1, praise, *honest[2:])
    for number in range(2, 6):
        announce(
            registry, number, ReceivedFrom(url=url(0), bytes_per_s=10**5), *honest[1:number], *honest[number + 1 :]
        )
    uplinks = {member.url: member.bytes_per_s for member in registry.members(NOW)}
    assert uplinks[url(0)] is not None
    assert uplinks[url(2)] is not None
    assert uplinks[url(0)] < 10**6 < uplinks[url(2)]


def test_places_are_networks() -> None:
    assert place_of("192.0.2.77") == place_of("192.0.2.3") == "192.0.2.0/24"
    assert place_of("2001:db8:1:2::3") == "2001:db8:1::/48"
    assert place_of("not an address") == ""
