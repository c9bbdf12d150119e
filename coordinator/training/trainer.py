"""The trainer: consumes admitted groups, trains the next policy, and publishes it from its origin.

A step: assign its batch (one transaction, logged), train, write the policy's file. Its checkpoint and the publication
go on in threads while the next step computes gradients; weights change only when the checkpoint is complete, and the
log has the policy of a step with a checkpoint only then. What a killed trainer loses it repeats with the same result:
it trains the logged batches since its newest checkpoint again. So does one whose disk was full.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from blake3 import blake3

from coordinator.errors import BadConfiguration, CoordinatorError
from coordinator.metrics.roles import TrainerMetrics
from coordinator.run.heartbeat import Condition
from coordinator.run.home import Home
from coordinator.storage import locks, training
from coordinator.storage.facts import TEACHER_DIGEST, put_fact, read_fact
from coordinator.storage.faults import DatabaseAway, advice, trouble_of
from coordinator.storage.verdicts import clock
from coordinator.training.batches import read_batch
from coordinator.training.companion import keep_companion
from coordinator.training.distributed_learner import Learner, Team
from coordinator.training.evaluation import EvaluationSettings, held_out_rewards
from coordinator.training.grpo import Execution
from coordinator.training.initial import initial_policy
from coordinator.training.losses import load_loss
from coordinator.training.publisher import Publisher
from coordinator.training.teacher import TEACHER, write_teacher
from coordinator.training.trackers import NullTracker, Tracker
from node.policy.file import write_policy
from node.protocol.run import TeacherSpec
from node.runtime.logs import bound
from shardcast import Origin, OriginServer
from shardcast.errors import LocalFault
from shardcast.store.reading import StoredVersions

log = logging.getLogger(__name__)

IDLE_SECONDS = 0.05
RETRY_SECONDS = 1.0
_PASSING = frozenset({"disk_full", "read_only", "no_access"})
"""Codes of the origin's faults that its operator mends while the trainer waits."""


class TrainerStopped(CoordinatorError):
    """The trainer was stopped in the middle of what it repeats when it is started again."""

    code = "stopped"


class ReplayDiffers(CoordinatorError):
    """Training a logged batch again did not make the policy that was published."""

    code = "replay_differs"


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of this process; the recipe is the run's.

    A checkpoint is written every `checkpoint_every` steps, after the last one, and when the trainer is stopped. Every
    `evaluate_every` steps, if not 0, the policy is evaluated on held-out problems with `evaluation`.
    """

    state: Path
    threads: int = 1
    execution: Execution = field(default_factory=Execution)
    checkpoint_every: int = 1
    evaluate_every: int = 0
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)


class Trainer:
    """Trains a run to its last step, then serves its policies until stopped."""

    def __init__(
        self,
        home: Home,
        *,
        origin: Origin,
        server: OriginServer,
        settings: TrainerSettings,
        metrics: TrainerMetrics | None = None,
        tracker: Tracker | None = None,
        announce: Callable[[], None] | None = None,
        condition: Condition | None = None,
    ) -> None:
        self._home = home
        self._settings = settings
        self._tracker = tracker or NullTracker()
        self._announce = announce or (lambda: None)
        self._condition = condition or Condition()
        self._metrics = metrics or TrainerMetrics()
        self._origin = origin
        self._state = settings.state
        self._team = Team(settings.state, settings.execution)
        self._publisher = Publisher(home, server, state=settings.state, metrics=self._metrics)
        self._unannounced: tuple[int, dict[str, float]] | None = None
        self._stop = threading.Event()
        self._missing = 0
        self._is_repeating = False
        """Whether what the learner holds is to be trained again: its policies may never have been logged."""

    def stop(self) -> None:
        """Make `run` return soon; safe from a signal handler or another thread."""
        self._stop.set()

    def run(self) -> None:
        """Train to the run's last step, then serve until `stop`; waits for a disk or database to be mended."""
        torch.set_num_threads(self._settings.threads)
        try:
            self._run()
        finally:
            self._publisher.settle()
            self._team.end()
        log.info("stopped; started again with the same --state, this trainer goes on from its last checkpoint")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._work()
            except TrainerStopped:
                break
            except (DatabaseAway, OSError, LocalFault) as error:
                if isinstance(error, LocalFault) and error.code not in _PASSING:
                    raise
                self._is_repeating = True
                self._metrics.outages.inc()
                self._condition.trouble = trouble_of(error)
                log.warning("database or disk unavailable (%s); retrying from the last checkpoint", advice(error))
                self._stop.wait(RETRY_SECONDS)
        if self._team.has_unsaved and not self._is_repeating:
            self._team.save(self._team.learner.stats)

    def _work(self) -> None:
        self._publisher.settle()
        self._unannounced = None
        learner = self._restore()
        self._is_repeating = False
        self._check_history(learner)
        self._announce()
        self._replay(learner)
        self._publish(learner, self._policy_file(learner))
        waited_since = time.monotonic()
        while not self._stop.is_set():
            if self._publisher.is_over:
                finishing_since = time.monotonic()
                self._finish_publishing()
                waited_since += time.monotonic() - finishing_since
            step = self._next_step(learner)
            if step is None:
                if self._unannounced is None:
                    self._condition.trouble = ""
                # Counted while waiting: counted afterwards, an endless wait would never show.
                self._metrics.wait_seconds.inc(IDLE_SECONDS)
                self._stop.wait(IDLE_SECONDS)
                continue
            waited = time.monotonic() - waited_since
            with bound(step=step):
                path = self._train(learner, waited=waited)
                self._condition.trouble = ""
                self._publish(learner, path)
            waited_since = time.monotonic()
        self._finish_publishing()

    def _restore(self) -> Learner:
        """Restore the newest checkpoint, or create the run's first policy."""
        load_loss(self._home.spec.training)  # refused before a warm start
        for leftover in self._state.glob(".*.tmp"):
            if leftover.is_file():
                leftover.unlink()  # left by a trainer killed while saving a policy
        if not self._team.first_policy.exists():
            with self._home.database.read() as connection:
                if training.result_digests(connection):
                    raise BadConfiguration(
                        f"the run in {self._home.folder} has policies already, and {self._state} is not its trainer's "
                        "folder; name the right --state, or restore it from a backup"
                    )
            source = initial_policy(self._home.spec, progress=self._on_warm_start_progress)
            keep_companion(self._state, self._home.spec.model.initial, source.tokenizer)
            write_policy(source, self._team.first_policy, dtype=self._dtype)
        self._check_first_policy()
        self._keep_teacher()
        learner = self._team.restore(self._home.spec)
        if learner.step:
            log.info("resuming at step %d", learner.step)
        self._write_progress("training", learner.step, self._home.spec.training.steps)
        return learner

    def _check_first_policy(self) -> None:
        """Take the first policy from the origin again if its file is not the one that the log names."""
        with self._home.database.read() as connection:
            known = training.result_digests(connection).get(0)
        path = self._team.first_policy
        if known is None or _digest_of(path) == known:
            return
        log.warning("%s is damaged; taking policy 0 from the origin again", path)
        again = self._state / f".{path.name}.tmp"
        again.unlink(missing_ok=True)
        StoredVersions(self._state / "origin").write(0, again)
        if _digest_of(again) != known:
            raise BadConfiguration(
                f"{self._state} is not the folder of this run's trainer: its policy 0 is another one"
            )
        again.replace(path)

    def _keep_teacher(self) -> None:
        """Write the run's teacher, if it has one, and refuse another than the run began with.

        The rules name a folder, whose content may change: its digest is a fact of the run from the first start on.
        """
        if not isinstance(self._home.spec.training.teacher, TeacherSpec):
            return
        write_teacher(self._home.spec, self._state)
        path = self._state / TEACHER
        found = _digest_of(path)
        with self._home.database.write() as connection:
            locks.leasing(connection)
            known = read_fact(connection, TEACHER_DIGEST)
            if known is None:
                put_fact(connection, TEACHER_DIGEST, found)
        if known not in (None, found):
            raise BadConfiguration(
                f"{path} is not the teacher that this run began with (its digest was {known[:16]}…, and is "
                f"{found[:16]}…): restore it, or remove it if training.teacher.folder is as it was"
            )

    def _check_history(self, learner: Learner) -> None:
        """Refuse a state folder that is not this run's: signing another history is fraud.

        Raises BadConfiguration unless the run's newest policy is one that this trainer has published, or its checkpoint
        is that of the next policy.
        """
        with self._home.database.read() as connection:
            known = training.result_digests(connection)
            # The policy published next was trained on a batch, which is logged before any training.
            ahead = learner.step == 0 or training.has_batch(connection, learner.step - 1)
        newest = max(known, default=-1)
        is_next = newest >= learner.step or (newest == learner.step - 1 and ahead)
        if is_next and (newest < 0 or self._holds(newest, known[newest])):
            return
        raise BadConfiguration(
            f"the run in {self._home.folder} is at policy {newest}, and {self._state} is not its trainer's folder "
            f"(step {learner.step}); name the right --state, or restore it from a backup"
        )

    def _replay(self, learner: Learner) -> None:
        """Train the logged batches between the checkpoint and the newest policy again; raises ReplayDiffers.

        Nothing is saved or published of a step that does not lead to the policy that the log names.
        """
        with self._home.database.read() as connection:
            known = training.result_digests(connection)
        behind = max(known, default=0) - learner.step
        if behind > 0:
            log.warning("the newest whole checkpoint is of step %d: training %d steps again", learner.step, behind)
        while learner.step < max(known, default=0):
            if self._stop.is_set():
                raise TrainerStopped("stopped while steps are trained again")
            with bound(step=learner.step):
                self._train(learner, waited=0.0, expected=known[learner.step + 1])

    def _holds(self, version: int, result_digest: str) -> bool:
        signed = self._origin.store.get(version)
        return signed is not None and signed.manifest.result_digest == result_digest

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._home.spec.model.dtype)
        return dtype

    def _next_step(self, learner: Learner) -> int | None:
        """Return the learner's step if a killed trainer left its batch, or if enough groups were admitted for one."""
        trained, spec = learner.step, self._home.spec
        with self._home.database.read() as connection:
            if training.has_batch(connection, trained):
                return trained
            if not training.may_assign(connection, spec=spec, now=clock(), trained=trained):
                self._report_missing(*training.missing_for_next_step(connection, spec=spec, now=clock()))
                return None
        self._missing = 0
        with self._home.database.write() as connection:
            return training.assign_batch(connection, spec=spec, now=clock(), trained=trained)

    def _report_missing(self, missing: int, seconds: float) -> None:
        """Log what a step waits for that has its groups, once for each number of slots."""
        if missing and missing != self._missing:
            log.info("the next step has its groups; waiting at most %.0f s for %d missing slots", seconds, missing)
        self._missing = missing

    def _train(self, learner: Learner, *, waited: float, expected: str | None = None) -> Path:
        """Train one step, begin its checkpoint if one is due, and return the policy's file.

        The policy before is announced by then. Raises ReplayDiffers unless the step makes the policy `expected`.
        """
        started, saved, published = time.monotonic(), self._team.waited_seconds, self._publisher.waited_seconds
        groups = read_batch(self._home, learner.step, stop=self._stop)
        if groups is None:
            raise TrainerStopped("stopped while a group is rebuilt")
        stats, trained = self._team.train(groups), time.monotonic()
        self._finish_publishing()  # with an evaluation, perhaps, which is no part of the step
        resumed = time.monotonic()
        path = self._policy_file(learner)
        if expected is not None and (found := _digest_of(path)) != expected:
            raise ReplayDiffers(
                f"training step {learner.step - 1} again made policy {learner.step} with the digest {found[:16]}…, and "
                f"{expected[:16]}… was published: nothing was saved or published. Start the trainer with the release, "
                f"machine, processes and options that trained it, or restore {self._state} and the run from a backup"
            )
        publish_stall = self._publisher.waited_seconds - published + time.monotonic() - resumed
        stats |= {
            "wait_seconds": waited,
            "train_seconds": trained - started + publish_stall,
            "checkpoint_stall_seconds": self._team.waited_seconds - saved,
            "publish_stall_seconds": publish_stall,
        }
        self._metrics.observe_step(stats)
        learner.stats = stats
        if learner.step % self._settings.checkpoint_every == 0 or learner.step == self._home.spec.training.steps:
            self._team.save(stats)
        return path

    def _publish(self, learner: Learner, path: Path) -> None:
        """Begin to record and announce policy `learner.step`, and to finish the step that made it; idempotent."""
        self._unannounced = learner.step, dict(learner.stats)
        saving = self._team.saving if self._team.saved == learner.step else None
        self._publisher.begin(path, version=learner.step, stats=learner.stats, checkpoint=saving)

    def _finish_publishing(self) -> None:
        """Wait until the newest policy is announced, and report the step that made it."""
        if self._unannounced is None:
            return
        self._publisher.wait()
        (step, stats), self._unannounced = self._unannounced, None
        steps = self._home.spec.training.steps
        self._write_progress("training", step, steps)
        if step == steps:
            log.info("run finished; serving its policies until this process is stopped")
        self._track(step, stats)

    def _track(self, step: int, stats: dict[str, float]) -> None:
        """Report the step that made policy `step` to the tracker, with an evaluation when due."""
        every = self._settings.evaluate_every
        if every and step % every == 0:
            stats = stats | held_out_rewards(
                self._policy_path(step),
                step=step,
                spec=self._home.spec,
                settings=self._settings.evaluation,
                datasets=self._home.dataset_files,
                stop=self._stop.is_set,
            )
        if stats:
            self._tracker.step(step, stats)

    def _policy_path(self, step: int) -> Path:
        return self._state / "policy.safetensors" if step else self._team.first_policy

    def _policy_file(self, learner: Learner) -> Path:
        """Save the policy in the run's dtype and return its path."""
        if learner.step == 0:
            return self._team.first_policy
        path = self._policy_path(learner.step)
        self._team.write_policy(path, self._dtype)
        return path

    def _on_warm_start_progress(self, done: int, total: int, loss: float) -> None:
        if self._stop.is_set():
            raise TrainerStopped("stopped during the warm start")
        self._write_progress("warm start", done, total, loss=loss)

    def _write_progress(self, phase: str, done: int, total: int, *, loss: float | None = None) -> None:
        """Write progress.json for observers of the state folder."""
        path = self._state / "progress.json"
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode({"phase": phase, "done": done, "total": total, "loss": loss}))
        partial.replace(path)


def _digest_of(path: Path) -> str:
    """Return a policy file's result digest; raises OSError, after which the trainer tries again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, blake3).hexdigest()  # type: ignore[arg-type]  # lacks what is not used
