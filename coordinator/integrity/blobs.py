"""The blobs that the tables name: whole, and what they have to be. What is damaged comes from a backup only."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Final

from coordinator.backup.blobs import max_blob_bytes
from coordinator.errors import StorageFault
from coordinator.integrity.differences import SAME, Difference
from coordinator.run.home import Home
from coordinator.storage import derived_rows
from coordinator.storage.database import Connection
from coordinator.storage.schema import SubmissionState
from coordinator.training.groups import Group, decode_group
from node.protocol.reasons import Reason, Refusal
from node.protocol.requests import open_claim
from node.submission.reader import read_rollouts
from shardcast.wire import digest, encode

_THREADS: Final = 8
_AT_ONCE: Final = 64


def check_blobs(home: Home, connection: Connection, *, report: Callable[[Difference], None]) -> None:
    """Report blobs that are missing, damaged, or not those of their row: a request of another node or body, a group
    with other rewards or tokens than were admitted. Files that were removed (`storage.retention`) are none of these.
    """
    blobs = _Blobs(home)
    for found in _each(blobs.check_rules, [()]):
        report(found)
    with_uploads = home.blobs.uploads is not None
    rows = (row for _, row in derived_rows.all_rows(connection, "submissions"))
    # A body in an object store's uploads becomes a blob with its verdict.
    kept = (row for row in rows if row["state"] != SubmissionState.EXPIRED)
    for found in _each(blobs.check_submission, (row for row in kept if not with_uploads or row["outcome"])):
        report(found)
    for _, row in derived_rows.all_rows(connection, "groups"):
        found_rows = derived_rows.rows_of(connection, "submissions", [(row["submission"],)])
        submission = next(iter(found_rows.values()), None)
        if submission is not None and submission["state"] == SubmissionState.EXPIRED:
            continue
        for found in blobs.check_group(row, None if submission is None else submission["body"]):
            report(found)


def _each(check: Callable[[Any], list[Difference]], rows: Iterable[Any]) -> Iterator[Difference]:
    iterator = iter(rows)
    with ThreadPoolExecutor(_THREADS) as pool:
        while batch := list(islice(iterator, _AT_ONCE)):
            for found in pool.map(check, batch):
                yield from found


class _Blobs:
    def __init__(self, home: Home) -> None:
        self._home, self._max_bytes = home, max_blob_bytes(home.spec)

    def check_rules(self, _row: object) -> list[Difference]:
        """Check the blob of the run's rules."""
        return self._read(digest(encode(self._home.spec)), "the rules")[1]

    def check_submission(self, row: Mapping[str, Any]) -> list[Difference]:
        """Check a submission's request, body and kept measurements."""
        of = f"submission {row['submission']}"
        request, found = self._read_request(row, of)
        body, more = self._read(row["body"], f"body of {of}")
        found += more
        if row["evidence"] is not None:
            found += self._read(row["evidence"], f"evidence of {of}")[1]
        if body is not None and len(body) != row["body_bytes"]:
            found.append(_wrong(row["body"], f"{row['body_bytes']} bytes, as {of} says", f"{len(body)} bytes"))
        if request is not None:
            found += self._check_request(request, row, of)
        return found

    def _read_request(self, row: Mapping[str, Any], of: str) -> tuple[bytes | None, list[Difference]]:
        if row["envelope"] is None:
            return self._read(row["request"], f"request of {of}")
        envelope = bytes(row["envelope"])
        if digest(envelope) != row["request"]:
            return None, [_wrong(row["request"], f"the request in the row of {of} is damaged", f"request of {of}")]
        return envelope, []

    def _check_request(self, request: bytes, row: Mapping[str, Any], of: str) -> list[Difference]:
        try:
            signer, claim = open_claim(request)
        except Refusal as refusal:
            return [_wrong(row["request"], refusal.detail, f"the signed request of {of}")]
        # A verdict on a file with another digest than was signed names the file's own.
        signed = claim.body_digest == row["body"] or row["reason"] == Reason.WRONG_BODY
        if claim.run_id != self._home.run_id or signer.hex() != row["node"] or not signed:
            return [_wrong(row["request"], "another run's, node's or body's request", f"that of {of}")]
        return []

    def check_group(self, row: Mapping[str, Any], body: str | None) -> list[Difference]:
        """Check the group that training reads against what was submitted and rewarded."""
        of = f"the group of submission {row['submission']}"
        data, found = self._read(row["blob"], of)
        if data is None or body is None:
            return found
        try:
            group = decode_group(data)
            submitted = read_rollouts(
                self._home.blobs.get(body, max_bytes=self._home.spec.limits.max_submission_bytes),
                spec=self._home.spec,
            )
        except StorageFault as error:
            return [*found, _wrong(row["blob"], str(error), of)]
        except Refusal as refusal:
            return [*found, _wrong(body, refusal.detail, f"the body behind {of}")]
        tokens = [(tuple(one.prompt_ids), tuple(one.completion_ids)) for one in submitted]
        if [(one.prompt_ids, one.completion_ids) for one in group.rollouts] != tokens:
            return [*found, _wrong(row["blob"], "other tokens than were submitted", of)]
        if not _has(group, version=row["slot"][0], mean=row["reward_mean"]):
            return [*found, _wrong(row["blob"], "another policy or other rewards than were logged", of)]
        return found

    def _read(self, name: str, of: str) -> tuple[bytes | None, list[Difference]]:
        try:
            return self._home.blobs.get(name, max_bytes=self._max_bytes), []
        except StorageFault as error:
            return None, [_wrong(name, str(error), of)]


def _has(group: Group, *, version: int, mean: float) -> bool:
    rewards = group.rewards
    return group.version == version and bool(rewards) and math.isclose(sum(rewards) / len(rewards), mean, rel_tol=SAME)


def _wrong(name: str, stored: str, derived: str) -> Difference:
    return Difference("blobs", name, "", stored, derived, can_repair=False)
