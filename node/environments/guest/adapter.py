"""What the kinds of environments have in common: an adapter answers three queries, and refuses by `Unusable`."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, NoReturn, Protocol

Json = dict[str, Any]
Turn = Any
"""A text; or, where the environment speaks messages, {content, tool_calls: [{id, name, arguments}]}."""


class Unusable(Exception):
    """The environment cannot answer; `code` is one of the protocol's (FaultCode)."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Adapter(Protocol):
    """One loaded environment. What it raises on account of the turns ends the rollout, for a reward of 0."""

    def loaded(self) -> Json:
        """Return problems, several_turns, speaks, tools, versions and digest, as the protocol has them."""

    def problem(self, index: int) -> Json:
        """Return prompt and messages of a problem."""

    def reply(self, index: int, turns: list[Turn]) -> Json:
        """Return text or messages after the last turn; neither where the rollout is over."""

    def reward(self, index: int, turns: list[Turn]) -> float:
        """Return the reward of all turns, of which there is at least one."""


USED: list[str] = []
"""What nobody can repeat and a query used nevertheless; the query has no answer then."""


def refuse_use(what: str) -> NoReturn:
    """Raise Unusable, and remember it, however the environment takes the error."""
    USED.append(what)
    raise Unusable("refused_environment", what)


class Forbidden:
    """A stand-in for what nobody can repeat: use of it is refused."""

    def __init__(self, what: str) -> None:
        vars(self)["_what"] = what

    def __getattr__(self, name: str) -> Any:
        refuse_use(vars(self)["_what"])

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, str(key))


def plain_message(message: Any) -> Json:
    """Return a message of a package as the protocol has it; raises Unusable for one that is no text.

    It is a mapping in the form of OpenAI's API, or an object with the same fields, whose calls may be flat.
    """
    role, content = field_of(message, "role"), field_of(message, "content")
    if role not in ("system", "user", "assistant", "tool"):
        raise Unusable("refused_environment", f"it has a message of the role {str(role)[:40]!r}")
    plain: Json = {"role": role, "content": _text_of(content)}
    for name in ("tool_call_id", "name"):
        if field_of(message, name):
            plain[name] = str(field_of(message, name))
    calls = [_plain_call(call) for call in field_of(message, "tool_calls") or ()]
    return plain | {"tool_calls": calls} if calls else plain


def openai_turn(turn: Turn) -> Json:
    """Return a turn of the policy as an assistant's message in the form of OpenAI's API."""
    message: Json = {"role": "assistant", "content": turn["content"]}
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in turn.get("tool_calls", ())
    ]
    return message | {"tool_calls": calls} if calls else message


def field_of(value: Any, name: str) -> Any:
    """Return a field of an object, or the value of a mapping's key; None without one."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Unusable("refused_environment", "a message's content is no text")
    texts = [part if isinstance(part, str) else field_of(part, "text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise Unusable("refused_environment", "it has messages with images or sounds")
    return "".join(texts)


def _plain_call(call: Any) -> Json:
    function = field_of(call, "function") or call
    arguments = field_of(function, "arguments")
    return {
        "id": str(field_of(call, "id") or ""),
        "name": str(field_of(function, "name")),
        "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments or {}),
    }


def digest_of(rows: Iterable[Any]) -> str:
    """Return the SHA-256 digest of rows, each as JSON with sorted keys; what is no JSON counts as Python shows it."""
    hasher = hashlib.sha256()
    for row in rows:
        hasher.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
    return hasher.hexdigest()


def within_bounds(reward: Any) -> float:
    """Return a reward cut to 0 .. 1; what is no number earns nothing."""
    number = float(reward)
    return min(max(number, 0.0), 1.0) if math.isfinite(number) else 0.0


def versions(package: str | None, environment: str | None) -> Json:
    """Return the versions of Python and of two distributions, None where one is not installed."""
    python = ".".join(map(str, sys.version_info[:3]))
    return {"python": python, "package": _version(package), "environment": _version(environment)}


def _version(distribution: str | None) -> str | None:
    try:
        return None if distribution is None else metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class RecentValues:
    """The values of a function for the indexes asked last: several queries are about the same problem."""

    def __init__(self, make: Callable[[int], Any], *, kept: int = 64) -> None:
        self._make, self._kept = make, kept
        self._values: dict[int, Any] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self._values:
            try:
                value = self._make(index)
            except (Unusable, MemoryError, OSError):
                raise
            except Exception as error:
                raise Unusable("environment_failed", f"it cannot make problem {index}: {error!r}") from error
            while len(self._values) >= self._kept:
                del self._values[next(iter(self._values))]
            self._values[index] = value
        return self._values[index]
