"""The learner on all processes of a world: the first process issues commands, all execute them.

A `Learner` is what training changes. A `Team` holds one per process and keeps them alike: the first process broadcasts
each call to the others, which `follow`. Groups, policies and the database belong to the first only; the others read the
first policy and the checkpoints from the same folder, which must be on a shared file system.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from coordinator.errors import BadConfiguration
from coordinator.training.background import Background
from coordinator.training.checkpoint import (
    CheckpointDamaged,
    TrainerState,
    checkpoints,
    held_rows,
    load_checkpoint,
    set_aside,
    write_checkpoint,
)
from coordinator.training.groups import Group
from coordinator.training.grpo import Execution, train_step
from coordinator.training.lora import adapter_counters, load_trained, policy_layout, policy_tensors
from coordinator.training.losses import load_loss
from coordinator.training.optimizers import Optimizers, make_optimizer
from coordinator.training.teacher import TEACHER, load_teacher
from coordinator.training.world import World, free_gathered
from node.policy.file import Policy, PolicySource, write_policy
from node.policy.layout import dtype_of, shapes_of
from node.protocol.run import LoraSpec, RunSpec
from shardcast.wire import encode

log = logging.getLogger(__name__)

FIRST_POLICY = "policy-0.safetensors"
CHECKPOINTS_KEPT = 3


@dataclass
class Learner:
    """What training changes: `step` counts finished steps, and is the version of the policy in `model`."""

    step: int
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    optimizer: Optimizers
    reference: PreTrainedModel | None
    teacher: PreTrainedModel | None
    stats: dict[str, float]


class _Command(msgspec.Struct, frozen=True):
    """A command to the other processes.

    `spec` is a run's canonical encoding, `checkpoint` a name, or "" for none, `path` the first process's alone.
    """

    action: Literal["restore", "train", "save", "write", "end"]
    spec: bytes = b""
    checkpoint: str = ""
    groups: tuple[Group, ...] = ()
    stats: dict[str, float] = {}
    path: str = ""
    dtype: str = ""


class Team:
    """A learner on every process, over the state folder `state`: policy 0, a run's teacher, and `checkpoints/`.

    `saved` is the step of the newest checkpoint, and `saving` its being written, None if it was read.
    """

    def __init__(self, state: Path, execution: Execution) -> None:
        self.first_policy = state / FIRST_POLICY
        self._teacher = state / TEACHER
        self._checkpoints = state / "checkpoints"
        self._execution = execution
        self._learner: Learner | None = None
        self._spec: RunSpec | None = None
        self._is_executing = False
        self._writer = Background("checkpoint")
        self.saved = 0
        self.saving: Future[object] | None = None
        self.waited_seconds = 0.0

    @property
    def learner(self) -> Learner:
        """The learner; raises RuntimeError before `restore`."""
        if self._learner is None:
            raise RuntimeError("restore() was not called")
        return self._learner

    @property
    def has_unsaved(self) -> bool:
        """Whether steps were trained since the newest checkpoint."""
        return self._learner is not None and self._learner.step > self.saved

    @property
    def world(self) -> World:
        return self._execution.world

    def restore(self, spec: RunSpec) -> Learner:
        """Load the newest whole checkpoint, or the run's first policy, on every process, and set damaged ones aside.

        What is loaded may be older than the run's newest policy. Raises CheckpointError, PolicyError, OSError.
        """
        self._writer.settle()
        for path in reversed(checkpoints(self._checkpoints)):
            try:
                self._run_everywhere(_Command("restore", spec=encode(spec), checkpoint=path.name))
            except CheckpointDamaged as error:
                log.warning("%s; kept as %s, going on from the one before it", error, set_aside(path).name)
            else:
                return self.learner
        self._run_everywhere(_Command("restore", spec=encode(spec)))
        return self.learner

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """Train one step and return its statistics; raises OSError if a checkpoint under way cannot be written."""
        self._run_everywhere(_Command("train", groups=tuple(groups)))
        return self.learner.stats

    def save(self, stats: dict[str, float]) -> None:
        """Begin to save a checkpoint of the step with `stats`, which goes on while the next one computes gradients.

        Weights and optimizer state must not change before it is done: `train` waits for that.
        """
        self._run_everywhere(_Command("save", stats=stats))

    def write_policy(self, path: Path, dtype: torch.dtype) -> None:
        """Write the policy to `path`, tensor by tensor, in `dtype`; raises OSError."""
        self._run_everywhere(_Command("write", path=str(path), dtype=str(dtype)[6:]))

    def end(self) -> None:
        """Tell the other processes to end; a no-op if they are gone.

        Also a no-op after a failure in the middle of a command: the message would meet another collective of theirs,
        and both would wait. They end when this process does and closes its connections.
        """
        self._writer.settle()
        if self.world.size > 1 and not self._is_executing:
            with contextlib.suppress(RuntimeError):  # raised by torch for a closed connection
                self.world.broadcast(msgspec.msgpack.encode(_Command("end")))

    def follow(self) -> None:
        """Execute the first process's commands until it ends; what it can handle itself is left to it."""
        while True:
            command = msgspec.msgpack.decode(self.world.broadcast(None), type=_Command)
            if command.action == "end":
                self._writer.settle()
                return
            try:
                self._execute(command)
            except OSError as error:
                log.warning("disk error in process %d: %s", self.world.rank, error)
            except CheckpointDamaged:
                continue  # raised in every process; the first says so, and names another one

    def _run_everywhere(self, command: _Command) -> None:
        if self.world.size > 1:
            self.world.broadcast(msgspec.msgpack.encode(command))
        self._is_executing = True
        try:
            self._execute(command)
        except OSError:
            self._is_executing = False  # of a file: no process waits in a collective
            raise
        self._is_executing = False

    def _execute(self, command: _Command) -> None:
        match command.action:
            case "restore":
                self._spec = msgspec.json.decode(command.spec, type=RunSpec)
                self._writer.settle()
                self._learner = None  # free memory before loading the next one
                self._learner = self._restore(self._spec, command.checkpoint)
            case "train":
                self._train(command.groups)
            case "save":
                self._save(command.stats)
            case "write":
                self._write(Path(command.path), getattr(torch, command.dtype))

    def _restore(self, spec: RunSpec, checkpoint: str) -> Learner:
        load_loss(spec.training)  # refused before anything is loaded
        # Read back even when just written, so that a restart begins with the same bits.
        policy = self._read_first(spec, lora=spec.training.lora or None)
        optimizer = make_optimizer(policy.model, spec.training)
        reference, teacher = self._reference(policy, spec), None
        if spec.training.teacher:
            teacher = load_teacher(self._teacher, policy=policy, spec=spec, world=self.world)
        learner = Learner(0, policy.model, policy.tokenizer, optimizer, reference, teacher, {})
        if checkpoint:
            path = self._checkpoints / checkpoint
            state = load_checkpoint(path, model=policy.model, optimizer=optimizer, world=self.world)
            learner.step = state.step
            learner.stats = json.loads(str(state.counters["stats"]))
        self.saving, self.saved = None, learner.step
        return learner

    def _reference(self, policy: Policy, spec: RunSpec) -> PreTrainedModel | None:
        """Return the policy of the KL penalty: the first one, which a model with adapters still has in it."""
        if not spec.training.kl_coefficient:
            return None
        return policy.model if spec.training.lora else self._read_first(spec).model.requires_grad_(False)

    def _read_first(self, spec: RunSpec, *, lora: LoraSpec | None = None) -> Policy:
        policy = load_trained(
            self.first_policy, lora=lora, seed=spec.seed, recompute=self._execution.recompute, world=self.world
        )
        min_hidden = spec.proofs.min_hidden
        if policy.hidden < min_hidden:
            raise BadConfiguration(f"proofs need {min_hidden} hidden units, but the model has only {policy.hidden}")
        return policy

    def _train(self, groups: Sequence[Group]) -> None:
        learner = self.learner
        assert self._spec is not None
        learner.stats = train_step(
            learner.model,
            learner.optimizer,
            groups,
            spec=self._spec,
            step=learner.step,
            reference=learner.reference,
            teacher=learner.teacher,
            execution=self._execution,
            before_update=self._wait_for_checkpoint,
        )
        learner.model.train(mode=False)
        for frozen in (learner.reference, learner.teacher):
            if frozen is not None:
                free_gathered(frozen)
        learner.step += 1

    def _save(self, stats: dict[str, float]) -> None:
        learner = self.learner
        learner.stats = stats
        self._wait_for_checkpoint()
        counters: dict[str, int | str] = {"stats": json.dumps(stats)}
        if self._spec is not None:
            counters |= adapter_counters(self._spec.training.lora or None, initial=self._spec.model.initial)
        write = functools.partial(
            write_checkpoint,
            self._checkpoints,
            held_rows(learner.model, learner.optimizer),
            state=TrainerState(step=learner.step, counters=counters),
            keep=CHECKPOINTS_KEPT,
            world=self.world,
        )
        self.saving, self.saved = self._writer.begin(self.world.beside(write)), learner.step

    def _wait_for_checkpoint(self) -> None:
        """Wait for the checkpoint under way; raises OSError, in every process alike."""
        self.waited_seconds += self._writer.wait()

    def _write(self, path: Path, dtype: torch.dtype) -> None:
        write_gathered(self.learner.model, self.learner.tokenizer, path, dtype=dtype, world=self.world)


def write_gathered(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, *, dtype: torch.dtype, world: World
) -> None:
    """Write a model that the processes of a world share to `path` in the first one, tensor by tensor, adapters merged.

    Every process calls it. Raises OSError, in the first alone.
    """
    gathered = (
        world.gather_parts(tensor, stored, dtype_of(stored.name, dtype)) for tensor, stored in policy_tensors(model)
    )
    numbers = chain.from_iterable(gathered)
    source = PolicySource(model.config, tokenizer, shapes_of(policy_layout(model)), numbers)
    try:
        if world.is_first:
            write_policy(source, path, dtype=dtype)
    finally:
        for _ in numbers:  # the other processes gather all, even if this disk is full
            pass
