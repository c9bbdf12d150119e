"""What is known of a run's first policy before it is loaded.

A folder is inspected in a process of its own, with a deadline: torch, a stranger's tokenizer and a stranger's chat
template stay out of whoever asks. This module imports none of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from node.policy.child import ANSWER_SECONDS, NoAnswer, ask_child
from node.policy.errors import MalformedPolicy, UnreadablePolicy
from node.policy.families import PROJECTIONS, TINY_ATTENTION, TINY_FAMILIES, TINY_HIDDEN, TINY_POSITIONS

RANDOM: Final = "random-"
"""Prefix of `model.initial` for a tiny policy that is not warm-started."""


class FirstPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's rules are compared with.

    `positions` is the longest sequence (None: any), `largest_layer` the parameters of the largest one, and
    `weight_bytes` the length of the folder's weights. `normalized_tokens` are the added tokens that the tokenizer looks
    for in normalized text, and `projections` the linear layers that can have adapters, with the inputs and outputs of
    all of one name. Of a tiny policy, only their names, `hidden` and `positions` are known.
    """

    family: str
    hidden: int
    positions: int | None
    parameters: int = 0
    largest_layer: int = 0
    weight_bytes: int = 0
    vocabulary: int = 0
    vocabulary_digest: str = ""
    end_marks: tuple[int, ...] = ()
    has_chat_template: bool = False
    normalized_tokens: tuple[str, ...] = ()
    projections: dict[str, int] = {}


class Inspected(msgspec.Struct, frozen=True):
    """The answer of `node.policy.inspection_process`: the policy, or code and message of a MalformedPolicy."""

    policy: FirstPolicy | None = None
    code: str = MalformedPolicy.code
    message: str = "its inspection said nothing"


def tiny_policy(initial: str) -> FirstPolicy | None:
    """Return what is known of the tiny policy that `model.initial` names, None if it names a folder."""
    family = initial.removeprefix(RANDOM)
    if family not in TINY_FAMILIES:
        return None
    if family in TINY_ATTENTION:
        layers = dict.fromkeys(PROJECTIONS, 0)
        return FirstPolicy(family=family, hidden=TINY_HIDDEN, positions=TINY_POSITIONS, projections=layers)
    return FirstPolicy(family=family, hidden=TINY_HIDDEN, positions=None)


def inspect_folder(folder: Path, *, seconds: float = ANSWER_SECONDS) -> FirstPolicy:
    """Validate a model's folder in Hugging Face's layout, its chat template too, by reading headers alone.

    Raises MalformedPolicy, whose message names the file and what to do, and UnreadablePolicy.
    """
    try:
        found = ask_child("node.policy.inspection_process", str(folder.absolute()), answer=Inspected, seconds=seconds)
    except NoAnswer as error:
        raise UnreadablePolicy(f"{folder} could not be inspected: its inspection {error}") from error
    if found.policy is None:
        raise MalformedPolicy(found.message, code=found.code)
    return found.policy
