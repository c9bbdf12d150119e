"""Conversations as they are given: messages in the form of OpenAI's API, read into turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from node.chat.errors import NotText, Unrenderable

Message = Mapping[str, Any]

MAX_CALLS: Final = 16
"""Calls of one assistant's message."""
MAX_MESSAGES: Final = 1024
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_ID = re.compile(r"[A-Za-z0-9_-]{0,128}")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function's name, its arguments, and the call's id."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message; `reasoning` and `calls` are an assistant's, `name` and `id` those of a tool's result."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    name: str = ""
    id: str = ""


def read_messages(messages: Sequence[Message], *, splits_thoughts: bool) -> list[Turn]:
    """Read messages into turns; with `splits_thoughts`, what ends with </think> is an assistant's reasoning.

    They may be anything that an environment says; raises NotText and Unrenderable.
    """
    if not _is_list(messages):
        raise Unrenderable("a conversation is a list of messages")
    if len(messages) > MAX_MESSAGES:
        raise Unrenderable(f"a conversation has at most {MAX_MESSAGES} messages, and this one {len(messages)}")
    return [_read(message, splits_thoughts=splits_thoughts) for message in messages]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _read(message: Message, *, splits_thoughts: bool) -> Turn:
    if not isinstance(message, Mapping):
        raise Unrenderable("a message is an object with a role and a content")
    role, content = message.get("role"), text_of(message)
    if role in ("system", "user"):
        return Turn(str(role), content)
    if role == "tool":
        name, call = str(message.get("name") or ""), str(message.get("tool_call_id") or "")
        if (name and not _NAME.fullmatch(name)) or not _ID.fullmatch(call):
            raise Unrenderable("a tool's name or a call's id has characters that have no place in a chat")
        return Turn("tool", content, name=name, id=call)
    if role != "assistant":
        raise Unrenderable(f"a message has the role {str(role)[:40]!r}; there are system, user, assistant and tool")
    reasoning = message.get("reasoning_content") or ""
    if not isinstance(reasoning, str):
        raise NotText("a message's reasoning_content is no text")
    if splits_thoughts and not message.get("reasoning_content"):
        reasoning, content = split_thoughts(content)
    calls = message.get("tool_calls") or ()
    if not _is_list(calls):
        raise Unrenderable("a message's tool_calls are no list")
    if len(calls) > MAX_CALLS:
        raise Unrenderable(f"a message has at most {MAX_CALLS} calls, and this one {len(calls)}")
    return Turn("assistant", content, reasoning, tuple(map(_read_call, calls)))


def split_thoughts(content: str) -> tuple[str, str]:
    """Return the reasoning and the rest of an assistant's text, as templates that keep them apart do."""
    if "</think>" not in content:
        return "", content
    reasoning = content.partition("</think>")[0].rstrip("\n").rpartition("<think>")[2].lstrip("\n")
    return reasoning, content.rpartition("</think>")[2].lstrip("\n")


def text_of(message: Message) -> str:
    """Return the text of a message's content, parts of text joined; raises NotText."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise NotText("a message's content is no text, and no list of parts")
    return "".join(map(_part, content))


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(text := part.get("text", ""), str):
        return text
    raise NotText("message holds content other than text")


def _read_call(call: Message) -> ToolCall:
    """Read one call; arguments may be an object, or JSON of one as OpenAI's API has them."""
    try:
        function = call.get("function", call)
        name, arguments, identity = str(function["name"]), function.get("arguments") or {}, str(call.get("id") or "")
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise Unrenderable("a call has no name, or arguments that are no JSON object") from error
    if not isinstance(arguments, Mapping) or not _NAME.fullmatch(name) or not _ID.fullmatch(identity):
        raise Unrenderable("a call has a name or an id of other characters, or arguments that are no JSON object")
    return ToolCall(name, arguments, identity)
