"""Proofs and numbers that are none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import msgspec

from coordinator.lab.redteam.attack import Forged, SlotAttack, submission
from coordinator.lab.redteam.workshop import Work
from node.protocol.submission import Rollout

Break = Callable[[Rollout], Rollout]


def _proofs(change: Callable[[list[bytes]], list[bytes]]) -> Break:
    return lambda rollout: msgspec.structs.replace(rollout, proofs=change(rollout.proofs))


def _logprobs(value: float) -> Break:
    return lambda rollout: msgspec.structs.replace(rollout, logprobs=[value, *rollout.logprobs[1:]])


WAYS: dict[str, Break] = {
    "null": _proofs(lambda proofs: [bytes(len(proof)) for proof in proofs]),
    "empty": _proofs(lambda proofs: [b"" for _ in proofs]),
    "none": _proofs(lambda _: []),
    "short": _proofs(lambda proofs: [proof[:-2] for proof in proofs]),
    "one too many": _proofs(lambda proofs: [*proofs, proofs[0]]),
    "constant": _proofs(lambda proofs: [b"\xff\xd9" + b"\x40\x5b" * (len(proof) // 2 - 1) for proof in proofs]),
    "NaN": _logprobs(math.nan),
    "infinite": _logprobs(-math.inf),
    "likelier than certain": _logprobs(1.0),
    "no log-probabilities": lambda rollout: msgspec.structs.replace(rollout, logprobs=[]),
}
"""What is done to the last row of an honest group."""


class BrokenProofs(SlotAttack):
    """What a checker meets that takes nothing wrong in nothing for right."""

    name = "broken-proofs"
    about = "sends null, short, missing, extra and constant proofs, NaN and infinity"
    stands_for = "missing, extra, null, malformed or NaN proofs"
    stopped_by = frozenset(
        {
            "malformed_proof",
            "wrong_proof_count",
            "logprob_not_finite",
            "wrong_logprob_count",
            "proof_mismatch",
            "wrong_schema",
        }
    )

    def __init__(self) -> None:
        self._turn = itertools.cycle(WAYS.items())

    async def forge(self, work: Work) -> Forged:
        way, change = next(self._turn)
        honest = await work.honest()
        return submission([*honest[:-1], change(honest[-1])], note=way)
