"""Check of a run's chat format: what the model's chat template becomes, before a run begins with it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from node.chat.errors import Irreducible
from node.chat.reduction import reduce_folder
from node.doctor.report import Check, fine, problem, warning
from node.protocol.chat import ChatFormat
from node.protocol.run import RunSpec


def check_chat(spec: RunSpec) -> list[Check]:
    """Check that `sampling.chat` is data, or that the chat template it means can become data."""
    chat = spec.sampling.chat
    if isinstance(chat, ChatFormat):
        return [fine("chat", f"Conversations become text by a chat format of run.toml: {describe(chat)}.")]
    if not isinstance(chat, str):
        return []
    folder = Path(spec.model.initial)
    try:
        found = reduce_folder(folder, thinking=chat == "model")
    except Irreducible as error:
        advice = 'Take sampling.chat "none" or a format by name (docs/chat.md), or mend the template.'
        return [problem("chat", f"{error}.", advice=advice)]
    assert found.chat is not None
    said = f"The chat template of {folder} becomes data: {describe(found.chat)}."
    if found.is_dated:
        return [warning("chat", f"{said} It writes the date.", advice="The run will keep that of its first start.")]
    return [fine("chat", said)]


def describe(chat: ChatFormat) -> str:
    """Return what a format has a place for."""
    parts = {
        "system messages": chat.openings.system,
        "tools": chat.openings.tools,
        "calls": chat.calls,
        "tools' results": chat.results,
    }
    known = ", ".join(name for name, part in parts.items() if part is not None) or "users and assistants only"
    missing = ", ".join(name for name, part in parts.items() if part is None)
    return f"{len(msgspec.json.encode(chat))} bytes, with {known}" + (
        f", and no place for {missing}" if missing else ""
    )
