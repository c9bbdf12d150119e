"""What was measured of problems, kept in a file, so that measuring that was killed goes on where it was.

JSON lines: first what the file belongs to (`MeasuredHeader`), then a `MeasuredBatch` for each batch of completions,
durable before the next one is drawn. Batches are the same ones after a kill, so that all rounds as it would have.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final, Literal, Protocol, Self

import msgspec

from shardcast.errors import LocalFault
from shardcast.files import as_local_fault

log = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 2**20
"""A batch has tens of bytes for each of some hundred completions."""
MAX_FILE_BYTES: Final = 2**30
"""Of completions by the ten million; a larger file is none of ours."""


class CompletionOutcome(msgspec.Struct, frozen=True, array_like=True):
    """A completion: its length in tokens, whether the limit ended it, and its reward, None where nobody can tell."""

    tokens: int
    is_cut_off: bool
    reward: float | None


class MeasuredHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file belongs to: `of` is the digest of all that decides what is drawn, and what it earns."""

    format: Literal["measured/1"] = "measured/1"
    of: str


class MeasuredBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The outcomes of the completions from number `first` on of environment number `environment`."""

    environment: int
    first: int
    outcomes: tuple[CompletionOutcome, ...]


class MeasuredBefore(Protocol):
    """Remembers batches of completions."""

    def known(self, environment: int, first: int, *, count: int) -> Sequence[CompletionOutcome] | None:
        """Return the outcomes of `count` completions from number `first` on, None if they are not known."""

    def add(self, environment: int, first: int, outcomes: Sequence[CompletionOutcome]) -> None:
        """Remember a batch."""


class NothingMeasured:
    """Remembers nothing."""

    def known(self, environment: int, first: int, *, count: int) -> Sequence[CompletionOutcome] | None:  # noqa: ARG002
        return None

    def add(self, environment: int, first: int, outcomes: Sequence[CompletionOutcome]) -> None:
        """Do nothing."""


NOTHING_MEASURED: MeasuredBefore = NothingMeasured()


class MeasuredFile:
    """Remembers batches in a file; a context manager, which has the file for itself."""

    def __init__(self, path: Path, *, of: str) -> None:
        """Open or make `path`; one of something else than `of` is kept beside it as `.old`, with a warning.

        Raises LocalFault, with code "in_use" while another process has it.
        """
        self._path, self._batches = path, dict[tuple[int, int], tuple[CompletionOutcome, ...]]()
        self._file = self._open()
        self._begin(MeasuredHeader(of=of))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def known(self, environment: int, first: int, *, count: int) -> Sequence[CompletionOutcome] | None:
        found = self._batches.get((environment, first), ())
        return found if len(found) == count else None

    def add(self, environment: int, first: int, outcomes: Sequence[CompletionOutcome]) -> None:
        """Append a batch durably, unless a completion could not be judged: that is tried again; raises LocalFault."""
        if any(one.reward is None for one in outcomes):
            return
        self._write(MeasuredBatch(environment=environment, first=first, outcomes=tuple(outcomes)))

    def _open(self) -> IO[bytes]:
        """Open or make the file for this process alone; raises LocalFault."""
        try:
            file = self._path.open("a+b")
        except OSError as error:
            raise as_local_fault(error, self._path) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise LocalFault(f"{self._path} is in use by another process", code="in_use") from error
        return file

    def _set_aside(self) -> None:
        """Keep the file under another name, and begin an empty one; raises LocalFault."""
        old = self._path.with_name(f"{self._path.name}.old")
        log.warning(
            "%s is of another run, policy, seed or number of samples: kept as %s, measuring anew", self._path, old
        )
        try:
            self._path.rename(old)
        except OSError as error:
            raise as_local_fault(error, self._path) from error
        self._file.close()
        self._file = self._open()

    def _begin(self, header: MeasuredHeader) -> None:
        """Read the batches, and cut off what a kill left behind them."""
        self._file.seek(0)
        size, end = os.fstat(self._file.fileno()).st_size, 0
        while size <= MAX_FILE_BYTES and (line := self._file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            try:
                if end:
                    batch = msgspec.json.decode(line, type=MeasuredBatch)
                    self._batches[batch.environment, batch.first] = batch.outcomes
                elif msgspec.json.decode(line, type=MeasuredHeader) != header:
                    break
            except msgspec.MsgspecError:
                break
            end += len(line)
        if size and not end:
            self._set_aside()
        self._file.truncate(end)
        if not end:
            self._write(header)
        elif self._batches:
            log.info("%s: %d completions are measured", self._path, sum(map(len, self._batches.values())))

    def _write(self, line: MeasuredHeader | MeasuredBatch) -> None:
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise as_local_fault(error, self._path) from error
