"""Render a conversation as the text a policy reads (docs/environments.md, verifiers).

A policy file has no chat template: templates are programs, and a policy comes from a stranger (docs/protocol.md,
section 11). So the forms are fixed here, and a run selects one. The policy's own turns stay in its context token by
token, end mark included; only what is said to it is rendered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

Form = Literal["plain", "chatml"]
Message = Mapping[str, Any]

MAX_TOOL_CALLS = 16
"""Calls per turn; later ones are ignored."""

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_TOOLS: Final = (
    "These functions can be called:\n{tools}\n"
    'To call one, write <tool_call>{{"name": "its name", "arguments": {{}}}}</tool_call> and end your turn.'
)


class NotText(ValueError):
    """A message holds an image, audio, or nothing a text model can read."""


def prompt_of(messages: Sequence[Message], *, form: Form, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, int]:
    """Render a conversation up to the assistant's turn; also return the offset of the first user message's text.

    `tools` are definitions in OpenAI's format, listed in the system message. Raises NotText.
    """
    listed = _with_tools(messages, tools)
    first = next((index for index, message in enumerate(listed) if message["role"] == "user"), None)
    if first is None:
        return _render(listed, form) + _assistant_prefix(form), 0
    before = _render(listed[:first], form) + _message_prefix("user", form)
    return _render(listed, form) + _assistant_prefix(form), len(before)


def reply_of(messages: Sequence[Message], *, form: Form) -> str:
    """Render what stands between two assistant turns. Raises NotText."""
    return ("\n\n" if form == "plain" else "\n") + _render(messages, form) + _assistant_prefix(form)


def turn_of(text: str, *, form: Form, number: int, tools: bool) -> dict[str, Any]:
    """The assistant's message, in the form of OpenAI's API; `number` counts turns, and is part of the calls' ids.

    A call that is no JSON of the right shape is passed on as a call of no function: what it is told is the
    environment's to say.
    """
    content = text.strip() if form == "plain" else text
    message: dict[str, Any] = {"role": "assistant", "content": content}
    calls = (
        [_parse_call(written, f"call_{number}_{place}") for place, written in enumerate(_tool_calls(content))]
        if tools
        else []
    )
    return message | {"tool_calls": calls} if calls else message


def _with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    if not tools:
        return list(messages)
    described = "\n".join(json.dumps(tool.get("function", tool), sort_keys=True) for tool in tools)
    told = _TOOLS.format(tools=described)
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{_text(messages[0])}\n\n{told}"}, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _render(messages: Sequence[Message], form: Form) -> str:
    end = "\n\n" if form == "plain" else "<|im_end|>\n"
    return "".join(_message_prefix(str(message["role"]), form) + _text(message) + end for message in messages)


def _message_prefix(role: str, form: Form) -> str:
    # Models are told a tool's result by a user's message with these marks (Qwen's and Hermes' templates).
    role = "user" if role == "tool" else role
    return f"{role.capitalize()}: " if form == "plain" else f"<|im_start|>{role}\n"


def _assistant_prefix(form: Form) -> str:
    return "Assistant:" if form == "plain" else "<|im_start|>assistant\n"


def _text(message: Message) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(_part(part) for part in content)
    if message["role"] == "tool":
        return f"<tool_response>\n{content}\n</tool_response>"
    return content


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") == "text":
        return str(part.get("text", ""))
    raise NotText("message holds content other than text")


def _tool_calls(text: str) -> list[str]:
    found: list[str] = []
    at = text.find(_CALL)
    while at >= 0 and len(found) < MAX_TOOL_CALLS:
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
