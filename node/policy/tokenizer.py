"""A policy's tokenizer and end marks; a stranger's, in a library that may raise anything."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import msgspec
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from node.policy.errors import MalformedPolicy
from shardcast.wire import digest


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer's end, padding and unknown marks."""

    eos_token: str
    pad_token: str | None = None
    unk_token: str | None = None


def render_tokenizer(tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """Render a tokenizer for a policy file: its tokenizer.json, and its marks as JSON."""
    # Padding and truncation are state of an earlier call, not part of the tokenizer.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    marks = {name: getattr(tokenizer, name) for name in TokenizerConfig.__struct_fields__}
    return (
        json.dumps(backend, ensure_ascii=False, separators=(",", ":")),
        json.dumps(marks, ensure_ascii=False, sort_keys=True),
    )


def normalized_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Return the added tokens that are looked for in normalized text, where other characters can become them.

    Each as it is written and as the text has to be in which it is found, which may differ: `<|END|>`, `<|end|>`.
    """
    backend = tokenizer.backend_tokenizer
    normalizer = backend.normalizer
    if normalizer is None or (isinstance(normalizer, normalizers.Sequence) and len(normalizer) == 0):
        return ()
    written = {token.content for token in backend.get_added_tokens_decoder().values() if token.normalized}
    return tuple(sorted(written | {normalizer.normalize_str(content) for content in written}))


def vocabulary_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the BLAKE3 of a tokenizer's tokens, added ones too, with their ids."""
    return digest(msgspec.json.encode(sorted(tokenizer.get_vocab().items())))


def parse_tokenizer(text: str, marks: str, *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a policy of `vocabulary` logits; raises MalformedPolicy."""
    with tokenizer_errors():
        config = msgspec.json.decode(marks, type=TokenizerConfig)
        backend = Tokenizer.from_str(text)
        entries = backend.get_vocab(with_added_tokens=True)
        most = max(entries.values(), default=-1)
        if most >= vocabulary:
            raise MalformedPolicy(
                f"its tokenizer has ids up to {most}, outside the model's vocabulary of {vocabulary}",
                code="bad_tokenizer",
            )
        named = {name: mark for name, mark in msgspec.structs.asdict(config).items() if mark is not None}
        for name in sorted(named.keys() - {name for name, mark in named.items() if mark in entries}):
            raise MalformedPolicy(
                f"its tokenizer has no entry for its {name} {named[name][:100]!r}", code="bad_tokenizer"
            )
        return PreTrainedTokenizerFast(tokenizer_object=backend, **named)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Convert any exception of a policy's tokenizer to MalformedPolicy."""
    try:
        yield
    except MalformedPolicy:
        raise
    except Exception as error:
        raise MalformedPolicy(f"its tokenizer is refused: {error}", code="bad_tokenizer") from error
    except BaseException as error:
        # A Rust panic is not an Exception, its class cannot be imported, and it would end the process.
        if type(error).__name__ != "PanicException":
            raise
        raise MalformedPolicy("its tokenizer makes the library panic", code="bad_tokenizer") from error


def eos_ids_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return the end marks: the configuration's and the tokenizer's. Raises MalformedPolicy."""
    declared = config.eos_token_id
    ids = {*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id} - {None}
    if not all(isinstance(token, int) and token < config.vocab_size for token in ids):
        raise MalformedPolicy("an end mark is not in the model's vocabulary", code="bad_config")
    return frozenset(ids)
