"""Checkpoints: what an operator gets back after the trainer was killed."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coordinator.training.checkpoint import (
    CheckpointDamaged,
    CheckpointError,
    TrainerState,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import train_step
from coordinator.training.optimizers import make_optimizer
from node.protocol.run import EnvironmentSpec, RunSpec, TrainingSpec

SPEC = RunSpec(
    name="test",
    environments=(EnvironmentSpec(name="arithmetic"),),
    training=TrainingSpec(minibatches=2, warmup_steps=2, weight_decay=0.01),
)


def small_model(*, seed: int = 0, hidden: int = 16, tie: bool = True) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tie,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def groups_of(step: int) -> list[Group]:
    samples = tuple(Sample((1, 2, 3 + step), (4 + row, 9, 7), (-3.0, -3.5, -3.25)) for row in range(4))
    return [Group(version=step, rewards=(0.0, 1.0, 0.0, 0.5), rollouts=samples)]


def bits(model, optimizer):
    moments = [
        tensor for parameter in model.parameters() for _, tensor in sorted(optimizer.state_of(parameter).items())
    ]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *moments)]


def equal(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def train(model, optimizer, steps):
    for step in steps:
        train_step(model, optimizer, groups_of(step), spec=SPEC, step=step)


def started(*, seed: int = 0, **shape):
    model = small_model(seed=seed, **shape)
    return model, make_optimizer(model, SPEC.training)


RESUME = """
import importlib.util, sys, torch
from pathlib import Path
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("resumed", sys.argv[1])
test = importlib.util.module_from_spec(spec); spec.loader.exec_module(test)
folder = Path(sys.argv[2])
model, optimizer = test.started(seed=99)
state = test.load_checkpoint(test.checkpoints(folder)[-1], model=model, optimizer=optimizer)
test.train(model, optimizer, [state.step])
test.save_checkpoint(folder, model=model, optimizer=optimizer, state=test.TrainerState(state.step + 1), keep=9)
"""

FULL_DISK = """
import importlib.util, resource, signal, torch
from pathlib import Path
torch.set_num_threads(1)
spec = importlib.util.spec_from_file_location("full", {test!r})
test = importlib.util.module_from_spec(spec); spec.loader.exec_module(test)
model, optimizer = test.started()
test.train(model, optimizer, [0])
def save(step):
    test.save_checkpoint(Path({folder!r}), model=model, optimizer=optimizer, state=test.TrainerState(step), keep=9)
save(1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    save(2)
except OSError as error:
    raise SystemExit(0 if "shard-00000.safetensors" in str(error) else 2)
raise SystemExit(1)
"""


@pytest.mark.system
def test_a_trainer_killed_between_steps_continues_bit_for_bit_in_a_new_process(tmp_path):
    """Otherwise the policy an auditor can recompute is not the one that was published."""
    whole = started()
    train(*whole, [0, 1])
    first = started()
    train(*first, [0])
    save_checkpoint(tmp_path, model=first[0], optimizer=first[1], state=TrainerState(1), keep=9)
    subprocess.run(
        [sys.executable, "-c", RESUME, __file__, str(tmp_path)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    resumed = started(seed=5)
    state = load_checkpoint(checkpoints(tmp_path)[-1], model=resumed[0], optimizer=resumed[1])
    assert state.step == 2
    assert not equal(bits(*whole), bits(*first))
    assert equal(bits(*whole), bits(*resumed))


def test_the_optimizers_memory_matters(tmp_path):
    """A checkpoint without it would pass a test that compares the weights alone after loading."""
    model, optimizer = started()
    train(model, optimizer, [0])
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(1), keep=1)
    resumed, fresh = started(seed=1)
    load_checkpoint(path, model=resumed, optimizer=fresh)
    forgetful = make_optimizer(resumed, SPEC.training)
    train(model, optimizer, [1])
    train(resumed, forgetful, [1])
    assert not torch.equal(model.lm_head.weight, resumed.lm_head.weight)


def test_nothing_changes_before_the_first_update_of_a_step_is_announced():
    """A checkpoint is written from where the tensors lie until then."""
    model, optimizer = started()
    train(model, optimizer, [0])
    before, seen = bits(model, optimizer), []

    def announced():
        seen.append(equal(before, bits(model, optimizer)))

    train_step(model, optimizer, groups_of(1), spec=SPEC, step=1, before_update=announced)
    assert seen == [True, False], "one for each minibatch"


def test_counters_and_untied_weights_come_back(tmp_path):
    model, optimizer = started(tie=False)
    state = TrainerState(7, {"log_size": 2**53, "manifest": "ab" * 32})
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=state, keep=1)
    other, fresh = started(seed=3, tie=False)
    assert load_checkpoint(path, model=other, optimizer=fresh) == state
    assert equal(list(model.parameters()), list(other.parameters()))
    assert not fresh.has_state


def test_only_the_newest_are_kept_and_in_the_order_of_steps(tmp_path):
    model, optimizer = started()
    (tmp_path / "checkpoint-notes.txt").write_text("the operator's own")
    for step in (8, 9, 10, 99_999_999, 100_000_000):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "checkpoint-99999999",
        "checkpoint-100000000",
    ]
    assert (tmp_path / "checkpoint-notes.txt").exists()


def test_a_write_cut_short_leaves_the_last_checkpoint_in_charge(tmp_path):
    model, optimizer = started()
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(1), keep=2)
    half = tmp_path / ".checkpoint.partial"
    half.mkdir()
    (half / "shard-00007-model-00001-of-00001.safetensors").write_bytes(b"half of step two")
    assert load_checkpoint(checkpoints(tmp_path)[-1], model=model, optimizer=optimizer).step == 1
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(2), keep=2)
    assert load_checkpoint(checkpoints(tmp_path)[-1], model=model, optimizer=optimizer).step == 2


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_training_goes_on_from_a_checkpoint_bit_for_bit_with_either_optimizer(tmp_path, name):
    spec = msgspec.structs.replace(SPEC, training=msgspec.structs.replace(SPEC.training, optimizer=name))
    model = small_model()
    optimizer = make_optimizer(model, spec.training)
    train_step(model, optimizer, groups_of(0), spec=spec, step=0)
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(1), keep=1)
    resumed = small_model(seed=7)
    its = make_optimizer(resumed, spec.training)
    load_checkpoint(checkpoints(tmp_path)[-1], model=resumed, optimizer=its)
    for each, with_ in ((model, optimizer), (resumed, its)):
        train_step(each, with_, groups_of(1), spec=spec, step=1)
    assert equal(bits(model, optimizer), bits(resumed, its))


def test_a_checkpoint_of_one_optimizer_is_refused_by_another(tmp_path):
    model, optimizer = started()
    train(model, optimizer, [0])
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(1), keep=1)
    other = make_optimizer(model, TrainingSpec(optimizer="muon"))
    with pytest.raises(CheckpointError, match="optimizer"):
        load_checkpoint(path, model=model, optimizer=other)


@pytest.mark.system
def test_a_full_disk_is_said_as_such_and_leaves_the_last_checkpoint(tmp_path):
    """Else the trainer would end, or go on as if it had a checkpoint."""
    script = FULL_DISK.format(test=__file__, folder=str(tmp_path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", script], timeout=120, env=environment, check=False)
    assert ended.returncode == 0
    model, optimizer = started(seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-00000001"]
    assert load_checkpoint(checkpoints(tmp_path)[-1], model=model, optimizer=optimizer).step == 1


@pytest.mark.parametrize(
    ("damage", "raised"),
    [
        ("truncated", CheckpointDamaged),
        ("empty", CheckpointDamaged),
        ("missing", CheckpointDamaged),
        ("no index", CheckpointDamaged),
        ("another format", CheckpointError),
        ("another model", CheckpointError),
        ("tied", CheckpointError),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_changes(tmp_path, damage, raised):
    """Half-loaded weights would be published as the next version."""
    source, its_optimizer = started(seed=4, hidden=32 if damage == "another model" else 16, tie=damage != "tied")
    train(source, its_optimizer, [0])
    path = save_checkpoint(tmp_path, model=source, optimizer=its_optimizer, state=TrainerState(1), keep=1)
    (shard,) = path.glob("*.safetensors")
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-100])
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "missing":
        shard.unlink()
    elif damage == "no index":
        (path / "checkpoint.json").unlink()
    elif damage == "another format":
        state = {"step": 1, "counters": {}}
        files = {shard.name: shard.stat().st_size}
        tensors = {"tensors": {"model/w": [2, 3]}, "digests": {"model/w": "ab" * 32}, "checksum": "cd" * 32}
        of_an_earlier_release = {"format": "checkpoint/3", "state": state, "files": files, **tensors}
        (path / "checkpoint.json").write_bytes(msgspec.json.encode(of_an_earlier_release))
    model, optimizer = started()
    train(model, optimizer, [0])
    before = bits(model, optimizer)
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert error.type is raised, "what is damaged is set aside, and what is another's is not"
    assert equal(before, bits(model, optimizer))


@pytest.mark.parametrize("part", ["optimizer/exp_avg_sq/", "optimizer/step/", "model/"])
def test_a_flipped_bit_of_the_optimizer_or_the_weights_is_named_and_not_trained_on(tmp_path, part):
    """Training would go on, by weights that no log leads to."""
    model, optimizer = started()
    train(model, optimizer, [0])
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(1), keep=1)
    (shard,) = path.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    name, place = next((n, p) for n, p in msgspec.json.decode(data[8:head]).items() if n.startswith(part))
    data[head + place["data_offsets"][0]] ^= 1
    shard.write_bytes(data)
    other, fresh = started(seed=1)
    with pytest.raises(CheckpointDamaged, match=f"checkpoint-00000001 is damaged: 1 tensors .* such as {name}$"):
        load_checkpoint(path, model=other, optimizer=fresh)


def test_any_flipped_bit_of_a_checkpoint_is_found_or_changes_nothing(tmp_path):
    model, optimizer = started()
    train(model, optimizer, [0])
    state = TrainerState(1, {"stats": "{}"})
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=state, keep=1)
    draw, found = random.Random(5), 0
    (shard,) = path.glob("*.safetensors")
    for file, tries in ((path / "checkpoint.json", 50), (shard, 25)):
        whole = file.read_bytes()
        for _ in range(tries):
            at, bit = draw.randrange(min(len(whole), 20_000)), draw.randrange(8)
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            other, fresh = started(seed=1)
            try:
                assert load_checkpoint(path, model=other, optimizer=fresh) == state
                assert equal(bits(model, optimizer), bits(other, fresh))
            except CheckpointDamaged:
                found += 1
        file.write_bytes(whole)
    assert found > 60
