"""Interface of a generation engine, and its errors.

EngineError
├── NoPolicy        generate was called before any policy was loaded
├── BadRequest      a prompt or a seed that the run does not allow
├── BrokenPolicy    the policy's numbers cannot be sampled or proved
├── DoesNotFit      the policy, or one completion, needs more than this machine may use
│   └── WrongEngine     the engine has no model of the policy's family
├── EngineDied      the engine's process ended, or did not start; load again
└── Interrupted     the caller went away while the engine was decoding

A policy file that cannot be loaded raises `node.policy.file.PolicyError` instead. Every error carries `code`, a stable
identifier for machines, and a sentence for people.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from node.policy.file import Blueprint
from node.protocol.profiles import Hardware
from node.protocol.run import RunSpec, SamplingSpec
from node.protocol.slots import SEED_BYTES
from node.protocol.submission import Expected, Rollout
from node.protocol.turns import RUN_RULES, AskReply, TurnRules


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
    """One completion to draw: the prompt's token ids, and the 16-byte seed that determines every token.

    `max_tokens` caps it below the run's own limit. `ask` is the environment, if it has several turns, and `rules` are
    what it adds to the run's. `position` is that of its first token if it is a later piece; then `prompt_ids` hold the
    whole dialogue so far.
    """

    prompt_ids: tuple[int, ...]
    seed: bytes
    max_tokens: int | None = None
    ask: AskReply | None = field(default=None, compare=False)
    position: int = 0
    rules: TurnRules = field(default=RUN_RULES, compare=False)

    @property
    def has_pieces(self) -> bool:
        """Whether something may be put between tokens, so that it is drawn piece by piece."""
        return self.ask is not None or self.rules.thinking is not None

    def cap(self, sampling: SamplingSpec) -> int:
        """Return the maximum number of tokens to draw."""
        limit = self.rules.most_tokens(sampling) - self.position
        return limit if self.max_tokens is None else min(limit, self.max_tokens)


def requests_for(expected: Expected) -> list[SampleRequest]:
    """Build the requests for a slot's completions."""
    prompt, rules = tuple(expected.prompt_ids), expected.rules
    return [SampleRequest(prompt, seed, ask=expected.ask, rules=rules) for seed in expected.seeds]


class Engine(Protocol):
    """Draws completions as specified in docs/protocol.md, section 4, with proofs."""

    name: str

    @property
    def version(self) -> int | None:
        """Version of the loaded policy; None before the first load and after the engine died."""

    @property
    def policy(self) -> Blueprint:
        """The loaded policy without its weights; raises NoPolicy when `version` is None."""

    async def hardware(self) -> Hardware:
        """Return what it computes on, as the run's pages show it; anything may be raised where that cannot be told."""

    async def load(self, path: Path, *, version: int) -> None:
        """Load the policy in `path`; every later token is drawn from it, also in running completions.

        Running completions are split into segments there and continue as if the new policy had read their whole prefix;
        to keep them whole, wait for them first. Starts the engine if needed. On PolicyError the old policy stays, or
        `version` is None; after an EngineError the engine must be loaded again.
        """

    async def generate(
        self, requests: Sequence[SampleRequest], *, on_finished: Callable[[], None] | None = None
    ) -> list[Rollout]:
        """Draw one rollout per request, in order.

        `on_finished` is called on the event loop whenever a completion has its last token and leaves the batch.
        Concurrent calls share the engine's batch. Cancelling a call stops its completions within a few tokens, and no
        others. Raises an EngineError.
        """

    async def close(self) -> None:
        """End what the engine started; idempotent."""


MakeEngine: TypeAlias = Callable[[RunSpec], Engine]
"""Makes the engine of a run."""


def check_requests(requests: Sequence[SampleRequest], *, vocabulary: int, sampling: SamplingSpec) -> None:
    """Raise BadRequest for the first request the run does not allow."""
    for index, request in enumerate(requests):
        max_tokens = sampling.most_tokens - 1 if request.position else sampling.max_prompt_tokens
        if not 1 <= len(request.prompt_ids) <= max_tokens:
            raise BadRequest(f"prompt {index} has {len(request.prompt_ids)} tokens, 1 to {max_tokens} are allowed")
        if not all(0 <= token < vocabulary for token in request.prompt_ids):
            raise BadRequest(f"prompt {index} has a token outside the vocabulary of {vocabulary}")
        if len(request.seed) != SEED_BYTES:
            raise BadRequest(f"seed {index} has {len(request.seed)} bytes, not {SEED_BYTES}")
