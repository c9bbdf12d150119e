"""Rows to tokens, each of them to be learnt or context.

A conversation is rendered by the folder's own chat template, as transformers does it. What the assistant adds to the
text before its turn is learnt, up to and with its end mark: a policy draws nothing behind that. The text before each
turn has to be a prefix of the whole conversation's, or no part of that could be called the assistant's; a template that
shows earlier turns differently is refused, or each turn becomes an example of its own.

Pieces are encoded apart, as in a run: a prompt by itself, then what the policy draws, then what answers it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from coordinator.sft.rows import ChatRow, PairRow, RowFault
from node.chat.template import TemplateAnswer


class Template(Protocol):
    """A folder's chat template, as `node.chat.template.FolderTemplate` runs it."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> TemplateAnswer:
        """Render a conversation; with `opening`, up to the beginning of the assistant's turn."""


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """Token ids, and whether each is learnt; the first is not, since nothing predicts it."""

    ids: tuple[int, ...]
    is_learnt: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class RowRenderer:
    """Renders rows with a folder's tokenizer and chat template, None where it has none.

    `end_marks` are the model's; `end_mark` is put behind a completion that no template ends. With `each_turn`, each of
    the assistant's turns becomes an example of its own, behind the conversation as the template shows it at that turn.
    """

    tokenizer: PreTrainedTokenizerFast
    end_marks: frozenset[int]
    end_mark: int
    template: Template | None
    each_turn: bool = False

    def examples(self, row: PairRow | ChatRow) -> Iterator[TokenizedExample]:
        """Yield the examples of a row; raises RowFault."""
        if isinstance(row, PairRow):
            completion = [*self._encode(row.completion), self.end_mark]
            yield _example([(self._encode(row.prompt, begins=True), False), (completion, True)])
            return
        if self.template is None:
            raise RowFault("is a conversation, and the model's folder has no chat template")
        pieces: list[tuple[list[int], bool]] = []
        shown = ""
        for turn, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            before = self._render(row.messages[:turn], row.tools, opening=True)
            after = self._render(row.messages[: turn + 1], row.tools, opening=False)
            if not after.startswith(before):
                raise RowFault(
                    f"message {turn + 1}: the chat template does not begin the assistant's turn with what it shows "
                    "before one (add_generation_prompt)"
                )
            if self.each_turn:
                shown, pieces = "", []
            if not before.startswith(shown):
                raise RowFault(
                    f"message {turn + 1}: the chat template shows earlier turns differently behind it, so that no part "
                    "of the text is theirs; --each-turn makes an example of each of the assistant's turns"
                )
            pieces += [(self._encode(before[len(shown) :]), False), *self._turn(after[len(before) :], number=turn + 1)]
            shown = after
            if self.each_turn:
                yield _example(pieces)
        if not self.each_turn:
            yield _example(pieces)

    def _turn(self, text: str, *, number: int) -> list[tuple[list[int], bool]]:
        """Encode what the assistant adds: learnt up to its last end mark, and context behind it."""
        ids = self._encode(text)
        ends = [at for at, token in enumerate(ids) if token in self.end_marks]
        if not ends:
            raise RowFault(
                f"message {number}: the chat template ends the assistant's turn with none of the model's end marks "
                f"({self._names()}); --end-mark adds the one that it uses"
            )
        return [(ids[: ends[-1] + 1], True), (ids[ends[-1] + 1 :], False)]

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, opening: bool
    ) -> str:
        assert self.template is not None
        answer = self.template(messages, tools, opening=opening)
        if answer.fault:
            raise RowFault(f"the chat template fails: {answer.fault}")
        return answer.text

    def _encode(self, text: str, *, begins: bool = False) -> list[int]:
        """Encode text, with the marks that begin a prompt if it `begins`: a template writes its own."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]
        return ids

    def _names(self) -> str:
        return ", ".join(map(str, self.tokenizer.convert_ids_to_tokens(sorted(self.end_marks))))


def _example(pieces: Sequence[tuple[Sequence[int], bool]]) -> TokenizedExample:
    ids = tuple(token for piece, _ in pieces for token in piece)
    is_learnt = tuple(learnt for piece, learnt in pieces for _ in piece)
    if is_learnt[0]:
        raise RowFault("nothing stands before the first token that is to be learnt")
    return TokenizedExample(ids, is_learnt)
