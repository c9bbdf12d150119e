"""Load the tokenizer of a model's folder, and refuse one that a policy file cannot hold as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from node.policy.errors import MalformedPolicy
from node.policy.model_files import MAX_BYTES, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, bad_file, read_object
from node.policy.tokenizer import parse_tokenizer, render_tokenizer, tokenizer_errors
from node.policy.weights import AGAIN

_OTHER_TOKENIZER: Final = "bring the tokenizer of this model"

_GENERIC_TOKENIZERS = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Tokenizers fully described by tokenizer.json; AutoTokenizer would substitute the model family's for some."""


class _AddedToken(msgspec.Struct, frozen=True):
    content: str
    id: int | None = None


class _AddedTokens(msgspec.Struct, frozen=True):
    """Those of tokenizer.json, and those of tokenizer_config.json."""

    added_tokens: tuple[_AddedToken, ...] = ()
    added_tokens_decoder: dict[int, _AddedToken] = {}


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of `folder`, and run no code of it; raises MalformedPolicy."""
    path = folder / TOKENIZER_CONFIG
    named = read_object(path).get("tokenizer_class") if path.is_file() else None
    tokenizer_class = PreTrainedTokenizerFast if named in _GENERIC_TOKENIZERS else AutoTokenizer
    if not (folder / TOKENIZER).is_file():
        raise bad_file(
            folder, f"has no fast tokenizer ({TOKENIZER}): save it again with use_fast", code="bad_tokenizer"
        )
    try:
        with tokenizer_errors():
            tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except MalformedPolicy as error:
        raise bad_file(folder / TOKENIZER, f"cannot be loaded: {error}; {AGAIN}", code=error.code) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise bad_file(path, f"names {type(tokenizer).__name__}, which is no fast tokenizer", code="bad_tokenizer")
    return tokenizer


def check_chat_template(folder: Path) -> None:
    """Render the chat template for one question; raises MalformedPolicy.

    A template is a program in transformers' sandbox, which has no limits of time and memory: call it in a process that
    has.
    """
    tokenizer: Any = load_tokenizer(folder)
    question = [{"role": "user", "content": "What is 2 + 2?"}]
    try:
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    except Exception as error:
        raise bad_file(
            folder / (TEMPLATE if (folder / TEMPLATE).is_file() else TOKENIZER_CONFIG),
            f"has a chat template that fails for one question ({type(error).__name__}: {str(error)[:300]}): mend "
            "or remove it, since no run needs one",
            code="bad_chat_template",
        ) from error


def check_tokenizer(folder: Path, *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Return the folder's tokenizer, if a policy file can hold it; raises MalformedPolicy.

    Its ids have to be those of a model of `vocabulary` logits.
    """
    found = load_tokenizer(folder)
    if found.eos_token is None:
        raise bad_file(folder / TOKENIZER_CONFIG, "names no eos_token: name the model's end mark", code="bad_tokenizer")
    templates = found.chat_template if isinstance(found.chat_template, dict) else {"": found.chat_template or ""}
    if sum(len(each.encode()) for each in templates.values()) > MAX_BYTES[TEMPLATE]:
        raise bad_file(
            folder / TOKENIZER_CONFIG,
            f"has a chat template of more than {MAX_BYTES[TEMPLATE]} bytes: shorten or remove it",
            code="bad_chat_template",
        )
    _check_added_tokens(folder, found)
    try:
        published = parse_tokenizer(*render_tokenizer(found), vocabulary=vocabulary)
        with tokenizer_errors():
            ids: list[int] = published("What is 2 + 2?")["input_ids"]
    except MalformedPolicy as error:
        raise bad_file(
            folder / TOKENIZER, f"cannot be a policy's: {error}; {_OTHER_TOKENIZER}", code=error.code
        ) from error
    if max(ids, default=0) >= vocabulary:
        raise bad_file(
            folder / TOKENIZER,
            f"puts token {max(ids)} into a text, outside the model's vocabulary of {vocabulary}: {_OTHER_TOKENIZER}",
            code="bad_tokenizer",
        )
    return found


def _check_added_tokens(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse added tokens that have another id once loaded: ids are given in turn, whatever the files say."""
    declared: list[tuple[str, int | None]] = []
    try:
        for path in (folder / TOKENIZER, folder / TOKENIZER_CONFIG):
            if path.is_file():
                found = msgspec.json.decode(path.read_bytes(), type=_AddedTokens)
                declared += [(token.content, token.id) for token in found.added_tokens]
                declared += [(token.content, number) for number, token in found.added_tokens_decoder.items()]
    except (OSError, msgspec.MsgspecError) as error:
        raise bad_file(folder / TOKENIZER, f"lists no added tokens ({error}): {AGAIN}", code="bad_tokenizer") from error
    for content, number in declared:
        loaded = tokenizer.backend_tokenizer.token_to_id(content)
        if loaded != number:
            raise bad_file(
                folder / TOKENIZER,
                f"has added token {content[:90]!r} with id {number}, which is {loaded} once loaded: {_OTHER_TOKENIZER}",
                code="bad_tokenizer",
            )
