"""Chat formats: how a conversation becomes the text that a policy reads, as data (docs/protocol.md, section 5.3).

A chat template is a program, and a run's comes from a stranger. So the operator reduces it to this data once
(`node.chat.reduce`), the run's key signs it with the other rules, and every node renders by it (`node.chat.render`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from shardcast.wire import Wire, encode

MAX_FORMAT_BYTES: Final = 48 * 1024
ENCODINGS: Final = ("", "strip", "strip-lf", "lstrip-lf", "rstrip-lf", "lstrip", "rstrip", "json")
"""What a slot does to its value, after a colon; see `node.chat.pieces`."""

Text = Annotated[str, Meta(max_length=8192)]
Pieces = Annotated[tuple[Text, ...], Meta(min_length=1, max_length=15)]
"""Texts at even places, and at odd ones the slots between them: a slot's name, or `name:encoding`."""
Mark = Annotated[str, Meta(min_length=2, max_length=128)]

_HEAD: Final = ("system", "tools")
_USER: Final = ("content",)
_OPENING_USER: Final = (*_HEAD, *_USER)
_ASSISTANT: Final = ("reasoning", "content", "calls")


class Opening(Wire, frozen=True):
    """How a conversation begins, and the forms of user messages that differ from the others'.

    `head` stands before the first user message. `first` is the form of the first user message, `last` of the last one,
    `final` of the last one where no message follows it; the later of these goes before the earlier.
    """

    head: Pieces
    first: Pieces | None = None
    last: Pieces | None = None
    final: Pieces | None = None


class Openings(Wire, frozen=True):
    """The openings without and with a system message, without and with tools; None where the format has none."""

    plain: Opening
    system: Opening | None = None
    tools: Opening | None = None
    both: Opening | None = None


class AssistantForms(Wire, frozen=True):
    """An assistant's message of text, of calls, or of text and calls; the last three have reasoning besides."""

    said: Pieces | None = None
    called: Pieces | None = None
    both: Pieces | None = None
    thought_said: Pieces | None = None
    thought_called: Pieces | None = None
    thought_both: Pieces | None = None


class ToolList(Wire, frozen=True):
    """How tool definitions are listed: each as JSON, with `between` from one to the next.

    `subject`: the whole definition, or its `function` alone. `indent` 0 is one line. With `raw_strings`, strings of the
    function itself stand between quotation marks without escapes.
    """

    subject: Literal["tool", "function"] = "tool"
    indent: Annotated[int, Meta(ge=0, le=8)] = 0
    sort_keys: bool = False
    raw_strings: bool = False
    between: Text = "\n"


class CallFormat(Wire, frozen=True):
    """Calls of an assistant's message: `call` for each, `between` from one to the next (None: one call at most).

    With `argument`, arguments are written one by one by it, values that are text as they are and others as JSON;
    without, they are one JSON object. `id_length`: of a call's id; 0 is any.
    """

    call: Pieces
    between: Text | None = None
    argument: Pieces | None = None
    id_length: Annotated[int, Meta(ge=0, le=64)] = 0


class ResultFormat(Wire, frozen=True):
    """Tool messages that follow each other: `first`, then `next` for each other one, then `end`."""

    first: Pieces
    next: Pieces
    end: Text


class ChatFormat(Wire, frozen=True):
    """All that rendering needs.

    `early` are the forms of assistant's messages before the last user message, `late` of those after it. `generation`
    begins the assistant's turn. `after_turn` follows the end mark that the policy itself draws, where the conversation
    goes on. `marks` are what a reply must not contain, since the tokenizer makes them part of the frame of turns.
    `splits_thoughts`: what ends with </think> in an assistant's text is its reasoning. `alternates`: users and
    assistants take turns. `special_tokens`: the tokenizer's own marks are added to the prompt's text, as they are where
    a run has no chat format; a model's template writes its own.
    """

    openings: Openings
    user: Pieces
    early: AssistantForms
    late: AssistantForms
    generation: Text
    after_turn: Text
    calls: CallFormat | None = None
    results: ResultFormat | None = None
    tools: ToolList | None = None
    marks: Annotated[tuple[Mark, ...], Meta(max_length=64)] = ()
    splits_thoughts: bool = False
    alternates: bool = False
    special_tokens: bool = False

    def __post_init__(self) -> None:
        """Refuse what rendering would stumble over; msgspec turns the ValueError into its own error."""
        used: set[str] = set()
        for where, pieces, allowed in self._all_pieces():
            if pieces is None:
                continue
            names = [slot.partition(":")[0] for slot in pieces[1::2]]
            encodings = [slot.partition(":")[2] for slot in pieces[1::2] if ":" in slot]
            if len(pieces) % 2 == 0 or len(set(names)) < len(names):
                raise ValueError(f"{where}: texts and slots take turns, beginning and ending with a text")
            if not set(names) <= set(allowed) or not set(encodings) <= set(ENCODINGS[1:]):
                raise ValueError(f"{where}: the slots are {', '.join(allowed)}, each at most once")
            if allowed in (_USER, _OPENING_USER) and "content" not in names:
                raise ValueError(f"{where}: a user message needs the slot content")
            used.update(names)
        for needed, part in (("calls", self.calls), ("tools", self.tools)):
            if part is None and needed in used:
                raise ValueError(f"a slot for {needed} needs the format of {needed}")
        if len(encode(self)) > MAX_FORMAT_BYTES:
            raise ValueError(f"a chat format has at most {MAX_FORMAT_BYTES} bytes")

    def _all_pieces(self) -> Iterator[tuple[str, Pieces | None, tuple[str, ...]]]:
        openings = self.openings
        for kind, opening in zip(openings.__struct_fields__, msgspec.structs.astuple(openings), strict=True):
            if opening is not None:
                yield f"openings.{kind}.head", opening.head, _HEAD
                for name in ("first", "last", "final"):
                    yield f"openings.{kind}.{name}", getattr(opening, name), _OPENING_USER
        yield "user", self.user, _USER
        for when, forms in (("early", self.early), ("late", self.late)):
            for name in forms.__struct_fields__:
                yield f"{when}.{name}", getattr(forms, name), _ASSISTANT
        if self.calls is not None:
            yield "calls.call", self.calls.call, ("name", "arguments", "id")
            yield "calls.argument", self.calls.argument, ("key", "value")
        if self.results is not None:
            yield "results.first", self.results.first, ("content", "name", "id")
            yield "results.next", self.results.next, ("content", "name", "id")
