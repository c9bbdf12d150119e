"""Kinds of faults, each injected from outside, as it happens to an operator.

A slow disk is played by the scheduler: the operator's processes are stopped for nine tenths of the time, in pieces of a
tenth of a second. Whoever waits for a disk does just that: it does not go on, in the middle of a transaction, with the
lock that others wait for. A disk itself cannot be slowed down here without a device of its own.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from benchmarks.faults.proxy import Moment
from benchmarks.faults.stage import OPERATOR, RELAYS, WORKERS, Stage

CLOCK_JUMP_S: Final = 3600
TRAP_S: Final = 20.0
SLOW_PIECE_S: Final = 0.09
QUICK_PIECE_S: Final = 0.01
LONGEST_LOCK_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Struck:
    """Description of a fault, and the processes that it harmed; made when the fault has ended."""

    what: str
    harmed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One way to break a swarm; `strike` returns when the fault has ended. Common ones have a greater `weight`."""

    name: str
    strike: Callable[[Stage, Random], Struck]
    weight: int
    needs_mounts: bool = False
    needs_compiler: bool = False


def kill(name: str) -> Callable[[Stage, Random], Struck]:
    """Kill one process, and sometimes again what was started in its place."""

    def strike(stage: Stage, rng: Random) -> Struck:
        stage.kill([name])
        if rng.random() >= 0.2:
            return Struck(f"kill -9 of {name}", (name,))
        stage.wait(rng.uniform(0.3, 4.0))
        stage.kill([name])
        return Struck(f"kill -9 of {name}, and of its successor", (name,))

    return strike


def kill_several(stage: Stage, rng: Random) -> Struck:
    """Kill some processes in the same moment, or all."""
    names = tuple(rng.sample(stage.names, k=rng.choice([2, 2, 3, 4, len(stage.names)])))
    stage.kill(names)
    return Struck(f"kill -9 of {', '.join(names)}", names)


def stop(stage: Stage, rng: Random) -> Struck:
    """Stop one process for a while; it keeps all that it holds."""
    name, seconds = rng.choice(stage.names), rng.uniform(1.0, 6.0)
    with stage.stopped([name]):
        stage.wait(seconds)
    return Struck(f"{name} stopped for {seconds:.1f} s", (name,))


def relays_away(stage: Stage, rng: Random) -> Struck:
    """Stop the relays: their listening sockets take connections, and nothing comes."""
    seconds = rng.uniform(2.0, 8.0)
    with stage.stopped(RELAYS):
        stage.wait(seconds)
    return Struck(f"relays away for {seconds:.1f} s", RELAYS)


def full_disk(stage: Stage, rng: Random) -> Struck:
    """Fill a file system but for some pages; half of the time kill a process, which restarts on that."""
    assert stage.disks is not None
    which = rng.choice(["home", "data"])
    disk = stage.disks.home if which == "home" else stage.disks.data
    seconds, room = rng.uniform(2.0, 6.0), rng.choice([0, 4, 16, 64]) * 1024
    victim = rng.choice(stage.names if which == "home" else OPERATOR) if rng.random() < 0.5 else None
    disk.fill(room_bytes=room)
    try:
        stage.wait(seconds / 2)
        if victim is not None:
            stage.kill([victim])
        stage.wait(seconds / 2)
    finally:
        disk.free()
    killed = "" if victim is None else f", {victim} killed meanwhile"
    return Struck(f"{which} disk full for {seconds:.1f} s{killed}", stage.names if which == "home" else OPERATOR)


def slow_disk(stage: Stage, rng: Random) -> Struck:
    """Stop the operator's processes for nine tenths of a while; see the module."""
    seconds = rng.uniform(2.0, 5.0)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with stage.stopped(OPERATOR):
            stage.wait(SLOW_PIECE_S)
        stage.wait(QUICK_PIECE_S)
    return Struck(f"slow disk for {seconds:.1f} s", OPERATOR)


def clock(whose: str) -> Callable[[Stage, Random], Struck]:
    """Move a wall clock by an hour while its processes run, and back."""

    def strike(stage: Stage, rng: Random) -> Struck:
        offset, seconds = rng.choice([-CLOCK_JUMP_S, CLOCK_JUMP_S]), rng.uniform(3.0, 7.0)
        stage.set_clock(whose, offset)
        try:
            stage.wait(seconds)
        finally:
            stage.set_clock(whose, 0)
        what = f"clock of {whose} {offset:+d} s for {seconds:.1f} s"
        return Struck(what, OPERATOR if whose == "operator" else (whose,))

    return strike


def locked_database(stage: Stage, rng: Random) -> Struck:
    """Hold SQLite's write lock, as a backup might; readers go on."""
    seconds = LONGEST_LOCK_S if rng.random() < 0.1 else rng.uniform(1.0, 8.0)
    with _exclusively(stage):
        stage.wait(seconds)
    return Struck(f"database locked for {seconds:.1f} s", OPERATOR)


@contextlib.contextmanager
def _exclusively(stage: Stage) -> Iterator[None]:
    database = sqlite3.connect(stage.database, timeout=0, isolation_level=None)
    try:
        while not _begins(database):
            stage.wait(0.002)
        yield
        database.execute("ROLLBACK")
    finally:
        database.close()


def _begins(database: sqlite3.Connection) -> bool:
    try:
        database.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError:
        return False
    return True


def upload_cut(moment: Moment) -> Callable[[Stage, Random], Struck]:
    """Kill the coordinator amid a worker's upload, or before the worker hears that it is stored."""

    def strike(stage: Stage, rng: Random) -> Struck:
        trap = stage.proxy.trap(moment)
        try:
            sprung = stage.until(trap.sprung.is_set, seconds=TRAP_S)
            stage.wait(rng.uniform(0.0, 0.5))
            stage.kill(["coordinator"])
            stage.wait(0.0)
        finally:
            stage.proxy.release(trap)
        where = {"body": "amid an upload", "answer": "before it answered an upload"}[moment]
        return Struck(
            f"kill -9 of coordinator {where if sprung else 'while nobody uploaded'}", ("coordinator", *WORKERS)
        )

    return strike


def connections_cut(stage: Stage, rng: Random) -> Struck:
    """Reset all connections of nodes to the coordinator, and for some seconds every new one."""
    seconds = rng.choice([0.0, rng.uniform(0.5, 4.0)])
    stage.proxy.shut(shut=seconds > 0)
    try:
        count = stage.proxy.cut()
        stage.wait(seconds)
    finally:
        stage.proxy.shut(shut=False)
    return Struck(f"{count} connections cut, and new ones for {seconds:.1f} s", WORKERS)


KINDS: Final = (
    *(FaultKind(f"kill {name}", kill(name), weight=6) for name in OPERATOR),
    *(FaultKind(f"kill {name}", kill(name), weight=2) for name in RELAYS),
    *(FaultKind(f"kill {name}", kill(name), weight=3) for name in WORKERS),
    FaultKind("kill several", kill_several, weight=4),
    FaultKind("stop", stop, weight=4),
    FaultKind("relays away", relays_away, weight=2),
    FaultKind("full disk", full_disk, weight=4, needs_mounts=True),
    FaultKind("slow disk", slow_disk, weight=2),
    FaultKind("operator's clock", clock("operator"), weight=2, needs_compiler=True),
    FaultKind("worker's clock", clock("honest-1"), weight=2, needs_compiler=True),
    FaultKind("locked database", locked_database, weight=3),
    FaultKind("killed amid an upload", upload_cut("body"), weight=3),
    FaultKind("killed before the answer", upload_cut("answer"), weight=3),
    FaultKind("connections cut", connections_cut, weight=3),
)


def plan(count: int, *, rng: Random, kinds: tuple[FaultKind, ...] = KINDS) -> list[FaultKind]:
    """Draw `count` faults in random order: each kind once as far as that goes, then by weight."""
    chosen = [*kinds, *rng.choices(kinds, weights=[kind.weight for kind in kinds], k=max(0, count - len(kinds)))]
    rng.shuffle(chosen)
    return chosen[:count]
