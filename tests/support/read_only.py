"""A run on a disk that is mounted read-only for a while, with every role at work: what runs inside a mount namespace.

    unshare --user --map-root-user --mount python read_only.py FOLDER POLICY

Mounts a tmpfs at FOLDER, so that nothing is left of it. Prints as JSON what each role did, and what it said.
"""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from swarm import running
from trainers import STEPS, finished_steps, outcome_of, run_in, train_to_the_end
from waiting import until

from coordinator.training.trackers import NullTracker
from node.submission.writer import write_rollouts


class Said(logging.Handler):
    """Keeps what is logged as a warning or worse, by logger, once each."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, list[str]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        known = self.lines.setdefault(record.name, [])
        text = record.getMessage() + (" (traceback)" if record.exc_info else "")
        if text not in known:
            known.append(text)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Whatever is opened in `folder` meanwhile is read-only; a mount that has writers cannot be made so itself."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def trained(folder: Path, disk: Path, said: Said) -> dict[str, object]:
    """Train a run whose disk is read-only from the middle of it until the trainer has said so."""

    is_read_only = threading.Event()

    class Held(NullTracker):
        """Holds the trainer, which would be at its end before the disk is spoilt."""

        def step(self, step: int, stats: Mapping[str, float]) -> None:
            assert is_read_only.wait(60)

    def spoil() -> None:
        until(lambda: finished_steps(home) >= 1, seconds=60)
        with read_only(disk):
            is_read_only.set()
            until(lambda: any("read-only" in line for line in said.lines.get("coordinator.training.trainer", ())))

    with run_in(folder) as home:
        helper = threading.Thread(target=spoil)
        helper.start()
        train_to_the_end(home, folder, tracker=Held())
        helper.join()
        return {"steps": STEPS, "policies": outcome_of(home)[0]}


def judged(folder: Path, disk: Path, policy: Path, said: Said) -> dict[str, object]:
    """Have a submission judged that was queued before its disk was read-only."""
    with running(folder, policy) as swarm:
        peer = swarm.peer()
        lease = peer.lease()
        body = write_rollouts(swarm.honest(lease))
        with read_only(disk):
            until(lambda: any("read-only" in line for line in said.lines.get("coordinator.verifier.daemon", ())))
            refused = peer.submit(lease.lease_id, body)
        receipt = swarm.verdict(peer, peer.submit(lease.lease_id, body))
    return {"refused": [refused.status, refused.code], "outcome": receipt.outcome}


def main() -> None:
    disk, policy = Path(sys.argv[1]), Path(sys.argv[2])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(disk)], check=True)
    said = Said()
    logging.getLogger().addHandler(said)
    logging.getLogger().setLevel(logging.WARNING)
    judgement = judged(disk / "run", disk, policy, said)
    training = trained(disk / "training", disk, said)
    print(json.dumps({"trainer": training, "verifier": judgement, "said": said.lines}))


if __name__ == "__main__":
    main()
