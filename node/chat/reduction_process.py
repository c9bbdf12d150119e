"""The process of `node.chat.reduction.reduce_folder`: reduce a folder's chat template, print one line of JSON.

The template is rendered by transformers, in its sandbox; time and memory, which that does not limit, are limited here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers.utils.chat_template_utils import _compile_jinja_template

from node.chat.conversation import Message
from node.chat.errors import ChatError
from node.chat.pieces import to_json
from node.chat.reduce import reduce_template
from node.chat.reduction import Reduced
from node.chat.render import Tool, folded
from node.policy.errors import MalformedPolicy
from node.policy.folder import open_folder
from node.policy.inspection_process import limit_resources
from node.policy.tokenizer import normalized_tokens
from node.protocol.chat import ChatFormat

_QUESTION: Final[list[Message]] = [{"role": "user", "content": "What day is it?"}]
_LONG: Final = timedelta(days=400)
LONGEST: Final = 256 * 1024
"""Characters of one rendered conversation."""


def reduce_tokenizer(tokenizer: Any, *, end_marks: Sequence[str], thinking: bool) -> Reduced:
    """Reduce a tokenizer's chat template; a refusal is a value here."""
    if not isinstance(tokenizer.chat_template, str):
        several = "several chat templates, and none is chosen" if tokenizer.chat_template else "no chat template"
        return Reduced(refusal=f"the folder has {several}")
    now = datetime.now(tz=UTC)
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    rendering = _Rendering(tokenizer, now, thinking=thinking)
    try:
        chat = reduce_template(rendering, end_marks=end_marks, added_tokens=added)
    except ChatError as error:
        return Reduced(refusal=str(error))
    if forgeable := _forgeable(chat, normalized_tokens(tokenizer)):
        return Reduced(refusal=f"its tokenizer makes the mark {forgeable[0]!r} of other characters, too (normalized)")
    written = rendering(_QUESTION, (), True)
    if not thinking and written == _Rendering(tokenizer, now, thinking=True)(_QUESTION, (), True):
        return Reduced(refusal="it has no thinking mode to turn off (enable_thinking)")
    earlier = _Rendering(tokenizer, now - _LONG, thinking=thinking)
    return Reduced(chat, is_dated=written != earlier(_QUESTION, (), True))


def _forgeable(chat: ChatFormat, tokens: Sequence[str]) -> list[str]:
    """Return those of the normalized tokens that are marks of the format, or are no word and in what it writes, in
    whatever case or width.
    """
    marks, written = set(map(folded, chat.marks)), folded(msgspec.json.encode(chat).decode())
    return [
        token
        for token in tokens
        if folded(token) in marks
        or (len(token) > 1 and not (token.isspace() or token.isalnum()) and folded(to_json(token)[1:-1]) in written)
    ]


class _Rendering:
    """A tokenizer's chat template at one moment, a `node.chat.reduce.Template`."""

    def __init__(self, tokenizer: Any, now: datetime, *, thinking: bool) -> None:
        self._tokenizer = tokenizer
        self._now = now
        self._settings: dict[str, Any] = {} if thinking else {"enable_thinking": False}

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool], generation: bool) -> str:
        # Set in the compiled template, which transformers caches: since 5.24 it hands on no functions as settings.
        _compile_jinja_template(self._tokenizer.chat_template).globals["strftime_now"] = self._now.strftime
        text: str = self._tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation,
            **self._settings,
        )
        if len(text) > LONGEST:
            raise ValueError(f"a conversation of {len(messages)} messages becomes {len(text)} characters")
        return text


def reduce(folder: Path, *, thinking: bool) -> Reduced:
    """Reduce the chat template in `folder`, a policy's; a fault is a value here."""
    try:
        found = open_folder(folder)
    except MalformedPolicy as error:
        return Reduced(refusal=str(error))
    ends = found.tokenizer.convert_ids_to_tokens(sorted(found.eos_ids))
    return reduce_tokenizer(found.tokenizer, end_marks=ends, thinking=thinking)


if __name__ == "__main__":
    torch.set_num_threads(1)
    limit_resources()
    sys.stdout.write(msgspec.json.encode(reduce(Path(sys.argv[1]), thinking=sys.argv[2] == "thinking")).decode() + "\n")
