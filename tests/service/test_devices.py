"""A run of several kinds of machines: what one device computes, another accepts, and one of a kind can repeat."""

from __future__ import annotations

import asyncio
import random
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from recording import HIDDEN, PROOFS, SPAN, Model, assert_same, expected, seed_of
from trainers import finished_steps, outcome_of, run_in, spec_with, train_to_the_end, trainer_of
from transformers import AutoModelForCausalLM, Qwen3Config
from waiting import until

from coordinator.training.checkpoint import checkpoints
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, train_step
from coordinator.training.lora import recompute_activations
from coordinator.training.optimizers import make_optimizer
from coordinator.training.world import World
from node.engines.base import requests_for
from node.engines.device import find_device
from node.engines.recorder import DecodeRow, Recorder
from node.engines.torch import TorchEngine
from node.environments import load_environments
from node.episodes.expected import expected_of
from node.policy.file import Blueprint, load_policy, save_policy
from node.policy.products import OutputHead
from node.policy.reading import OpenPolicy
from node.protocol.admission import Outcome
from node.protocol.run import EnvironmentSpec, ModelSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout
from node.sampling.forced import warm_up
from node.verification.plan import Claim, Rules
from node.verification.prefill import Prefill, TransformersPrefills
from node.verification.verify import decide_many
from toploc import build_chunk_proofs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
PAIRS = [
    pytest.param(*pair, marks=[needs_gpu] * ("cuda" in pair))
    for pair in [("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")]
]
RUN_ID, MANIFEST, VERSION, SLOTS = "ab" * 32, "cd" * 32, 1, range(4)


@dataclass
class Held:
    """`node.verification.measure.Policies` of one policy on one device, whole in its memory or layer by layer."""

    path: Path
    prefill_of_it: Prefill
    device: str

    async def blueprint(self, version: int) -> Blueprint:
        return self.prefill_of_it.blueprint

    async def prefill(self, version: int) -> Prefill:
        return self.prefill_of_it

    async def file(self, version: int) -> OpenPolicy:
        return OpenPolicy(self.path, device=self.device)


def rules_of(dtype: str) -> Rules:
    spec = RunSpec(
        name="devices",
        environments=(EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse")),
        model=ModelSpec(dtype=dtype),  # type: ignore[arg-type]
        sampling=SamplingSpec(group_size=4, max_new_tokens=40),
    )
    return Rules(RUN_ID, spec, load_environments(spec))


def drawn(path: Path, rules: Rules, device: str) -> list[list[Rollout]]:
    """A group for each of SLOTS, as an honest worker draws them."""
    policy = load_policy(path, dtype=torch.float32)
    run = {"run_id": RUN_ID, "version": VERSION, "manifest_digest": MANIFEST}
    wanted = [expected_of(rules.spec, policy, rules.environments, slot=slot, **run) for slot in SLOTS]

    async def generate() -> list[list[Rollout]]:
        engine = TorchEngine(rules.spec, device=find_device(device))
        await engine.load(path, version=VERSION)
        groups = await asyncio.gather(*(engine.generate(requests_for(each)) for each in wanted))
        await engine.close()
        return groups

    return asyncio.run(generate())


def outcomes(
    groups: Sequence[Sequence[Rollout]], path: Path, rules: Rules, device: str, *, streamed: bool = False
) -> set[Outcome]:
    """What a verifier says of groups for SLOTS, each of which gets a second look."""
    prefills = TransformersPrefills(dtype=rules.spec.model.dtype, device=find_device(device))
    prefill = asyncio.run(prefills.prefill(path, version=VERSION, streamed=streamed))
    claims = [
        Claim(version=VERSION, manifest_digest=MANIFEST, slot=slot, rollouts=group)
        for slot, group in zip(SLOTS, groups, strict=True)
    ]
    held: Any = Held(path, prefill, device)
    found = asyncio.run(
        decide_many(claims, policies=held, published={VERSION}, rules=rules, look=lambda _totals, _limits: True)
    )
    return {judgement.verdict.outcome for judgement in found}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("worker", "verifier"), PAIRS)
def test_honest_work_of_one_device_is_admitted_on_another_and_that_of_other_weights_is_not(
    worker: str, verifier: str, dtype: str, tiny_policy_path: Path, tmp_path: Path
) -> None:
    """Contributors bring GPUs, and whoever audits has a laptop."""
    rules = rules_of(dtype)
    honest = drawn(tiny_policy_path, rules, worker)
    for streamed in (False, True):
        assert outcomes(honest, tiny_policy_path, rules, verifier, streamed=streamed) == {Outcome.ADMITTED}
    other = load_policy(tiny_policy_path, dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in other.model.parameters():
            tensor.add_(0.1 * tensor.std() * torch.randn(tensor.shape, generator=draw))
    save_policy(other.model, other.tokenizer, tmp_path / "other")
    dishonest = drawn(tmp_path / "other", rules, worker)
    assert outcomes(dishonest, tiny_policy_path, rules, verifier) == {Outcome.REJECTED}


@needs_gpu
def test_a_worker_tells_the_name_of_the_gpu_that_it_computes_on() -> None:
    hardware = asyncio.run(TorchEngine(rules_of("bfloat16").spec, device=find_device("cuda")).hardware())
    assert (hardware.device, hardware.dtype) == (torch.cuda.get_device_name(0), "bfloat16")


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("recipe", [{}, {"lora": {"rank": 3, "alpha": 6.0}}], ids=["weights", "adapters"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_a_trainer_without_checkpoints_trains_its_steps_again_to_the_logged_policies(
    device: str, recipe: dict[str, Any], autocast: torch.dtype | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else one that was killed between two of them could not go on: its run has logged the digests."""
    spec = spec_with(**recipe)
    execution = Execution(World(device=find_device(device)), row_tokens=64, autocast=autocast)
    found = []
    for folder in (tmp_path / "undisturbed", tmp_path / "stopped"):
        folder.mkdir()
        with run_in(folder, spec) as home:
            if folder.name == "stopped":
                with trainer_of(home, folder, execution=execution, checkpoint_every=10) as trainer:
                    stopper = threading.Thread(
                        target=lambda: (until(lambda: finished_steps(home) >= 2), trainer.stop())
                    )
                    stopper.start()
                    trainer.run()
                    stopper.join()
                for path in checkpoints(folder / "checkpoints"):
                    shutil.rmtree(path)
            train_to_the_end(home, folder, execution=execution, checkpoint_every=10)
            found.append(outcome_of(home))
    assert found[0] == found[1]
    assert "steps again" in caplog.text


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("device", "tokens"), [("cpu", 60), pytest.param("cuda", 1000, marks=needs_gpu)])
def test_a_step_on_long_samples_is_repeated_to_the_same_weights(device: str, tokens: int, recompute: bool) -> None:
    """A GPU's attention sums gradients in whatever order they come once a sample is longer than a block of it."""
    place = find_device(device)
    rng = random.Random(0)

    def sample() -> Sample:
        length = rng.randrange(tokens // 2, tokens)
        return Sample(tuple(range(5, 55)), tuple(rng.choices(range(5, 900), k=length)), (-6.8,) * length)

    samples = tuple(sample() for _ in range(4))
    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000}
    config = Qwen3Config(hidden_size=512, intermediate_size=1024, num_hidden_layers=2, **shape)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(place)
        if recompute:
            recompute_activations(model)
        spec = spec_with(learning_rate=1e-3)
        spec = structs.replace(spec, sampling=structs.replace(spec.sampling, max_new_tokens=tokens))
        execution = Execution(World(device=place), row_tokens=4096, autocast=torch.bfloat16, recompute=recompute)
        group = Group(0, (1.0, 0.0, 0.0, 1.0), samples)
        train_step(model, make_optimizer(model, spec.training), [group], spec=spec, step=0, execution=execution)
        found.append([tensor.detach().cpu() for tensor in model.parameters()])
    assert all(one.equal(other) for one, other in zip(*found, strict=True))


@needs_gpu
@pytest.mark.parametrize("rows", [1, 16, 110])
def test_logits_of_a_gpu_are_summed_in_float32(rows: int) -> None:
    """Of 150,000 tokens hundreds are close together: sums in 16 bits would choose others."""
    draw = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(count, 1024, generator=draw).bfloat16() for count in (rows, 5000))
    logits = OutputHead(weight.to(find_device("cuda"))).logits(states.cuda())
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double().cpu(), states.double() @ weight.double().t(), rtol=1e-5, atol=1e-3)


@needs_gpu
def test_proofs_of_a_gpu_are_those_of_a_cpu() -> None:
    """Else an honest worker would be rejected for where it computes."""
    draw = torch.Generator().manual_seed(0)
    chunks = [torch.randn(tokens, 1024, generator=draw).bfloat16() for tokens in (32, 32, 7, 1)]
    here, there = (build_chunk_proofs([chunk.to(device) for chunk in chunks], 128) for device in ("cpu", "cuda"))
    assert here == there


@needs_gpu
def test_a_step_of_a_gpus_recorder_waits_for_nothing_and_its_proofs_are_a_cpus() -> None:
    """The whole of forced sampling and recording; that no other thread reads too early is tested without a GPU."""
    model, records = Model(), []
    versions = [7] * (SPAN - 1)
    for device in ("cuda", "cpu"):
        recorder = Recorder(hidden=HIDDEN, proofs=PROOFS, temperature=0.7, version=7, device=torch.device(device))
        drawn = [[each.to(device) for each in model.at("a", position, 7)] for position in range(len(versions))]
        warm_up(torch.device(device))
        try:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            for position, (states, logits) in enumerate(drawn):
                recorder.begin([DecodeRow("a", seed_of("a"), position)], states[None])
                recorder.sample(logits[None].clone())
                recorder.end()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        records += recorder.collect([("a", len(versions))])
    for record in records:
        assert_same(record, expected(model, "a", versions))
