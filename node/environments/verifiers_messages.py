"""What `node.environments.verifiers` and its child process say to each other, in frames of `node.parquet_frames`."""

from __future__ import annotations

from typing import Literal

import msgspec

from node.environments.chat import Form
from node.protocol.run import Argument

MAX_FRAME_BYTES = 16 * 1024 * 1024


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load `target`, a module with `load_environment` or `module:Class`. Answered by Loaded or Fault."""

    target: str
    arguments: dict[str, Argument]
    form: Form


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The environment is there: how many problems, whether of several turns, and what of it can be pinned."""

    rows: int
    conversation: bool
    package_version: str
    environment_version: str | None
    dataset_digest: str
    python: str


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """About one row of the data set: its prompt, the reply after `turns`, or their reward."""

    what: Literal["problem", "reply", "reward"]
    row: int
    turns: tuple[str, ...] = ()


class Said(msgspec.Struct, frozen=True, tag="said"):
    """The answer to an Ask: `text` with `opening` for a problem, `text` or None for a reply, `reward`."""

    text: str | None = None
    opening: int = 0
    reward: float = 0.0


class Fault(msgspec.Struct, frozen=True, tag="fault"):
    """Why there is no answer: `code` and `detail` become an EnvironmentFault's."""

    code: str
    detail: str
