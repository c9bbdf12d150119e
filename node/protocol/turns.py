"""Turns: an environment's replies between the model's tokens, re-derived by everybody (docs/protocol.md, 4.7).

A completion is the model's tokens alone. Where one of them ends the sequence, or completes a stop string, a turn is
over, and the environment may say something, over which the model goes on. Where a thought is longer than its budget,
its end is put behind it. A worker finds out by `Dialogue` as it draws, whoever checks its work by `replay`. Both ask
the environment with the same turns, so neither has to believe the other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
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

CONTEXT_TOKENS: Final = 8
"""Tokens of a window for stop strings beyond the bytes of the longest: some have no text, or more behind others."""

_ALL_TURNS: Final = SamplingSpec(max_new_tokens=2**31 - 1, max_turns=64)


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The texts that end a turn; `decode` is the policy's tokenizer."""

    strings: Sequence[str]
    decode: Callable[[Sequence[int]], str]

    @property
    def window(self) -> int:
        """How many tokens are looked at: each has a byte or more, but for a few."""
        return max(len(one.encode()) for one in self.strings) + CONTEXT_TOKENS

    def found(self, tokens: Sequence[int], start: int, end: int) -> bool:
        """Return whether token `end` - 1 ends what began at `start`. Raises what `decode` raises."""
        text = self.decode(tokens[max(start, end - self.window) : end])
        return any(one in text for one in self.strings)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """What stands behind a turn's first `tokens` tokens where `is_open` of them: `end_ids`."""

    tokens: int
    end_ids: tuple[int, ...]
    is_open: Callable[[Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class TurnRules:
    """What an environment adds to the run's sampling rules.

    `max_new_tokens`: of a completion, the ends of its thoughts included; None is the run's.
    """

    max_new_tokens: int | None = None
    stop: StopStrings | None = None
    thinking: ThinkingBudget | None = None

    def most_tokens(self, sampling: SamplingSpec) -> int:
        """Return the most tokens of a completion and of the ends of its thoughts together."""
        run = sampling.max_new_tokens
        return run if self.max_new_tokens is None else min(run, self.max_new_tokens)

    def ends_turn(
        self, tokens: Sequence[int], eos_ids: Collection[int], *, start: int = 0, end: int | None = None
    ) -> bool:
        """Return whether token `end` - 1 (the last) ends the turn of which a piece began at `start`.

        Raises what the tokenizer raises.
        """
        end = len(tokens) if end is None else end
        return tokens[end - 1] in eos_ids or (self.stop is not None and self.stop.found(tokens, start, end))


RUN_RULES: Final = TurnRules()
"""Of an environment that adds nothing."""


@dataclass(eq=False)
class Dialogue:
    """A rollout in progress: `after` returns what stands behind each piece that the model draws.

    A piece is a turn, or either part of one that is longer than the thinking budget. `replies` are what stands behind
    pieces, the ends of thoughts included; `turns` are the turns so far, with these ends in them.
    """

    sampling: SamplingSpec
    eos_ids: Collection[int]
    ask: AskReply | None
    rules: TurnRules = RUN_RULES
    replies: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    turns: list[tuple[int, ...]] = field(default_factory=list)
    tokens: int = 0
    _thought: tuple[int, ...] | None = None
    _end_tokens: int = 0
    _reply_tokens: int = 0

    @property
    def most(self) -> int:
        """The most tokens of the completion, which the ends of its thoughts leave."""
        return self.rules.most_tokens(self.sampling) - self._end_tokens

    @property
    def room(self) -> int:
        """The most tokens of the next piece."""
        left, thinking = self.most - self.tokens, self.rules.thinking
        if thinking is None or self._thought is not None or thinking.tokens + len(thinking.end_ids) >= left:
            return left
        return thinking.tokens

    def piece_end(self, tokens: Sequence[int]) -> int | None:
        """Return where the next piece ends in the completion `tokens`; None where the completion does before it."""
        start, room = self.tokens, self.room
        if self.rules.stop is None:  # `ends_turn` of each token takes three times as long
            for end, token in enumerate(tokens[start : start + room], start + 1):
                if token in self.eos_ids:
                    return end
        else:
            for end in range(start + 1, min(start + room, len(tokens)) + 1):
                if self.rules.ends_turn(tokens, self.eos_ids, start=start, end=end):
                    return end
        return start + room if start + room < self.most and start + room <= len(tokens) else None

    def after(self, piece: Sequence[int]) -> tuple[int, ...] | None:
        """Return what stands behind the model's next `piece`; None where the rollout is over.

        Raises whatever asking raises.
        """
        turn = (*(self._thought or ()), *piece)
        is_turn = self.rules.ends_turn(piece, self.eos_ids)
        is_thought = not is_turn and len(piece) == self.room < self.most - self.tokens
        self.tokens += len(piece)
        thinking = self.rules.thinking
        if is_thought and thinking is not None:
            end_ids = thinking.end_ids if thinking.is_open(turn) else ()
            self._thought = turn + end_ids
            self._end_tokens += len(end_ids)
            self.replies.append((self.tokens, end_ids))
            return end_ids
        self._thought = None
        self.turns.append(turn)
        if self.ask is None or not is_turn:
            return None
        if len(self.turns) >= self.sampling.max_turns or self.tokens >= self.most:
            return None
        said = self.ask(tuple(self.turns))
        if said is None or self._reply_tokens + len(said) > self.sampling.max_reply_tokens:
            return None
        self._reply_tokens += len(said)
        self.replies.append((self.tokens, tuple(said)))
        return tuple(said)

    def see(self, tokens: Sequence[int]) -> int | None:
        """Go through a completion; return the number of its tokens with which the rollout was over, None if it was not.

        Raises whatever asking raises.
        """
        while (end := self.piece_end(tokens)) is not None:
            if self.after(tokens[self.tokens : end]) is None:
                return end
        return None


@dataclass(frozen=True, slots=True)
class Replay:
    """Replies in a completion, the number of its tokens when it ended (None: it has not), and the most that it has."""

    replies: Replies
    end: int | None
    most: int


def replay(
    tokens: Sequence[int],
    *,
    eos_ids: Collection[int],
    sampling: SamplingSpec,
    ask: AskReply | None = None,
    rules: TurnRules = RUN_RULES,
) -> Replay:
    """Replay a completion as its worker generated it; `ask` is None where the environment has no turns.

    It ends where the rollout is over, whatever follows there. Raises whatever asking raises.
    """
    dialogue = Dialogue(sampling, eos_ids, ask, rules)
    end = dialogue.see(tokens)
    return Replay(tuple(dialogue.replies), end, dialogue.most)


def turns_of(tokens: Sequence[int], eos_ids: Collection[int], rules: TurnRules = RUN_RULES) -> list[list[int]]:
    """Split a whole completion into its turns, the ends of their thoughts put in."""
    dialogue = Dialogue(_ALL_TURNS, eos_ids, lambda _: (), rules)
    dialogue.see(tokens)
    if dialogue.tokens < len(tokens):
        dialogue.after(tokens[dialogue.tokens :])
    return [list(turn) for turn in dialogue.turns]


def ends_whole(tokens: Sequence[int], eos_ids: Collection[int], rules: TurnRules = RUN_RULES) -> bool:
    """Return whether a whole completion's last token ends its last turn; otherwise the completion was cut off."""
    dialogue = Dialogue(_ALL_TURNS, eos_ids, lambda _: (), rules)
    dialogue.see(tokens)
    return dialogue.tokens == len(tokens)


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
