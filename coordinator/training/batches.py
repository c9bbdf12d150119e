"""The groups of a step, read from the blob store; lost ones are asked of the verifiers again."""

from __future__ import annotations

import logging
import threading

import msgspec

from coordinator.errors import StorageFault
from coordinator.run.home import Home
from coordinator.storage import rebuilds, training
from coordinator.training.group_size import max_group_bytes
from coordinator.training.groups import Group, decode_group
from node.protocol.slots import slot_problem

log = logging.getLogger(__name__)

REBUILD_POLL_SECONDS = 1.0


def read_batch(home: Home, step: int, *, stop: threading.Event) -> list[Group] | None:
    """Return the groups of `step` in training order, None if `stop` was set while verifiers rebuild lost ones.

    Raises StorageFault for a group that cannot be rebuilt, and OSError.
    """
    with home.database.read() as connection:
        rows = training.batch(connection, step)
    read: dict[str, Group] = {}
    requested: set[str] = set()
    while True:
        for submission in [row.submission for row in rows if row.submission not in read]:
            with home.database.read() as connection:
                waits = rebuilds.is_queued(connection, submission)
            try:
                read[submission] = _read(home, submission)
            except StorageFault as error:
                if not waits:
                    _request(home, submission, step=step, error=error, requested=requested)
        if len(read) == len(rows):
            return [_of_environment(read[row.submission], home, row) for row in rows]
        if stop.wait(REBUILD_POLL_SECONDS):
            return None


def _of_environment(group: Group, home: Home, row: training.BatchRow) -> Group:
    """Return the group with the environment that its slot drew, whichever candidate the problem was."""
    drawn = slot_problem(home.spec, run_id=home.run_id, manifest_digest=row.manifest_digest, slot=row.slot)
    return msgspec.structs.replace(group, environment=drawn.environment)


def _read(home: Home, submission: str) -> Group:
    with home.database.read() as connection:
        blob = rebuilds.blob_of(connection, submission)
    return decode_group(home.blobs.get(blob, max_bytes=max_group_bytes(home.spec)))


def _request(home: Home, submission: str, *, step: int, error: StorageFault, requested: set[str]) -> None:
    """Queue the submission for a rebuild; raises StorageFault if that was tried."""
    if submission not in requested:
        log.warning(
            "the group of submission %s… in step %d is lost (%s): waiting for a verifier to measure it again",
            submission[:16],
            step,
            error,
        )
        requested.add(submission)
        with home.database.write() as connection:
            rebuilds.request(connection, submission)
        return
    with home.database.read() as connection:
        body = rebuilds.admitted_group(connection, submission).body
    why = "the verifiers' logs say why"
    try:
        home.blobs.get(body, max_bytes=home.spec.limits.max_submission_bytes)
    except StorageFault as lost:
        why = f"its evidence is lost, too: {lost}"
    raise StorageFault(
        f"step {step} cannot be trained: the group of submission {submission} is lost ({error}) and could not be "
        f"rebuilt ({why}); put either blob back from a backup of the run, and start the trainer again"
    ) from error
