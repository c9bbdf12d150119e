"""A signed request is good once, whatever becomes of it, and is done with in one write transaction.

Who reads the wire of a coordinator without TLS has every request's bytes, and may send them again at a moment of their
own choosing: also those that were refused then, and would be taken now.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Connection, func, select
from sqlalchemy.exc import IntegrityError, OperationalError
from swarm import INSTANCE, Peer, serve, small_spec

from coordinator.errors import StorageFault
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.storage import signed_requests
from coordinator.storage.database import Database
from coordinator.storage.prepared import Prepared
from coordinator.storage.schema import nodes, nonces
from node.protocol.messages import LeaseRequest, Registration, RequestClaim
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import MAX_CLOCK_SKEW_SECONDS, sign_request
from shardcast.wire import encode

NODE = "ab" * 32
PATH = "/v1/nodes"
NOW = 1_000_000.0
REGISTRATION = Registration(software="x", engine="x", instance=INSTANCE, name="x")


@pytest.fixture
def home(tmp_path: Path, database_url: str | None) -> Iterator[Home]:
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=database_url)
    yield home
    home.database.close()


@pytest.fixture
def coordinator(home: Home) -> Coordinator:
    return Coordinator(home, key=Ed25519PrivateKey.generate())


@pytest.fixture
def uptime(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """For how long the machine has run, whatever its clock says."""
    seconds = [NOW]
    monkeypatch.setattr(signed_requests, "monotonic", lambda: seconds[0])
    monkeypatch.setattr(signed_requests, "shared_clock", lambda _connection, now, uptime: (now, uptime))
    return seconds


def claim_of(home: Home, *, at: float = NOW) -> RequestClaim:
    return RequestClaim(
        run_id=home.run_id,
        method="POST",
        path=PATH,
        body_digest="0" * 64,
        body_bytes=0,
        issued_at=int(at),
        nonce=secrets.token_hex(16),
    )


def accept(coordinator: Coordinator, claim: RequestClaim, *, now: float = NOW) -> AbstractContextManager[Connection]:
    return coordinator.accept(NODE, claim, method="POST", path=PATH, now=now)


def count(home: Home, table: object) -> int:
    with home.database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(table)).scalar_one())  # type: ignore[arg-type]


def is_replay(coordinator: Coordinator, claim: RequestClaim, *, now: float = NOW) -> bool:
    try:
        with accept(coordinator, claim, now=now):
            return False
    except Refusal as refusal:
        return refusal.reason is Reason.REPLAYED_REQUEST


FAILURES = [
    Refusal(Reason.BANNED, "."),
    StorageFault("a blob is missing"),
    ZeroDivisionError("a mistake in here"),
    IntegrityError("INSERT", None, ValueError()),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_what_fails_is_undone_and_cannot_be_replayed(home: Home, coordinator: Coordinator, failure: Exception) -> None:
    claim = claim_of(home)
    with pytest.raises(type(failure)) as raised, accept(coordinator, claim) as connection:
        coordinator.register(connection, NODE, REGISTRATION, now=NOW)
        raise failure
    assert raised.value is failure, "a mistake of the coordinator's own must not be taken for a replay"
    assert count(home, nodes) == 0
    assert is_replay(coordinator, claim)


def test_a_request_during_which_the_database_went_away_may_come_again(home: Home, coordinator: Coordinator) -> None:
    """Nothing of it is kept then, which is told apart by nothing from its never having arrived."""
    claim, away = claim_of(home), OperationalError("INSERT", None, ValueError("disk I/O error"))
    with pytest.raises(OperationalError) as raised, accept(coordinator, claim) as connection:
        coordinator.register(connection, NODE, REGISTRATION, now=NOW)
        connection.exec_driver_sql("ROLLBACK")  # as SQLite does by itself when the disk is full
        raise away
    assert raised.value is away
    assert count(home, nodes) == 0
    assert not is_replay(coordinator, claim)


def test_of_copies_that_arrive_together_one_is_done(home: Home, coordinator: Coordinator) -> None:
    claim = claim_of(home)
    with ThreadPoolExecutor(8) as pool:
        replays = list(pool.map(lambda _: is_replay(coordinator, claim), range(8)))
    assert sorted(replays) == [False] + [True] * 7


def test_a_nonce_is_remembered_while_its_request_is_good_and_then_forgotten(
    home: Home, coordinator: Coordinator, uptime: list[float]
) -> None:
    """For ever would fill the disk; and the clock of the signer may be ahead."""
    ahead = claim_of(home, at=NOW + MAX_CLOCK_SKEW_SECONDS)
    assert not is_replay(coordinator, ahead)
    for later in range(1, 2 * MAX_CLOCK_SKEW_SECONDS, 7):
        uptime[0] = NOW + later
        assert not is_replay(coordinator, claim_of(home, at=NOW + later), now=NOW + later)
        assert is_replay(coordinator, ahead, now=NOW + later)
    uptime[0] = much_later = NOW + 10 * MAX_CLOCK_SKEW_SECONDS
    assert not is_replay(coordinator, claim_of(home, at=much_later), now=much_later)
    assert count(home, nonces) == 1


def test_nonces_are_forgotten_though_the_clock_was_set_back(
    home: Home, coordinator: Coordinator, uptime: list[float]
) -> None:
    for n in range(20):
        uptime[0] = NOW + n * 10 * MAX_CLOCK_SKEW_SECONDS
        now = NOW - 3600 + n * 10 * MAX_CLOCK_SKEW_SECONDS if n else NOW
        assert not is_replay(coordinator, claim_of(home, at=now), now=now)
    assert count(home, nonces) <= 2


def test_attack_a_request_is_sent_again_while_the_clock_is_set_right(
    home: Home, coordinator: Coordinator, uptime: list[float]
) -> None:
    """By the clock that was an hour ahead its nonce was over, and by the right one the request is still good."""
    heard = claim_of(home)
    assert not is_replay(coordinator, heard)
    for second in range(1, 10):
        uptime[0] = NOW + second
        assert not is_replay(coordinator, claim_of(home, at=NOW + 3600 + second), now=NOW + 3600 + second)
    assert not is_replay(coordinator, claim_of(home, at=NOW + 10), now=NOW + 10)
    assert is_replay(coordinator, heard, now=NOW + 10)


def test_attack_a_request_is_sent_again_to_a_coordinator_that_started_with_its_clock_ahead(
    home: Home, coordinator: Coordinator, uptime: list[float]
) -> None:
    heard = claim_of(home)
    assert not is_replay(coordinator, heard)
    restarted = Coordinator(home, key=Ed25519PrivateKey.generate())
    for second in range(1, 10):
        uptime[0] = NOW + second
        assert not is_replay(restarted, claim_of(home, at=NOW + 3600 + second), now=NOW + 3600 + second)
    assert is_replay(restarted, heard, now=NOW + 10)


@pytest.mark.parametrize("ahead", [300, -300])
def test_attack_a_request_is_sent_again_to_the_coordinator_that_took_it_beside_one_whose_clock_differs(
    tmp_path: Path, postgresql_url: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than a nonce is kept: each would forget what is still good by the other's clock."""
    seconds = [0.0]
    monkeypatch.setattr(signed_requests, "monotonic", lambda: seconds[0])
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=spec_of(), database_url=postgresql_url)
    one, other = (Coordinator(home, key=Ed25519PrivateKey.generate()) for _ in range(2))
    now = time.time()
    for each, clock in ((one, now), (other, now + ahead)):
        assert not is_replay(each, claim_of(home, at=clock), now=clock)
    seconds[0] += signed_requests.KEPT_SECONDS + 10
    heard = claim_of(home, at=now)
    assert not is_replay(one, heard, now=now + 1)
    heard_there = claim_of(home, at=now + ahead)
    assert not is_replay(other, heard_there, now=now + ahead + 1)
    for each, clock in ((one, now), (other, now + ahead)):
        assert not is_replay(each, claim_of(home, at=clock + 3), now=clock + 3)
    assert is_replay(one, heard, now=now + 5)
    assert is_replay(other, heard_there, now=now + ahead + 5)
    home.database.close()


def is_done_again(coordinator: Coordinator, claim: RequestClaim, *, now: float) -> bool:
    try:
        with accept(coordinator, claim, now=now):
            return True
    except Refusal:
        return False


def warm_up(home: Home, uptime: list[float], *coordinators: Coordinator) -> None:
    """Run for so long that old nonces are forgotten."""
    uptime[0] = start = NOW - signed_requests.KEPT_SECONDS - 10
    for coordinator in coordinators:
        assert is_done_again(coordinator, claim_of(home, at=start), now=start)
    uptime[0] = NOW


@pytest.mark.parametrize("behind", [5, 90, 180])
def test_attack_a_request_is_sent_again_to_a_coordinator_whose_clock_is_behind(
    home: Home, uptime: list[float], monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    """There it is good for longer, and longest if its signer's clock is ahead."""
    monkeypatch.setattr(signed_requests, "shared_clock", lambda _connection, **_clocks: (uptime[0], uptime[0]))
    right, late = (Coordinator(home, key=Ed25519PrivateKey.generate()) for _ in range(2))
    warm_up(home, uptime, right, late)
    heard = claim_of(home, at=NOW + MAX_CLOCK_SKEW_SECONDS)
    assert is_done_again(right, heard, now=NOW)
    for second in range(1, behind + 3 * MAX_CLOCK_SKEW_SECONDS, 2):
        uptime[0] = now = NOW + second
        assert is_done_again(right, claim_of(home, at=now), now=now)
        assert not is_done_again(late, heard, now=now - behind), second


def test_attack_a_request_is_sent_again_once_the_clock_is_set_back(
    home: Home, coordinator: Coordinator, uptime: list[float]
) -> None:
    warm_up(home, uptime, coordinator)
    heard = claim_of(home, at=NOW + MAX_CLOCK_SKEW_SECONDS)
    assert is_done_again(coordinator, heard, now=NOW)
    for second in range(1, 290, 3):
        uptime[0] = now = NOW + second
        assert is_done_again(coordinator, claim_of(home, at=now), now=now)
    assert not is_done_again(coordinator, heard, now=NOW + 290 - 180)


def test_nonces_are_forgotten_though_requests_wait_for_the_database(
    home: Home, coordinator: Coordinator, uptime: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock and the uptime of a request are read together, or the end of each wait looks like a clock set ahead."""
    write = Database.write

    def waiting(database: Database, *, durable: bool = True) -> AbstractContextManager[Connection]:
        uptime[0] += 8 * (n % 2)
        return write(database, durable=durable)

    monkeypatch.setattr(Database, "write", waiting)
    for n in range(40):
        uptime[0] = now = NOW + 10 * n
        assert not is_replay(coordinator, claim_of(home, at=now), now=now)
    assert count(home, nonces) <= signed_requests.KEPT_SECONDS / 10 + 1


def test_nonces_are_forgotten_though_the_clock_was_set_ahead(
    home: Home, coordinator: Coordinator, uptime: list[float]
) -> None:
    assert not is_replay(coordinator, claim_of(home))
    for seconds in (1, signed_requests.KEPT_SECONDS + 2):
        uptime[0], now = NOW + seconds, NOW + 3600 + seconds
        assert not is_replay(coordinator, claim_of(home, at=now), now=now)
    assert count(home, nonces) == 1


def test_nonces_of_long_ago_are_forgotten_some_at_a_time(
    home: Home, coordinator: Coordinator, uptime: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was away comes back to a whole table of them: nobody waits for that in one transaction."""
    monkeypatch.setattr(signed_requests, "MOST_FORGOTTEN", 10)
    for n in range(25):
        assert not is_replay(coordinator, claim_of(home), now=NOW + n / 1000)
    left: list[int] = []
    for n in range(4):
        uptime[0] = now = NOW + 10 * MAX_CLOCK_SKEW_SECONDS + n * signed_requests.FORGET_SECONDS
        assert not is_replay(coordinator, claim_of(home, at=now), now=now)
        left.append(count(home, nonces) - n - 1)
    assert left == [15, 5, 0, 0]


def test_of_requests_in_the_same_second_one_looks_for_old_nonces(
    home: Home, coordinator: Coordinator, uptime: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To look for them with each request costs a tenth of it, and a minute's worth at once 0.1 s for all."""
    assert signed_requests.FORGET_SECONDS <= 5
    before = NOW - signed_requests.KEPT_SECONDS
    uptime[0] = before
    assert not is_replay(coordinator, claim_of(home, at=before), now=before)
    looked: list[float] = []
    run = Prepared.run

    def noting(statement: Prepared, *args: Any) -> int:
        if statement is signed_requests._DELETE_EXPIRED:
            looked.append(now)
        return run(statement, *args)

    monkeypatch.setattr(Prepared, "run", noting)
    for n in range(40):
        uptime[0] = now = NOW + n / 20
        assert not is_replay(coordinator, claim_of(home, at=now), now=now)
    assert looked == [NOW, NOW + signed_requests.FORGET_SECONDS]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A line for each write transaction: whether it waits for the disk."""
    begun: list[bool] = []
    write = Database.write

    def noting(database: Database, *, durable: bool = True) -> AbstractContextManager[Connection]:
        begun.append(durable)
        return write(database, durable=durable)

    monkeypatch.setattr(Database, "write", noting)
    return begun


def test_a_signed_request_takes_one_turn_at_the_database_and_an_upload_two(tmp_path: Path, written: list[bool]) -> None:
    """Writers take turns: at twice the turns, the coordinator carries half the load."""
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path, public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    Actors(home).publish(0)
    with serve(Coordinator(home, key=key)) as url:
        peer = Peer(url, home.run_id)

        def turns(ask: Callable[[], object]) -> list[bool]:
            written.clear()
            ask()
            return list(written)

        assert turns(peer.register) == [False]
        leases = []
        assert turns(lambda: leases.append(peer.lease())) == [False]
        assert turns(lambda: peer.signed("POST", f"/v1/leases/{'0' * 64}/return", b"")) == [False]
        assert turns(lambda: peer.submit(leases[0].lease_id, b"rollouts")) == [False, False]
        assert turns(lambda: peer.submit(leases[0].lease_id, b"others")) == [False]
    home.database.close()


def test_a_refused_request_is_not_done_later(tmp_path: Path) -> None:
    """A stranger's request is kept by whoever reads it, until the stranger has registered."""
    key = Ed25519PrivateKey.generate()
    home = create_home(tmp_path, public_key=key.public_key().public_bytes_raw(), spec=small_spec())
    Actors(home).publish(0)
    with serve(Coordinator(home, key=key)) as url:
        peer = Peer(url, home.run_id)
        body = encode(LeaseRequest(held_versions=(0,), slots=1, instance=INSTANCE))
        header, _ = sign_request(peer.claim("POST", "/v1/leases", body), key=peer.key)
        kept = {"Authorization": header}
        assert peer.send("POST", "/v1/leases", body, kept).code == "unknown_identity"
        assert peer.register().status == 200
        assert peer.send("POST", "/v1/leases", body, kept).code == "replayed_request"

        header, _ = sign_request(peer.claim("POST", "/v1/leases", body), key=peer.key)
        kept = {"Authorization": header}
        assert peer.send("POST", "/v1/leases", b"swapped", kept).code == "body_mismatch"
        assert peer.send("POST", "/v1/leases", body, kept).code == "replayed_request"
    home.database.close()


def test_whether_somebody_may_submit_is_looked_up_without_writing(home: Home, coordinator: Coordinator) -> None:
    """While writes wait, it decides in a read who may join them: an error there would refuse every upload."""
    actors = Actors(home)
    actors.register("a", "b")
    actors.publish(0)
    (lease,) = actors.lease("a", held=(0,))
    coordinator.refuse_stranger(who("a"), lease.lease_id, now=actors.now)
    for node, reason in ((who("b"), Reason.FOREIGN_LEASE), (who("nobody"), Reason.UNKNOWN_IDENTITY)):
        with pytest.raises(Refusal) as raised:
            coordinator.refuse_stranger(node, lease.lease_id, now=actors.now)
        assert raised.value.reason is reason
