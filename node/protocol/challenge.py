"""Derivation of a challenge's work, distinct from every slot's (docs/protocol.md, section 14.4).

A challenge is slot 0 of a policy that no run has: of one whose manifest would have a digest that is derived from the
node's key and from a nonce that the asker has just made. So nobody can have the answer beforehand, and what a challenge
yields fits no slot, however its nonce is chosen: that would take a manifest with a digest known in advance.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET

from node.protocol.control import MAX_CHALLENGE_BYTES, AskChallenge
from node.protocol.run import EnvironmentSpec, RunSpec
from node.protocol.submission import chunk_count, proof_bytes
from shardcast.wire import derive

CHALLENGE_SLOT: Final = 0
_FILE_BYTES: Final = 32 * 1024
"""More than what a submission of a few rows has besides its values."""


def challenge_manifest(*, run_id: str, manifest_digest: str, node: bytes, nonce: str) -> str:
    """Return the pseudo manifest digest of a challenge to the node with this public key (32 bytes)."""
    parts = bytes.fromhex(run_id), bytes.fromhex(manifest_digest), node, bytes.fromhex(nonce)
    return derive("swarmproof/1 challenge", *parts).hex()


def challenge_spec(spec: RunSpec, ask: AskChallenge) -> RunSpec:
    """Return the run's rules with a challenge's rows and tokens, one policy, and one turn without rules of its own."""
    sampling = msgspec.structs.replace(
        spec.sampling,
        group_size=ask.samples,
        max_new_tokens=min(ask.max_tokens, spec.sampling.max_new_tokens),
        max_version_lead=0,
        max_turns=1,
    )
    limits = msgspec.structs.replace(spec.limits, max_submission_bytes=MAX_CHALLENGE_BYTES)
    environments = tuple(map(_without_turn_rules, spec.environments))
    return msgspec.structs.replace(spec, environments=environments, sampling=sampling, limits=limits)


def _without_turn_rules(spec: EnvironmentSpec) -> EnvironmentSpec:
    return msgspec.structs.replace(spec, max_new_tokens=UNSET, stop=UNSET, thinking=UNSET)


def fits(spec: RunSpec, *, samples: int, prompt_tokens: int) -> bool:
    """Return whether an answer under `spec` (`challenge_spec`) fits into MAX_CHALLENGE_BYTES."""
    tokens, proofs = spec.sampling.max_new_tokens, spec.proofs
    chunks = chunk_count([tokens], chunk_tokens=proofs.chunk_tokens)
    proved = chunks * (4 + proof_bytes(proofs, tokens=min(proofs.chunk_tokens, tokens)))
    return _FILE_BYTES + samples * (proved + 4 * prompt_tokens + 8 * tokens + 64) <= MAX_CHALLENGE_BYTES
