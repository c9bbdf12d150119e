"""The interface of a generation engine, and what can go wrong in one.

EngineError
├── NoPolicy        asked to generate before anything was loaded
├── BadRequest      a prompt or a seed that the run does not allow
├── BrokenPolicy    the policy's numbers cannot be sampled or proved
├── DoesNotFit      the policy, or one completion, needs more than this machine was told to use
│   └── WrongEngine     the engine has no model of the policy's family
├── EngineDied      the engine's process ended, or did not start; it has to be loaded anew
└── Interrupted     the caller went away while the engine was decoding

A policy file that cannot be loaded raises `node.policy.PolicyError` instead. Every error carries `code`, a
stable identifier for machines, and a sentence for people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from node.policy import Blueprint
from node.protocol.run import SamplingSpec
from node.protocol.slots import SEED_BYTES
from node.protocol.submission import Expected, Rollout
from node.protocol.turns import AskReply


class EngineError(Exception):
    """Base of the tree; `code` is stable across releases."""

    code = "engine_error"


class NoPolicy(EngineError):
    code = "no_policy"


class BadRequest(EngineError):
    code = "bad_request"


class BrokenPolicy(EngineError):
    code = "broken_policy"


class DoesNotFit(EngineError):
    code = "does_not_fit"


class WrongEngine(DoesNotFit):
    code = "wrong_engine"


class EngineDied(EngineError):
    code = "engine_died"


class Interrupted(EngineError):
    code = "interrupted"


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to draw: the prompt's token ids, and the 16-byte seed that forces every choice.

    `max_tokens` ends it before the run's own limit does. `ask` is the environment, where it has several turns.
    `position` is that of its first token where it is a later turn by itself: then `prompt_ids` are all that was said
    before.
    """

    prompt_ids: tuple[int, ...]
    seed: bytes
    max_tokens: int | None = None
    ask: AskReply | None = field(default=None, compare=False)
    position: int = 0

    def cap(self, sampling: SamplingSpec) -> int:
        """The most tokens that it may have."""
        most = sampling.max_new_tokens - self.position
        return most if self.max_tokens is None else min(most, self.max_tokens)


def requests_for(expected: Expected) -> list[SampleRequest]:
    """What a worker asks its engine for: a slot's completions."""
    return [SampleRequest(tuple(expected.prompt_ids), seed, ask=expected.ask) for seed in expected.seeds]


class Engine(Protocol):
    """Draws completions as docs/protocol.md, section 4, says, and proves how."""

    name: str

    @property
    def version(self) -> int | None:
        """The version of the loaded policy, None before the first and after the engine died."""

    @property
    def policy(self) -> Blueprint:
        """The loaded policy without its weights; raises NoPolicy where `version` is None."""

    async def load(self, path: Path, *, version: int) -> None:
        """Draw every later token from the policy in `path`, those of completions under way too.

        Completions under way are cut into segments there, and go on as if the new policy had read all before.
        Whoever wants them whole waits for them first. Starts the engine if it does not run. The old policy
        stays if this raises PolicyError; the engine has to be loaded anew after an EngineError.
        """

    async def generate(
        self, requests: Sequence[SampleRequest], *, ended: Callable[[], None] | None = None
    ) -> list[Rollout]:
        """One rollout for each request, in their order.

        `ended` is called on the event loop whenever one of them has its last token and leaves the batch. May be
        called while earlier calls are under way: all share the engine's batch. Cancelling it makes its completions
        stop within a few tokens, and no other call's. Raises an EngineError.
        """

    async def close(self) -> None:
        """End what the engine started; nothing is under way any more. May be called again."""


def check_requests(requests: Sequence[SampleRequest], *, vocabulary: int, sampling: SamplingSpec) -> None:
    """Raise BadRequest for the first request that the run does not allow."""
    for index, request in enumerate(requests):
        most = sampling.max_prompt_tokens
        if request.position:
            most += request.position + sampling.reply_tokens
        if not 1 <= len(request.prompt_ids) <= most:
            raise BadRequest(f"prompt {index} has {len(request.prompt_ids)} tokens, 1 to {most} are allowed")
        if not all(0 <= token < vocabulary for token in request.prompt_ids):
            raise BadRequest(f"prompt {index} has a token outside the vocabulary of {vocabulary}")
        if len(request.seed) != SEED_BYTES:
            raise BadRequest(f"seed {index} has {len(request.seed)} bytes, not {SEED_BYTES}")
