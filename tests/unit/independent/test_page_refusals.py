"""What a client by the page refuses to believe of a run, although the run's key signed it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from independent.broadcast import Publications
from independent.descriptor import Descriptors
from independent.envelope import seal
from independent.messages import DESCRIPTOR, HEAD
from independent.values import Refused, encode
from locations import ROOT

RUN = json.loads((ROOT / "tests" / "vectors" / "protocol" / "run.json").read_text())
KEY = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(RUN["run_private_key"]))
NOW = 1_760_000_000


def refusal(call: Any, *given: Any, **named: Any) -> str:
    """The code with which a call refuses what it was given."""
    with pytest.raises(Refused) as refused:
        call(*given, **named)
    return refused.value.code


def test_descriptors_that_are_old_expired_or_contradict_an_earlier_one() -> None:
    genuine = bytes.fromhex(RUN["descriptor"])
    seen = Descriptors(RUN["run_id"])
    value = seen.accept(genuine, now=NOW)

    def signed(**changes: Any) -> bytes:
        return seal(KEY, "swarmproof/run", encode(DESCRIPTOR, value | changes))

    later = signed(version=value["version"] + 1)
    rules = value["spec"] | {"seed": 8}
    assert refusal(seen.accept, genuine, now=value["expires_at"]) == "expired"
    assert refusal(seen.accept, signed(endpoints=["https://other.example"]), now=NOW) == "equivocation"
    assert seen.contradictions == [(genuine, signed(endpoints=["https://other.example"]))]
    assert refusal(seen.accept, signed(version=value["version"] + 1, spec=rules), now=NOW) == "other_rules"
    assert refusal(Descriptors("0" * 64).accept, genuine, now=NOW) == "wrong_run"
    seen.accept(later, now=NOW)
    for holder in (seen, Descriptors(RUN["run_id"], remembered=seen.envelope)):
        assert refusal(holder.accept, genuine, now=NOW) == "rollback", "also after a restart"


def test_heads_that_are_old_expired_early_or_contradict_an_earlier_one() -> None:
    seen = Publications(RUN["run_id"], RUN["run_public_key"])

    def head(version: int, digit: str = "a", *, issued_at: int = NOW, run_id: str = RUN["run_id"]) -> bytes:
        value = {"run_id": run_id, "version": version, "manifest_digest": digit * 64, "issued_at": issued_at}
        return seal(KEY, "shardcast/head", encode(HEAD, value | {"expires_at": issued_at + 60}))

    assert refusal(seen.accept_head, head(4, issued_at=NOW - 91), now=NOW) == "expired"
    assert refusal(seen.accept_head, head(4, issued_at=NOW + 31), now=NOW) == "not_yet_valid"
    assert refusal(seen.accept_head, head(4, run_id="0" * 64), now=NOW) == "wrong_run"
    assert seen.accept_head(head(4, issued_at=NOW - 90), now=NOW)["version"] == 4, "within the tolerance for clocks"
    assert seen.accept_head(head(4, issued_at=NOW + 30), now=NOW)["version"] == 4
    assert refusal(seen.accept_head, head(3), now=NOW) == "rollback"
    assert refusal(seen.accept_head, head(4, "b"), now=NOW) == "equivocation"
    assert len(seen.contradictions) == 1
