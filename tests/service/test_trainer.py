"""The trainer: killed anywhere, it goes on as if nothing had happened."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import psycopg
import pytest
import torch
from model_folders import make_folder
from safetensors import safe_open
from sqlalchemy import delete, select, update
from trainers import (
    GROUPS,
    STEPS,
    finished_steps,
    outcome_of,
    run_in,
    spec_of,
    spec_with,
    train_to_the_end,
    trainer_of,
)
from waiting import until

from coordinator.errors import BadConfiguration
from coordinator.run.heartbeat import Condition
from coordinator.run.history import KeptHistory
from coordinator.run.home import Home
from coordinator.storage import log, training
from coordinator.storage.facts import read_fact
from coordinator.storage.retention import RESUMES_FROM
from coordinator.storage.schema import groups, policies, steps
from coordinator.storage.training import PolicyRecord
from coordinator.training import distributed_learner, initial
from coordinator.training.batches import read_batch
from coordinator.training.checkpoint import checkpoints
from coordinator.training.evaluation import EvaluationSettings
from coordinator.training.groups import Group, Sample, encode_group
from coordinator.training.optimizers import Optimizers
from coordinator.training.teacher import TEACHER
from coordinator.training.trainer import ReplayDiffers, Trainer
from node.policy.file import load_policy, save_policy, write_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.run import EnvironmentSpec
from node.protocol.slots import slot_problem


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, and no handler catches it."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[tuple[int, tuple[str, ...]]]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with run_in(folder) as home:
        train_to_the_end(home, folder)
        kept = KeptHistory(folder, run_id=home.run_id).load()
        with home.database.read() as connection:
            assert kept is not None
            assert kept.size == log.size(connection), "else it would go on from an older database"
            oldest = checkpoints(folder / "checkpoints")[0].name
            assert f"checkpoint-{int(read_fact(connection, RESUMES_FROM) or 0):08d}" == oldest, (
                "else no evidence expires"
            )
        return outcome_of(home)


def test_an_undisturbed_run_changes_the_policy_every_step(undisturbed: tuple[list[str], list]) -> None:
    policies, batches = undisturbed
    assert len(set(policies)) == STEPS + 1
    assert [step for step, _ in batches] == list(range(STEPS))


POINTS: dict[str, Callable[[pytest.MonkeyPatch, Callable[..., None]], object]] = {
    "before a policy is saved": lambda patch, die: [
        patch.setattr(f"coordinator.training.{module}.write_policy", die)
        for module in ("trainer", "distributed_learner")
    ],
    "before a step is trained": lambda patch, die: patch.setattr(
        "coordinator.training.distributed_learner.train_step", die
    ),
    "before the checkpoint": lambda patch, die: patch.setattr(
        "coordinator.training.distributed_learner.write_checkpoint", die
    ),
    "before the policy is published": lambda patch, die: patch.setattr(Trainer, "_policy_file", die),
    "before the policy is recorded": lambda patch, die: patch.setattr(training, "record_policy", die),
    "before the step is finished": lambda patch, die: patch.setattr(training, "finish_step", die),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("occasion", [1, 2])
def test_killed_anywhere_it_makes_the_same_policies_of_the_same_groups(
    tmp_path: Path, undisturbed: tuple[list[str], list], point: str, occasion: int
) -> None:
    with run_in(tmp_path) as home:
        with pytest.MonkeyPatch.context() as patch, trainer_of(home, tmp_path) as trainer:
            POINTS[point](patch, dying(patch, point, occasion))
            with pytest.raises(Killed):
                trainer.run()
        train_to_the_end(home, tmp_path)
        assert outcome_of(home) == undisturbed


@pytest.mark.parametrize("point", ["before a step is trained", "before the policy is recorded"])
def test_killed_between_checkpoints_it_trains_the_logged_batches_to_the_same_policies(
    tmp_path: Path, undisturbed: tuple[list[str], list], caplog: pytest.LogCaptureFixture, point: str
) -> None:
    """Policy 2 is out and in no checkpoint: another one in its place would be a second history."""
    rare: dict[str, Any] = {"checkpoint_every": STEPS}
    occasion = {"before a step is trained": 3, "before the policy is recorded": 4}[point]
    with run_in(tmp_path) as home:
        with pytest.MonkeyPatch.context() as patch, trainer_of(home, tmp_path, **rare) as trainer:
            POINTS[point](patch, dying(patch, point, occasion))
            with pytest.raises(Killed):
                trainer.run()
        for path in checkpoints(tmp_path / "checkpoints"):
            shutil.rmtree(path)
        train_to_the_end(home, tmp_path, **rare)
        assert outcome_of(home) == undisturbed
    assert "training 2 steps again" in caplog.text
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == [f"checkpoint-{STEPS:08d}"]


def test_groups_carry_the_environment_of_their_slot_to_whoever_watches_the_rewards(tmp_path: Path) -> None:
    """Blobs do not say it, and one that a verifier wrote could not be believed: it follows from the log's slots."""
    told, names = Told(), ("arithmetic", "reverse")
    spec = msgspec.structs.replace(spec_of(), environments=tuple(EnvironmentSpec(name=name) for name in names))
    with run_in(tmp_path, spec) as home:
        train_to_the_end(home, tmp_path, tracker=told)
        with home.database.read() as connection:
            manifest = connection.execute(select(policies.c.manifest_digest).where(policies.c.version == 0)).scalar()
        where, seen = {"run_id": home.run_id, "manifest_digest": manifest}, set[int]()
        for step, stats in told.steps:
            if step == 0:
                continue
            slots = range(GROUPS * (step - 1), GROUPS * step)
            drawn = [slot_problem(spec, **where, slot=slot).environment for slot in slots]
            batch = read_batch(home, step - 1, stop=threading.Event())
            assert [group.environment for group in batch or ()] == drawn
            keys = {key for key in stats if key.startswith("reward/")}
            assert keys == {f"reward/{names[environment]}" for environment in drawn}
            seen |= set(drawn)
    assert seen == {0, 1}


def test_a_trainer_that_is_stopped_keeps_what_it_has_trained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The next one may be of a release that rounds otherwise, and could not train the steps again."""

    class Stopping(Told):
        def step(self, step: int, stats: Mapping[str, float]) -> None:
            if step == 1:
                trainer.stop()

    caplog.set_level("INFO")
    with run_in(tmp_path) as home:
        with trainer_of(home, tmp_path, tracker=Stopping(), checkpoint_every=100) as trainer:
            trainer.run()
        assert "stopped; started again with the same --state" in caplog.text
        (kept,) = checkpoints(tmp_path / "checkpoints")
        assert 1 <= int(kept.name[-8:]) < STEPS
        train_to_the_end(home, tmp_path, checkpoint_every=100)
    assert "steps again" not in caplog.text


def test_the_next_step_computes_gradients_while_a_checkpoint_is_written_and_a_policy_published(
    tmp_path: Path, undisturbed: tuple[list[str], list]
) -> None:
    """Each waits here until the next step is about to update; one after the other, neither would ever begin.

    An update that does not wait for the checkpoint would be in it, in part.
    """
    about_to_update, order, steps = threading.Event(), list[str](), list[int]()
    write, record, train = (
        distributed_learner.write_checkpoint,
        training.record_policy,
        distributed_learner.train_step,
    )
    wait, update = distributed_learner.Team._wait_for_checkpoint, Optimizers.step

    def written(folder: Path, rows: Any, **given: Any) -> Path:
        step = given["state"].step
        assert step > 1 or about_to_update.wait(60)
        path = write(folder, rows, **given)
        order.append(f"checkpoint {step}")
        return path

    def recorded(connection: Any, policy: PolicyRecord, *, now: float) -> None:
        assert policy.version != 1 or about_to_update.wait(60)
        order.append(f"policy {policy.version}")
        record(connection, policy, now=now)

    def trained(*arguments: Any, **given: Any) -> dict[str, float]:
        steps.append(given["step"])
        return train(*arguments, **given)

    def waited(team: distributed_learner.Team) -> None:
        if steps[-1] == 1:
            about_to_update.set()
        wait(team)

    def updated(optimizer: Optimizers) -> None:
        order.append(f"update {steps[-1]}")
        update(optimizer)

    with run_in(tmp_path) as home, pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_learner, "write_checkpoint", written)
        patch.setattr(training, "record_policy", recorded)
        patch.setattr(distributed_learner, "train_step", trained)
        patch.setattr(distributed_learner.Team, "_wait_for_checkpoint", waited)
        patch.setattr(Optimizers, "step", updated)
        train_to_the_end(home, tmp_path)
        assert outcome_of(home) == undisturbed
    for step in range(1, STEPS):
        assert order.index(f"checkpoint {step}") < order.index(f"update {step}")
    for version in range(1, STEPS + 1):
        assert order.index(f"checkpoint {version}") < order.index(f"policy {version}")


def test_a_checkpoint_that_cannot_be_written_keeps_its_policy_out_of_the_log(tmp_path: Path) -> None:
    """Its step is trained again, perhaps by another machine, and comes out otherwise: nobody may have heard of it."""
    with run_in(tmp_path) as home, pytest.MonkeyPatch.context() as patch, trainer_of(home, tmp_path) as trainer:

        def failed(*_: Any, **__: Any) -> None:
            trainer.stop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(distributed_learner, "write_checkpoint", failed)
        trainer.run()
        assert finished_steps(home) == 0
        assert not checkpoints(tmp_path / "checkpoints")
        assert trainer._origin.store.get(1) is None, "whoever asks the origin is given what it has signed"


def test_a_trainer_stopped_while_a_publication_fails_goes_on_when_it_is_started_again(
    tmp_path: Path, undisturbed: tuple[list[str], list]
) -> None:
    """The step beside the failing publication is trained by then: a checkpoint of it would be ahead of the log."""
    train, record, is_trained = distributed_learner.train_step, training.record_policy, threading.Event()

    def trained(*arguments: Any, **given: Any) -> dict[str, float]:
        stats = train(*arguments, **given)
        if given["step"] == 1:
            is_trained.set()
        return stats

    def away(connection: Any, policy: PolicyRecord, *, now: float) -> None:
        if policy.version == 1:
            assert is_trained.wait(60)
            trainer.stop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        record(connection, policy, now=now)

    with run_in(tmp_path) as home:
        with pytest.MonkeyPatch.context() as patch, trainer_of(home, tmp_path) as trainer:
            patch.setattr(distributed_learner, "train_step", trained)
            patch.setattr(training, "record_policy", away)
            trainer.run()
        train_to_the_end(home, tmp_path)
        assert outcome_of(home) == undisturbed


def test_a_disk_that_is_full_for_a_while_is_waited_for(
    tmp_path: Path, undisturbed: tuple[list[str], list], caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the first policy nor a checkpoint fits, until there is room; the kernel's limit on files is the disk.

    The run's page says so meanwhile: for an hour it said that everything works.
    """
    condition, said_of_it = Condition(), list[str]()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fits(size_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))

    def make_room_in_two_steps() -> None:
        for room in (2_000_000, before[0]):  # a policy has 1.6 MB, a checkpoint three times as much
            said = caplog.text.count("retrying from the last checkpoint")
            deadline = time.monotonic() + 100
            while caplog.text.count("retrying from the last checkpoint") == said and time.monotonic() < deadline:
                time.sleep(0.02)
            said_of_it.append(condition.trouble)
            fits(room)

    with run_in(tmp_path) as home:
        fits(1_000_000)
        helper = threading.Thread(target=make_room_in_two_steps)
        helper.start()
        try:
            train_to_the_end(home, tmp_path, condition=condition)
        finally:
            helper.join()
            fits(before[0])
        assert outcome_of(home) == undisturbed
        assert [*said_of_it, condition.trouble] == ["disk_full", "disk_full", ""]
        assert caplog.text.count("retrying from the last checkpoint") >= 2
        assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("fault", ["its folder is forbidden to it", "PostgreSQL is away"])
def test_what_is_mended_while_the_trainer_waits_costs_nothing_and_is_said_in_a_line(
    tmp_path: Path,
    undisturbed: tuple[list[str], list],
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
    fault: str,
) -> None:
    away = fault == "PostgreSQL is away"
    url = request.getfixturevalue("postgresql_url") if away else None
    broken = without_connections(url) if url else forbidden(tmp_path / "checkpoints")
    wanted = "the database is away" if away else "is not this user's to use (Permission denied): mend its owner"

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if wanted in record.getMessage()]

    def break_and_mend() -> None:
        until(lambda: finished_steps(home) >= 1, seconds=60)
        with broken:
            until(said, seconds=60)

    with run_in(tmp_path, database_url=url) as home:
        helper = threading.Thread(target=break_and_mend)
        helper.start()
        train_to_the_end(home, tmp_path)
        helper.join()
        assert outcome_of(home) == undisturbed
    assert said()
    assert not any("\n" in line for line in said())
    assert not any(record.exc_info for record in caplog.records)


@contextmanager
def forbidden(folder: Path) -> Iterator[None]:
    """A folder in which this process may not write, which root may anywhere unless it is nobody for a while."""
    root = os.geteuid() == 0
    mode = folder.stat().st_mode
    folder.chmod(0o555)
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(mode)


@contextmanager
def without_connections(url: str) -> Iterator[None]:
    """A database that ends its connections and takes none."""
    name = urlsplit(url).path.strip("/")
    with psycopg.connect(url.replace(f"/{name}", "/postgres"), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name])
        try:
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")


def test_what_a_killed_trainer_was_saving_does_not_stay(tmp_path: Path) -> None:
    """It is as large as the policy, and each kill would leave another."""
    with run_in(tmp_path) as home:
        leftover = tmp_path / ".policy-0.safetensors.4711.tmp"
        leftover.write_bytes(b"half a policy")
        train_to_the_end(home, tmp_path)
        assert not leftover.exists()


def test_no_worker_hears_of_a_policy_that_the_log_lacks(tmp_path: Path) -> None:
    """Else an honest worker could name a policy that a verifier finds nowhere, and be rejected for it."""
    with run_in(tmp_path) as home:
        seen: list[tuple[int | None, int | None]] = []
        with trainer_of(home, tmp_path) as trainer, pytest.MonkeyPatch.context() as patch:
            record = training.record_policy

            def recording(connection: Any, policy: PolicyRecord, *, now: float) -> None:
                head = trainer._origin.head()
                seen.append((policy.version, None if head is None else head.version))
                if policy.version == 1:
                    raise Killed
                record(connection, policy, now=now)

            patch.setattr(training, "record_policy", recording)
            with pytest.raises(Killed):
                trainer.run()
        assert seen == [(0, None), (1, 0)]
        with trainer_of(home, tmp_path) as trainer:
            head = trainer._origin.head()
            assert head is not None
            assert head.version == 0, "policy 1 is in the store, and not in the log"
        train_to_the_end(home, tmp_path)


def dying(patch: pytest.MonkeyPatch, point: str, occasion: int) -> Callable[..., object]:
    """Something that works until it is called for the `occasion`th time, and then the process is dead."""
    from coordinator.training import trainer as module

    originals = {
        "before a policy is saved": module.write_policy,
        "before a step is trained": distributed_learner.train_step,
        "before the checkpoint": distributed_learner.write_checkpoint,
        "before the policy is published": Trainer._policy_file,
        "before the policy is recorded": training.record_policy,
        "before the step is finished": training.finish_step,
    }
    calls = 0

    def die(*arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == occasion:
            raise Killed
        return originals[point](*arguments, **named)  # type: ignore[operator]

    return die


def test_a_trainer_in_another_folder_does_not_sign_a_second_history(tmp_path: Path) -> None:
    """Two manifests for one version are fraud in everybody's eyes; a mistyped --state must not commit it."""
    announced: list[str] = []
    with run_in(tmp_path) as home:
        train_to_the_end(home, tmp_path, announce=lambda: announced.append("its own"))
        assert announced == ["its own"]
        other = trainer_of(home, tmp_path / "other", announce=lambda: announced.append("other"))
        with other as trainer, pytest.raises(BadConfiguration, match="--state"):
            trainer.run()
        assert announced == ["its own"], "nodes would be sent to it, and the run would stand still"
        assert not list((tmp_path / "other" / "origin").rglob("manifests/*"))


def test_a_teacher_that_was_exchanged_is_refused_and_one_that_was_lost_is_read_again(tmp_path: Path) -> None:
    """From some step on the policy would near another model, and nothing would say so."""
    folder = make_folder(tmp_path / "big", num_hidden_layers=1)
    spec = spec_with(teacher={"folder": str(folder), "coefficient": 0.5})
    with run_in(tmp_path, spec) as home:
        train_to_the_end(home, tmp_path)
        save_policy(make_model(8), make_tokenizer(), tmp_path / TEACHER)
        with trainer_of(home, tmp_path) as trainer, pytest.raises(BadConfiguration, match="not the teacher that this"):
            trainer.run()
        (tmp_path / TEACHER).unlink()
        restarted(home, tmp_path)


def test_a_trainer_whose_newest_checkpoints_were_moved_away_goes_on_from_an_older_one(
    tmp_path: Path, undisturbed: tuple[list[str], list]
) -> None:
    with run_in(tmp_path) as home:
        train_to_the_end(home, tmp_path)
        for newer in checkpoints(tmp_path / "checkpoints")[1:]:
            shutil.rmtree(newer)
        restarted(home, tmp_path)
        assert outcome_of(home) == undisturbed


def test_a_trainer_from_an_old_backup_does_not_sign_a_second_history(tmp_path: Path) -> None:
    """It would make the same policies, and sign them at another time: two manifests of one version."""
    with run_in(tmp_path) as home:
        train_to_the_end(home, tmp_path)
        for newer in checkpoints(tmp_path / "checkpoints")[1:]:
            shutil.rmtree(newer)
        for newer in (f"{STEPS:016d}", f"{STEPS - 1:016d}"):
            (tmp_path / "origin" / "manifests" / newer).unlink()
        with trainer_of(home, tmp_path) as trainer, pytest.raises(BadConfiguration, match="backup"):
            trainer.run()


def test_a_database_older_than_the_trainers_folder_gets_no_policy_without_its_batch(tmp_path: Path) -> None:
    """The folder was copied after the backup that is restored: its next policy is of a step that the log lacks."""
    with run_in(tmp_path) as home:
        train_to_the_end(home, tmp_path)
        with home.database.write() as connection:
            connection.execute(delete(policies).where(policies.c.version == STEPS))
            connection.execute(delete(steps).where(steps.c.step == STEPS - 1))
        with trainer_of(home, tmp_path) as trainer, pytest.raises(BadConfiguration, match="backup"):
            trainer.run()


def test_a_proof_larger_than_the_models_width_is_refused_before_anything_is_published(tmp_path: Path) -> None:
    spec = spec_of()
    spec = msgspec.structs.replace(spec, proofs=msgspec.structs.replace(spec.proofs, top_k=129))
    with run_in(tmp_path, spec) as home:
        with trainer_of(home, tmp_path) as trainer, pytest.raises(BadConfiguration, match="hidden units"):
            trainer.run()
        assert finished_steps(home) == -1


def test_a_half_precision_run_trains_in_single_precision(tmp_path: Path) -> None:
    spec = spec_of(dtype="bfloat16")
    with run_in(tmp_path, spec) as home:
        train_to_the_end(home, tmp_path)
    published = load_policy(tmp_path / "policy.safetensors", dtype=torch.bfloat16)
    assert published.model.dtype == torch.bfloat16
    (newest,) = checkpoints(tmp_path / "checkpoints")[-1].glob("*.safetensors")
    with safe_open(newest, framework="pt") as file:
        weights = {name: file.get_tensor(name) for name in file.keys() if name.startswith("model/")}  # noqa: SIM118
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    finer = sum(int((weight != weight.bfloat16().float()).sum()) for weight in weights.values())
    assert finer > 100_000, "small updates are kept, though workers never see them"


def test_a_local_folder_is_a_start(tmp_path: Path) -> None:
    make_model(7).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    source = initial.initial_policy(spec_of(initial=str(tmp_path)))
    write_policy(source, tmp_path / "policy", dtype=torch.float32)
    policy = load_policy(tmp_path / "policy", dtype=torch.float32)
    assert torch.equal(policy.model.get_input_embeddings().weight, make_model(7).get_input_embeddings().weight)
    assert policy.tokenizer("Q:1+1").input_ids == make_tokenizer()("Q:1+1").input_ids


@pytest.mark.parametrize("there", [False, True])
def test_a_start_that_is_no_model_is_one_clear_sentence(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoConfig": "x.Y"}}')
    with pytest.raises(BadConfiguration, match=r"model\.initial"):
        initial.initial_policy(spec_of(initial=str(tmp_path)))


class Told:
    """A watcher that remembers what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []

    def step(self, step: int, stats: Mapping[str, float]) -> None:
        self.steps.append((step, dict(stats)))

    def close(self) -> None:
        """Nothing is held."""


def test_every_step_is_told_to_whoever_watches_and_policies_are_measured_now_and_then(tmp_path: Path) -> None:
    """An operator sees held-out rewards beside those of training; measuring them must not change what is trained."""
    told, spec = Told(), spec_of()
    spec = msgspec.structs.replace(spec, sampling=msgspec.structs.replace(spec.sampling, max_new_tokens=16))
    with run_in(tmp_path / "watched", spec) as home:
        train_to_the_end(
            home,
            tmp_path / "watched",
            tracker=told,
            evaluate_every=2,
            evaluation=EvaluationSettings(problems=3),
        )
        watched = outcome_of(home)
    with run_in(tmp_path / "alone", spec) as home:
        train_to_the_end(home, tmp_path / "alone")
        assert outcome_of(home) == watched
    assert [step for step, _ in told.steps] == [0, 1, 2, 3]
    assert [("evaluation/arithmetic" in stats, "entropy" in stats) for _, stats in told.steps] == [
        (True, False),
        (False, True),
        (True, True),
        (False, True),
    ]


# -- one bit


def flip(path: Path, *, at: int = -1) -> None:
    """Change one bit of a file, as a bad disk does."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def checkpoint_files(folder: Path) -> list[Path]:
    """The tensors of each checkpoint, oldest first; the last bytes of a file are the optimizer's or the weights'."""
    return [next(path.glob("*.safetensors")) for path in checkpoints(folder / "checkpoints")]


def digests(folder: Path) -> dict[str, list[str]]:
    """What the newest checkpoint says of its tensors."""
    index = msgspec.json.decode((checkpoint_files(folder)[-1].parent / "checkpoint.json").read_bytes())
    return {name: [piece["digest"] for piece in tensor["pieces"]] for name, tensor in index["tensors"].items()}


def restarted(home: Home, folder: Path) -> None:
    """Start the trainer once more on a finished run, until it serves the newest policy again."""
    with trainer_of(home, folder) as trainer, pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "_track", lambda *_: trainer.stop())
        trainer.run()


@pytest.mark.parametrize("damaged", [1, 3])
def test_a_flipped_bit_in_the_newest_checkpoints_costs_steps_and_makes_the_same_policies(
    tmp_path: Path, undisturbed: tuple[list[str], list], caplog: pytest.LogCaptureFixture, damaged: int
) -> None:
    """With all of them damaged it begins with the first policy; the log has every batch since."""
    with run_in(tmp_path) as home:
        train_to_the_end(home, tmp_path)
        whole = digests(tmp_path)
        for path in checkpoint_files(tmp_path)[-damaged:]:
            flip(path)
        restarted(home, tmp_path)
        assert outcome_of(home) == undisturbed
        assert digests(tmp_path) == whole
        names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
        assert f"checkpoint-{STEPS:08d}.damaged" in names
        assert f"checkpoint-{STEPS:08d} is damaged: 1 tensors are not as written" in caplog.text
        assert f"training {damaged} steps again" in caplog.text


def test_a_trainer_killed_before_it_published_loses_its_newest_checkpoint(
    tmp_path: Path, undisturbed: tuple[list[str], list]
) -> None:
    with run_in(tmp_path) as home:
        with pytest.MonkeyPatch.context() as patch, trainer_of(home, tmp_path) as trainer:
            patch.setattr(training, "record_policy", dying(patch, "before the policy is recorded", 3))
            with pytest.raises(Killed):
                trainer.run()
        flip(checkpoint_files(tmp_path)[-1])
        train_to_the_end(home, tmp_path)
        assert outcome_of(home) == undisturbed


def test_a_replay_that_makes_another_policy_is_neither_saved_nor_published(tmp_path: Path) -> None:
    """Two histories under one key are fraud; here a group of an old step has changed in the run's store."""
    with run_in(tmp_path) as home:
        train_to_the_end(home, tmp_path)
        flip(checkpoint_files(tmp_path)[-1])
        other = Group(0, (0.0, 1.0, 1.0, 0.0), tuple(Sample((5, 6), (9, 8), (-1.0, -1.0)) for _ in range(4)))
        with home.database.write() as connection:
            blob = home.blobs.put(encode_group(other))
            connection.execute(update(groups).where(groups.c.step == STEPS - 1).values(blob=blob))
        manifests = {path: path.read_bytes() for path in (tmp_path / "origin").rglob("manifests/*")}
        with (
            trainer_of(home, tmp_path) as trainer,
            pytest.raises(ReplayDiffers, match="nothing was saved"),
        ):
            trainer.run()
        assert [path.name for path in checkpoints(tmp_path / "checkpoints")][-1] == f"checkpoint-{STEPS - 1:08d}"
        assert {path: path.read_bytes() for path in (tmp_path / "origin").rglob("manifests/*")} == manifests


def test_flipped_bits_in_the_first_and_the_newest_policy_are_mended_at_the_start(
    tmp_path: Path, undisturbed: tuple[list[str], list], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody could fetch the newest policy, and the first one is what the KL penalty is measured against."""
    with run_in(tmp_path) as home:
        train_to_the_end(home, tmp_path)
        (newest,) = (tmp_path / "origin" / "versions").glob(f"{STEPS}-*.bin")
        whole = newest.read_bytes(), (tmp_path / "policy-0.safetensors").read_bytes()
        flip(newest, at=5000)
        flip(tmp_path / "policy-0.safetensors", at=5000)
        restarted(home, tmp_path)
        assert (newest.read_bytes(), (tmp_path / "policy-0.safetensors").read_bytes()) == whole
        assert "policy-0.safetensors is damaged; taking policy 0 from the origin again" in caplog.text
        assert outcome_of(home) == undisturbed
