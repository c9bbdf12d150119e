"""Fine-tuning from a model's folder to another one, which `model.initial` takes.

Every process of a world calls `fine_tune` with the same job. The first one prepares the state folder, which the others
read, so that it is on a shared file system:

    sft.json               what it belongs to (`PreparedSft`), written last
    data/                  the tokenized examples
    policy-0.safetensors   the model that training begins with
    checkpoints/           the newest ones, from which a killed fine-tuning goes on bit for bit
    curve.jsonl            each step's statistics

What a step trains on follows from its number and the recipe's seed alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec
import torch
from blake3 import blake3

from coordinator.errors import BadConfiguration, CoordinatorError, UnfitModel
from coordinator.sft.examples import Examples, write_examples
from coordinator.sft.recipe import FORMAT, PreparedSft, SftRecipe
from coordinator.sft.rendering import RowRenderer, Template
from coordinator.training.checkpoint import (
    CheckpointDamaged,
    TrainerState,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
    set_aside,
)
from coordinator.training.companion import read_companion
from coordinator.training.distributed_learner import write_gathered
from coordinator.training.export import export_file, require_empty
from coordinator.training.grpo import Execution
from coordinator.training.lora import adapter_counters, load_trained
from coordinator.training.optimizers import Optimizers, make_optimizer
from coordinator.training.packing import PackedRow, pack
from coordinator.training.supervised import CosineSchedule, SupervisedStep, packed_backward, packed_loss, supervise
from coordinator.training.trackers import Tracker
from coordinator.training.world import World
from node.chat.template import FolderTemplate
from node.policy.errors import MalformedPolicy
from node.policy.file import Policy, write_policy
from node.policy.folder import ModelFolder, open_folder
from node.policy.model_files import MAX_BYTES
from node.policy.models.base import RecurrentForCausalLM
from node.protocol.run import LoraSpec
from shardcast.content import file_digest
from shardcast.errors import Malformed
from shardcast.files import FolderLock, read_bounded, write_atomically

log = logging.getLogger(__name__)

INDEX, DATA, FIRST, LAST, CURVE = "sft.json", "data", "policy-0.safetensors", "policy.safetensors", "curve.jsonl"
CHECKPOINTS, CHECKPOINTS_KEPT = "checkpoints", 2
DEFAULT_MAX_TOKENS = 4096
_MAX_INDEX_BYTES = 2**20
_READING_SECONDS = 10.0
"""Between two lines about how far the data is read."""


class SftStopped(CoordinatorError):
    """Fine-tuning was stopped; the same command goes on."""

    code = "stopped"


@dataclass(frozen=True, kw_only=True)
class SftJob:
    """What is fine-tuned with which rows, and where to; held-out loss and checkpoints come every so many steps."""

    model: Path
    data: Path
    to: Path
    state: Path
    recipe: SftRecipe
    execution: Execution
    evaluate_every: int
    checkpoint_every: int


@dataclass(frozen=True, slots=True)
class SftResult:
    """What was made: the losses of all steps and those on held-out rows, first and last included, in nats per token;
    and the digest of the policy's file.
    """

    losses: tuple[float, ...]
    held_out_losses: tuple[float, ...]
    digest: str


class SftObserver(Protocol):
    """Told what goes on, in the first process."""

    def begun(self, prepared: PreparedSft, *, steps: int, done: int) -> None:
        """Note that training goes on behind `done` steps."""

    def step(self, step: SupervisedStep, *, tokens: int) -> None:
        """Note a finished step on so many tokens."""

    def evaluated(self, step: int, loss: float) -> None:
        """Note the held-out loss after `step` steps."""


def fine_tune(
    job: SftJob, *, tracker: Callable[[PreparedSft], Tracker], observer: SftObserver, stop: Callable[[], bool]
) -> SftResult | None:
    """Prepare, train and write the folder `job.to`, or go on with it; None in all processes but the first.

    `stop` says that a signal has come: a checkpoint is written, and SftStopped raised. Raises CoordinatorError,
    LocalFault, PolicyError, OSError.
    """
    world = job.execution.world
    with contextlib.ExitStack() as held:

        def prepare() -> PreparedSft:
            require_empty(job.to)
            is_new = not job.state.exists()
            held.callback(FolderLock(job.state).release)
            try:
                return _prepare(job, stop=stop)
            except BaseException:
                if is_new and not (job.state / INDEX).exists():
                    shutil.rmtree(job.state, ignore_errors=True)
                raise

        prepared = _from_first(world, prepare)
        work = _FineTuning(job, prepared, observer=observer, stop=stop)
        if world.is_first:
            work.tracker = tracker(prepared)
            held.callback(work.tracker.close)
        work.train()
        return work.finish()


def _from_first(world: World, work: Callable[[], PreparedSft]) -> PreparedSft:
    """Return what `work` returns in the first process; raises in all of them if it does."""
    prepared: PreparedSft | None = None
    try:
        if world.is_first:
            prepared = work()
    finally:
        said = world.broadcast(msgspec.json.encode(prepared) if world.is_first else None)
    prepared = msgspec.json.decode(said, type=PreparedSft | None)  # the same value in all of them
    if prepared is None:
        raise BadConfiguration("the first process cannot begin, and says why")
    return prepared


def _prepare(job: SftJob, *, stop: Callable[[], bool]) -> PreparedSft:
    """Prepare the state folder, or find that it is this job's; raises BadConfiguration if it is another's."""
    try:
        found = open_folder(job.model)
    except (MalformedPolicy, OSError) as error:
        raise UnfitModel(f"--model: {error}") from error
    _check_adapters(found, job.recipe.lora)
    model, data = _model_digest(job.model), file_digest(job.data)
    index = job.state / INDEX
    if index.exists():
        return _same(index, job, model=model, data=data)

    rows, said = 0, time.monotonic()

    def on_row() -> None:
        nonlocal rows, said
        if stop():
            raise SftStopped("stopped while the data was read")
        rows += 1
        if time.monotonic() - said >= _READING_SECONDS:
            said = time.monotonic()
            log.info("read %d rows", rows)

    folder = job.state / DATA
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
    folder.mkdir(parents=True)
    most = _max_tokens(found, job.recipe)
    with contextlib.ExitStack() as held:
        has_template = bool(found.tokenizer.chat_template)
        template = held.enter_context(FolderTemplate(job.model)) if has_template else None
        renderer = _renderer(found, job.recipe, template)
        try:
            counts = write_examples(folder, job.data, job.recipe, renderer, max_tokens=most, on_row=on_row)
        except MalformedPolicy as error:
            raise UnfitModel(f"--model: {error}") from error
    write_policy(found.source(), job.state / FIRST, dtype=found.dtype)
    prepared = PreparedSft(recipe=job.recipe, model=model, data=data, dtype=str(found.dtype)[6:], counts=counts)
    write_atomically(index, msgspec.json.encode(prepared))
    return prepared


def _same(index: Path, job: SftJob, *, model: str, data: str) -> PreparedSft:
    try:
        known = msgspec.json.decode(read_bounded(index, max_bytes=_MAX_INDEX_BYTES), type=PreparedSft)
    except (msgspec.MsgspecError, Malformed) as error:
        raise BadConfiguration(f"{index} is no index of a fine-tuning of this release: name another --state") from error
    given, before = msgspec.structs.asdict(job.recipe), msgspec.structs.asdict(known.recipe)
    other = [name for name in given if given[name] != before[name]]
    other += [name for name, now in (("model", model), ("data", data)) if getattr(known, name) != now]
    if other or known.format != FORMAT:
        raise BadConfiguration(
            f"{job.state} is of another fine-tuning, with another {', '.join(other) or 'format'}: give what it began "
            "with to go on, or name another --state"
        )
    return known


def _renderer(found: ModelFolder, recipe: SftRecipe, template: Template | None) -> RowRenderer:
    """Return the renderer of the folder's rows, with the recipe's end mark made one of the model's."""
    marks, last = found.eos_ids, found.tokenizer.eos_token_id
    if recipe.end_mark is not None:
        last = found.tokenizer.get_vocab().get(recipe.end_mark)
        if last is None:
            raise BadConfiguration(f"--end-mark: {recipe.end_mark!r} is no token of {found.tokenizer.name_or_path}")
        marks |= {last}
        found.config.eos_token_id = sorted(marks)
    return RowRenderer(found.tokenizer, marks, last, template, recipe.each_turn)


def _check_adapters(found: ModelFolder, lora: LoraSpec | None) -> None:
    policy = found.first_policy()
    missing = [target for target in (lora.targets if lora else ()) if target not in policy.projections]
    if missing:
        raise UnfitModel(f"--lora-targets: a {policy.family} model has no {', '.join(missing)}")


def _max_tokens(found: ModelFolder, recipe: SftRecipe) -> int:
    positions = found.first_policy().positions
    if recipe.max_tokens is None:
        return min(positions or DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS)
    if positions is not None and recipe.max_tokens > positions:
        raise BadConfiguration(f"--max-tokens: the model has {positions} positions")
    return recipe.max_tokens


class _FineTuning:
    """One process's part of a fine-tuning."""

    def __init__(self, job: SftJob, prepared: PreparedSft, *, observer: SftObserver, stop: Callable[[], bool]) -> None:
        self._job, self._prepared, self._observer, self._stop = job, prepared, observer, stop
        self._world = job.execution.world
        self._examples = Examples(job.state / DATA)
        self._schedule: CosineSchedule = job.recipe.schedule(len(self._examples.training))
        self._policy, self._optimizer, self._done = self._restore()
        self._tokens = 0
        self.tracker: Tracker | None = None

    def _restore(self) -> tuple[Policy, Optimizers, int]:
        """Return model and optimizer of the newest whole checkpoint, or the first ones, and the finished steps."""
        recipe = self._job.recipe
        for path in [*reversed(checkpoints(self._job.state / CHECKPOINTS)), None]:
            policy = load_trained(
                self._job.state / FIRST,
                lora=recipe.lora,
                seed=recipe.seed,
                recompute=self._job.execution.recompute,
                world=self._world,
            )
            optimizer = make_optimizer(policy.model, recipe.training())
            if path is None:
                return policy, optimizer, 0
            try:
                state = load_checkpoint(path, model=policy.model, optimizer=optimizer, world=self._world)
            except CheckpointDamaged as error:
                if self._world.is_first:
                    log.warning("%s; kept as %s, going on from the one before it", error, set_aside(path).name)
            else:
                return policy, optimizer, state.step
        raise AssertionError("unreachable")

    def train(self) -> None:
        """Train the steps that are left; raises SftStopped."""
        self._keep_curve()
        if self._world.is_first:
            self._observer.begun(self._prepared, steps=self._schedule.steps, done=self._done)
        if self._done == 0:
            self._report(0, self._evaluate(0))
        model = self._policy.model
        steps = supervise(
            model,
            self._optimizer,
            self._schedule,
            self._backward,
            gradient_clip=self._job.recipe.gradient_clip,
            first=self._done,
        )
        for step in steps:
            self._done = step.step
            held_out = self._evaluate(step.step)
            if self._world.is_first:
                self._observer.step(step, tokens=self._tokens)
            stats = {"loss": step.loss, "learning_rate": step.learning_rate, "grad_norm": step.grad_norm}
            self._report(step.step, stats | {"tokens": float(self._tokens)} | held_out)
            is_stopped = bool(self._world.largest(torch.tensor([float(self._stop())])))
            if is_stopped or self._is_due(self._job.checkpoint_every):
                self._save()
            if is_stopped:
                raise SftStopped(f"stopped after step {step.step} of {self._schedule.steps}")
        model.train(mode=False)

    def finish(self) -> SftResult | None:
        """Write the trained policy as a folder; only the first process returns what was made."""
        path, dtype = self._job.state / LAST, getattr(torch, self._prepared.dtype)
        write_gathered(self._policy.model, self._policy.tokenizer, path, dtype=dtype, world=self._world)
        if not self._world.is_first:
            return None
        export_file(path, self._job.to, companion=read_companion(self._job.model))
        losses, held_out = (
            tuple(line[name] for line in self.curve() if name in line) for name in ("loss", "held_out_loss")
        )
        return SftResult(losses, held_out, file_digest(path))

    def curve(self) -> Iterator[dict[str, float]]:
        """Yield the statistics of each step since the beginning."""
        path = self._job.state / CURVE
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(msgspec.DecodeError):  # half a line, where a disk was full
                yield msgspec.json.decode(line, type=dict[str, float])

    def _is_due(self, every: int) -> bool:
        return self._done % every == 0 or self._done == self._schedule.steps

    def _save(self) -> None:
        counters = adapter_counters(self._job.recipe.lora, initial=str(self._job.model.absolute()))
        save_checkpoint(
            self._job.state / CHECKPOINTS,
            model=self._policy.model,
            optimizer=self._optimizer,
            state=TrainerState(step=self._done, counters=counters),
            keep=CHECKPOINTS_KEPT,
            world=self._world,
        )

    def _backward(self, step: int) -> float:
        recipe = self._job.recipe
        epoch, at = divmod(step, recipe.steps_per_epoch(len(self._examples.training)))
        numbers = self._order(epoch)[at * recipe.batch : (at + 1) * recipe.batch]
        rows = self._rows(numbers)
        self._tokens = sum(len(row.targets) for row in rows)
        return packed_backward(self._policy.model, rows, execution=self._job.execution)

    @functools.lru_cache(maxsize=1)  # noqa: B019  (one object, which lives as long as the process)
    def _order(self, epoch: int) -> list[int]:
        numbers = list(self._examples.training)
        Random(f"{self._job.recipe.seed} {epoch}").shuffle(numbers)
        return numbers

    def _rows(self, numbers: Sequence[int]) -> list[PackedRow]:
        recurrent = isinstance(self._policy.model, RecurrentForCausalLM)
        scored = [self._examples.scored(number) for number in numbers]
        return pack(scored, row_tokens=self._job.execution.row_tokens, recurrent=recurrent)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Return the held-out loss if it is due and anything is held out."""
        numbers, size = self._examples.held_out, self._job.recipe.batch
        if not numbers or not self._is_due(self._job.evaluate_every):
            return {}
        batches = (self._rows(numbers[at : at + size]) for at in range(0, len(numbers), size))
        loss = packed_loss(self._policy.model, batches, execution=self._job.execution)
        if self._world.is_first:
            self._observer.evaluated(step, loss)
        return {"held_out_loss": loss}

    def _keep_curve(self) -> None:
        """Drop what a killed process wrote of steps that are trained again."""
        if self._world.is_first:
            kept = [line for line in self.curve() if self._done and line["step"] <= self._done]
            write_atomically(self._job.state / CURVE, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))

    def _report(self, step: int, stats: dict[str, float]) -> None:
        """Append a step to the curve, and pass it to the tracker."""
        if not self._world.is_first or not stats:
            return
        with (self._job.state / CURVE).open("ab") as file:
            file.write(msgspec.json.encode({"step": step} | stats) + b"\n")
        if self.tracker is not None:
            self.tracker.step(step, stats)


def _model_digest(folder: Path) -> str:
    """Digest what a folder says, and how large its weights are: the state folder has their numbers."""
    hasher = blake3()
    for path in sorted(folder.iterdir()):
        if path.name in MAX_BYTES:
            hasher.update(msgspec.json.encode((path.name, file_digest(path))))
        elif path.suffix == ".safetensors":
            hasher.update(msgspec.json.encode((path.name, path.stat().st_size)))
    return hasher.hexdigest()
