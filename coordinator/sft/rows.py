"""Rows of the data: JSON lines, each a conversation, or a prompt and its completion.

A row is read within limits, and a faulty one is named by its line. Nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.errors import BadConfiguration

MAX_LINE_BYTES: Final = 4 * 2**20
"""A conversation of a million tokens fits; what is longer is no line of such a file."""
MAX_MESSAGES: Final = 1000
ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})


class BadData(BadConfiguration):
    """The data cannot be trained on; the message names lines."""

    code = "bad_data"


class RowFault(Exception):
    """Why one row cannot be trained on."""


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Names of the columns that are read. With `chat`, a prompt is the user's message and a completion its reply."""

    messages: str = "messages"
    prompt: str = "prompt"
    completion: str = "completion"
    chat: bool = False


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prompt and its completion, as text that no chat template touches."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatRow:
    """Messages as OpenAI's API has them, at least one of them the assistant's, and the tools it may call."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, with its number from 1; raises BadData for one that is too long."""
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise BadData(
                    f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; the file has to be JSON lines, one "
                    "object a line"
                )
            if line := line.strip():
                yield number, line


def parse_row(line: bytes, columns: RowColumns) -> PairRow | ChatRow:
    """Parse a line; raises RowFault."""
    try:
        row = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RowFault(f"not a JSON object ({error})") from error
    if columns.messages in row:
        return _conversation(row[columns.messages], row.get("tools"))
    if columns.prompt not in row or columns.completion not in row:
        raise RowFault(
            f"has neither {columns.messages!r} nor both {columns.prompt!r} and {columns.completion!r}, but "
            f"{', '.join(map(repr, sorted(row)[:8])) or 'nothing'}; --messages, --prompt and --completion name columns"
        )
    prompt, completion = row[columns.prompt], row[columns.completion]
    for name, text in ((columns.prompt, prompt), (columns.completion, completion)):
        if not isinstance(text, str):
            raise RowFault(f"{name!r} is no text")
        if not text:
            raise RowFault(f"{name!r} is empty")
    if columns.chat:
        return ChatRow(({"role": "user", "content": prompt}, {"role": "assistant", "content": completion}))
    return PairRow(prompt, completion)


def _conversation(messages: object, tools: object) -> ChatRow:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise RowFault(f"the messages are no list of 1 to {MAX_MESSAGES}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise RowFault(f"message {number} is no object with role and content")
        if message.get("role") not in ROLES:
            raise RowFault(f"message {number} has the role {str(message.get('role'))[:40]!r}, not one of {_roles()}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RowFault(f"the content of message {number} is no text")
    if messages[0]["role"] == "assistant":
        raise RowFault("message 1 is the assistant's, and follows nothing")
    if not any(message["role"] == "assistant" for message in messages):
        raise RowFault("no message is the assistant's, so there is nothing to learn")
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise RowFault("'tools' is no list of objects")
    return ChatRow(tuple(messages), tuple(tools or ()))


def _roles() -> str:
    return ", ".join(sorted(ROLES))
