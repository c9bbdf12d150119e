"""Turns: an environment's replies between the model's tokens, re-derived by everybody (docs/protocol.md, 4.7).

A completion is the model's tokens alone. Where one of them ends the sequence a turn is over, and the environment may
say something, over which the model goes on. A worker finds out by `Dialogue` as it draws, whoever checks its work by
`replay`. Both ask the environment with the same turns, so neither has to believe the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

from node.protocol.run import SamplingSpec

MAX_REPLY_CHARACTERS: Final = 65_536
"""A longer reply ends the rollout without being tokenised."""

Replies = tuple[tuple[int, tuple[int, ...]], ...]
"""What the environment said in a rollout: the completion tokens before it, and its own token ids; ascending."""

AskReply = Callable[[Sequence[Sequence[int]]], Sequence[int] | None]
"""From the model's turns so far, as token ids with their ends, to what the environment says next; None: nothing more.

Deterministic; may take a while, and raises only for faults of this machine.
"""


@dataclass(eq=False)
class Dialogue:
    """A rollout in progress: `after` returns the environment's reply to each turn."""

    sampling: SamplingSpec
    eos_ids: Collection[int]
    ask: AskReply | None
    replies: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    _turns: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """The model's tokens so far."""
        return sum(map(len, self._turns))

    def after(self, turn: Sequence[int]) -> tuple[int, ...] | None:
        """Return the environment's reply to the model's next `turn`; None where the rollout is over.

        Raises whatever asking raises.
        """
        self._turns.append(tuple(turn))
        sampling = self.sampling
        if self.ask is None or turn[-1] not in self.eos_ids:
            return None
        if len(self._turns) >= sampling.max_turns or self.tokens >= sampling.max_new_tokens:
            return None
        said = self.ask(tuple(self._turns))
        if said is None or len(said) + sum(len(ids) for _, ids in self.replies) > sampling.max_reply_tokens:
            return None
        self.replies.append((self.tokens, tuple(said)))
        return tuple(said)


@dataclass(frozen=True, slots=True)
class Replay:
    """Replies in a completion, and the number of its tokens when it ended (None: it has not)."""

    replies: Replies
    end: int | None


def replay(
    tokens: Sequence[int], *, eos_ids: Collection[int], sampling: SamplingSpec, ask: AskReply | None = None
) -> Replay:
    """Replay a completion as its worker generated it; `ask` is None where the environment has no turns.

    It ends where the rollout is over, whatever follows there. Raises whatever asking raises.
    """
    dialogue = Dialogue(sampling, eos_ids, ask)
    for start, end in pairwise([0, *_ends(tokens, eos_ids)]):
        if dialogue.after(tokens[start:end]) is None:
            return Replay(tuple(dialogue.replies), end)
    return Replay(tuple(dialogue.replies), None)


def turns_of(tokens: Sequence[int], eos_ids: Collection[int]) -> list[list[int]]:
    """Split a completion after each end-of-sequence token."""
    edges = [0, *_ends(tokens, eos_ids)]
    if edges[-1] < len(tokens):
        edges.append(len(tokens))
    return [list(tokens[start:end]) for start, end in pairwise(edges)]


def _ends(tokens: Sequence[int], eos_ids: Collection[int]) -> Iterator[int]:
    return (index + 1 for index, token in enumerate(tokens) if token in eos_ids)


def interleaved(tokens: Sequence[int], replies: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """Return `tokens` with the replies inserted at their positions: the model's input."""
    found: list[int] = []
    at = 0
    for before, ids in replies:
        found += tokens[at:before]
        found += ids
        at = before
    return [*found, *tokens[at:]]


def pieces(segment_tokens: Iterable[int], replies: Iterable[tuple[int, Sequence[int]]]) -> list[int]:
    """Return the lengths of the runs of tokens that one policy drew in one turn: what proof chunks do not go beyond."""
    edges = {0, *accumulate(segment_tokens), *(before for before, _ in replies)}
    return [end - start for start, end in pairwise(sorted(edges))]
