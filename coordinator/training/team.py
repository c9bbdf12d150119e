"""The learner, on all processes of a world: the first says what to do, and all do it.

A `Learner` is what training changes. A `Team` has one on every process and keeps them alike: what the first process
calls is said to the others, which `follow`. Groups, policies and the database are the first's alone; the others read
the first policy and the checkpoints from the same folder, so that is on a file system which all of them see.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from coordinator.errors import BadConfiguration
from coordinator.training.checkpoint import TrainerState, checkpoints, load_checkpoint, save_checkpoint
from coordinator.training.groups import Group
from coordinator.training.grpo import Execution, train_step
from coordinator.training.optimizers import Optimizers, make_optimizer
from coordinator.training.world import World, whole
from node.policy import Policy, load_policy
from node.protocol.run import RunSpec
from shardcast.wire import encode

log = logging.getLogger(__name__)

CHECKPOINTS_KEPT = 3


@dataclass
class Learner:
    """What training changes: `step` counts finished steps, and is the version of the policy in `model`."""

    step: int
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    optimizer: Optimizers
    reference: PreTrainedModel | None
    stats: dict[str, float]


class _Say(msgspec.Struct, frozen=True):
    """What the first process has the others do. `spec` is a run's canonical encoding, `stats` JSON."""

    what: Literal["restore", "train", "save", "gather", "end"]
    spec: bytes = b""
    groups: tuple[Group, ...] = ()
    stats: dict[str, float] = {}


class Team:
    """A learner on every process, over the state folder `state`: `policy-0.safetensors` and `checkpoints/`."""

    def __init__(self, state: Path, execution: Execution) -> None:
        self.first_policy = state / "policy-0.safetensors"
        self._checkpoints = state / "checkpoints"
        self._execution = execution
        self._learner: Learner | None = None
        self._spec: RunSpec | None = None
        self._gathered: PreTrainedModel | None = None
        self._is_apart = False

    @property
    def learner(self) -> Learner:
        """Meaningful once `restore` was called."""
        if self._learner is None:
            raise RuntimeError("nothing was restored")
        return self._learner

    @property
    def world(self) -> World:
        return self._execution.world

    def restore(self, spec: RunSpec) -> Learner:
        """The newest checkpoint, or the run's first policy, on every process; raises CheckpointError, PolicyError."""
        self._together(_Say("restore", spec=encode(spec)))
        return self.learner

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        """One step; the learner's `stats` are this step's."""
        self._together(_Say("train", groups=tuple(groups)))
        return self.learner.stats

    def save(self, stats: dict[str, float]) -> None:
        """Make the step durable, with what is to be said of it; raises OSError."""
        self._together(_Say("save", stats=stats))

    def gather(self) -> PreTrainedModel:
        """The whole model in this process's memory; the learner's own where there is only one process."""
        self._together(_Say("gather"))
        return self._gathered or self.learner.model

    def end(self) -> None:
        """Let the other processes go; where they are gone already, nothing.

        Nor where something failed here that they may be in the middle of: what is said would meet another collective of
        theirs, and both wait. They end when this process does, and closes its connections.
        """
        if self.world.size > 1 and not self._is_apart:
            with contextlib.suppress(RuntimeError):  # what torch raises for a closed connection
                self.world.say(msgspec.msgpack.encode(_Say("end")))

    def follow(self) -> None:
        """Do what the first process says until it says that it is over; what fails there as well is its to handle."""
        while True:
            said = msgspec.msgpack.decode(self.world.say(None), type=_Say)
            if said.what == "end":
                return
            try:
                self._do(said)
            except OSError as error:
                log.warning("the disk failed process %d: %s", self.world.rank, error)

    def _together(self, said: _Say) -> None:
        if self.world.size > 1:
            self.world.say(msgspec.msgpack.encode(said))
        self._is_apart = True
        self._do(said)
        self._is_apart = False

    def _do(self, said: _Say) -> None:
        match said.what:
            case "restore":
                self._spec = msgspec.json.decode(said.spec, type=RunSpec)
                self._learner = self._gathered = None  # before the next one needs the memory
                self._learner = self._restored(self._spec)
            case "train":
                self._train(said.groups)
            case "save":
                self._save(said.stats)
            case "gather":
                self._gather()

    def _restored(self, spec: RunSpec) -> Learner:
        # Read back even when just written, so that a restart begins with the same bits.
        policy = self._read_first(spec)
        optimizer = make_optimizer(policy.model, spec.training)
        reference = self._read_first(spec).model.requires_grad_(False) if spec.training.kl_coefficient else None
        learner = Learner(0, policy.model, policy.tokenizer, optimizer, reference, {})
        found = checkpoints(self._checkpoints)
        if found:
            state = load_checkpoint(found[-1], model=policy.model, optimizer=optimizer, world=self.world)
            learner.step = state.step
            learner.stats = json.loads(str(state.counters["stats"]))
        return learner

    def _read_first(self, spec: RunSpec) -> Policy:
        policy = load_policy(self.first_policy, dtype=torch.float32)
        least = spec.proofs.min_hidden
        if policy.hidden < least:
            raise BadConfiguration(f"the proofs need {least} hidden units, but the model has only {policy.hidden}")
        if self._execution.recompute:
            policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.world.shard(policy.model)
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
            execution=self._execution,
        )
        learner.model.train(mode=False)
        learner.step += 1

    def _save(self, stats: dict[str, float]) -> None:
        learner = self.learner
        learner.stats = stats
        save_checkpoint(
            self._checkpoints,
            model=learner.model,
            optimizer=learner.optimizer,
            state=TrainerState(step=learner.step, counters={"stats": json.dumps(stats)}),
            keep=CHECKPOINTS_KEPT,
            world=self.world,
        )

    def _gather(self) -> None:
        if self.world.mesh is None:
            return
        learner = self.learner
        if self.world.is_first and self._gathered is None:
            self._gathered = load_policy(self.first_policy, dtype=torch.float32).model
        places = dict(self._gathered.named_parameters()) if self._gathered is not None else {}
        for name, parameter in learner.model.named_parameters():
            tensor = whole(parameter.detach())
            if places:
                places[name].data.copy_(tensor)
