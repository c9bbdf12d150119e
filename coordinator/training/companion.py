"""What a model's folder has beside the policy: its chat template and generation settings, for exports.

No policy file holds them: a template is a program, and a run needs neither. The trainer keeps them in its state folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from transformers import PreTrainedTokenizerFast

from node.policy.errors import MalformedPolicy
from node.policy.folder import validate_folder
from node.policy.inspection import tiny_policy
from node.policy.model_files import GENERATION
from node.policy.tokenizer_files import load_tokenizer
from shardcast.errors import Malformed
from shardcast.files import read_bounded, write_atomically

FILE: Final = "first-policy.json"
MAX_BYTES: Final = 2**20


class Companion(msgspec.Struct, frozen=True):
    """Chat templates as `tokenizer.chat_template` has them, and generation_config.json."""

    chat_template: str | dict[str, str] | None = None
    generation: dict[str, Any] = {}


def keep_companion(state: Path, initial: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Keep in a trainer's `state` what the folder `initial` has; nothing if it names a tiny policy."""
    if tiny_policy(initial) is None:
        write_atomically(state / FILE, msgspec.json.encode(_of_folder(Path(initial), tokenizer)))


def kept_companion(state: Path) -> Companion:
    """Return what a trainer kept in `state`; empty for the folder of another process. Raises MalformedPolicy."""
    path = state / FILE
    if not path.is_file():
        return Companion()
    try:
        return msgspec.json.decode(read_bounded(path, max_bytes=MAX_BYTES), type=Companion)
    except (msgspec.MsgspecError, Malformed) as error:
        raise MalformedPolicy(f"{path} is damaged: name the model's folder with --model", code="bad_config") from error


def read_companion(folder: Path) -> Companion:
    """Return what a model's folder has, once it is validated; raises MalformedPolicy."""
    validate_folder(folder)
    return _of_folder(folder, load_tokenizer(folder))


def _of_folder(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Companion:
    path = folder / GENERATION
    generation = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.is_file() else {}
    return Companion(tokenizer.chat_template, generation)
