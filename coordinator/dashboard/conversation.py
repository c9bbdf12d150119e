"""A completion of several turns as people read one: who said what, thoughts, calls of tools and what they returned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from coordinator.dashboard.visible import visible
from coordinator.verifier.evidence import RowEvidence

MOST_CHARACTERS: Final = 4000
"""Of one part; the tokens below have all that was kept."""

MOST_PARTS: Final = 64
"""Of one utterance: a policy may write nothing but marks."""

_MARKED: Final = re.compile(
    r"<think>(?P<thought>.*?)(?:</think>|\Z)"
    r"|<tool_call>(?P<call>.*?)(?:</tool_call>|\Z)"
    r"|<tool_response>(?P<result>.*?)(?:</tool_response>|\Z)",
    re.DOTALL,
)

_MARKUP: Final = re.compile(r"<\|[a-z_]{1,32}\|>(?:system|user|assistant|tool)?\n?")
"""What a chat format writes between messages, which a reply has around what the environment said."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of what was said, made visible; `name` is that of a call's function."""

    kind: Literal["text", "thought", "call", "result"]
    text: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Utterance:
    """What the model wrote in one turn, or what the environment replied."""

    is_models: bool
    parts: Sequence[Passage]


def conversation_of(row: RowEvidence, *, most_tokens: int) -> list[Utterance]:
    """Return the turns of a completion, as far as its first `most_tokens` kept tokens go; [] if it is plain text."""
    said, at = [], 0
    pieces = row.pieces[:most_tokens]
    for before, reply in row.replies:
        if before > len(pieces):
            break
        said += [(True, "".join(pieces[at:before])), (False, reply)]
        at = before
    said.append((True, "".join(pieces[at:])))
    texts = [(is_models, _opened(text) if is_models else _MARKUP.sub("", text)) for is_models, text in said]
    found = [Utterance(is_models, parts) for is_models, text in texts if (parts := list(_parts(text)))]
    is_plain = all(part.kind == "text" for utterance in found for part in utterance.parts)
    return [] if len(found) <= 1 and is_plain else found


def _opened(text: str) -> str:
    """Return a turn with the mark of its thought, which the chat format may have written before the model began."""
    thought, mark, _ = text.partition("</think>")
    return f"<think>{text}" if mark and "<think>" not in thought else text


def _parts(text: str) -> Iterator[Passage]:
    at = 0
    for count, marked in enumerate(_MARKED.finditer(text)):
        if count >= MOST_PARTS:
            break
        if plain := text[at : marked.start()].strip():
            yield Passage("text", _shown(plain))
        at = marked.end()
        if marked["call"] is not None:
            yield _call(marked["call"])
        elif marked["thought"] is None:
            yield Passage("result", _shown(marked["result"].strip()))
        elif marked["thought"].strip():
            yield Passage("thought", _shown(marked["thought"].strip()))
    if plain := text[at:].strip():
        yield Passage("text", _shown(plain))


def _call(written: str) -> Passage:
    """Return a call with its arguments a line each, code as it is; one that is no JSON as it was written."""
    try:
        call = json.loads(written)
        name, arguments = str(call["name"]), call.get("arguments", {})
        lines = [_argument(key, value) for key, value in arguments.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Passage("call", _shown(written.strip()), "not a call")
    return Passage("call", _shown("\n".join(lines)), visible(name, most=64))


def _argument(key: str, value: object) -> str:
    return value if key == "code" and isinstance(value, str) else f"{key} = {json.dumps(value, ensure_ascii=False)}"


def _shown(text: str) -> str:
    # Marks of line ends are for whoever looks at tokens.
    return visible(text, most=MOST_CHARACTERS, lines=True).replace("↵\n", "\n")
