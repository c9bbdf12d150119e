"""A run with something in every table, whose blobs are all there: what tests of backups make copies of."""

from __future__ import annotations

from pathlib import Path

import pytest
from actors import PUBLIC_KEY, Actors, spec_of, who
from sqlalchemy import insert, update

from coordinator.backup.create import back_up
from coordinator.run.home import create_home
from coordinator.storage.schema import nodes, stakes
from node.protocol.admission import Outcome


def no_wait(_seconds: float) -> None:
    """The old coordinator has long stopped."""


def begin(folder: Path, *, url: str | None = None, blobs_url: str | None = None) -> Actors:
    """A run with admitted, rejected and waiting work whose blobs are all there, and everything else in every table."""
    actors = Actors(create_home(folder, public_key=PUBLIC_KEY, spec=spec_of(), database_url=url, blobs_url=blobs_url))
    actors.files = 1000
    actors.register("a", "b")
    actors.publish(0)
    for _ in range(3):
        actors.work("a")
    actors.work("b", Outcome.REJECTED)
    actors.assign()
    actors.submit("a", actors.lease("a", held=(0,))[0].lease_id)
    for number in range(1001, actors.files + 1):
        actors.home.blobs.put(str(number).encode())
    with actors.home.database.write() as connection:
        connection.execute(insert(stakes).values(node=who("a"), amount=5, why="a transfer", at=1.5))
        odd = {"software": "ein Gerät\u2028", "registered_at": 0.1 + 0.2, "seen_at": 5e-324, "drift": bytes(range(256))}
        connection.execute(update(nodes).where(nodes.c.node == who("a")).values(**odd))
    return actors


@pytest.fixture(scope="module")
def backed_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backup of such a run that is whole; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("whole")
    actors = begin(folder / "run")
    assert back_up(actors.home, folder / "backup").manifest.missing == ()
    actors.home.database.close()
    return folder / "backup"
