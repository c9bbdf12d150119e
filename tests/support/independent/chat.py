"""Conversations as text by a ChatFormat (section 5.3)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from .values import BOOLEAN, ArrayOf, OrNull, Record, Refused, integer, one_of, text, write


class ChatFormatRecord(Record):
    """A Record whose pieces have slots that rendering can fill, as section 5.3 says."""

    def conform(self, value: Any, where: str = "") -> Any:
        chat = super().conform(value, where)
        used = set[str]()
        for place, pieces, allowed, needed in _all_pieces(chat):
            slots = [slot.partition(":") for slot in pieces[1::2]]
            names = [name for name, _, _ in slots]
            fillable = all(encoding in ENCODINGS and bool(colon) == bool(encoding) for _, colon, encoding in slots)
            distinct = len(set(names)) == len(names) and len(pieces) % 2 == 1
            if not (fillable and distinct and needed <= set(names) <= allowed):
                raise Refused("bad_value", f"{where}.{place}")
            used |= set(names)
        if ("calls" in used and chat["calls"] is None) or ("tools" in used and chat["tools"] is None):
            raise Refused("bad_value", f"{where}: a slot without its format")
        if len(write(chat).encode()) > 49152:
            raise Refused("bad_value", f"{where} is too long")
        return chat


def _all_pieces(chat: dict[str, Any]) -> Iterator[tuple[str, list[str], set[str], set[str]]]:
    """Yield all pieces of a format: where they are, the slots they may have, and those that they must have."""
    head, content = {"system", "tools"}, {"content"}
    found = [("user", chat["user"], content, content)]
    for kind, opening in chat["openings"].items():
        if opening is not None:
            found.append((f"openings.{kind}.head", opening["head"], head, set()))
            users = (name for name in opening if name != "head")
            found += [(f"openings.{kind}.{name}", opening[name], head | content, content) for name in users]
    for when in ("early", "late"):
        slots = {"reasoning", "content", "calls"}
        found += [(f"{when}.{name}", form, slots, set()) for name, form in chat[when].items()]
    if chat["calls"] is not None:
        found.append(("calls.call", chat["calls"]["call"], {"name", "arguments", "id"}, set()))
        found.append(("calls.argument", chat["calls"]["argument"], {"key", "value"}, set()))
    if chat["results"] is not None:
        slots = {"content", "name", "id"}
        found += [(f"results.{name}", chat["results"][name], slots, set()) for name in ("first", "next")]
    return (each for each in found if each[1] is not None)


STRING = text(0, 8192)
PIECES = ArrayOf(STRING, 15, 1)
OPENING = Record({"head": PIECES, "first": OrNull(PIECES), "last": OrNull(PIECES), "final": OrNull(PIECES)})
FORMS = ("said", "called", "both", "thought_said", "thought_called", "thought_both")
ASSISTANT = Record({name: OrNull(PIECES) for name in FORMS})
CHAT_FORMAT = ChatFormatRecord(
    {
        "openings": Record(
            {"plain": OPENING, "system": OrNull(OPENING), "tools": OrNull(OPENING), "both": OrNull(OPENING)}
        ),
        "user": PIECES,
        "early": ASSISTANT,
        "late": ASSISTANT,
        "generation": STRING,
        "after_turn": STRING,
        "calls": OrNull(
            Record({"call": PIECES, "between": OrNull(STRING), "argument": OrNull(PIECES), "id_length": integer(0, 64)})
        ),
        "results": OrNull(Record({"first": PIECES, "next": PIECES, "end": STRING})),
        "tools": OrNull(
            Record(
                {
                    "subject": one_of("tool", "function"),
                    "indent": integer(0, 8),
                    "sort_keys": BOOLEAN,
                    "raw_strings": BOOLEAN,
                    "between": STRING,
                }
            )
        ),
        "marks": ArrayOf(text(2, 128), 64),
        "splits_thoughts": BOOLEAN,
        "alternates": BOOLEAN,
        "special_tokens": BOOLEAN,
    }
)
NOTHING = {"head": [""], "first": None, "last": None, "final": None}
ENCODINGS = {
    "": str,
    "strip": str.strip,
    "lstrip": str.lstrip,
    "rstrip": str.rstrip,
    "strip-lf": lambda value: value.strip("\n"),
    "lstrip-lf": lambda value: value.lstrip("\n"),
    "rstrip-lf": lambda value: value.rstrip("\n"),
    "json": lambda value: json.dumps(value, ensure_ascii=False),
}


def conversation_text(chat: dict[str, Any], messages: Sequence[Any], tools: Sequence[Any] = ()) -> tuple[str, int]:
    """Return the text of a conversation, and where the first user's text begins in it."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    rest = messages if system is None else messages[1:]
    kind = {(False, False): "plain", (True, False): "system", (False, True): "tools", (True, True): "both"}
    opening = _needed(chat["openings"][kind[system is not None, bool(tools)]])
    values = {"system": system or "", "tools": _tools(chat["tools"], tools) if tools else ""}
    head = _fill(opening["head"], values)
    spoken = [message["role"] for message in rest if message["role"] != "tool" and not message.get("tool_calls")]
    if chat["alternates"] and spoken != [("user", "assistant")[at % 2] for at in range(len(spoken))]:
        raise Refused("unrenderable_chat")
    form = _user_form(chat, opening, rest, 0)
    place = next(at for at, slot in enumerate(form) if at % 2 and slot.split(":")[0] == "content")
    begin = len(head) + len(_fill(form[:place], values))
    return head + _messages(chat, opening, rest, values) + chat["generation"], begin


def reply_text(chat: dict[str, Any], messages: Sequence[Any]) -> str:
    """Return what stands between two of the policy's turns."""
    broken = [{**message, "content": _break(message["content"], chat["marks"])} for message in messages]
    return str(chat["after_turn"] + _messages(chat, NOTHING, broken, {}) + chat["generation"])


def seen_turn(chat: dict[str, Any], turn: str) -> str:
    """Return the text of a turn as an environment sees it."""
    at = chat["generation"].rfind("<think>")
    return turn if at < 0 else chat["generation"][at:] + turn


def _break(content: str, marks: Sequence[str]) -> str:
    starts = {at for mark in marks for at in range(len(content)) if content.startswith(mark, at)}
    return "".join(char + " " * (at in starts) for at, char in enumerate(content))


def _fill(pieces: Sequence[str], values: dict[str, str]) -> str:
    found = ""
    for at, piece in enumerate(pieces):
        name, _, encoding = piece.partition(":")
        found += ENCODINGS[encoding](values[name]) if at % 2 else piece
    return found


def _needed(part: Any) -> Any:
    if part is None:
        raise Refused("unrenderable_chat")
    return part


def _user_form(chat: dict[str, Any], opening: dict[str, Any], messages: Sequence[Any], at: int) -> list[str]:
    is_last = all(message["role"] != "user" for message in messages[at + 1 :])
    for name, holds in (("final", at == len(messages) - 1), ("last", is_last), ("first", at == 0)):
        if holds and opening[name] is not None:
            return list(opening[name])
    return list(chat["user"])


def _messages(chat: dict[str, Any], opening: dict[str, Any], messages: Sequence[Any], values: dict[str, str]) -> str:
    question = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
    found = ""
    for at, message in enumerate(messages):
        if message["role"] == "user":
            found += _fill(_user_form(chat, opening, messages, at), {**values, "content": message["content"]})
        elif message["role"] == "assistant":
            found += _assistant(chat, chat["late" if at > question else "early"], message)
        else:
            results = _needed(chat["results"])
            follows = at > 0 and messages[at - 1]["role"] == "tool"
            ends = at + 1 == len(messages) or messages[at + 1]["role"] != "tool"
            own = {
                "content": message["content"],
                "name": message.get("name", ""),
                "id": message.get("tool_call_id", ""),
            }
            found += _fill(results["next" if follows else "first"], own) + (results["end"] if ends else "")
    return found


def _assistant(chat: dict[str, Any], forms: dict[str, Any], message: Any) -> str:
    content, why, calls = message["content"], message.get("reasoning_content", ""), message.get("tool_calls") or []
    if chat["splits_thoughts"] and not why and "</think>" in content:
        why = content[: content.index("</think>")].rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = content.split("</think>")[-1].lstrip("\n")
    values = {"content": content, "reasoning": why, "calls": _calls(chat["calls"], calls) if calls else ""}
    for text_left in (content, ""):
        name = ("both" if text_left else "called") if calls else "said"
        form = _needed(forms["thought_" * bool(why) + name])
        slots = [slot for slot in form[1::2] if slot.split(":")[0] == "content"]
        if not slots or not text_left or _fill(["", slots[0], ""], values):
            break
    return _fill(form, values)


def _calls(chat: Any, calls: Sequence[Any]) -> str:
    written = []
    for call in calls:
        made = call["function"]["arguments"]
        arguments = json.dumps(made, ensure_ascii=False)
        if _needed(chat)["argument"] is not None:
            arguments = "".join(
                _fill(chat["argument"], {"key": key, "value": value if isinstance(value, str) else _json(value)})
                for key, value in made.items()
            )
        if chat["id_length"] not in (0, len(call["id"])):
            raise Refused("unrenderable_chat")
        values = {"name": call["function"]["name"], "arguments": arguments, "id": call["id"]}
        written.append(_fill(chat["call"], values))
    return str((chat["between"] if len(written) == 1 else _needed(chat["between"])) or "").join(written)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _tools(chat: Any, tools: Sequence[Any]) -> str:
    written = []
    for tool in tools:
        function = tool["function"]
        shown = function if chat["subject"] == "function" else {"type": "function", "function": function}
        line = json.dumps(shown, ensure_ascii=False, indent=chat["indent"] or None, sort_keys=chat["sort_keys"])
        if chat["raw_strings"]:
            fields = [f'"{key}": ' + (f'"{it}"' if isinstance(it, str) else _json(it)) for key, it in function.items()]
            line = "{" + ", ".join(fields) + "}"
            line = line if chat["subject"] == "function" else '{"type": "function", "function": ' + line + "}"
        written.append(line)
    return str(_needed(chat)["between"]).join(written)
