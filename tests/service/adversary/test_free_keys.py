"""Free keys against a run that asks something of each new one: invites, stakes and proofs of work (protocol.md, 3.7).

Everything goes through the coordinator's own HTTP door, as an attacker's client does it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import update
from swarm import REGISTRATION, RUN_KEY, Peer, Reply, run_id_of, serve, small_spec

from coordinator.commands.stakes import stakes
from coordinator.run.home import Home, create_home
from coordinator.run.service import Coordinator
from coordinator.storage.schema import nodes
from node.protocol.control import Authority, sign_authority
from node.protocol.membership import (
    INVITE_DOMAIN,
    MAX_INVITE_ENVELOPE_BYTES,
    Invite,
    MembershipSpec,
    ProofOfWork,
    Puzzle,
    find_work,
    sign_invite,
    work_bits,
    work_seed,
)
from node.protocol.messages import LeaseRequest
from node.protocol.requests import sign_request
from node.protocol.run import RunSpec
from shardcast.envelope import seal
from shardcast.wire import decode, encode

PUBLIC_KEY = RUN_KEY.public_key().public_bytes_raw()
RUN_ID = run_id_of(PUBLIC_KEY)
BY_INVITE = MembershipSpec(policy="invite")
BY_STAKE = MembershipSpec(policy="stake", stake=1000)
BY_WORK = MembershipSpec(policy="work", bits=4, most_bits=11)


def spec_of(rules: MembershipSpec) -> RunSpec:
    return small_spec(membership=rules)


@contextmanager
def coordinated(folder: Path, rules: MembershipSpec, *, apis: int = 1, database_url: str | None = None) -> Iterator:
    """A run with this policy, served by so many coordinators; yields its home and their URLs."""
    with ExitStack() as stack:
        homes, urls = [], []
        for _ in range(apis):
            home = create_home(folder, public_key=PUBLIC_KEY, spec=spec_of(rules), database_url=database_url)
            stack.callback(home.database.close)
            homes.append(home)
            urls.append(stack.enter_context(serve(Coordinator(home, key=RUN_KEY))))
        yield homes[0], urls


def invite_of(
    *, keys: int = 1, node: str | None = None, signer: Ed25519PrivateKey = RUN_KEY, **changes: object
) -> bytes:
    """An invite that holds for an hour, with `changes`."""
    now = int(time.time())
    run_id = run_id_of(signer.public_key().public_bytes_raw())
    made = Invite(
        run_id=run_id, id=secrets.token_hex(32), keys=keys, node=node, issued_at=now - 10, expires_at=now + 3600
    )
    return sign_invite(msgspec.structs.replace(made, **changes), key=signer)


def refused(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.code


def may_lease(peer: Peer) -> bool:
    """Whether the coordinator knows the key, and so lets it ask for work."""
    return (
        peer.signed("POST", "/v1/leases", encode(LeaseRequest(held_versions=(), slots=1, instance="0" * 32))).status
        == 200
    )


# -- invites


@pytest.fixture(scope="module")
def invited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with coordinated(tmp_path_factory.mktemp("invite"), BY_INVITE) as (_, (url,)):
        yield url


def test_a_key_without_an_invite_gets_neither_a_row_nor_a_lease(invited: str) -> None:
    peer = Peer(invited, RUN_ID)
    assert refused(peer.register()) == (403, "invite_required")
    assert not may_lease(peer)


def test_an_invite_lets_in_as_many_keys_as_it_is_for_and_never_asks_them_again(invited: str) -> None:
    invite = invite_of(keys=2)
    first, second, third = (Peer(invited, RUN_ID) for _ in range(3))
    assert [peer.register(invite=invite).status for peer in (first, first, second)] == [200, 200, 200]
    assert refused(third.register(invite=invite)) == (403, "spent_invite")
    assert not may_lease(third)
    assert first.register().status == 200, "whoever is in is not asked again"
    assert may_lease(first)


def test_an_invite_of_another_run(invited: str) -> None:
    peer, other = Peer(invited, RUN_ID), Ed25519PrivateKey.generate()
    assert refused(peer.register(invite=invite_of(signer=other))) == (403, "bad_invite")
    assert refused(peer.register(invite=invite_of(signer=other, run_id=RUN_ID))) == (403, "bad_invite")
    assert refused(peer.register(invite=invite_of(run_id="ab" * 32))) == (403, "bad_invite")


def test_an_invite_out_of_its_time(invited: str) -> None:
    peer, now = Peer(invited, RUN_ID), int(time.time())
    for begin, end in ((now - 7200, now - 3600), (now - 10, now), (now + 3600, now + 7200)):
        reply = peer.register(invite=invite_of(issued_at=begin, expires_at=end))
        assert refused(reply) == (403, "expired_invite")


def test_an_invite_stolen_from_the_node_that_it_is_for(invited: str) -> None:
    owner, thief = Peer(invited, RUN_ID), Peer(invited, RUN_ID)
    invite = invite_of(node=owner.node)
    assert refused(thief.register(invite=invite)) == (403, "foreign_invite")
    assert owner.register(invite=invite).status == 200, "the thief's try has used nothing up"


def test_what_the_run_signed_for_another_purpose_is_no_invite(invited: str) -> None:
    peer, now = Peer(invited, RUN_ID), int(time.time())
    grant = Authority(
        run_id=RUN_ID, node=peer.node, purposes=("invite",), subject=None, issued_at=now, expires_at=now + 60
    )
    assert refused(peer.register(invite=sign_authority(grant, key=RUN_KEY))) == (403, "bad_invite")


def test_invites_that_are_bytes_of_anything(invited: str) -> None:
    peer, whole = Peer(invited, RUN_ID), invite_of()
    forever = b'{"run_id":"' + RUN_ID.encode() + b'","id":"' + b"ab" * 32 + b'","keys":10001,"node":null,"issued_at":0,'
    odd = [
        b"",
        b"\0" * 100,
        whole[:-1],
        whole + b"\0",
        whole[:-1] + bytes([whole[-1] ^ 1]),
        seal(b"{}", domain=INVITE_DOMAIN, version=1, key=RUN_KEY),
        seal(forever + b'"expires_at":60}', domain=INVITE_DOMAIN, version=1, key=RUN_KEY),
        seal(b"{}", domain=INVITE_DOMAIN, version=2, key=RUN_KEY),
    ]
    assert {refused(peer.register(invite=each)) for each in odd} == {(403, "bad_invite")}
    assert refused(peer.register(invite=b"x" * (MAX_INVITE_ENVELOPE_BYTES + 1))) == (400, "bad_request")


def test_the_refusal_of_an_invite_does_not_repeat_it(invited: str) -> None:
    """A refusal is logged and shown; an invite is as good as a password."""
    invite = invite_of(expires_at=int(time.time()))
    reply = Peer(invited, RUN_ID).register(invite=invite)
    assert refused(reply) == (403, "expired_invite")
    assert decode(Invite, invite[4 + 1 + 17 + 2 + 32 + 4 : -64], max_bytes=1024).id.encode() not in reply.body


def test_keys_that_use_one_invite_at_once_at_two_coordinators(tmp_path: Path, database_url: str | None) -> None:
    invite = invite_of(keys=3)
    with coordinated(tmp_path, BY_INVITE, apis=2, database_url=database_url) as (_, urls):
        peers = [Peer(urls[at % 2], RUN_ID) for at in range(12)]
        with ThreadPoolExecutor(12) as pool:
            replies = list(pool.map(lambda peer: peer.register(invite=invite), peers))
    assert sorted(reply.status for reply in replies) == [200] * 3 + [403] * 9
    assert {reply.code for reply in replies if reply.status == 403} == {"spent_invite"}


def test_a_restart_of_the_coordinator_forgets_neither_members_nor_uses(tmp_path: Path) -> None:
    invite, key = invite_of(), Ed25519PrivateKey.generate()
    with coordinated(tmp_path, BY_INVITE) as (_, (url,)):
        assert Peer(url, RUN_ID, key).register(invite=invite).status == 200
    with coordinated(tmp_path, BY_INVITE) as (_, (url,)):
        assert Peer(url, RUN_ID, key).register().status == 200
        assert refused(Peer(url, RUN_ID).register(invite=invite)) == (403, "spent_invite")


# -- stakes


def note(home: Home, node: str, amount: int, *, why: str) -> None:
    """The operator's entry, by the command that exists for it."""
    command = ["enter", "--data", str(home.folder), "--why", why, "--", node, str(amount)]
    assert CliRunner().invoke(stakes, command, catch_exceptions=False).exit_code == 0


def test_a_key_without_a_stake_is_told_its_name_and_how_much_it_lacks(tmp_path: Path) -> None:
    with coordinated(tmp_path, BY_STAKE) as (home, (url,)):
        peer = Peer(url, RUN_ID)
        for held in (0, 999):
            if held:
                note(home, peer.node, held, why="transfer 1")
            reply = peer.register()
            assert refused(reply) == (403, "stake_required")
            assert f"Node {peer.node} has {held} at stake, 1000 are asked for.".encode() in reply.body
            assert not may_lease(peer)
        note(home, peer.node, 1, why="transfer 2")
        assert peer.register().status == 200
        assert refused(Peer(url, RUN_ID).register()) == (403, "stake_required"), "a stake is for one key"
        note(home, peer.node, -1000, why="slashed")
        assert peer.register().status == 200, "what comes after joining is the standing's to judge"


# -- proofs of work


@pytest.fixture
def worked(tmp_path: Path) -> Iterator[tuple[Home, str]]:
    with coordinated(tmp_path, BY_WORK) as (home, (url,)):
        yield home, url


def puzzle(url: str) -> Puzzle:
    reply = Peer(url, RUN_ID).send("GET", "/v1/puzzle")
    assert reply.status == 200, reply
    return decode(Puzzle, reply.body, max_bytes=1024)


def solve(peer: Peer, salt: str, *, bits: int, exactly: bool = False) -> ProofOfWork:
    """A proof of work for the peer's key; `exactly`: of no more bits than that."""
    seed, start = work_seed(run_id=RUN_ID, node=peer.node, salt=salt), 0
    while True:
        found = find_work(seed, bits=bits, start=start, attempts=2**20)
        assert found is not None
        if not exactly or work_bits(seed, found) == bits:
            return ProofOfWork(salt=salt, counter=found)
        start = found + 1


def join(url: str, salt: str, *, least: int = BY_WORK.bits) -> int:
    """What a new key pays: it tries the `least` price, and raises it while it is refused."""
    peer = Peer(url, RUN_ID)
    for bits in range(least, BY_WORK.most_bits + 1):
        if peer.register(work=solve(peer, salt, bits=bits, exactly=bits < BY_WORK.most_bits)).status == 200:
            return bits
    raise AssertionError("not let in at the highest price")


def test_a_key_without_work_is_told_where_the_puzzle_is(worked: tuple[Home, str]) -> None:
    _, url = worked
    peer = Peer(url, RUN_ID)
    reply = peer.register()
    assert refused(reply) == (403, "work_required")
    assert b"/v1/puzzle" in reply.body
    assert not may_lease(peer)
    given = puzzle(url)
    assert given.bits == BY_WORK.bits
    assert 590 <= given.expires_at - time.time() <= 1200
    assert peer.register(work=solve(peer, given.salt, bits=given.bits)).status == 200
    assert peer.register().status == 200, "whoever is in is not asked again"
    assert may_lease(peer)


def test_work_done_for_another_key_is_worth_nothing(worked: tuple[Home, str]) -> None:
    _, url = worked
    salt = puzzle(url).salt
    owner, thief = Peer(url, RUN_ID), Peer(url, RUN_ID)
    seed = work_seed(run_id=RUN_ID, node=thief.node, salt=salt)
    work = next(
        work
        for start in range(100)
        if (work := ProofOfWork(salt=salt, counter=_from(owner, salt, start)))
        and work_bits(seed, work.counter) < BY_WORK.bits
    )
    assert refused(thief.register(work=work)) == (403, "work_required")
    assert owner.register(work=work).status == 200
    assert refused(thief.register(work=work)) == (403, "work_required"), "replayed, once it was taken"


def _from(peer: Peer, salt: str, start: int) -> int:
    seed = work_seed(run_id=RUN_ID, node=peer.node, salt=salt)
    return find_work(seed, bits=BY_WORK.bits, start=1000 * start, attempts=1000) or 0


def test_a_puzzle_of_one_coordinator_is_taken_by_another_of_the_run(tmp_path: Path) -> None:
    """They share nothing but the database and the run's key."""
    with coordinated(tmp_path, BY_WORK, apis=2) as (_, urls):
        peer, given = Peer(urls[1], RUN_ID), puzzle(urls[0])
        assert puzzle(urls[1]).salt == given.salt
        assert peer.register(work=solve(peer, given.salt, bits=given.bits)).status == 200


def test_a_replayed_registration_is_refused_whatever_work_is_in_it(worked: tuple[Home, str]) -> None:
    _, url = worked
    peer = Peer(url, RUN_ID)
    body = encode(msgspec.structs.replace(REGISTRATION, work=solve(peer, puzzle(url).salt, bits=BY_WORK.most_bits)))
    header, _ = sign_request(peer.claim("POST", "/v1/nodes", body), key=peer.key)
    replies = [peer.send("POST", "/v1/nodes", body, {"Authorization": header}) for _ in range(2)]
    assert replies[0].status == 200
    assert refused(replies[1]) == (401, "replayed_request")


def test_work_of_too_few_bits_on_an_old_or_an_invented_salt(worked: tuple[Home, str]) -> None:
    home, url = worked
    window, peer, given = int(time.time()) // 600, Peer(url, RUN_ID), puzzle(url)
    few = solve(peer, given.salt, bits=BY_WORK.bits - 1, exactly=True)
    assert refused(peer.register(work=few)) == (403, "work_required")
    coordinator = Coordinator(home, key=RUN_KEY)
    before, ago = (coordinator.puzzle(now=time.time() - seconds).salt for seconds in (600, 1200))
    for salt in (ago, "ab" * 32):
        work = solve(peer, salt, bits=BY_WORK.most_bits)
        assert refused(peer.register(work=work)) == (403, "work_required")
    taken = peer.register(work=solve(peer, before, bits=BY_WORK.bits)).status == 200
    assert taken or int(time.time()) // 600 > window, "it may be solved for ten minutes after it was told"


def test_the_hundredth_free_key_of_a_minute_pays_more_than_the_first_and_the_price_falls(
    worked: tuple[Home, str],
) -> None:
    """Two newcomers' slots: the price doubles with the second key, and with each doubling from then on."""
    home, url = worked
    salt = puzzle(url).salt
    paid = [BY_WORK.bits]
    while len(paid) <= 100:
        paid.append(join(url, salt, least=paid[-1]))
    assert (paid[1], paid[2], paid[3], paid[5], paid[100]) == (4, 4, 5, 6, 10)
    late = Peer(url, RUN_ID)
    assert refused(late.register(work=solve(late, salt, bits=9, exactly=True))) == (403, "work_required")
    assert Coordinator(home, key=RUN_KEY).puzzle(now=time.time()).bits == 10
    with home.database.write() as connection:  # a minute in which none of them was heard of
        connection.execute(update(nodes).values(seen_at=nodes.c.seen_at - 61))
    assert join(url, salt) == BY_WORK.bits


def test_nodes_with_admitted_work_raise_the_price_for_nobody(worked: tuple[Home, str]) -> None:
    home, url = worked
    salt = puzzle(url).salt
    for _ in range(8):
        join(url, salt)
    with home.database.write() as connection:
        connection.execute(update(nodes).values(admitted=1))
    assert join(url, salt) == BY_WORK.bits


def test_a_flood_of_keys_that_do_not_work_keeps_no_newcomer_out(worked: tuple[Home, str]) -> None:
    """A hundred keys ask, and send junk; who asks next pays what the first would have."""
    _, url = worked
    salt = puzzle(url).salt
    junk = ProofOfWork(salt="00" * 32, counter=0)

    def ask(_: int) -> set[tuple[int, str]]:
        peer = Peer(url, RUN_ID)
        return {refused(peer.register()), refused(peer.register(work=junk))}

    with ThreadPoolExecutor(8) as pool:
        assert set().union(*pool.map(ask, range(100))) == {(403, "work_required")}
    assert join(url, salt) == BY_WORK.bits


def test_an_open_run_asks_for_nothing_and_has_no_puzzle(tmp_path: Path) -> None:
    home = create_home(tmp_path, public_key=PUBLIC_KEY, spec=small_spec())
    with serve(Coordinator(home, key=RUN_KEY)) as url:
        peer = Peer(url, RUN_ID)
        assert peer.register().status == 200
        assert may_lease(peer)
        assert refused(peer.send("GET", "/v1/puzzle")) == (404, "not_found")
    home.database.close()
