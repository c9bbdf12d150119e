"""Attacks on control: by strangers, by who has a little authority and wants more, and by nodes that answer lies.

The victim is a worker as the command runs it, in a thread, of a real run; attackers are peers of its network.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from ports import free_port
from swarm import Swarm, running, settle_slots, small_spec

pytest.importorskip("libp2p")

import trio  # noqa: TID251  (the attacker speaks libp2p)
from libp2p.custom_types import TProtocol  # noqa: TID251

from node.control.authorization import STRANGERS_BURST
from node.control.caller import ControlClient
from node.discovery.descriptor import DescriptorStore
from node.engines.torch import TorchEngine
from node.errors import NetworkDown
from node.joining.session import JoinSettings
from node.p2p import PeerNetwork, PeerSettings
from node.p2p.control import PROTOCOL
from node.p2p.host import connect, peer_of
from node.protocol.admission import Outcome
from node.protocol.control import (
    MAX_REQUEST_BYTES,
    REPLY_DOMAIN,
    Ask,
    AskChallenge,
    AskDrain,
    AskInvite,
    AskLogs,
    AskRestart,
    AskStatus,
    Authority,
    ChallengeBody,
    ControlReply,
    ControlRequest,
    DrainBody,
    StatusBody,
    sign_authority,
    sign_control,
    sign_reply,
)
from node.protocol.peers import Address
from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION, open_descriptor, run_id_of
from node.worker.daemon import WorkerSettings, run_worker
from shardcast.envelope import open_envelope, seal
from shardcast.errors import PeerFault
from shardcast.wire import decode, digest, encode

SECONDS = 60.0
RUN = Ed25519PrivateKey.generate()
WORKER = Ed25519PrivateKey.generate()
OTHER_RUN = Ed25519PrivateKey.generate()
ALL_BUT_LOGS = ("status", "invite", "challenge", "drain")


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


RUN_ID, NODE = run_id_of(public(RUN)), public(WORKER)


def grant(node: Ed25519PrivateKey, *purposes: str, key: Ed25519PrivateKey = RUN, **changes: object) -> bytes:
    """Authority as the run gives it, with changes."""
    now = int(time.time())
    granted = Authority(
        run_id=RUN_ID,
        node=public(node).hex(),
        purposes=purposes or ("status",),
        subject=None,
        issued_at=now - 10,
        expires_at=now + 600,
    )
    return sign_authority(msgspec.structs.replace(granted, **changes), key=key)


def request(ask: Ask, authority: bytes | None, **changes: object) -> ControlRequest:
    asked = ControlRequest(
        run_id=RUN_ID,
        to=NODE.hex(),
        ask=ask,
        nonce=secrets.token_hex(16),
        issued_at=int(time.time()),
        authority=authority,
    )
    return msgspec.structs.replace(asked, **changes)


@dataclass
class Victim:
    """A worker whose owner lets the operator do everything but read its log and restart it."""

    swarm: Swarm
    address: Address
    folder: Path
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory, tiny_policy_path: Path) -> Iterator[Victim]:
    folder = tmp_path_factory.mktemp("control")
    with running(folder, tiny_policy_path, spec=small_spec(), key=RUN) as swarm:
        port = free_port()
        nobody = Address("ip4", "127.0.0.1", 1, public(Ed25519PrivateKey.generate()))
        entry = JoinSettings(run_id=RUN_ID, coordinators=(swarm.url,), peers=(nobody,), host="127.0.0.1", port=port)
        settings = WorkerSettings(join=entry, state=folder / "worker", slots=2, control=frozenset(ALL_BUT_LOGS))
        found = Victim(swarm, Address("ip4", "127.0.0.1", port, NODE), folder / "worker")
        stop = asyncio.Event()
        work = run_worker(settings, key=WORKER, make_engine=TorchEngine, stop=stop)

        def labour() -> None:
            with asyncio.Runner(loop_factory=lambda: found.loop) as runner:
                runner.run(work)

        thread = threading.Thread(target=labour)
        thread.start()
        try:
            deadline = time.monotonic() + SECONDS
            while b'"version":0' not in status_of(found):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield found
        finally:
            found.loop.call_soon_threadsafe(stop.set)
            thread.join()


def status_of(victim: Victim) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return (victim.folder / "status.json").read_bytes()
    return b""


@contextlib.asynccontextmanager
async def peer(folder: Path, key: Ed25519PrivateKey, *bootstrap: Address) -> AsyncIterator[PeerNetwork]:
    """Somebody with a key in the victim's network, who is not told of to others."""
    settings = PeerSettings(
        bootstrap=bootstrap, state=folder / public(key).hex()[:8], host="127.0.0.1", announced=False
    )
    async with PeerNetwork(settings, key=key, store=DescriptorStore(RUN_ID)) as network:
        await network.ready()
        yield network


async def answer(network: PeerNetwork, victim: Victim, data: bytes) -> ControlReply:
    """What the victim answers to these bytes, as far as it is its signature under an answer to them."""
    reply, _ = await network.request(NODE, data, address=victim.address, timeout_seconds=30)
    opened = open_envelope(reply, domain=REPLY_DOMAIN, versions=(1,), max_payload_bytes=2**20, signer=NODE)
    answered = decode(ControlReply, opened.payload, max_bytes=2**20)
    assert answered.request == digest(data)
    return answered


async def ask(network: PeerNetwork, victim: Victim, asked: ControlRequest, key: Ed25519PrivateKey) -> ControlReply:
    return await answer(network, victim, sign_control(asked, key=key))


async def is_served(victim: Victim, folder: Path) -> bool:
    """Whether an operator gets an answer who was never here before, and so waits with all strangers for a moment."""
    key, deadline = Ed25519PrivateKey.generate(), time.monotonic() + 10
    async with peer(folder, key) as network:
        while True:
            answered = await ask(network, victim, request(AskStatus(), grant(key)), key)
            if answered.reason != "too_many_requests" or time.monotonic() > deadline:
                return isinstance(answered.body, StatusBody)
            await asyncio.sleep(0.5)


# -- who may not ask


async def test_a_replayed_request(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    data = sign_control(request(AskStatus(), grant(key)), key=key)
    async with peer(tmp_path, key) as network:
        assert (await answer(network, victim, data)).reason is None
        assert (await answer(network, victim, data)).reason == "replayed_request"


async def test_a_request_to_another_node(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    asked = request(AskStatus(), grant(key), to=public(OTHER_RUN).hex())
    async with peer(tmp_path, key) as network:
        assert (await ask(network, victim, asked, key)).reason == "wrong_node"


async def test_an_expired_authority(victim: Victim, tmp_path: Path) -> None:
    key, now = Ed25519PrivateKey.generate(), int(time.time())
    expired = grant(key, issued_at=now - 100, expires_at=now - 1)
    async with peer(tmp_path, key) as network:
        assert (await ask(network, victim, request(AskStatus(), expired), key)).reason == "expired_authority"


async def test_a_purpose_that_the_authority_does_not_cover(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    async with peer(tmp_path, key) as network:
        assert (await ask(network, victim, request(AskDrain(), grant(key)), key)).reason == "wrong_purpose"
    assert b'"draining":false' in status_of(victim)


async def test_an_authority_of_another_run(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    async with peer(tmp_path, key) as network:
        for foreign in (
            grant(key, key=OTHER_RUN),
            grant(key, key=OTHER_RUN, run_id=run_id_of(public(OTHER_RUN))),
            grant(key, run_id=run_id_of(public(OTHER_RUN))),
            grant(key, key=key),
        ):
            assert (await ask(network, victim, request(AskStatus(), foreign), key)).reason == "bad_authority"


async def test_a_stolen_grant(victim: Victim, tmp_path: Path) -> None:
    operator, thief = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    async with peer(tmp_path, thief) as network:
        asked = request(AskStatus(), grant(operator))
        assert (await ask(network, victim, asked, thief)).reason == "foreign_authority"


async def test_a_peer_that_brings_what_somebody_else_signed(victim: Victim, tmp_path: Path) -> None:
    """A relay, a listener or a node that the operator asked before has such bytes; they are worth nothing to it."""
    operator, listener = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    data = sign_control(request(AskStatus(), grant(operator)), key=operator)
    async with peer(tmp_path, listener) as network:
        assert (await answer(network, victim, data)).reason == "wrong_peer"


async def test_an_authority_for_longer_than_any_run_gives(victim: Victim, tmp_path: Path) -> None:
    key, now = Ed25519PrivateKey.generate(), int(time.time())
    long = msgspec.json.encode(
        {
            "run_id": RUN_ID,
            "node": public(key).hex(),
            "purposes": ["status"],
            "subject": None,
            "issued_at": now - 10,
            "expires_at": now + 31 * 24 * 3600,
        }
    )
    sealed = seal(long, domain="swarmproof/authority", version=1, key=RUN)
    async with peer(tmp_path, key) as network:
        assert (await ask(network, victim, request(AskStatus(), sealed), key)).reason == "bad_authority"


async def test_a_signature_that_was_made_for_something_else(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    asked = encode(request(AskStatus(), grant(key)))
    async with peer(tmp_path, key) as network:
        for domain in ("swarmproof/request", "swarmproof/peer", "swarmproof/control-reply"):
            sealed = seal(asked, domain=domain, version=1, key=key)
            assert (await answer(network, victim, sealed)).reason == "bad_request"


async def test_a_revoked_key_is_out_as_soon_as_a_peer_tells(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    async with peer(tmp_path, key) as network:
        assert (await ask(network, victim, request(AskStatus(), grant(key)), key)).reason is None
    messenger, store = Ed25519PrivateKey.generate(), DescriptorStore(RUN_ID)
    settings = PeerSettings(
        bootstrap=(victim.address,), state=tmp_path / "messenger", host="127.0.0.1", announced=False
    )
    async with PeerNetwork(settings, key=messenger, store=store):
        deadline = time.monotonic() + SECONDS
        while store.newest is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        known, _ = open_descriptor(store.newest.envelope, run_id=RUN_ID, now=time.time())
        revoking = msgspec.structs.replace(known, version=known.version + 1, revoked=(public(key).hex(),))
        sealed = seal(encode(revoking), domain=DESCRIPTOR_DOMAIN, version=DESCRIPTOR_VERSION, key=RUN)
        store.offer(sealed, source="test")
        async with peer(tmp_path, key) as network:
            while (said := await ask(network, victim, request(AskStatus(), grant(key)), key)).reason is None:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.2)
    assert said.reason == "revoked"


# -- what nobody gets


async def test_the_log_of_a_worker_whose_owner_does_not_show_it(victim: Victim, tmp_path: Path) -> None:
    """Neither with authority for it nor with the run's own key."""
    key = Ed25519PrivateKey.generate()
    async with peer(tmp_path, key) as network:
        asked = request(AskLogs(lines=200), grant(key, "logs"))
        assert (await ask(network, victim, asked, key)).reason == "not_allowed"
        assert (await ask(network, victim, request(AskRestart(), grant(key, "restart")), key)).reason == "not_allowed"
    async with peer(tmp_path, RUN) as network:
        assert (await ask(network, victim, request(AskLogs(lines=1), None), RUN)).reason == "not_allowed"


async def test_what_a_status_tells_of_the_machine(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    async with peer(tmp_path, key) as network:
        answered = await ask(network, victim, request(AskStatus(), grant(key)), key)
    said = encode(answered)
    for secret in (str(victim.folder), socket.gethostname(), "127.0.0.1", victim.swarm.url):
        assert secret.encode() not in said


async def test_a_challenge_as_an_oracle_for_a_real_slot(victim: Victim, tmp_path: Path) -> None:
    """A lazy worker with some authority has an honest one do its work: what comes back fits no lease."""
    key = Ed25519PrivateKey.generate()
    granted = grant(key, "challenge", "drain", "invite")
    lazy = victim.swarm.peer()
    async with peer(tmp_path, key) as network:
        assert (await ask(network, victim, request(AskDrain(), granted), key)).reason is None
        with victim.swarm.home.database.write() as connection:  # there is work, whatever the victim has done already
            settle_slots(connection, "admitted", "used")
        lease = await asyncio.to_thread(lazy.lease)
        for start in range(32):
            # The nonce is the asker's to choose, here from what it would like to have.
            nonce = lease.lease_id[start : start + 32]
            asked = request(AskChallenge(samples=4, max_tokens=40), granted, nonce=nonce)
            answered = await ask(network, victim, asked, key)
            if answered.reason is None:
                break
            assert answered.reason == "busy", answered
            await asyncio.sleep(1.1)
        assert (await ask(network, victim, request(AskInvite(endpoint=None), granted), key)).reason is None
    assert isinstance(answered.body, ChallengeBody)
    assert answered.body.manifest_digest == lease.manifest_digest
    submitted = lazy.submit(lease.lease_id, answered.body.rollouts)
    receipt = await asyncio.to_thread(victim.swarm.verdict, lazy, submitted)
    assert (receipt.outcome, receipt.reason in {"wrong_prompt", "wrong_seed"}) == (Outcome.REJECTED, True), receipt


# -- lies in answers


async def test_a_node_that_answers_another_request(tmp_path: Path) -> None:
    """What it once answered to somebody, and what it would answer to something else."""
    liar, asker = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()

    def said(data: bytes, key: Ed25519PrivateKey = liar, run_id: str = RUN_ID) -> bytes:
        body = DrainBody(slots=0, undelivered=0)
        reply = ControlReply(run_id=run_id, request=digest(data), reason=None, detail="", answered_at=0, body=body)
        return sign_reply(reply, key=key)

    lies = {
        "wrong_request": lambda _data: said(b"an earlier one"),
        "wrong_purpose": said,
        "wrong_run": lambda data: said(data, run_id="0" * 64),
        "malformed": lambda data: said(data)[:40],
        "wrong_signer": lambda data: said(data, key=asker),
    }
    async with peer(tmp_path, liar) as answering, peer(tmp_path, asker) as asking:
        port = answering._port
        at = Address("ip4", "127.0.0.1", port, public(liar))
        caller = ControlClient(asking, store=DescriptorStore(RUN_ID), key=asker, authority=None)
        for code, lie in lies.items():

            async def handler(_peer: bytes, data: bytes, lie=lie) -> bytes:
                return lie(data)

            answering.set_handler(handler)
            with pytest.raises(PeerFault) as caught:
                await caller.ask(public(liar), AskStatus(), address=at, find_seconds=0)
            assert caught.value.code == code


async def test_requests_at_the_same_time_get_each_its_own_answer(victim: Victim, tmp_path: Path) -> None:
    """Prime Intellect's protocol keys pending requests by peer and protocol, so that these two would collide."""
    key = Ed25519PrivateKey.generate()
    granted = grant(key, "status", "challenge")
    async with peer(tmp_path, key) as network:
        for _ in range(4):
            asked = [request(AskStatus(), granted), request(AskChallenge(samples=1, max_tokens=1), granted)]
            first, second = await asyncio.gather(*(ask(network, victim, each, key) for each in asked))
            assert isinstance(first.body, StatusBody)
            assert second.reason == "busy" or isinstance(second.body, ChallengeBody)


# -- floods


async def test_a_flood_of_strangers(victim: Victim, tmp_path: Path) -> None:
    """Signed garbage without authority, faster than it is looked at: the operator is answered all the while."""
    operator, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    async with peer(tmp_path, operator) as known, peer(tmp_path, stranger) as flooding:
        assert (await ask(known, victim, request(AskStatus(), grant(operator)), operator)).reason is None
        began = time.monotonic()
        flood = [request(AskStatus(), None) for _ in range(STRANGERS_BURST + 20)]
        said = [(await ask(flooding, victim, asked, stranger)).reason for asked in flood]
        assert set(said) == {"no_authority", "too_many_requests"}
        assert said.count("no_authority") < STRANGERS_BURST + (time.monotonic() - began)
        assert (await ask(known, victim, request(AskStatus(), grant(operator)), operator)).reason is None


async def test_a_frame_that_is_too_large(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    async with peer(tmp_path, key) as network:
        with pytest.raises(NetworkDown) as caught:
            await network.request(NODE, bytes(MAX_REQUEST_BYTES + 1), address=victim.address, timeout_seconds=20)
    assert caught.value.code == "no_answer"
    assert await is_served(victim, tmp_path)


async def test_streams_that_stay_open_and_say_nothing(victim: Victim, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    async with peer(tmp_path, key) as network:

        async def hold() -> int:
            """Begin requests that never end; how many of them the victim waits for."""
            await connect(network._host, victim.address, seconds=5)
            held = 0
            for _ in range(6):
                with trio.move_on_after(2.5) as waited, contextlib.suppress(Exception):
                    stream = await network._host.new_stream(peer_of(NODE), [TProtocol(PROTOCOL)])
                    await stream.write((1000).to_bytes(4))
                    await stream.read(1)
                held += waited.cancelled_caught
            return held

        assert await network._thread.call(hold, timeout_seconds=60) == 2
        assert await is_served(victim, tmp_path)
