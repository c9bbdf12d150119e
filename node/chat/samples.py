"""Made-up conversations, on which a reduced format is compared with the template that it came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any, Final

from node.chat.conversation import Message
from node.chat.errors import Unrenderable
from node.chat.render import Tool, render
from node.protocol.chat import ChatFormat

MOST_TRIED: Final = 4000
TOOLS: Final[tuple[Tool, ...]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": said,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": kind, "description": f'The {key}, größer "als" <0>.'}},
                "required": [key],
            },
        },
    }
    for name, said, key, kind in (
        ("add", 'Adds "two" numbers & more.', "numbers", "array"),
        ("look_up", "Sucht ein Wörterbuch durch: 你好.", "word", "string"),
        ("now", "Returns the time.", "zone", "string"),
    )
)
_WORDS: Final = (
    "What", "is", "2 + 2?", "größer", "你好", '"quoted"', "it's", "back\\slash", "{{ braces }}", "{% if %}", "a\nb",
    "<b>", "\ttab", "  spaces  ", "🙂", "#", "$x^2$", "end.", "[x]", "&amp;",
)  # fmt: skip
_EDGES: Final = ("", "", "", " ", "\n", "\n\n", "\t\n ", "  ")


def conversations(chat: ChatFormat, count: int, *, seed: int = 0) -> Iterator[tuple[list[Message], list[Tool], str]]:
    """Yield up to `count` conversations that `chat` can express, with their tools, and the text it makes of them."""
    found = 0
    for number in range(MOST_TRIED):
        if found == count:
            return
        messages, tools = sample(Random(f"{seed}/{number}"))
        try:
            text, _ = render(messages, chat, tools=tools)
        except Unrenderable:
            continue
        found += 1
        yield messages, tools, text


def sample(rng: Random) -> tuple[list[Message], list[Tool]]:
    """Return one conversation of any kind, and its tools."""
    tools = list(TOOLS[: rng.choice((0, 0, 1, 2, 3))])
    messages: list[Message] = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.5 else []
    rounds = rng.choice((1, 1, 2, 3, 4))
    for number in range(rounds):
        is_last = number == rounds - 1
        messages.append({"role": "user", "content": _text(rng)})
        for _ in range(rng.choice((0, 0, 1, 2))):
            messages += _calling(rng)
        if not is_last and rng.random() < 0.95:
            messages.append({"role": "assistant", "content": _said(rng)} | _reasoning(rng))
    return messages, tools


def _calling(rng: Random) -> list[Message]:
    """Return an assistant's message with calls, and the results of these."""
    ids = [f"{rng.randrange(36**9):09x}"[-9:] for _ in range(rng.choice((1, 1, 2, 3)))]
    calls = [
        {
            "id": identity,
            "type": "function",
            "function": {"name": rng.choice(TOOLS)["function"]["name"], "arguments": _arguments(rng)},
        }
        for identity in ids
    ]
    asking: dict[str, Any] = {
        "role": "assistant",
        "content": _said(rng) if rng.random() < 0.4 else "",
        "tool_calls": calls,
    }
    results = [{"role": "tool", "tool_call_id": identity, "content": _text(rng)} for identity in ids]
    return [asking | _reasoning(rng), *results]


def _arguments(rng: Random) -> dict[str, Any]:
    values: Sequence[Any] = (1, -2.5, True, None, "two", 'q"é', [1, "x"], {"deep": {"er": []}}, "a\nb", "")
    return {f"key_{at}": rng.choice(values) for at in range(rng.choice((0, 1, 1, 2, 3)))}


def _reasoning(rng: Random) -> dict[str, str]:
    return {"reasoning_content": "because " + _text(rng)} if rng.random() < 0.2 else {}


def _said(rng: Random) -> str:
    text = f"It is {_text(rng)}"
    return f"<think>\n{_text(rng)}x\n</think>\n\n{text}" if rng.random() < 0.3 else text


def _text(rng: Random) -> str:
    words = " ".join(rng.choice(_WORDS) for _ in range(rng.choice((1, 3, 6))))
    return rng.choice(_EDGES) + words + rng.choice(_EDGES)
