"""The registry of relays: strangers write into it, and everybody is told by it whom to ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.run.relays import GOOD_SECONDS, RELAY_SECONDS, RelayRegistry
from coordinator.storage import facts
from coordinator.storage.database import Database
from coordinator.storage.facts import put_fact
from coordinator.storage.places import place_of
from coordinator.storage.relays import ProbedRelay, RegisteredRelay, note_probe, relays_seen_since
from node.protocol.messages import ReceivedFrom, RelayAnnouncement
from node.protocol.reasons import Refusal
from shardcast.errors import Malformed
from shardcast.wire import decode

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
    registry: RelayRegistry,
    number: int,
    *received: ReceivedFrom,
    at: str | None = None,
    now: float = NOW,
    address: str = "192.0.2.9",
    probe: bool | None = True,
) -> None:
    """Announce a relay, and let a probe find that it serves, or (False) that it does not; None: nobody probes it."""
    message = RelayAnnouncement(url=at or url(number), received=received)
    registry.announce(node(number), message, address=address, now=now)
    if probe is not None:
        with registry._database.write() as connection:
            relay = next(row for row in relays_seen_since(connection, 0.0) if row.node == node(number))
            found = ProbedRelay(relay, good_at=now if probe else None, failed_probes=0 if probe else 1)
            note_probe(connection, found, now=now)


def known(registry: RelayRegistry) -> dict[str, RegisteredRelay]:
    with registry._database.read() as connection:
        return {row.node: row for row in relays_seen_since(connection, 0.0)}


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
    assert place_of("2001:db8:1:2::/64") == "2001:db8:1::/48", "as requests are counted"
    assert place_of("::ffff:192.0.2.3") == "192.0.2.0/24"
    assert place_of("not an address") == ""


# -- what strangers' relays may not do


def test_a_relay_that_was_not_seen_to_serve_is_told_to_nobody(registry: RelayRegistry) -> None:
    """Twelve free keys that announced hanging relays took a run from 13 steps a minute to none."""
    announce(registry, 0)
    for number in range(1, 13):
        announce(registry, number, probe=[None, False][number % 2])
    assert registry.urls(now=NOW) == [ORIGIN, url(0)]
    assert [member.url for member in registry.members(NOW)] == [url(0)]


def test_a_relay_that_fails_a_probe_or_moves_has_to_show_itself_again(registry: RelayRegistry) -> None:
    announce(registry, 0)
    for other in (url(2), url(1)):
        announce(registry, 0, at=other, probe=None)
        assert registry.urls(now=NOW) == [ORIGIN], "another address begins anew"
        announce(registry, 0, at=other)
    announce(registry, 0, at=url(1), now=NOW + 15, probe=None)
    assert registry.urls(now=NOW + 15) == [ORIGIN, url(1)], "the same one goes on"
    announce(registry, 0, at=url(1), now=NOW + 30, probe=False)
    assert registry.urls(now=NOW + 30) == [ORIGIN]


def test_relays_that_nobody_probes_any_more_are_forgotten_in_time(registry: RelayRegistry) -> None:
    announce(registry, 0)
    announce(registry, 0, now=NOW + GOOD_SECONDS, probe=None)
    assert registry.urls(now=NOW + GOOD_SECONDS) == [ORIGIN]


def test_256_keys_from_three_addresses_do_not_fill_the_list(
    registry: RelayRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They shut every honest relay out within two seconds."""
    monkeypatch.setattr("coordinator.run.relays.MAX_RELAYS", 12)
    announce(registry, 1, address="198.51.100.1")
    for number in range(10, 40):
        announce(registry, number, address=f"203.0.113.{number % 3}", probe=None, now=NOW + 1)
    announce(registry, 2, address="192.0.2.5", probe=None, now=NOW + 2)
    announce(registry, 3, address="192.0.2.5", probe=None, now=NOW + 2)
    for number in range(40, 80):
        announce(registry, number, address=f"203.0.113.{number % 3}", probe=None, now=NOW + 3)
    rows = known(registry)
    assert {node(1), node(2), node(3)} <= set(rows), "they make place for each other"
    assert len(rows) == 12


def test_relays_that_failed_their_probe_give_way_first(
    registry: RelayRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.run.relays.MAX_RELAYS", 3)
    for number, probe in ((1, None), (2, False), (3, None)):
        announce(registry, number, probe=probe)
    announce(registry, 4, probe=None)
    assert set(known(registry)) == {node(1), node(3), node(4)}


def test_a_list_of_relays_that_all_serve_takes_no_more_and_keeps_those_on_it(
    registry: RelayRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.run.relays.MAX_RELAYS", 2)
    announce(registry, 1, address="203.0.113.1")
    announce(registry, 2, address="198.51.100.1")
    with pytest.raises(Refusal, match="full"):
        announce(registry, 3)
    announce(registry, 2, address="198.51.100.1", now=NOW + 15, probe=None)


def test_many_keys_that_announce_one_good_url_give_way(
    registry: RelayRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.run.relays.MAX_RELAYS", 3)
    for number in (1, 2, 3):
        announce(registry, number, at=url(0), address="203.0.113.1")
    announce(registry, 4)
    announce(registry, 5, address="198.51.100.1")
    assert {node(4), node(5)} <= set(known(registry))


@pytest.mark.parametrize(
    "named",
    ["http://127.0.0.1:22", "http://[::1]:8720", "http://169.254.169.254", "http://10.0.0.7:8720", "http://0.0.0.0:1"],
)
def test_ssrf_by_announcement_is_refused(registry: RelayRegistry, named: str) -> None:
    """Workers and relays sent requests to their own loopback and their cloud's metadata, as a stranger named them."""
    with pytest.raises(Refusal, match="nearer"):
        announce(registry, 1, at=named, address="8.8.8.8", probe=None)
    announce(registry, 1, at="http://127.0.0.1:8720", address="127.0.0.1", probe=None)


@pytest.mark.parametrize(
    "named",
    [
        "http://[dA5.10AD]",
        "http://[1.2.3.4]",
        "http://[::::]",
        "http://2130706433:22",
        "http://0x7f000001:22",
        "http://127.1",
        "http://0177.0.0.1",
        "http://a..b",
        "http://h:0",
        "http://h:65536",
        "http://h/a/",
        "http://-h",
    ],
)
def test_a_url_that_clients_would_not_use_cannot_be_announced(named: str) -> None:
    """One such announcement made the run's page answer 500, and every audit end, for as long as it was renewed."""
    with pytest.raises(Malformed):
        decode(RelayAnnouncement, json.dumps({"url": named}).encode(), max_bytes=1000)


@pytest.mark.parametrize(
    ("origin", "endpoint", "told"),
    [
        ("http://192.0.2.7:8710", "http://192.0.2.1:8700", True),
        ("http://127.0.0.1:8710", "http://127.0.0.1:8700", True),
        ("http://127.0.0.1:8710", "http://192.0.2.1:8700", False),
        ("http://127.0.0.1:8710", "http://run.example:8700", False),
    ],
)
def test_a_run_without_relays_has_the_trainers_origin_where_others_can_reach_it(
    tmp_path: Path, origin: str, endpoint: str, told: bool
) -> None:
    """Else a worker waits for ever for a policy, in a run that says that all is well."""
    database = registry_at(tmp_path)._database
    registry = RelayRegistry(database, fixed=(), salt=b"s", endpoints=(endpoint,))
    assert registry.urls(now=NOW) == []
    with database.write() as connection:
        put_fact(connection, facts.ORIGIN, origin)
    assert registry.urls(now=NOW) == ([origin] if told else [])
    announce(registry, 1)
    assert registry.urls(now=NOW) == [url(1)], "the last resort only"
