"""`sampling.chat` at the first start of a run: the model's own chat template becomes data, which the run then keeps."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.errors import UnfitModel
from node.chat.errors import Irreducible
from node.chat.reduction import reduce_folder
from node.environments.python_tool import is_callable_in
from node.policy.inspection import tiny_policy
from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import ToolSpec
from node.protocol.run import RunSpec

log = logging.getLogger(__name__)

_MOST_SHOWN: Final = 60
"""Characters of a value that a changed key is shown with: a chat format has thousands."""


def resolve_chat(spec: RunSpec) -> RunSpec:
    """Return the rules with the chat template of `model.initial` as data, if they ask for it; raises UnfitModel."""
    name = spec.sampling.chat
    if not isinstance(name, str):
        return spec
    if tiny_policy(spec.model.initial) is not None:
        raise UnfitModel(
            f"sampling.chat = {name!r} needs a model's folder, and model.initial is {spec.model.initial!r}"
        )
    folder = Path(spec.model.initial)
    if not folder.is_dir():
        raise UnfitModel(f"sampling.chat = {name!r} reads the chat template of {folder}, which is no folder here")
    try:
        found = reduce_folder(folder, thinking=name == "model")
    except Irreducible as error:
        raise UnfitModel(f"sampling.chat = {name!r}: {error}") from error
    if found.is_dated:
        log.warning("The chat template of %s writes the date: the run keeps that of today.", folder)
    assert found.chat is not None
    if any(isinstance(one.tool, ToolSpec) for one in spec.environments) and not is_callable_in(found.chat):
        raise UnfitModel(
            f"sampling.chat = {name!r}: this template has no place for environments.tool, or its calls are no JSON in "
            "<tool_call> marks; chatml has both"
        )
    return with_chat_format(spec, found.chat)


def as_begun(spec: RunSpec, begun: RunSpec) -> RunSpec:
    """Return the rules of a run.toml with the chat format that the run `begun` has made of a name."""
    kept = begun.sampling.chat
    return (
        with_chat_format(spec, kept) if isinstance(spec.sampling.chat, str) and isinstance(kept, ChatFormat) else spec
    )


def changed_keys(spec: RunSpec, begun: RunSpec) -> list[str]:
    """Return a clause for each key in which a run.toml differs from the run that has `begun`: both values."""
    return list(_changes("", msgspec.to_builtins(as_begun(spec, begun)), msgspec.to_builtins(begun)))


def _changes(key: str, given: Any, kept: Any) -> Iterator[str]:
    if given == kept:
        return
    if isinstance(given, dict) and isinstance(kept, dict):
        for name in sorted(given.keys() | kept.keys()):
            yield from _changes(f"{key}.{name}" if key else name, given.get(name), kept.get(name))
    elif isinstance(given, list | tuple) and isinstance(kept, list | tuple) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True), start=1):
            yield from _changes(f"{key}[{number}]", one, other)
    else:
        yield f"{key} is {_shown(given)} here and {_shown(kept)} in the run"


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def with_chat_format(spec: RunSpec, chat: ChatFormat) -> RunSpec:
    """Return the rules with another chat format."""
    return msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, chat=chat))
