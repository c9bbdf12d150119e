"""Parsers that are broken on purpose: what a campaign must notice, or its zeros mean nothing."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.messages import LEASE_REQUESTS
from node.protocol.messages import LeaseRequest
from shardcast.wire import encode

MIB = 2**20
TRIGGER = b"!"


def _spin() -> None:
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass


def _triggered(defect: Callable[[], object]) -> Callable[[ExitStack], Harness]:
    """Make a parser that has its defect where an input contains the trigger."""

    def prepare(_: ExitStack) -> Harness:
        def run(data: bytes) -> None:
            if TRIGGER in data:
                defect()

        return Harness([b"harmless"], run, (), bytes_mutator(*[b"x"] * 30, TRIGGER))

    return prepare


def _untyped() -> None:
    raise KeyError("field")


def _lenient(_: ExitStack) -> Harness:
    """Make a decoder that accepts two encodings of one value."""

    def run(data: bytes) -> None:
        value = msgspec.json.decode(data, type=LeaseRequest)
        assert msgspec.json.encode(value) == data, "it encodes to other bytes"

    refusals = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
    return Harness([encode(message) for message in LEASE_REQUESTS], run, refusals, json_mutator())


def _target(name: str, prepare: Callable[[ExitStack], Harness]) -> Target:
    return Target(f"broken.{name}", "nobody", 1, prepare, hang_seconds=0.5, memory_mib=16)


TARGETS = (
    _target("untyped", _triggered(_untyped)),
    _target("lenient", _lenient),
    _target("segfault", _triggered(lambda: ctypes.string_at(0))),
    _target("endless", _triggered(lambda: time.sleep(3600))),
    _target("slow", _triggered(_spin)),
    _target("greedy", _triggered(lambda: b"x" * (64 * MIB))),
)
