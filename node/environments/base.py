"""Problems, and rewards for completions of them (docs/protocol.md, sections 5 and 7).

An environment is a pure function of its arguments: worker, coordinator and auditor each compute `problem(index)` and
get the same prompt, and anyone can recompute a reward. So nothing here reads a clock, a network, Python's salted
`hash`, or the order of a set of strings; randomness comes from `draws`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import msgspec

from node.errors import NodeError
from node.protocol.environment_spec import END_OF_THOUGHT
from shardcast.wire import derive

INDEX_LIMIT = 2**63
"""Exclusive upper bound of problem indices; slots draw them uniformly (section 5)."""

REPLY_SECONDS = 20.0
"""Limit of an environment's replies, and of its rewards, in one submission: a third of a verifier's claim on it."""


class EnvironmentFault(NodeError):
    """An environment cannot be used on this machine, or for this run; `code` says why."""

    code = "environment_fault"


class DatasetChanged(EnvironmentFault):
    """A dataset's file is no longer the one that was verified: nothing more may be drawn from it."""

    code = "dataset_changed"


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt as text, and what the environment needs to score an answer.

    `opening`: characters of the prompt before the user's text (e.g. chat markup), where additional requests are
    inserted. `messages`: the conversation up to the assistant's turn, where the environment has one (role and content,
    as OpenAI's API has them); `prompt` is what a run without a chat format shows.
    """

    prompt: str
    data: Mapping[str, Any] = field(default_factory=dict)
    opening: int = 0
    messages: Sequence[Mapping[str, Any]] = ()


class Environment(Protocol):
    """A source of problems with its reward."""

    @property
    def name(self) -> str:
        """Name in a run's `environments` list."""

    def problem(self, index: int) -> Problem:
        """Return problem `index`, 0 <= index < 2**63; the same on every machine and Python version."""

    def reward(self, problem: Problem, completion: str) -> float:
        """Return the reward in [0, 1]; deterministic, never raises on account of the completion's text.

        Raises NodeError if this machine cannot tell; the verdict is then indeterminate.
        """


@runtime_checkable
class Conversation(Environment, Protocol):
    """An environment of several turns: after each turn of the model it may reply, and the model continues.

    Replies are never transmitted: worker, coordinator and auditor each call `reply` with the same turns and get the
    same text (docs/protocol.md, section 4.7). `reward` scores a completion of one turn.
    """

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """Return the environment's reply to the last of the model's `turns`; None ends the rollout.

        Deterministic, bounded in time and size, never raises on account of the turns' text. Raises NodeError if this
        machine cannot tell; the verdict is then indeterminate.
        """

    def reward_turns(self, problem: Problem, turns: Sequence[str]) -> float:
        """Return the reward in [0, 1] of all the model's turns, at least one; otherwise like `Environment.reward`."""


def is_conversation(environment: Environment) -> TypeGuard[Conversation]:
    """Return whether an environment is a `Conversation`; for each reward, where isinstance takes 12 µs."""
    return hasattr(environment, "reply") and hasattr(environment, "reward_turns")


def draws(environment: str, index: int) -> Iterator[int]:
    """Yield uniform 64-bit integers for one problem: BLAKE3 of the environment's name, the index and a block counter.

    `next(numbers) % n` is uniform below n up to a bias of n / 2**64. Python's `random` is avoided, as its methods may
    change between releases.
    """
    for block in count():
        drawn = derive(
            "swarmproof/1 environment", environment.encode(), index.to_bytes(8, "big"), block.to_bytes(4, "big")
        )
        yield from (int.from_bytes(drawn[at : at + 8], "big") for at in range(0, len(drawn), 8))


def answer_in(completion: str) -> str | None:
    """Return the text after the last `</think>`, stripped; None without one."""
    _, mark, answer = completion.rpartition(END_OF_THOUGHT)
    return answer.strip() if mark else None


T = TypeVar("T", bound=msgspec.Struct)


def configure(cls: type[T], arguments: Mapping[str, Any]) -> T:
    """Build an environment from its settings `arguments`; raises EnvironmentFault (bad_arguments) for a wrong one."""
    try:
        return msgspec.convert(dict(arguments), cls)
    except msgspec.ValidationError as error:
        raise EnvironmentFault(f"{cls.__name__}: {error}", code="bad_arguments") from error
