"""Adapters: what an operator trains by a few numbers beside frozen weights, and what everybody else gets of it.

What would break for whom: a policy whose bytes depend on the machine that merged it is another one than the log names,
and an operator who chose LoRA for its memory must not pay for all weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import Tensor
from trainers import groups_of, spec_with
from transformers import PreTrainedModel

from benchmarks.modelling.families import small_model
from coordinator.errors import BadConfiguration
from coordinator.training.checkpoint import checkpoints
from coordinator.training.distributed_learner import Learner, Team
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution
from coordinator.training.lora import adapted_layers, add_adapters, merge
from node.cli import main
from node.policy.file import load_policy, save_policy
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.skeleton import build_skeleton
from node.protocol.run import LoraSpec, RunSpec

LORA = LoraSpec(rank=4, alpha=8.0)


def lora_run(lora: LoraSpec = LORA, **recipe: Any) -> RunSpec:
    return spec_with(lora=lora, warmup_steps=0, **recipe)


def team_in(folder: Path, model: PreTrainedModel | None = None) -> Team:
    folder.mkdir(exist_ok=True)
    save_policy(model or MAKERS["tiny"](1), make_tokenizer(), folder / "policy-0.safetensors")
    return Team(folder, Execution())


def trained(
    folder: Path, spec: RunSpec, *, steps: int = 2, model: PreTrainedModel | None = None
) -> tuple[Team, Learner]:
    team = team_in(folder, model)
    learner = team.restore(spec)
    for step in range(steps):
        team.train(groups_of(step))
    return team, learner


def published(team: Team, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    path = team.first_policy.with_name("published.safetensors")
    team.write_policy(path, dtype)
    return load_policy(path, dtype=None).model.state_dict()


def by_hand(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The rule as docs/training.md states it: one product or sum of float32 at a time."""
    w, a_, b_ = (each.numpy() for each in (weight, a, b))
    total = b_[:, :1] * a_[0]
    for k in range(1, len(a_)):
        total = total + b_[:, k : k + 1] * a_[k]
    found = w + np.float32(scale) * total
    assert found.dtype == np.float32
    return torch.from_numpy(found)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_merged_weight_has_the_bits_of_the_rule(threads: int) -> None:
    """A fused multiply-add, a matrix product or another order would give others, on this machine or on the next."""
    draw = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(*shape, generator=draw) for shape in ((37, 29), (7, 29), (37, 7)))
    torch.set_num_threads(threads)
    assert torch.equal(merge(weight, a, b, scale=0.3), by_hand(weight, a, b, 0.3))
    tall, a, b = (torch.randn(*shape, generator=draw) for shape in ((2**16, 3), (7, 3), (2**16, 7)))
    parts = [merge(tall[rows], a, b[rows], scale=0.3) for rows in (slice(0, 40_001), slice(40_001, None))]
    assert torch.equal(merge(tall, a, b, scale=0.3), torch.cat(parts)), "as processes share it, in blocks and not"


FUSED = LoraSpec(rank=4, alpha=8.0, targets=("qkv_proj", "gate_up_proj"))


@pytest.mark.parametrize("family", ["tiny", "phi3"])
def test_what_is_published_is_the_first_policy_plus_the_adapters_by_the_rule(tmp_path: Path, family: str) -> None:
    fused = family == "phi3"
    model = small_model(family, vocab_size=len(make_tokenizer()), hidden_size=128) if fused else None
    team, learner = trained(tmp_path, lora_run(FUSED if fused else LORA), model=model)
    first = load_policy(team.first_policy, dtype=None).model.state_dict()
    after, half = published(team), published(team, torch.bfloat16)
    layers = dict(adapted_layers(learner.model))
    assert len(layers) == learner.model.config.num_hidden_layers * (2 if fused else 7)
    for name, weight in first.items():
        layer = layers.get(name.removesuffix(".weight"))
        wanted = weight
        if layer is not None:
            wanted = by_hand(weight, layer.lora_A.detach(), layer.lora_B.detach(), LORA.alpha / LORA.rank)
            assert not torch.equal(wanted, weight)
        assert torch.equal(after[name], wanted)
        assert torch.equal(half[name], wanted.bfloat16())


def test_the_trainer_learns_with_the_policy_that_it_publishes(tmp_path: Path) -> None:
    """Else ratios would be of two models, and workers would sample from neither."""
    team, learner = trained(tmp_path, lora_run(learning_rate=1e-2))
    ids = torch.tensor([[5, 6, 7, 8]])
    team.write_policy(tmp_path / "published.safetensors", torch.float32)
    merged = load_policy(tmp_path / "published.safetensors", dtype=None).model
    with torch.no_grad():
        before, inside, outside = (
            each(input_ids=ids).logits
            for each in (load_policy(team.first_policy, dtype=None).model, learner.model, merged)
        )
    torch.testing.assert_close(inside, outside, rtol=0, atol=1e-4)
    assert (inside - before).abs().max() > 0.05


def test_adapters_learn_what_is_rewarded(tmp_path: Path) -> None:
    """One token earns; frozen, the head allows it some twelve times what chance gives."""
    team = team_in(tmp_path)
    learner = team.restore(lora_run(learning_rate=3e-2, minibatches=1, clip_epsilon=100.0))

    def probability() -> float:
        with torch.no_grad():
            return float(learner.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)[42])

    before, draw = probability(), torch.Generator().manual_seed(0)
    for step in range(12):
        tokens = [42, *torch.randint(50, 100, (7,), generator=draw).tolist()]
        samples = tuple(Sample((5, 6, 7), (token,), (-4.8,)) for token in tokens)
        team.train([Group(step, tuple(float(token == 42) for token in tokens), samples)])
    assert probability() > 4 * before


def test_state_gradients_and_checkpoints_are_the_adapters_alone(tmp_path: Path) -> None:
    team, learner = trained(tmp_path, lora_run())
    team.save({})
    team.end()
    numbers = sum(layer.lora_A.numel() + layer.lora_B.numel() for _, layer in adapted_layers(learner.model))
    weights = sum(each.numel() for each in learner.model.parameters())
    assert numbers < weights / 10
    grads = [each for each in learner.model.parameters() if each.grad is not None]
    assert sum(each.numel() for each in grads) == numbers
    moments = [each for part in learner.optimizer.parts for state in part.state.values() for each in state.values()]
    assert sum(each.numel() for each in moments if each.ndim) == 2 * numbers
    (path,) = checkpoints(tmp_path / "checkpoints")
    (shard,) = path.glob("*.safetensors")
    assert 12 * numbers < shard.stat().st_size < 12 * numbers + 20_000


def test_a_checkpoint_of_adapters_leads_to_the_same_policies(tmp_path: Path) -> None:
    team, _ = trained(tmp_path / "whole", lora_run(), steps=3)
    wanted = published(team)
    team, _ = trained(tmp_path / "parts", lora_run(), steps=2)
    team.save({})
    team.end()
    again = Team(tmp_path / "parts", Execution())
    assert again.restore(lora_run()).step == 2
    again.train(groups_of(2))
    found = published(again)
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_the_kl_penalty_is_towards_the_first_policy_which_is_no_second_model(tmp_path: Path) -> None:
    team = team_in(tmp_path)
    learner = team.restore(lora_run(kl_coefficient=0.1, learning_rate=1e-2, minibatches=1))
    assert learner.reference is learner.model
    stats = [team.train(groups_of(step)) for step in range(2)]
    assert stats[0]["kl"] == 0.0
    assert stats[1]["kl"] > 0.0
    assert all(layer.is_adapted for _, layer in adapted_layers(learner.model))


def test_only_the_layers_that_are_named_change(tmp_path: Path) -> None:
    team, _ = trained(tmp_path, lora_run(LoraSpec(rank=1, alpha=1.0, targets=("v_proj", "down_proj"))), steps=1)
    first, after = load_policy(team.first_policy, dtype=None).model.state_dict(), published(team)
    changed = {name.split(".")[-2] for name, each in first.items() if not torch.equal(each, after[name])}
    assert changed == {"v_proj", "down_proj"}


def test_another_seed_begins_with_other_factors_and_the_same_policy(tmp_path: Path) -> None:
    team, beginnings = team_in(tmp_path), []
    for seed in (0, 0, 1):
        spec = lora_run()
        learner = team.restore(
            RunSpec(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"seed": seed})
        )
        beginnings.append(next(adapted_layers(learner.model))[1].lora_A.detach())
        first = load_policy(team.first_policy, dtype=None).model.state_dict()
        assert all(torch.equal(each, first[name]) for name, each in published(team).items())
    assert torch.equal(beginnings[0], beginnings[1])
    assert not torch.equal(beginnings[0], beginnings[2])
    bound = beginnings[0].shape[1] ** -0.5
    assert 0.9 * bound < beginnings[0].abs().max() <= bound


def test_a_family_without_these_layers_is_refused_by_the_learner_too() -> None:
    config = MAKERS["finch"](1).config
    with pytest.raises(BadConfiguration, match="a finch policy has no down_proj, gate_proj, k_proj"):
        add_adapters(build_skeleton(config, dtype=torch.float32), LORA)


# Exports.


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", "policy", *map(str, arguments)])


def test_an_exported_adapter_merged_by_hand_is_the_published_policy(tmp_path: Path) -> None:
    """Names, shapes and settings are those that PEFT writes and reads itself."""
    lora = LoraSpec(rank=3, alpha=6.0, targets=("q_proj", "k_proj", "down_proj"))
    team, _ = trained(tmp_path / "state", lora_run(lora))
    team.save({})
    team.end()
    done = export("latest", "--adapter", "--state", tmp_path / "state", "--to", tmp_path / "adapter")
    assert done.exit_code == 0, done.output
    assert "adapters of policy 2" in done.output
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, list(lora.targets))
    assert config["base_model_name_or_path"] == "random-tiny"
    adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    first, after = load_policy(team.first_policy, dtype=None).model.state_dict(), published(team)
    for name, weight in first.items():
        if name.split(".")[-2] not in lora.targets:
            assert torch.equal(after[name], weight)
            continue
        a, b = (adapters.pop(f"base_model.model.{name.removesuffix('.weight')}.lora_{each}.weight") for each in "AB")
        assert (a.shape, b.shape) == ((3, weight.shape[1]), (weight.shape[0], 3))
        assert torch.equal(after[name], by_hand(weight, a, b, config["lora_alpha"] / config["r"]))
    assert adapters == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("1", "--adapter"), "no checkpoint of policy 1; of these there are some: 2"),
        (("latest", "--adapter", "--model", "."), "--adapter takes a version from --state"),
    ],
)
def test_adapters_that_are_not_there_are_said_to_be_missing(tmp_path: Path, given: tuple[str, ...], said: str) -> None:
    team, _ = trained(tmp_path / "state", lora_run())
    team.save({})
    team.end()
    done = export(*given, "--state", tmp_path / "state", "--to", tmp_path / "adapter")
    assert done.exit_code != 0
    assert said in f"{done.output} {done.exception}"
    assert not (tmp_path / "adapter").exists()


def test_a_run_that_trains_all_weights_has_no_adapters_to_export(tmp_path: Path) -> None:
    team, _ = trained(tmp_path / "state", spec_with(), steps=1)
    team.save({})
    team.end()
    done = export("1", "--adapter", "--state", tmp_path / "state", "--to", tmp_path / "adapter")
    assert "without [training.lora]" in f"{done.output} {done.exception}"


@pytest.mark.parametrize("damaged", ["flipped", "short"])
def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, damaged: str) -> None:
    """Else an adapter that nobody trained would go around under the run's name."""
    team, _ = trained(tmp_path / "state", lora_run(), steps=1)
    team.save({})
    team.end()
    (shard,) = (tmp_path / "state" / "checkpoints" / "checkpoint-00000001").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    head = 8 + int.from_bytes(data[:8], "little")
    place = next(each for name, each in json.loads(data[8:head]).items() if name.startswith("model/"))
    data[head + place["data_offsets"][0]] ^= 1
    shard.write_bytes(data if damaged == "flipped" else data[:-1])
    done = export("1", "--adapter", "--state", tmp_path / "state", "--to", tmp_path / "adapter")
    assert "is damaged" in f"{done.output} {done.exception}"
    assert not (tmp_path / "adapter").exists()
