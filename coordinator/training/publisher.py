"""Publishing: a policy is staged, logged and announced in a thread, while the next step is trained.

The log has a policy before any worker can hear of it, so whoever names an unlogged one made it up. Where a checkpoint
of the policy's step is being written, all of this waits for it: until a manifest is signed, which anybody may ask the
origin for, the step may be trained again and come out otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

from coordinator.metrics.roles import TrainerMetrics
from coordinator.run.history import KeptHistory
from coordinator.run.home import Home
from coordinator.storage import retention, training
from coordinator.storage.training import PolicyRecord
from coordinator.storage.verdicts import clock
from coordinator.training.background import Background
from coordinator.training.checkpoint import step_of_oldest
from coordinator.training.step_line import step_line
from node.runtime.logs import bound
from shardcast import OriginServer
from shardcast.manifest import SignedManifest

log = logging.getLogger(__name__)


class Publisher:
    """Publishes one policy at a time. `waited_seconds` is what the trainer has waited for it in all."""

    def __init__(self, home: Home, server: OriginServer, *, state: Path, metrics: TrainerMetrics) -> None:
        self._home, self._server, self._metrics = home, server, metrics
        self._history = KeptHistory(state, run_id=home.run_id)
        self._checkpoints = state / "checkpoints"
        self._thread = Background("publishing")
        self._reward: float | None = None
        self.waited_seconds = 0.0

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once what came of a policy."""
        return self._thread.is_over

    def begin(self, path: Path, *, version: int, stats: Mapping[str, float], checkpoint: Future[object] | None) -> None:
        """Begin to publish the file at `path`, which must stay as it is until `wait`; idempotent.

        The step that made it is finished with `stats`, once the `checkpoint`, if any, is written.
        """
        started = time.monotonic()

        def record(signed: SignedManifest) -> None:
            policy = PolicyRecord(
                version=version,
                manifest_digest=signed.digest,
                result_digest=signed.manifest.result_digest,
                manifest=signed.envelope,
            )
            seconds = time.monotonic() - started
            with self._home.database.write() as connection:
                training.record_policy(connection, policy, now=clock())
                training.finish_step(connection, version - 1, stats={**stats, "publish_seconds": seconds}, now=clock())
                retention.note_checkpoints(connection, step_of_oldest(self._checkpoints))

        def publish() -> None:
            if checkpoint is not None:
                checkpoint.result()
            with bound(policy=version, step=version - 1 if version else None):
                self._server.publish(path, version=version, before_announcing=record)
                self._history.keep_current(self._home.database)
                self._metrics.publish_seconds.observe(time.monotonic() - started)
                log.info("policy %d published", version)
                if "reward" in stats:
                    log.info("%s", step_line(version, stats, before=self._reward))
                    self._reward = stats["reward"]

        self._thread.begin(publish)

    def wait(self) -> None:
        """Wait until the policy is announced; raises what publishing raised."""
        self.waited_seconds += self._thread.wait()

    def settle(self) -> None:
        """Wait for what is under way; what failed is left to a restart, which publishes the policy again."""
        self._thread.settle()
