"""Files of a model's folder in Hugging Face's layout: their names, their limits, and how a fault of one is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from node.policy.errors import MalformedPolicy
from node.policy.weights import AGAIN, CONFIG, MAX_CONFIG_BYTES

GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"

MAX_BYTES: Final = {
    CONFIG: MAX_CONFIG_BYTES,
    GENERATION: 64 * 1024,
    TOKENIZER: 90_000_000,  # a policy file's header holds it, and has at most 100 MB
    TOKENIZER_CONFIG: 16 * 1024 * 1024,
    TEMPLATE: 128 * 1024,
    "added_tokens.json": 16 * 1024 * 1024,
    "special_tokens_map.json": 1024 * 1024,
    "vocab.json": 90_000_000,
    "merges.txt": 90_000_000,
}
"""Limits of the files that are parsed, by swarmproof or transformers, checked before."""


def check_sizes(folder: Path) -> None:
    """Refuse a folder without a configuration, or with a file over its limit; raises MalformedPolicy."""
    if not (folder / CONFIG).is_file():
        raise bad_file(folder, f"has no {CONFIG}: name a folder in Hugging Face's layout", code="bad_config")
    for name, most in MAX_BYTES.items():
        path = folder / name
        if path.is_file() and path.stat().st_size > most:
            code = "bad_chat_template" if name == TEMPLATE else "bad_config"
            raise bad_file(path, f"has {path.stat().st_size} bytes, and at most {most} are read: shorten it", code=code)


def read_object(path: Path) -> dict[str, Any]:
    """Parse a JSON object, whose length was checked; raises MalformedPolicy."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_file(path, f"is not a JSON object ({error}): {AGAIN}", code="bad_config") from error


def bad_file(path: Path, fault: str, *, code: str) -> MalformedPolicy:
    """Make the error whose message begins with `path`; `fault` goes on with what is wrong and what to do."""
    return MalformedPolicy(f"{path} {fault}", code=code)
