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
MAX_DATASET_BYTES = 2**32
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


class EnvironmentSpec(Wire, frozen=True):
    """One source of problems, drawn with probability weight / sum of weights; without `problems` it has no end.

    One with a `dataset` is named "dataset:NAME", and `problems` says how many of its rows are drawn from. `answers`
    says who alone has the answers; UNSET for everybody.
    """

    name: Annotated[str, Meta(min_length=1, max_length=200)]
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    arguments: dict[str, Argument] = msgspec.field(default_factory=dict)
    length: LengthSpec | None = None
    problems: ProblemsSpec | UnsetType = UNSET
    dataset: DatasetSpec | UnsetType = UNSET
    answers: Literal["operator"] | UnsetType = UNSET

    def __post_init__(self) -> None:
        has_file = isinstance(self.dataset, DatasetSpec)
        if (self.answers == "operator") != (isinstance(self.dataset, DatasetSpec) and bool(self.dataset.answers)):
            raise ValueError('environments.answers = "operator" goes with a file in environments.dataset.answers')
        if self.name.startswith(DATASET) != has_file:
            raise ValueError(f"an environment has a dataset if its name begins with {DATASET!r}, and no other has")
        if has_file and not isinstance(self.problems, ProblemsSpec):
            raise ValueError("an environment with a dataset needs environments.problems")
