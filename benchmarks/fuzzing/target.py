"""Fuzz targets, and the outcome of one input."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from traceback import walk_tb
from types import TracebackType

from node.protocol.reasons import Refusal

Mutator = Callable[[Random, Sequence[bytes]], bytes]
"""Makes an input from a corpus of at least one; the same one from the same arguments."""

_CHANGING = re.compile(r"0x[0-9a-fA-F]+|[0-9]+|'[^']*'|\"[^\"]*\"")


@dataclass(frozen=True, slots=True)
class Harness:
    """A parser made ready to be fed, in one process.

    `seeds`: what an honest peer sends, written by the real writers; `run` takes them. `hostile`: other beginnings,
    which it may refuse. `run` raises one of `refusals` for what it refuses; an AssertionError tells of a property
    that does not hold, and that or anything else is a crash. It may return what tells accepted inputs apart.
    """

    seeds: Sequence[bytes]
    run: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    mutate: Mutator
    hostile: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """One parser, who can reach it, and what it may cost.

    `share`: its part of a campaign's inputs. Budgets are per input: `cpu_ms` of processor time of the process, and
    `memory_mib` by which its resident set may rise meanwhile. `hang_seconds` of processor time, or twenty times that
    of the clock, is a hang. `prepare` registers on the stack what must be closed in the end.
    """

    name: str
    sender: str
    share: int
    prepare: Callable[[ExitStack], Harness]
    cpu_ms: float = 50.0
    memory_mib: int = 32
    hang_seconds: float = 1.0


class Kind(StrEnum):
    ACCEPTED = "accepted"
    REFUSED = "refused"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class AttemptOutcome:
    """Outcome of an input. Inputs of one `signature` took one path, as far as can be told from outside."""

    kind: Kind
    signature: str
    error: BaseException | None = None


def attempt(harness: Harness, data: bytes) -> AttemptOutcome:
    """Feed one input."""
    try:
        shape = harness.run(data)
    except harness.refusals as error:
        return AttemptOutcome(Kind.REFUSED, _signature(error), error)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001  (a panic of Rust code is no Exception)
        return AttemptOutcome(Kind.CRASHED, _signature(error), error)
    return AttemptOutcome(Kind.ACCEPTED, f"accepted {shape}")


def describe(error: BaseException) -> str:
    """Describe a crash in one line: the error, and where in this project it left."""
    ours = [place for place in _places(error.__traceback__) if "/site-packages/" not in place]
    return f"{type(error).__name__}: {str(error)[:300]!r} at {ours[-1] if ours else 'an unknown place'}"


def code_of(error: BaseException | None) -> str:
    """Return an error's stable code or reason, or its type where it has none."""
    if isinstance(error, Refusal):
        return error.reason.value
    return str(getattr(error, "code", None) or type(error).__name__)


def _signature(error: BaseException) -> str:
    """Return the lines that an error came through, and its sentence without what the input put into it."""
    cause = error.__cause__
    lines = [place.rpartition("/")[2] for place in _places(error.__traceback__)]
    said = _CHANGING.sub("", f"{error} {'' if cause is None else cause}"[:400])
    return f"{code_of(error)} {' '.join(lines[-4:])} {said[:160]}"


def _places(trace: TracebackType | None) -> list[str]:
    return [f"{frame.f_code.co_filename}:{line}" for frame, line in walk_tb(trace)]
