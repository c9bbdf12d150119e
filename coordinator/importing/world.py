"""The tokenizer of RWKV's World models: at each place the longest token of the vocabulary, over the bytes of UTF-8.

The tokenizers library has no such model. But a regular expression whose branches are a trie of the vocabulary, each
taken as far as it goes, matches the longest token at each place; it splits a text into tokens, and a plain table gives
their ids. The work for a place is bounded by the trie's depth, so that no text takes more than linear time. Bytes are
characters in there as in every byte-level tokenizer, since some tokens are not UTF-8 by themselves.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from coordinator.importing.errors import BadVocabulary
from shardcast.errors import Malformed
from shardcast.files import read_bounded

ENDING: Final = "<|endoftext|>"
ENDING_ID: Final = 0
"""In no text of the vocabulary; it ends a document."""
MAX_FILE_BYTES: Final = 2**24
MAX_TOKEN_BYTES: Final = 256
"""Of one token, which is as deep as the trie may be."""

_LINE: Final = re.compile(r"(\d{1,7}) (b?'.*'|b?\".*\") (\d{1,3})\r?")
_MAX_LINE: Final = 8 * MAX_TOKEN_BYTES

_Trie = dict[str, Any]


def read_vocabulary(path: Path, *, size: int) -> dict[bytes, int]:
    """Return the ids, below `size`, of the tokens in `path`, of which each byte is one.

    A line is an id, a Python literal of str or bytes, and its length in bytes. Raises BadVocabulary, OSError.
    """
    try:
        lines = read_bounded(path, max_bytes=MAX_FILE_BYTES).decode().rstrip("\n").split("\n")
    except (Malformed, UnicodeDecodeError) as error:
        raise BadVocabulary(f"{path}: it is not a vocabulary ({error})") from error
    found: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        parsed = _parse(line)
        if parsed is None:
            raise BadVocabulary(f"{path}: line {number} is not an id, a literal and its length: {line[:100]!r}")
        token, token_id = parsed
        if token in found or token_id == ENDING_ID:
            raise BadVocabulary(f"{path}: line {number} has a token or an id that is taken")
        if token_id >= size:
            raise BadVocabulary(
                f"{path}: line {number} has the id {token_id}, outside the model's vocabulary of {size}"
            )
        found[token] = token_id
    if len(set(found.values())) != len(found) or any(bytes([byte]) not in found for byte in range(256)):
        raise BadVocabulary(f"{path}: an id has two tokens, or a byte none")
    return found


def world_tokenizer(vocabulary: dict[bytes, int]) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a vocabulary in which each byte is a token; its end mark is ENDING."""
    written = {token.decode("latin-1").translate(_ALPHABET): token_id for token, token_id in vocabulary.items()}
    backend = Tokenizer(models.WordLevel({ENDING: ENDING_ID, **written}))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            pre_tokenizers.Split(Regex(_pattern(_trie(written))), "isolated"),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ENDING)  # type: ignore[no-untyped-call]


def _parse(line: str) -> tuple[bytes, int] | None:
    """Return the token and id of a line; None if it is not one."""
    match = _LINE.fullmatch(line)
    if match is None or len(line) > _MAX_LINE:
        return None
    try:
        literal = ast.literal_eval(match[2])
        token = literal.encode() if isinstance(literal, str) else literal
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    if not isinstance(token, bytes) or len(token) != int(match[3]) or not 0 < len(token) <= MAX_TOKEN_BYTES:
        return None
    return token, int(match[1])


def _byte_characters() -> dict[int, str]:
    """Return the character that stands for each byte in GPT-2's alphabet: itself, or one that can be seen."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + index) for index, byte in enumerate(unseen)}


_ALPHABET: Final = _byte_characters()


def _trie(tokens: dict[str, int]) -> _Trie:
    """Return a trie of nested dictionaries by character; one that ends a token has the key ""."""
    root: _Trie = {}
    for token in tokens:
        node = root
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def _pattern(node: _Trie) -> str:
    """Return an expression that matches the longest way from `node` to the end of a token."""
    leaves = "".join(re.escape(each) for each, below in sorted(node.items()) if each and below.keys() == {""})
    branches = [re.escape(each) + _pattern(below) for each, below in sorted(node.items()) if below.keys() - {""}]
    if leaves:
        branches.append(f"[{leaves}]")
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in node else ''}"
