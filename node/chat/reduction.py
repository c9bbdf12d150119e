"""Reduce the chat template of a model's folder, in a process of its own with a deadline.

A stranger's template stays out of whoever asks, and so do torch and transformers: this module imports none of them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from node.chat.errors import Irreducible
from node.policy.child import ANSWER_SECONDS, NoAnswer, ask_child
from node.protocol.chat import ChatFormat


class Reduced(msgspec.Struct, frozen=True):
    """The answer of `node.chat.reduction_process`: a format, or why there is none.

    `is_dated`: the template writes the date, and the format the date of its reduction.
    """

    chat: ChatFormat | None = None
    is_dated: bool = False
    refusal: str = "its reduction said nothing"


def reduce_folder(folder: Path, *, thinking: bool) -> Reduced:
    """Reduce the chat template in `folder`, with its thinking mode on or off; raise Irreducible with the reason."""
    switch = "thinking" if thinking else "no-think"
    try:
        found = ask_child(
            "node.chat.reduction_process", str(folder.absolute()), switch, answer=Reduced, seconds=ANSWER_SECONDS
        )
    except NoAnswer as error:
        raise Irreducible(f"{folder}: the reduction of its chat template {error}") from error
    if found.chat is None:
        raise Irreducible(f"{folder}: its chat template cannot be reduced to data: {found.refusal}")
    return found
