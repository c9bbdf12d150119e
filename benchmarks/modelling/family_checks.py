"""One family's policy through calibration, training and export: a part each of `benchmarks.families`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks import workload
from coordinator.calibration.procedure import CalibrationSettings, calibrate
from coordinator.calibration.result import CalibrationResult
from coordinator.training import recipe
from coordinator.training.export import export_file
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, score, train_step
from coordinator.training.initial import initial_policy
from coordinator.training.lora import load_trained
from coordinator.training.optimizers import make_optimizer
from coordinator.training.world import SINGLE_PROCESS, World, full_tensor
from node.policy.file import Policy, load_policy, write_policy
from node.policy.models import RECURRENT
from node.protocol.run import RunSpec

NEW_TOKENS: Final = 64
GENERAL: Final = {
    "2 % noise on weights": "perturbed",
    "1 % noise on weights": "noise_1pct",
    "changed prompt": "other_prompt",
}
OWN: Final = {
    "an expert dropped": "expert_dropped",
    "10 % noise on routers": "router_perturbed",
    "1 % noise on routers": "router_noise_1pct",
    "one expert fewer": "top_k_lowered",
    "experts in int4": "experts_int4",
    "half the window": "half_window",
    "fp8 cache": "fp8_cache",
}
"""Cheats of a calibration, and their columns; the latter only some families allow, and the others are left out."""
VLLM: Final = {"max_num_seqs": 32, "kv_cache_gib": 0.05}
ROW_TOKENS: Final = 96
"""Of a packed row: fewer than the groups have, so that each of two processes gets some."""
LEAST_SHARE: Final = 1e-3
_LENGTHS: Final = ((30, (5, 40, 17, 1)), (7, (33, 2, 60, 12)), (41, (9, 9, 20, 31)))
"""Tokens of the prompt and of each completion of the groups that are trained on."""


def run_of(dtype: str, *, readings: int = 1) -> RunSpec:
    """Return the rules of the run: TOPLOC and sketches, one update a step, no gradient clipped."""
    spec = workload.make_spec(dtype=dtype, tokens=NEW_TOKENS)
    training = msgspec.structs.replace(spec.training, minibatches=1, gradient_clip=1e9)
    limits = msgspec.structs.replace(spec.limits, readings=readings)
    return msgspec.structs.replace(spec, training=training, limits=limits)


def calibrated(
    path: Path, spec: RunSpec, *, engines: Sequence[str], groups: int, cheat_groups: int
) -> CalibrationResult:
    """Calibrate a run of the policy in `path`, and try the cheats that it allows."""
    settings = CalibrationSettings(
        engines=engines,
        device="cpu",
        threads=1,
        vllm=VLLM,
        policy=path,
        groups=groups,
        cheat_groups=cheat_groups,
        cheats=(*GENERAL, *OWN),
    )
    return asyncio.run(calibrate(spec, settings))


def export_problem(path: Path, folder: Path) -> str | None:
    """Export a policy and read it back, by transformers and as a run's first policy; say what is not bit for bit.

    Compared are the weights, the logits that transformers computes of both, and the policy file made of the folder.
    """
    policy = load_policy(path, dtype=None)
    export_file(path, folder)
    read: Any = AutoModelForCausalLM
    has_attention = policy.config.model_type not in RECURRENT
    kernels = {"attn_implementation": "eager", "experts_implementation": "eager"} if has_attention else {}
    exported = read.from_pretrained(folder, dtype=policy.model.dtype, **kernels).eval()
    own: Any = policy.model
    if has_attention:
        own.set_attn_implementation("eager")
        own.set_experts_implementation("eager")
    states = own.state_dict(), exported.state_dict()
    if states[0].keys() != states[1].keys():
        return "other tensors"
    if not all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items()):
        return "other weights"
    ids = torch.arange(3, 83)[None]
    with torch.inference_mode():
        if not torch.equal(own(input_ids=ids).logits, exported(input_ids=ids).logits):
            return "other logits"
    again = folder.with_suffix(".safetensors")
    spec = run_of(str(policy.model.dtype)[6:])
    spec = msgspec.structs.replace(spec, model=msgspec.structs.replace(spec.model, initial=str(folder)))
    write_policy(initial_policy(spec), again, dtype=policy.model.dtype)
    return None if again.read_bytes() == path.read_bytes() else "another policy file"


def groups_for(policy: Policy, spec: RunSpec) -> list[Group]:
    """Make groups of random tokens with the policy's own log-probabilities, so that no ratio is clipped."""
    draw = torch.Generator().manual_seed(7)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(5, 100, (count,), generator=draw).tolist())

    def sample(prompt: tuple[int, ...], tokens: int) -> Sample:
        bare = Sample(prompt, ids(tokens), ())
        with torch.no_grad():
            return Sample(prompt, bare.completion_ids, tuple(own_logprobs(policy.model, bare, spec).tolist()))

    return [
        Group(0, (1.0, 0.0, 0.25, 1.0), tuple(sample(prompt, tokens) for tokens in lengths))
        for prompt, lengths in ((ids(tokens), lengths) for tokens, lengths in _LENGTHS)
    ]


def own_logprobs(model: PreTrainedModel, sample: Sample, spec: RunSpec) -> Tensor:
    """Return the log-probabilities of a sample's tokens, by a forward pass of transformers alone."""
    sequence = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    logits = model(input_ids=sequence, use_cache=False).logits[0].float() / spec.sampling.temperature
    logprobs = torch.log_softmax(logits[len(sample.prompt_ids) - 1 : -1], -1)
    return logprobs.gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]


def own_gradients(model: PreTrainedModel, groups: Sequence[Group], spec: RunSpec) -> dict[str, Tensor]:
    """Return the gradients of a step's loss as transformers has them: a sample a row, dropout off, its eager kernel."""
    scored = [each for group in groups for each in score(group, spec=spec, step=0)]
    lengths = [len(each.sample.completion_ids) for each in scored]
    divisor = recipe.loss_divisor(lengths, training=spec.training, most=spec.sampling.max_new_tokens)
    model.zero_grad()
    for each in scored:
        logp = own_logprobs(model, each.sample, spec)
        ratio = recipe.token_ratios(logp, torch.tensor(each.sample.logprobs))
        advantage = torch.full_like(logp, each.advantage)
        losses = recipe.token_losses(
            logp, ratio, advantage, training=spec.training, kl_N=None, entropy_N=torch.zeros_like(logp)
        )
        (losses.sum() * each.weight / divisor).backward()  # type: ignore[no-untyped-call]
    return _gradients(model)


def step_gradients(
    policy: Policy, groups: Sequence[Group], spec: RunSpec, *, world: World = SINGLE_PROCESS
) -> dict[str, Tensor]:
    """Train one step; return the gradients it took, whole in every process of the world."""
    found: dict[str, Tensor] = {}
    train_step(
        policy.model,
        make_optimizer(policy.model, spec.training),
        groups,
        spec=spec,
        step=0,
        execution=Execution(world=world, row_tokens=ROW_TOKENS),
        before_update=lambda: found.update(_gradients(policy.model)),
    )
    return found


def trainer_differences(path: Path) -> tuple[float, dict[str, Tensor], list[Group]]:
    """Return how far a step's gradients are from transformers' own, and for other processes the former and the groups.

    The largest over parameters: the length of the difference, of the gradient's.
    """
    spec = run_of("float32")
    policy = load_policy(path, dtype=torch.float32)
    own: Any = policy.model
    if policy.config.model_type not in RECURRENT:
        own.set_attn_implementation("eager")
    groups = groups_for(policy, spec)
    expected = own_gradients(own, groups, spec)
    trained = load_trained(path, lora=None, seed=0, recompute=False, world=SINGLE_PROCESS)
    found = step_gradients(trained, groups, spec)
    return relative(found, expected), found, groups


def relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference of a tensor, relative to its length; infinite if other tensors are there.

    A length below LEAST_SHARE of all tensors' counts as that: some gradients are 0 but for rounding, such as that of
    what is added to all keys.
    """
    if found.keys() != expected.keys():
        return float("inf")
    least = LEAST_SHARE * float(torch.stack([one.norm() for one in expected.values()]).norm())
    return max(float((found[name] - one).norm()) / max(least, float(one.norm())) for name, one in expected.items())


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {
        name: full_tensor(weight.grad).detach().clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
