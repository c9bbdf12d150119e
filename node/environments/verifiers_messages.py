"""Messages between `node.environments.verifiers` and its child process, in frames of `node.environments.frames`."""

from __future__ import annotations

from typing import Literal

import msgspec

from node.protocol.chat import ChatFormat
from node.protocol.environment_spec import Argument

MAX_FRAME_BYTES = 16 * 1024 * 1024


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load `target`, a module with `load_environment` or `module:Class`; answered by EnvironmentLoaded or Fault."""

    target: str
    arguments: dict[str, Argument]
    chat: ChatFormat


class EnvironmentLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The loaded environment: number of problems, whether it has several turns or messages, and what can be pinned."""

    rows: int
    conversation: bool
    messages: bool
    package_version: str
    environment_version: str | None
    dataset_digest: str
    python: str


class RowQuery(msgspec.Struct, frozen=True, tag="ask"):
    """A query about one data set row: its prompt, the reply after `turns`, or their reward."""

    what: Literal["problem", "reply", "reward"]
    row: int
    turns: tuple[str, ...] = ()


class RowResult(msgspec.Struct, frozen=True, tag="said"):
    """Result of a RowQuery: `text` with `opening` for a problem, `text` or None for a reply, or `reward`."""

    text: str | None = None
    opening: int = 0
    reward: float = 0.0


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """A failed query: `code` and `detail` become an EnvironmentFault's."""

    code: str
    detail: str
