"""A run with admitted groups and no network: what a trainer works on, one process or several."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from dated_origin import DatedOrigin
from sqlalchemy import insert, select

from coordinator.run.heartbeat import Condition
from coordinator.run.home import Home, create_home
from coordinator.storage import log, training
from coordinator.storage.faults import DatabaseAway
from coordinator.storage.schema import SlotState, groups, leases, nodes, slots, submissions
from coordinator.training import checkpoint
from coordinator.training.distributed_learner import Team
from coordinator.training.groups import Group, Sample, encode_group
from coordinator.training.grpo import Execution
from coordinator.training.trackers import Tracker
from coordinator.training.trainer import Trainer, TrainerSettings
from coordinator.training.world import open_world
from node.policy.errors import MalformedPolicy
from node.policy.file import load_policy
from node.protocol.messages import BatchEntry, LogEntry, PolicyEntry
from node.protocol.run import EnvironmentSpec, LoraSpec, RunSpec, TeacherSpec
from shardcast import OriginServer
from shardcast.wire import decode, digest

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
STEPS = 3
GROUPS = 2


def spec_of(**model: str) -> RunSpec:
    spec = RunSpec(name="trainer", environments=(EnvironmentSpec(name="arithmetic"),))
    return msgspec.structs.replace(
        spec,
        model=msgspec.structs.replace(spec.model, **({"initial": "random-tiny"} | model)),
        batch=msgspec.structs.replace(spec.batch, groups_per_step=GROUPS, max_async=STEPS),
        training=msgspec.structs.replace(spec.training, steps=STEPS, minibatches=2),
    )


def admit(home: Home, steps: range = range(STEPS)) -> None:
    """Admit enough groups of policy 0 for these steps, as a verifier leaves them."""
    with home.database.write() as connection:
        if not steps.start:
            connection.execute(insert(nodes).values(node="n", software="", engine="", registered_at=0.0, seen_at=0.0))
        for number in range(GROUPS * steps.start, GROUPS * steps.stop):
            rng = random.Random(number)
            name = digest(str(number).encode())
            values = {"version": 0, "number": number, "state": SlotState.ADMITTED, "opened_at": 0.0}
            slot = connection.execute(insert(slots).values(**values).returning(slots.c.id)).scalar_one()
            lease = {"lease": name, "slot_id": slot, "node": "n", "state": "submitted"}
            connection.execute(insert(leases).values(**lease, issued_at=0.0, expires_at=0.0))
            work = {"submission": name, "lease": name, "slot_id": slot, "node": "n", "request": name, "body": name}
            connection.execute(
                insert(submissions).values(**work, body_bytes=1, received_at=0.0, state="done", outcome="admitted")
            )
            samples = tuple(
                Sample((5, 6, 7), tuple(rng.randrange(5, 100) for _ in range(6)), (-4.0,) * 6) for _ in range(4)
            )
            blob = home.blobs.put(encode_group(Group(0, (1.0, 0.0, 0.0, 1.0), samples)))
            group = {"slot_id": slot, "submission": name, "blob": blob, "reward_mean": 0.5, "signal": True}
            connection.execute(insert(groups).values(group))


@contextmanager
def trainer_of(
    home: Home,
    folder: Path,
    *,
    tracker: Tracker | None = None,
    announce: Callable[[], None] | None = None,
    condition: Condition | None = None,
    **settings: Any,
) -> Iterator[Trainer]:
    """A freshly started trainer process, as far as its state goes."""
    with home.database.read() as connection:
        recorded = training.newest_version(connection)
    origin = DatedOrigin(folder / "origin", KEY, home.run_id, announced=-1 if recorded is None else recorded)
    server = OriginServer(origin)
    server.start()
    try:
        yield Trainer(
            home,
            origin=origin,
            server=server,
            settings=TrainerSettings(state=folder, **settings),
            tracker=tracker,
            announce=announce,
            condition=condition,
        )
    finally:
        server.stop()
        origin.close()


def finished_steps(home: Home) -> int:
    with home.database.read() as connection:
        return sum(isinstance(entry, PolicyEntry) for entry in entries(home, connection)) - 1


def entries(home: Home, connection: object) -> list[LogEntry]:
    leaves = log.leaves(connection, 0, log.size(connection))  # type: ignore[arg-type]
    return [decode(LogEntry, leaf, max_bytes=2**20) for leaf in leaves]  # type: ignore[arg-type]


def train_to_the_end(home: Home, folder: Path, **given: Any) -> None:
    with trainer_of(home, folder, **given) as trainer:

        def stop_at_the_end() -> None:
            deadline = time.monotonic() + 200
            finished = False
            while not finished and time.monotonic() < deadline:
                time.sleep(0.02)
                with suppress(DatabaseAway):  # a test may take it away from the trainer
                    finished = finished_steps(home) >= STEPS
            trainer.stop()

        tracker = threading.Thread(target=stop_at_the_end)
        tracker.start()
        trainer.run()
        tracker.join()
    assert finished_steps(home) == STEPS


def outcome_of(home: Home) -> tuple[list[str], list[tuple[int, tuple[str, ...]]]]:
    """What others see of a run: the digests of its policies, and which groups made each."""
    with home.database.read() as connection:
        logged = entries(home, connection)
        used = connection.execute(select(groups.c.step)).scalars().all()
    assert sorted(used) == sorted(step for step in range(STEPS) for _ in range(GROUPS))
    policies = [entry.result_digest for entry in logged if isinstance(entry, PolicyEntry)]
    return policies, [(entry.step, entry.submissions) for entry in logged if isinstance(entry, BatchEntry)]


@contextmanager
def run_in(
    folder: Path, spec: RunSpec | None = None, *, database_url: str | None = None, steps: range = range(STEPS)
) -> Iterator[Home]:
    public = KEY.public_key().public_bytes_raw()
    home = create_home(folder / "data", public_key=public, spec=spec or spec_of(), database_url=database_url)
    admit(home, steps)
    yield home
    home.database.close()


def groups_of(step: int) -> list[Group]:
    """As many rows as no number of processes divides evenly, of many lengths."""
    draw = torch.Generator().manual_seed(step)

    def sample() -> Sample:
        tokens = int(torch.randint(1, 30, (1,), generator=draw))
        ids = torch.randint(5, 100, (tokens,), generator=draw).tolist()
        return Sample((5, 6, 7), tuple(ids), (-4.5,) * tokens)

    return [Group(step, (1.0, 0.0, 0.25, 1.0), tuple(sample() for _ in range(4))) for _ in range(3)]


def spec_with(**recipe: object) -> RunSpec:
    """The rules with another recipe; its tables may be as run.toml has them, for a script of another process."""
    tables = {"lora": LoraSpec, "teacher": TeacherSpec}
    made = {key: msgspec.convert(one, tables[key]) if isinstance(one, Mapping) else one for key, one in recipe.items()}
    spec = spec_of()
    return msgspec.structs.replace(spec, training=msgspec.structs.replace(spec.training, **made))


def refuse(state: Path) -> None:
    """What each process says of a first policy that it cannot train, in `state`."""
    with open_world(device="cpu") as world:
        try:
            load_policy(state / "policy-0.safetensors", dtype=torch.float32, shards=world)
        except MalformedPolicy as error:
            (state / f"refusal-{world.rank}").write_text(f"{error.code}: {error}")


def publish(state: Path) -> None:
    """The first policy as all processes publish it, after the first one has failed to write it."""
    with open_world(device="cpu") as world:
        team = Team(state, Execution(world=world))
        if not world.is_first:
            team.follow()
            return
        team.restore(spec_of())
        try:
            team.write_policy(state / "no-folder" / "published", torch.bfloat16)
        except FileNotFoundError:
            for dtype in (torch.bfloat16, torch.float32):
                team.write_policy(state / f"published-{str(dtype)[6:]}", dtype)
        team.end()


def publish_newest(state: Path, *, steps: int = 0, **recipe: object) -> None:
    """The newest checkpoint's policy as all processes publish it, after `steps` more."""
    torch.set_num_threads(1)
    with open_world(device="cpu") as world:
        team = Team(state, Execution(world=world, row_tokens=64))
        if not world.is_first:
            team.follow()
            return
        learner = team.restore(spec_with(**recipe))
        for _ in range(steps):
            team.save(team.train(groups_of(learner.step)))
        for dtype in (torch.bfloat16, torch.float32):
            team.write_policy(state / f"published-{str(dtype)[6:]}", dtype)
        team.end()


def learn(state: Path, *, steps: int, recompute: bool = False, full_disk: bool = False, **recipe: object) -> None:
    """What each process does; the first leaves the curve in `state`.

    With `full_disk` the other processes' first checkpoint does not fit, and the step beside it is trained again.
    """
    torch.set_num_threads(1)
    with open_world(device="cpu") as world:
        team = Team(state, Execution(world=world, row_tokens=64, recompute=recompute))
        if not world.is_first:
            if full_disk:
                fill_up_once()
            team.follow()
            return
        spec = spec_with(**recipe)
        learner = team.restore(spec)
        begin, curve, faults = learner.step, list[dict[str, float]](), list[OSError]()
        while len(curve) < steps:
            try:
                stats = team.train(groups_of(learner.step))
            except OSError as error:
                faults.append(error)
                learner = team.restore(spec)
                del curve[learner.step - begin :]
                continue
            team.save(stats)
            curve.append(stats)
        assert [error.errno for error in faults] == [errno.ENOSPC] * full_disk
        team.write_policy(state / "last.safetensors", torch.float32)
        team.end()
    before = json.loads((state / "curve.json").read_text()) if (state / "curve.json").exists() else []
    (state / "curve.json").write_text(json.dumps([*before, *curve]))


def fill_up_once() -> None:
    """Let this process find no room for its part of one checkpoint."""
    write = checkpoint.write_rows

    def full(path: Path, rows: Any) -> Any:
        checkpoint.write_rows = write
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    checkpoint.write_rows = full
