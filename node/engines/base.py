"""The interface of a generation engine, and what can go wrong in one.

EngineError
├── NoPolicy        asked to generate before anything was loaded
├── BadRequest      a prompt or a seed that the run does not allow
├── BrokenPolicy    the policy's numbers cannot be sampled or proved
└── Interrupted     the caller went away while the engine was decoding

A policy file that cannot be loaded raises `node.policy.PolicyError` instead. Every error carries `code`, a
stable identifier for machines, and a sentence for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node.policy import Policy
from node.protocol.run import SamplingSpec
from node.protocol.slots import SEED_BYTES
from node.protocol.submission import Rollout


class EngineError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "engine_error"


class NoPolicy(EngineError):
    code = "no_policy"


class BadRequest(EngineError):
    code = "bad_request"


class BrokenPolicy(EngineError):
    code = "broken_policy"


class Interrupted(EngineError):
    code = "interrupted"


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to draw: the prompt's token ids, and the 16-byte seed that forces every choice."""

    prompt_ids: tuple[int, ...]
    seed: bytes


class Engine(Protocol):
    """Draws completions as docs/protocol.md, section 4, says, and proves how."""

    name: str

    @property
    def version(self) -> int | None:
        """The version of the loaded policy, None before the first."""

    @property
    def policy(self) -> Policy:
        """The loaded policy; raises NoPolicy before the first."""

    async def load(self, path: Path, *, version: int) -> None:
        """Take the policy in `path` for all later calls of `generate`; the old one stays if this raises.

        A `generate` under way goes on with the policy it began with. Raises PolicyError and BrokenPolicy.
        """

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Rollout]:
        """One rollout for each request, in their order, all of the policy that is loaded when this is called.

        Cancelling it makes the decoding stop within a few tokens. Raises an EngineError.
        """


def check_requests(requests: Sequence[SampleRequest], *, vocabulary: int, sampling: SamplingSpec) -> None:
    """Raise BadRequest for the first request that the run does not allow."""
    for index, request in enumerate(requests):
        if not 1 <= len(request.prompt_ids) <= sampling.max_prompt_tokens:
            raise BadRequest(
                f"prompt {index} has {len(request.prompt_ids)} tokens, 1 to {sampling.max_prompt_tokens} are allowed"
            )
        if not all(0 <= token < vocabulary for token in request.prompt_ids):
            raise BadRequest(f"prompt {index} has a token outside the vocabulary of {vocabulary}")
        if len(request.seed) != SEED_BYTES:
            raise BadRequest(f"seed {index} has {len(request.seed)} bytes, not {SEED_BYTES}")
