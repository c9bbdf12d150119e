"""Render conversations by a chat format: what everybody derives alike (docs/protocol.md, section 5.3).

Text from an operator's data is rendered as it is: a mark in it becomes a mark, as with the model's own template. What
an environment replies may be what a policy made it say, so marks in it are broken, and it cannot forge a turn.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from node.chat.conversation import Message, ToolCall, Turn, read_messages
from node.chat.errors import Unrenderable
from node.chat.pieces import fill, length_before, slot_of, slot_value, to_json
from node.protocol.chat import AssistantForms, CallFormat, ChatFormat, Opening, Pieces, ToolList

Tool = Mapping[str, Any]


def render(messages: Sequence[Message], chat: ChatFormat, *, tools: Sequence[Tool] = ()) -> tuple[str, int]:
    """Render a conversation up to the assistant's turn; also return the offset of the first user message's text.

    `tools` are definitions in the form of OpenAI's API. Raises NotText, and Unrenderable for what the format cannot
    express.
    """
    turns = read_messages(messages, splits_thoughts=chat.splits_thoughts)
    system = turns.pop(0).content if turns and turns[0].role == "system" else None
    _check_order(turns, chat)
    opening = _opening(chat, system=system is not None, tools=bool(tools))
    values = {"system": system or "", "tools": "" if chat.tools is None else list_tools(tools, chat.tools)}
    head = fill(opening.head, values)
    first = _user_form(turns, 0, chat, opening)
    offset = len(head) + length_before(first, "content", values | {"content": turns[0].content})
    return head + _render_turns(turns, chat, opening, values) + chat.generation, offset


def render_reply(messages: Sequence[Message], chat: ChatFormat) -> str:
    """Render what stands between two of the policy's turns: messages of users and tools. Raises as `render`.

    The policy's own turn stays in its context token by token, end mark included.
    """
    turns = read_messages(messages, splits_thoughts=False)
    if any(turn.role not in ("user", "tool") for turn in turns):
        raise Unrenderable("a reply has messages of users and tools only")
    broken = [Turn(turn.role, break_marks(turn.content, chat.marks), name=turn.name, id=turn.id) for turn in turns]
    return chat.after_turn + _render_turns(broken, chat, Opening(head=("",)), {}) + chat.generation


def break_marks(text: str, marks: Sequence[str]) -> str:
    """Insert a space behind the first character of each of `marks` in `text`, so that none is left."""
    if not marks:
        return text
    starts = re.compile(f"(?=(?:{'|'.join(map(re.escape, marks))}))(.)", re.DOTALL)
    return starts.sub(r"\1 ", text)


def folded(text: str) -> str:
    """Return what normalizers of tokenizers make of a text at most: its letters without case, width and form."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def list_tools(tools: Sequence[Tool], listed: ToolList) -> str:
    """Write the definitions of tools one after the other."""
    return listed.between.join(_tool(tool, listed) for tool in tools)


def _tool(tool: Tool, listed: ToolList) -> str:
    function = tool.get("function", tool)
    subject = function if listed.subject == "function" else {"type": "function", "function": function}
    if not listed.raw_strings:
        return to_json(subject, indent=listed.indent, sort_keys=listed.sort_keys)
    fields = ", ".join(
        f'"{key}": ' + (f'"{value}"' if isinstance(value, str) else to_json(value)) for key, value in function.items()
    )
    inner = f"{{{fields}}}"
    return inner if listed.subject == "function" else f'{{"type": "function", "function": {inner}}}'


def _opening(chat: ChatFormat, *, system: bool, tools: bool) -> Opening:
    kind = ("both" if tools else "system") if system else ("tools" if tools else "plain")
    found: Opening | None = getattr(chat.openings, kind)
    if found is None:
        missing = {"system": "a system message", "tools": "tools", "both": "a system message with tools"}[kind]
        raise Unrenderable(f"this chat format has no place for {missing}")
    return found


def _check_order(turns: Sequence[Turn], chat: ChatFormat) -> None:
    if not turns or turns[0].role != "user" or turns[-1].role not in ("user", "tool"):
        raise Unrenderable("a conversation begins with a user's message, and ends with a user's or a tool's")
    for before, turn in pairwise(turns):
        if turn.role == "system":
            raise Unrenderable("a system message stands at the beginning only")
        if turn.role == "tool" and before.role != "tool" and not before.calls:
            raise Unrenderable("a tool's message follows a call or another tool's")
    spoken = [turn.role for turn in turns if turn.role != "tool" and not turn.calls]
    if chat.alternates and any((role == "user") != (at % 2 == 0) for at, role in enumerate(spoken)):
        raise Unrenderable("this chat format wants users and assistants to take turns")


def _render_turns(turns: Sequence[Turn], chat: ChatFormat, opening: Opening, values: Mapping[str, str]) -> str:
    last_user = max((at for at, turn in enumerate(turns) if turn.role == "user"), default=-1)
    parts: list[str] = []
    for at, turn in enumerate(turns):
        if turn.role == "user":
            parts.append(fill(_user_form(turns, at, chat, opening), {**values, "content": turn.content}))
        elif turn.role == "assistant":
            parts.append(_assistant(turn, chat.late if at > last_user else chat.early, chat))
        else:
            parts.append(_result(turns, at, chat))
    return "".join(parts)


def _user_form(turns: Sequence[Turn], at: int, chat: ChatFormat, opening: Opening) -> Pieces:
    if at == len(turns) - 1 and opening.final is not None:
        return opening.final
    if opening.last is not None and all(turn.role != "user" for turn in turns[at + 1 :]):
        return opening.last
    return opening.first if at == 0 and opening.first is not None else chat.user


def _assistant(turn: Turn, forms: AssistantForms, chat: ChatFormat) -> str:
    calls = write_calls(turn.calls, chat.calls) if turn.calls else ""
    values = {"content": turn.content, "reasoning": turn.reasoning, "calls": calls}
    form = _assistant_form(forms, turn, content=bool(turn.content))
    slot = None if form is None else slot_of(form, "content")
    if turn.content and slot is not None and not slot_value(slot, values):  # white space, of which nothing is left
        form = _assistant_form(forms, turn, content=False)
    if form is None:
        raise Unrenderable("this chat format has no place for such an assistant's message here")
    return fill(form, values)


def _assistant_form(forms: AssistantForms, turn: Turn, *, content: bool) -> Pieces | None:
    if not content and not turn.calls:
        raise Unrenderable("an assistant's message has neither text nor calls")
    name = ("both" if content else "called") if turn.calls else "said"
    found: Pieces | None = getattr(forms, f"thought_{name}" if turn.reasoning else name)
    return found


def write_calls(made: Sequence[ToolCall], calls: CallFormat | None) -> str:
    """Write the calls of one message; raises Unrenderable."""
    if calls is None or (calls.between is None and len(made) > 1):
        raise Unrenderable("this chat format has no place for " + ("calls" if calls is None else "several calls"))
    written: list[str] = []
    for call in made:
        if calls.id_length and len(call.id) != calls.id_length:
            raise Unrenderable(f"this chat format wants calls' ids of {calls.id_length} characters")
        if calls.argument is None:
            arguments = to_json(dict(call.arguments))
        else:
            arguments = "".join(
                fill(calls.argument, {"key": str(key), "value": value if isinstance(value, str) else to_json(value)})
                for key, value in call.arguments.items()
            )
        written.append(fill(calls.call, {"name": call.name, "arguments": arguments, "id": call.id}))
    return (calls.between or "").join(written)


def _result(turns: Sequence[Turn], at: int, chat: ChatFormat) -> str:
    results, turn = chat.results, turns[at]
    if results is None:
        raise Unrenderable("this chat format has no place for a tool's result")
    if chat.calls is not None and chat.calls.id_length and len(turn.id) != chat.calls.id_length:
        raise Unrenderable(f"this chat format wants calls' ids of {chat.calls.id_length} characters")
    form = results.next if at > 0 and turns[at - 1].role == "tool" else results.first
    is_last = at + 1 == len(turns) or turns[at + 1].role != "tool"
    return fill(form, {"content": turn.content, "name": turn.name, "id": turn.id}) + (results.end if is_last else "")
