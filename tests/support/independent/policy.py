"""A policy file, as far as it says how texts become tokens (section 11); its tensors are for an engine."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from .values import Refused

MAX_HEADER_BYTES = 100_000_000
METADATA = {"format", "swarmproof", "config", "tokenizer", "tokenizer_config"}


@dataclass(frozen=True)
class Policy:
    """Configuration, tokenizer and end-of-sequence ids of a policy."""

    config: dict[str, Any]
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    end_mark: int

    @property
    def vocabulary(self) -> int:
        """How many logits the model has."""
        return int(self.config["vocab_size"])

    @property
    def hidden(self) -> int:
        """How many elements a hidden state has."""
        return int(self.config["hidden_size"])

    def prompt_ids(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt, with those that the tokenizer's post-processor adds (5.2, 5.3)."""
        return list(self.tokenizer.encode(text, add_special_tokens=special_tokens).ids)

    def reply_ids(self, text: str) -> list[int]:
        """Return the tokens of an environment's reply, without special ones (4.7)."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn without its end-of-sequence token (4.7)."""
        kept = [token for token in tokens if token not in self.eos_ids]
        return str(self.tokenizer.decode(kept, skip_special_tokens=False))


@functools.cache
def read_policy(file: bytes) -> Policy:
    """Return what a policy file says of tokens; raises Refused with `bad_policy`."""
    try:
        return _read(file)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refused("bad_policy", str(error)) from None


def _read(file: bytes) -> Policy:
    length = int.from_bytes(file[:8], "little")
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(file) - 8):
        raise ValueError("the header's length")
    header = json.loads(file[8 : 8 + length])
    metadata = header.pop("__metadata__")
    if set(metadata) != METADATA or (metadata["format"], metadata["swarmproof"]) != ("pt", "policy/1"):
        raise ValueError("metadata")
    ends = sorted(tuple(tensor["data_offsets"]) for tensor in header.values())
    if len({tensor["dtype"] for tensor in header.values()}) != 1:
        raise ValueError("several dtypes")
    if [0, *(end for _, end in ends)] != [*(start for start, _ in ends), len(file) - 8 - length]:
        raise ValueError("the tensors do not fill the file")
    config = json.loads(metadata["config"])
    tokenizer = Tokenizer.from_str(metadata["tokenizer"])
    eos = config["eos_token_id"]
    eos_ids = {*(eos if isinstance(eos, list) else [eos])}
    end_mark = tokenizer.token_to_id(json.loads(metadata["tokenizer_config"])["eos_token"])
    return Policy(config, tokenizer, frozenset({*eos_ids, end_mark} - {None}), end_mark)
