"""The part of a run's rules that says what is trained on: its environments (docs/protocol.md, section 5)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from node.protocol.spec_types import Positive
from shardcast.wire import MAX_INTEGER, Digest, Wire

MAX_KEPT_BYTES = 96 * 1024
"""Limit of all environments' bitmaps together, so that a descriptor holds them."""

MAX_PROBLEMS = 2**20
MAX_LOCK_BYTES = 256 * 1024
PACKAGE_NAME = r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?"
"""A distribution's name as indexes compare it (PEP 503)."""

PACKAGE_VERSION = r"[0-9][0-9a-z.!+]{0,63}"
"""A version in its canonical form (PEP 440)."""

MAX_DATASET_BYTES = 2**32
END_OF_THOUGHT = "</think>"
REPLACEMENT = "\ufffd"
DATASET = "dataset:"
"""How the names of environments begin whose problems are the rows of a dataset."""

Argument = (
    str | bool | Annotated[int, Meta(ge=-MAX_INTEGER, le=MAX_INTEGER)] | Annotated[float, Meta(ge=-1e15, le=1e15)]
)


class LengthSpec(Wire, frozen=True):
    """Length targets, as in INTELLECT-2 (arXiv 2505.07291) after L1 (arXiv 2503.04697): `node.environments.lengths`.

    Each problem asks for one of `targets` tokens, and a reward loses `penalty` for each token that the model wrote more
    or fewer.
    """

    targets: Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=64)]
    penalty: Annotated[float, Meta(gt=0, le=1)] = 0.0003
    form: Literal["sentence", "short"] = "sentence"


class ProblemsSpec(Wire, frozen=True):
    """A finite set: the problems 0 .. `count` - 1 of an environment, or of those the `kept` ones (offline filtering).

    `kept` is a bitmap of ceil(count / 8) bytes: problem i is kept where bit i mod 8 of byte i // 8 is set, bit 0 being
    the lowest. None keeps all.
    """

    count: Annotated[int, Meta(ge=1, le=MAX_PROBLEMS)]
    kept: Annotated[bytes, Meta(min_length=1, max_length=MAX_KEPT_BYTES)] | None = None

    def __post_init__(self) -> None:
        if self.kept is None:
            return
        if len(self.kept) != -(-self.count // 8) or int.from_bytes(self.kept, "little") >> self.count:
            raise ValueError("kept must have one bit for each of count problems, and zeros after them")
        if not any(self.kept):
            raise ValueError("kept must keep a problem")


class FileSpec(Wire, frozen=True):
    """A file by its digest and size."""

    digest: Digest
    bytes: Annotated[int, Meta(ge=1, le=MAX_DATASET_BYTES)]


class DatasetSpec(FileSpec, frozen=True):
    """The canonical file that an environment's problems are in (docs/protocol.md, section 5.5).

    With `answers` it has the prompts alone, and that file, which the operator keeps, has the answers too.
    """

    answers: FileSpec | UnsetType = UNSET


class PackageSpec(Wire, frozen=True):
    """The package that an environment is in, and the file that says what is installed for it.

    Every participant installs it (`swarmproof env install`); a run sends no code. `lock`: `node.environments.isolated`.
    """

    name: Annotated[str, Meta(min_length=1, max_length=100, pattern=rf"^{PACKAGE_NAME}\Z")]
    version: Annotated[str, Meta(min_length=1, max_length=64, pattern=rf"^{PACKAGE_VERSION}\Z")]
    lock: FileSpec

    def __post_init__(self) -> None:
        if self.lock.bytes > MAX_LOCK_BYTES:
            raise ValueError(f"environments.package.lock has at most {MAX_LOCK_BYTES} bytes")


StopString = Annotated[str, Meta(min_length=1, max_length=64)]


class ThinkingSpec(Wire, frozen=True):
    """The budget of a turn's thought: `end` is put behind its first `tokens` tokens if the thought is open there."""

    tokens: Positive
    end: Annotated[str, Meta(min_length=1, max_length=500)] = f"\n{END_OF_THOUGHT}\n\n"

    def __post_init__(self) -> None:
        if END_OF_THOUGHT not in self.end:
            raise ValueError(f"thinking.end must hold {END_OF_THOUGHT}, or the thought would go on behind it")


class ToolSpec(Wire, frozen=True):
    """The tool `python`: what runs the code of the model's calls (docs/environments.md).

    `python` is the version everywhere, such as "3.11". `steps` are the instructions of the interpreter for all calls of
    a rollout, `characters` the longest output of one call.
    """

    python: Annotated[str, Meta(pattern=r"^3\.[0-9]{1,2}$")]
    steps: Annotated[int, Meta(ge=1000, le=500_000)] = 500_000
    characters: Annotated[int, Meta(ge=16, le=16_384)] = 2000


class EnvironmentSpec(Wire, frozen=True):
    """One source of problems, drawn with probability weight / sum of weights; without `problems` it has no end.

    One with a `dataset` is named "dataset:NAME", and `problems` says how many of its rows are drawn from. `answers`
    says who alone has the answers; UNSET for everybody. One that is no part of swarmproof is in a `package`.
    `max_prompt_tokens` and `max_new_tokens` go before the run's own where they are lower. A turn ends with the token
    that completes one of the strings `stop`. With a `tool` the model has several turns, in which it may call it.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    arguments: dict[str, Argument] = msgspec.field(default_factory=dict)
    length: LengthSpec | None = None
    package: PackageSpec | UnsetType = UNSET
    problems: ProblemsSpec | UnsetType = UNSET
    dataset: DatasetSpec | UnsetType = UNSET
    answers: Literal["operator"] | UnsetType = UNSET
    max_prompt_tokens: Positive | UnsetType = UNSET
    max_new_tokens: Positive | UnsetType = UNSET
    stop: Annotated[tuple[StopString, ...], Meta(min_length=1, max_length=8)] | UnsetType = UNSET
    thinking: ThinkingSpec | UnsetType = UNSET
    tool: ToolSpec | UnsetType = UNSET

    def __post_init__(self) -> None:
        if isinstance(self.stop, tuple) and any(REPLACEMENT in one for one in self.stop):
            raise ValueError("environments.stop must not hold U+FFFD, which stands for parts of characters")
        has_file = isinstance(self.dataset, DatasetSpec)
        if (self.answers == "operator") != (isinstance(self.dataset, DatasetSpec) and bool(self.dataset.answers)):
            raise ValueError('environments.answers = "operator" goes with a file in environments.dataset.answers')
        if self.name.startswith(DATASET) != has_file:
            raise ValueError(f"an environment has a dataset if its name begins with {DATASET!r}, and no other has")
        if has_file and not isinstance(self.problems, ProblemsSpec):
            raise ValueError("an environment with a dataset needs environments.problems")
