"""Read what a policy wrote in its turn as an assistant's message, with its calls."""

from __future__ import annotations

import json
from typing import Any, Final

from node.chat.conversation import MAX_CALLS
from node.chat.pieces import slot_of, slot_value
from node.protocol.chat import ChatFormat

_CALL: Final = "<tool_call>"
_CALL_END: Final = "</tool_call>"
_THOUGHT: Final = "<think>"
_THOUGHT_END: Final = "</think>"


def reads_calls(chat: ChatFormat) -> bool:
    """Tell whether calls of this format are JSON between <tool_call> marks, which are the ones that are read here."""
    call = chat.calls
    return call is not None and call.argument is None and _CALL in call.call[0]


def whole_turn(text: str, chat: ChatFormat) -> str:
    """Return what a policy wrote with the thoughts that the format begins its turn with, such as empty ones."""
    _, mark, thoughts = chat.generation.rpartition(_THOUGHT)
    return mark + thoughts + text if mark else text


def is_thinking(text: str, chat: ChatFormat | None) -> bool:
    """Tell whether a turn that begins with `text` is in the middle of a thought.

    Without a chat format a turn begins with one, as the environments that read an answer behind </think> have it.
    """
    if chat is None:
        return _THOUGHT_END not in text
    _, mark, thought = whole_turn(text, chat).rpartition(_THOUGHT)
    return bool(mark) and _THOUGHT_END not in thought


def turn_of(text: str, chat: ChatFormat, *, number: int, tools: bool) -> dict[str, Any]:
    """Return the assistant's message, in the form of OpenAI's API; `number` counts turns, and is part of calls' ids.

    A call that is no JSON of the right shape is passed on as a call of no function: what it is told is the
    environment's to say. More than MAX_CALLS are ignored.
    """
    said = chat.early.said
    slot = None if said is None else slot_of(said, "content")
    content = whole_turn(text, chat)
    content = content if slot is None else slot_value(slot, {"content": content})
    message: dict[str, Any] = {"role": "assistant", "content": content}
    calls = (
        [_parse_call(written, f"call_{number}_{place}") for place, written in enumerate(_tool_calls(content))]
        if tools
        else []
    )
    return message | {"tool_calls": calls} if calls else message


def _tool_calls(text: str) -> list[str]:
    found: list[str] = []
    at = text.find(_CALL)
    while at >= 0 and len(found) < MAX_CALLS:
        end = text.find(_CALL_END, at)
        if end < 0:
            break
        found.append(text[at + len(_CALL) : end].strip())
        at = text.find(_CALL, end)
    return found


def _parse_call(written: str, identity: str) -> dict[str, Any]:
    try:
        call = json.loads(written)
        name, arguments = str(call["name"]), json.dumps(call.get("arguments", {}))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        name, arguments = "", written
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
