"""Control: what a node must refuse, in which order, and what an asker must not believe."""

from __future__ import annotations

import itertools
from typing import get_args

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import inspect

from node.control.authorization import MAX_KNOWN, NONCE_SECONDS, PEER_BURST, STRANGERS_BURST, ControlAuthorizer
from node.protocol.challenge import CHALLENGE_SLOT, challenge_manifest, challenge_spec, fits
from node.protocol.control import (
    AUTHORITY_DOMAIN,
    CONTROL_DOMAIN,
    CONTROL_VERSION,
    FREE_PURPOSES,
    MAX_AUTHORITY_SECONDS,
    MAX_CHALLENGE_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    PURPOSES,
    REPLY_DOMAIN,
    AskChallenge,
    AskDrain,
    AskInvite,
    AskLogs,
    AskRestart,
    AskStatus,
    Authority,
    Body,
    ChallengeBody,
    ControlReason,
    ControlRefusal,
    ControlReply,
    ControlRequest,
    DrainBody,
    InviteBody,
    LogsBody,
    open_authority,
    open_control,
    open_reply,
    purpose_of,
    sign_control,
)
from node.protocol.run import EnvironmentSpec, LengthSpec, RunSpec
from node.protocol.slots import group_seeds, sample_seed
from shardcast.envelope import seal
from shardcast.errors import PeerFault
from shardcast.wire import MAX_INTEGER, digest, encode

NOW = 1_800_000_000
RUN_ID, OTHER_RUN = "1" * 64, "2" * 64
RUN, NODE, ASKER, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([index]) * 32) for index in range(1, 5))
SPEC = RunSpec(name="test", environments=(EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse")))
nonces = (f"{index:032x}" for index in itertools.count())


def public(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def forged(value: msgspec.Struct, **changes: object) -> bytes:
    """The encoding of a value with changes that its type need not allow."""
    return msgspec.json.encode(msgspec.to_builtins(value) | msgspec.to_builtins(changes))


def grant(key: Ed25519PrivateKey = RUN, **changes: object) -> bytes:
    granted = Authority(
        run_id=RUN_ID,
        node=public(ASKER).hex(),
        purposes=("status", "drain"),
        subject=None,
        issued_at=NOW - 100,
        expires_at=NOW + 100,
    )
    return seal(forged(granted, **changes), domain=AUTHORITY_DOMAIN, version=CONTROL_VERSION, key=key)


def request(**changes: object) -> ControlRequest:
    asked = ControlRequest(
        run_id=RUN_ID, to=public(NODE).hex(), ask=AskStatus(), nonce=next(nonces), issued_at=NOW, authority=grant()
    )
    return msgspec.structs.replace(asked, **changes)


class Door:
    """A door, with the clocks in the test's hand."""

    def __init__(self, *, allowed=FREE_PURPOSES, revoked=()) -> None:
        self.now, self.ticks, self.revoked = float(NOW), 0.0, revoked
        self.door = ControlAuthorizer(
            node=public(NODE),
            run_id=RUN_ID,
            run_key=public(RUN),
            allowed=allowed,
            revoked=lambda: self.revoked,
            clock=lambda: self.now,
            monotonic=lambda: self.ticks,
        )

    def knock(self, asked: ControlRequest | bytes, *, key=ASKER, peer: Ed25519PrivateKey | None = None) -> str:
        """The code of the refusal, or "in"."""
        data = asked if isinstance(asked, bytes) else sign_control(asked, key=key)
        try:
            self.door.let_in(public(peer or key), data)
        except ControlRefusal as refusal:
            return refusal.code
        return "in"


# -- the door


def test_who_has_authority_is_let_in() -> None:
    assert Door().knock(request()) == "in"
    assert Door().knock(request(authority=grant(subject=public(NODE).hex()))) == "in"


def test_the_key_of_the_run_needs_no_authority() -> None:
    assert Door().knock(request(authority=None), key=RUN) == "in"


WRONG = {
    "bad_request": b"no envelope",
    "wrong_node": request(to=public(STRANGER).hex()),
    "wrong_run": request(run_id=OTHER_RUN),
    "no_authority": request(authority=None),
    "bad_authority": request(authority=grant(STRANGER)),
    "expired_authority": request(authority=grant(expires_at=NOW)),
    "foreign_authority": request(authority=grant(node=public(STRANGER).hex())),
    "wrong_purpose": request(ask=AskLogs(lines=1)),
    "wrong_subject": request(authority=grant(subject=public(STRANGER).hex())),
    "not_allowed": request(ask=AskDrain()),
}


@pytest.mark.parametrize("code", WRONG)
def test_each_thing_that_is_wrong_has_its_code(code: str) -> None:
    assert Door().knock(WRONG[code]) == code


def test_of_several_wrongs_the_first_of_the_order_is_named() -> None:
    door = Door(revoked=(public(ASKER).hex(),))
    door.revoked = None
    worst = {"node": public(STRANGER).hex(), "purposes": ("logs",), "subject": public(STRANGER).hex()}
    everything = {"to": public(STRANGER).hex(), "run_id": OTHER_RUN, "issued_at": NOW - 61, "nonce": "f" * 32}
    everything["authority"] = None

    def knock(peer: Ed25519PrivateKey = ASKER) -> str:
        return door.knock(request(**everything, ask=AskDrain()), peer=peer)

    said = [knock(STRANGER), knock()]
    for name, right in (("to", public(NODE).hex()), ("run_id", RUN_ID), ("issued_at", NOW)):
        everything[name] = right
        said.append(knock())
    expired = {"expires_at": NOW}
    for granted in (
        grant(STRANGER, **worst, **expired),
        grant(**worst, **expired),
        grant(**worst),
        grant(**{**worst, "node": public(ASKER).hex()}),
        grant(subject=public(STRANGER).hex()),
        grant(),
    ):
        everything["authority"] = granted
        said.append(knock())
    door.revoked = (public(ASKER).hex(),)
    said.append(knock())
    door.revoked = ()
    said += [knock(), knock()]
    assert list(dict.fromkeys(said)) == [
        *("wrong_peer", "wrong_node", "wrong_run", "clock_skew", "no_authority", "bad_authority"),
        *("expired_authority", "foreign_authority", "wrong_purpose", "wrong_subject", "stale_run", "revoked"),
        *("not_allowed", "replayed_request"),
    ]


def test_a_flipped_bit() -> None:
    data = bytearray(sign_control(request(), key=ASKER))
    data[-1] ^= 1
    assert Door().knock(bytes(data)) == "bad_signature"


def test_a_request_that_another_peer_brings() -> None:
    assert Door().knock(request(), peer=STRANGER) == "wrong_peer"


@pytest.mark.parametrize(("seconds", "code"), [(-61, "clock_skew"), (-60, "in"), (60, "in"), (61, "clock_skew")])
def test_a_request_of_another_minute(seconds: int, code: str) -> None:
    assert Door().knock(request(issued_at=NOW + seconds)) == code


def test_an_authority_of_another_run_under_the_same_key() -> None:
    assert Door().knock(request(authority=grant(run_id=OTHER_RUN))) == "bad_authority"


def test_an_authority_that_begins_later() -> None:
    assert Door().knock(request(authority=grant(issued_at=NOW + 61))) == "expired_authority"


@pytest.mark.parametrize(
    "changes",
    [
        {"expires_at": NOW - 100 + MAX_AUTHORITY_SECONDS + 1},
        {"purposes": ()},
        {"purposes": ("status", "status")},
        {"purposes": ("status", "everything")},
    ],
)
def test_an_authority_that_no_run_gives(changes: dict[str, object]) -> None:
    assert Door().knock(request(authority=grant(**changes))) == "bad_authority"


def test_a_revoked_key() -> None:
    door = Door(revoked=(public(ASKER).hex(),))
    assert door.knock(request()) == "revoked"
    assert door.knock(request(authority=None), key=RUN) == "in"


def test_a_node_that_cannot_know_who_is_revoked_asks_nobody_in() -> None:
    """Whoever keeps news from a node must not thereby keep a revoked key at work."""
    door = Door()
    door.revoked = None
    assert door.knock(request()) == "stale_run"
    assert door.knock(request(authority=None), key=RUN) == "in"


def test_a_replay_within_the_time_in_which_it_would_hold() -> None:
    door, data = Door(), sign_control(request(), key=ASKER)
    assert door.knock(data) == "in"
    for seconds in (0, 59, 119):
        door.ticks, door.now = float(seconds), float(NOW + min(seconds, 60))
        assert door.knock(data) == "replayed_request"
    door.ticks, door.now = NONCE_SECONDS + 1.0, float(NOW + NONCE_SECONDS)
    assert door.knock(data) == "clock_skew"


def test_two_askers_may_use_one_nonce() -> None:
    door, nonce = Door(), "a" * 32
    assert door.knock(request(nonce=nonce)) == "in"
    assert door.knock(request(nonce=nonce, authority=None), key=RUN) == "in"


def test_one_asker_has_a_limit_and_gets_another_chance() -> None:
    door = Door()
    said = [door.knock(request()) for _ in range(PEER_BURST + 1)]
    assert said == ["in"] * PEER_BURST + ["too_many_requests"]
    door.ticks = 1.0
    assert [door.knock(request()) for _ in range(2)] == ["in", "too_many_requests"]


def test_strangers_together_have_a_limit_that_is_not_the_operators() -> None:
    door = Door()
    assert door.knock(request()) == "in"
    strangers = [Ed25519PrivateKey.generate() for _ in range(STRANGERS_BURST)]
    said = [door.knock(request(), key=key) for key in strangers]
    assert set(said[:-1]) == {"foreign_authority"}
    assert said[-1] == "too_many_requests"
    assert door.knock(request()) == "in"


def test_what_the_door_remembers_is_bounded() -> None:
    door = Door()
    for index in range(MAX_KNOWN + 9):
        key = Ed25519PrivateKey.generate()
        assert door.knock(request(authority=grant(node=public(key).hex())), key=key) == "in"
        door.ticks = index / 5
    assert len(door.door._known) == MAX_KNOWN
    door.ticks += NONCE_SECONDS + 1
    assert door.knock(request()) == "in"
    assert len(door.door._nonces) == 1


# -- values


def test_every_reason_says_what_the_asker_should_do() -> None:
    assert all(reason.advice.endswith(".") for reason in ControlReason)


@pytest.mark.parametrize(
    "ask",
    [
        AskStatus(),
        AskInvite(endpoint="http://192.0.2.1:8700"),
        AskInvite(endpoint=None),
        AskChallenge(samples=8, max_tokens=128),
        AskDrain(),
        AskRestart(),
        AskLogs(lines=200),
    ],
    ids=lambda ask: type(ask).__name__,
)
def test_what_is_asked_survives_the_wire(ask) -> None:
    asked = request(ask=ask)
    signer, found = open_control(sign_control(asked, key=ASKER))
    assert (signer, found) == (public(ASKER), asked)
    assert purpose_of(found.ask) in PURPOSES


@pytest.mark.parametrize(
    "ask",
    [
        AskLogs(lines=201),
        AskLogs(lines=0),
        AskChallenge(samples=9, max_tokens=1),
        AskChallenge(samples=1, max_tokens=129),
        AskInvite(endpoint="file:///etc/passwd"),
    ],
    ids=str,
)
def test_what_may_not_be_asked(ask) -> None:
    assert Door().knock(request(ask=ask)) == "bad_request"


def test_a_spelling_that_is_not_canonical() -> None:
    payload = encode(request()).replace(b'{"run_id"', b'{ "run_id"')
    assert Door().knock(seal(payload, domain=CONTROL_DOMAIN, version=CONTROL_VERSION, key=ASKER)) == "bad_request"


def test_an_envelope_of_another_domain_or_version() -> None:
    """What a node signs for anything else is no request, and a later version is not guessed at."""
    payload = encode(request())
    for domain, version in (("swarmproof/request", 1), ("swarmproof/control-reply", 1), (CONTROL_DOMAIN, 2)):
        assert Door().knock(seal(payload, domain=domain, version=version, key=ASKER)) == "bad_request"


def test_more_bytes_than_a_request_may_have() -> None:
    with pytest.raises(ControlRefusal, match="bad_request"):
        open_control(bytes(MAX_REQUEST_BYTES + 1))


def test_an_authority_survives_the_wire() -> None:
    signer, granted = open_authority(grant())
    assert (signer, granted.purposes) == (public(RUN), ("status", "drain"))


# -- replies


def reply(data: bytes, **changes: object) -> bytes:
    answered = ControlReply(
        run_id=RUN_ID,
        request=digest(data),
        reason=None,
        detail="",
        answered_at=NOW,
        body=DrainBody(slots=2, undelivered=1),
    )
    return forged(answered, **changes)


ASKED = sign_control(request(ask=AskDrain()), key=ASKER)


def opened(payload: bytes, *, key=NODE):
    data = seal(payload, domain=REPLY_DOMAIN, version=CONTROL_VERSION, key=key)
    return open_reply(data, node=public(NODE), run_id=RUN_ID, request=digest(ASKED), purpose="drain")


def test_the_answer_of_the_node_that_was_asked() -> None:
    assert opened(reply(ASKED)) == DrainBody(slots=2, undelivered=1)


def test_a_refusal_comes_with_its_reason_and_what_to_do() -> None:
    refused = reply(ASKED, reason=ControlReason.NOT_ALLOWED, detail="Ask them.", body=None)
    with pytest.raises(ControlRefusal, match=r"^not_allowed: Ask them\. .*--allow-control"):
        opened(refused)


@pytest.mark.parametrize(
    ("changes", "key", "code"),
    [
        ({}, STRANGER, "wrong_signer"),
        ({"run_id": OTHER_RUN}, NODE, "wrong_run"),
        ({"request": digest(b"another")}, NODE, "wrong_request"),
        ({"body": LogsBody(lines=())}, NODE, "wrong_purpose"),
        ({"body": None}, NODE, "malformed"),
        ({"reason": ControlReason.BUSY}, NODE, "malformed"),
        ({"body": LogsBody(lines=("a\x1b[2J",))}, NODE, "malformed"),
        ({"body": LogsBody(lines=("a",) * 201)}, NODE, "malformed"),
        ({"body": InviteBody(room=-1)}, NODE, "malformed"),
    ],
)
def test_what_is_no_answer_to_this_request(changes, key, code) -> None:
    with pytest.raises(PeerFault) as caught:
        opened(reply(ASKED, **changes), key=key)
    assert caught.value.code == code


@pytest.mark.parametrize("body", get_args(Body), ids=lambda body: body.__name__)
def test_no_answer_has_an_integer_that_only_some_parsers_can_hold(body: type[msgspec.Struct]) -> None:
    """Of 2**53 and its successor many JSON parsers make one number: a page would show what nobody signed."""
    kinds = [field.type for field in inspect.type_info(body).fields]
    integers = [kind for kind in kinds if isinstance(kind, inspect.IntType)]
    assert [kind.le for kind in integers] == [MAX_INTEGER] * len(integers)


def test_the_largest_answer_fits() -> None:
    body = ChallengeBody(version=1, manifest_digest="0" * 64, rollouts=bytes(MAX_CHALLENGE_BYTES))
    payload = reply(ASKED, body=body)
    data = seal(payload, domain=REPLY_DOMAIN, version=CONTROL_VERSION, key=NODE)
    assert len(data) < MAX_REPLY_BYTES
    answered = open_reply(data, node=public(NODE), run_id=RUN_ID, request=digest(ASKED), purpose="challenge")
    assert answered == body


# -- challenges

WHERE = {"run_id": RUN_ID, "manifest_digest": "3" * 64, "node": public(NODE), "nonce": "0" * 32}


def test_a_challenge_is_another_one_for_each_run_policy_node_and_nonce() -> None:
    others = [{"run_id": OTHER_RUN}, {"manifest_digest": "4" * 64}, {"node": public(STRANGER)}, {"nonce": "1" * 32}]
    assert len({challenge_manifest(**WHERE | changed) for changed in ({}, *others)}) == 5


def test_a_challenge_is_of_no_slot_that_the_run_has() -> None:
    """Even one whose nonce spells the manifest, or a slot's number: what stands for the digest is derived anew."""
    where = {"run_id": RUN_ID, "manifest_digest": WHERE["manifest_digest"]}
    real = {seed for slot in range(64) for seed in group_seeds(SPEC, **where, slot=slot)}
    for nonce in ("3" * 32, *(f"{slot:032x}" for slot in range(64))):
        manifest = challenge_manifest(**WHERE | {"nonce": nonce})
        asked = {"run_id": RUN_ID, "manifest_digest": manifest, "slot": CHALLENGE_SLOT}
        assert not real & set(group_seeds(SPEC, **asked))
    assert sample_seed(**where, slot=63, sample=0) in real  # it would be found


def test_a_challenge_asks_for_no_more_than_the_run_allows() -> None:
    rules = challenge_spec(SPEC, AskChallenge(samples=3, max_tokens=128))
    assert (rules.sampling.group_size, rules.sampling.max_new_tokens) == (3, SPEC.sampling.max_new_tokens)
    assert rules.sampling.max_version_lead == 0
    assert challenge_spec(SPEC, AskChallenge(samples=1, max_tokens=5)).sampling.max_new_tokens == 5


def test_a_challenge_is_shorter_than_the_lengths_that_the_run_asks_for() -> None:
    """An honest node of such a run would else look as if it gave no answer."""
    length = LengthSpec(targets=(SPEC.sampling.max_new_tokens,))
    environments = tuple(msgspec.structs.replace(one, length=length) for one in SPEC.environments)
    rules = challenge_spec(msgspec.structs.replace(SPEC, environments=environments), AskChallenge(1, 5))
    assert rules.sampling.max_new_tokens == 5
    assert rules.environments == environments


def test_an_answer_that_would_be_too_large_is_not_begun() -> None:
    rules = challenge_spec(SPEC, AskChallenge(samples=8, max_tokens=128))
    assert fits(rules, samples=8, prompt_tokens=128)
    heavy = msgspec.structs.replace(rules, proofs=msgspec.structs.replace(rules.proofs, chunk_tokens=1, top_k=4096))
    assert not fits(heavy, samples=8, prompt_tokens=128)
    assert not fits(rules, samples=8, prompt_tokens=MAX_CHALLENGE_BYTES // 8)


def test_an_answer_that_is_almost_too_large_is_given() -> None:
    """An operator whose run has long prompts would else take every honest node for one that cannot answer.

    Of each completion: two proofs of 258 + 128 bytes with their lengths, 48 tokens with their log-probabilities.
    """
    rules = challenge_spec(SPEC, AskChallenge(samples=8, max_tokens=128))
    completion = 2 * (4 + 258 + 128) + 8 * 48 + 64
    prompt_tokens = ((MAX_CHALLENGE_BYTES - 32 * 1024) // 8 - completion) // 4
    assert fits(rules, samples=8, prompt_tokens=prompt_tokens)
    assert not fits(rules, samples=8, prompt_tokens=prompt_tokens + 1)
