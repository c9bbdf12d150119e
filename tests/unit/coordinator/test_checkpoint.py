"""Checkpoints: what an operator gets back after the trainer was killed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coordinator.training.checkpoint import CheckpointError, TrainerState, checkpoints, load_checkpoint, save_checkpoint
from coordinator.training.grpo import Group, Sample, make_optimizer, train_step
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
    moments = [tensor for parameter in model.parameters() for _, tensor in sorted(optimizer.state[parameter].items())]
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


def test_a_trainer_killed_between_steps_continues_bit_for_bit_in_a_new_process(tmp_path):
    """Otherwise the policy an auditor can recompute is not the one that was published."""
    torch.set_num_threads(1)
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


def test_counters_and_untied_weights_come_back(tmp_path):
    model, optimizer = started(tie=False)
    state = TrainerState(7, {"log_size": 2**53, "manifest": "ab" * 32})
    path = save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=state, keep=1)
    other, fresh = started(seed=3, tie=False)
    assert load_checkpoint(path, model=other, optimizer=fresh) == state
    assert equal(list(model.parameters()), list(other.parameters()))
    assert not fresh.state


def test_only_the_newest_are_kept_and_in_the_order_of_steps(tmp_path):
    model, optimizer = started()
    (tmp_path / "checkpoint-notes.txt").write_text("the operator's own")
    for step in (8, 9, 10, 99_999_999, 100_000_000):
        save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(step), keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "checkpoint-99999999.safetensors",
        "checkpoint-100000000.safetensors",
    ]
    assert (tmp_path / "checkpoint-notes.txt").exists()


def test_a_write_cut_short_leaves_the_last_checkpoint_in_charge(tmp_path):
    model, optimizer = started()
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(1), keep=2)
    (tmp_path / ".checkpoint.partial").write_bytes(b"half of step two")
    assert load_checkpoint(checkpoints(tmp_path)[-1], model=model, optimizer=optimizer).step == 1
    save_checkpoint(tmp_path, model=model, optimizer=optimizer, state=TrainerState(2), keep=2)
    assert load_checkpoint(checkpoints(tmp_path)[-1], model=model, optimizer=optimizer).step == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "another format", "another model", "tied"])
def test_a_checkpoint_that_does_not_fit_is_refused_and_nothing_changes(tmp_path, damage):
    """Half-loaded weights would be published as the next version."""
    source, its_optimizer = started(seed=4, hidden=32 if damage == "another model" else 16, tie=damage != "tied")
    train(source, its_optimizer, [0])
    path = save_checkpoint(tmp_path, model=source, optimizer=its_optimizer, state=TrainerState(1), keep=1)
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "missing":
        path.unlink()
    elif damage == "another format":
        path.write_bytes(path.read_bytes().replace(b"checkpoint/1", b"checkpoint/2"))
    model, optimizer = started()
    train(model, optimizer, [0])
    before = bits(model, optimizer)
    with pytest.raises(CheckpointError):
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert equal(before, bits(model, optimizer))
