"""How often decoding and a prefill choose other experts, what that does to a token, and who is caught in spite of it.

`python -m benchmarks.routing [--json]`. Three parts:

- `choices`: models of random weights, whose routers' logits have a standard deviation of 1. The torch engine's decoder
  reads 32 prompts and then `--tokens` given tokens of each; the reference prefill reads the whole. Counted are tokens
  for which a layer's router chose another set of experts, and how far the final state is off, relative to its
  length, for tokens of which some layer did and for those of which none did. `mixtral` and `qwen3_moe` have routers in
  the run's dtype, `glm4_moe` in float32; `float32 router` computes the same weights in float32 in the former, too.
- `replay`: the same models. Groups are drawn by the torch engine and read as a verifier does; the trainer computes
  the same tokens from the float32 weights that were rounded to the policy, through the experts that its own routers
  choose, and through the verifier's: shares of other choices, and how far log-probabilities are from the verifier's.
  Then once more after a training step at a learning rate of 1e-6.
- `caught`: a small mixture after a warm start (`--warm-start` of its steps), in bfloat16, read twice, and
  `swarmproof calibrate` of it with the torch engine: honest groups that were rejected, of those that no level was
  fitted to, and groups of each cheat that were.

There is nothing to compare with; the floor of `choices` and `replay` is 0, which float32 reaches.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.modelling.families import small_config
from benchmarks.modelling.replayed import measure_replay
from benchmarks.report import make_parser, report, say
from coordinator.calibration.procedure import CalibrationSettings, calibrate
from coordinator.training.warm_start import GUESSING_STAGE, WORKED_STAGE, demonstration, learn
from node.engines.torch_decoder import Decoder
from node.policy.experts import SORTED, routers
from node.policy.families import ATTENTION_FAMILIES
from node.policy.file import load_policy, save_policy
from node.policy.layout import cast
from node.policy.models.tiny_llama import TINY_HIDDEN, VOCABULARY, make_tokenizer
from node.policy.routing import noted_choices
from node.protocol.run import EnvironmentSpec, LimitsSpec, ModelSpec, ProofSpec, RunSpec, SamplingSpec

PROMPT = 33
ROWS = 32
CASES = (
    ("mixtral", 8, 2),
    ("qwen3_moe", 8, 2),
    ("qwen3_moe", 64, 8),
    ("glm4_moe", 64, 8),
)
TRAINED = (("mixtral", 8, 2, 2), ("qwen3_moe", 32, 4, 3))
"""Family, experts, chosen ones and layers."""
TRAINERS = (
    ("float32", 1, "float32"),
    ("bfloat16", 1, "float32"),
    ("bfloat16", 1, "autocast"),
    ("bfloat16", 2, "float32"),
)
"""Dtype of the run, its readings, and what the trainer computes in."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What the routers chose, [layers, tokens, chosen] in ascending order, and the final states [tokens, hidden]."""

    experts: Tensor
    states: Tensor


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="decoded of each prompt (default 64)")
    parser.add_argument("--layers", type=int, default=6, help="of the models of random weights (default 6)")
    parser.add_argument("--replay-groups", type=int, default=8, help="of 8 completions that are replayed (default 8)")
    parser.add_argument("--warm-start", type=float, default=1.0, help="share of the warm start's steps (default 1)")
    parser.add_argument("--groups", type=int, default=256, help="honest groups of each kernel (default 256)")
    parser.add_argument("--cheat-groups", type=int, default=32, help="groups of each cheat (default 32)")
    parser.add_argument("--only", choices=("choices", "replay", "caught"), help="one part alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    choices = all_choices(options) if options.only in (None, "choices") else []
    replay = all_replayed(options) if options.only in (None, "replay") else []
    caught = [row for case in TRAINED for row in all_caught(*case, options)] if options.only in (None, "caught") else []
    figures = {
        "other_experts_bfloat16_most": max(
            (row["other_experts"] for row in choices if row["dtype"] == "bfloat16"), default=None
        ),
        "other_experts_float32_most": max(
            (row["other_experts"] for row in choices if row["dtype"] == "float32"), default=None
        ),
        "replayed_over_own_kl_most": max(
            (row["replayed_kl"] / row["own_kl"] for row in replay if row["other_experts"] and not row["steps"]),
            default=None,
        ),
        "honest_rejected": sum(row["rejected"] for row in caught if row["is_honest"]) if caught else None,
    }
    notes = {name: "--only left it out" for name, value in figures.items() if value is None}
    report("routing", options, figures, notes, choices=choices, replay=replay, caught=caught)


def all_choices(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each of CASES in both dtypes, and with routers in float32 where the family has them in 16 bits."""
    rows = []
    for family, experts, chosen in CASES:
        for dtype, router in (("bfloat16", "own"), ("bfloat16", "float32 router"), ("float32", "own")):
            if router == "own" or family != "glm4_moe":
                say(f"{family}, {chosen} of {experts}, {dtype}, {router}")
                change = _in_float32 if router != "own" else nn.Module.eval
                found = compare(family, experts, chosen, dtype=getattr(torch, dtype), change=change, options=options)
                rows.append(
                    {"family": family, "experts": f"{chosen} of {experts}", "dtype": dtype, "router": router} | found
                )
    return rows


def compare(
    family: str,
    experts: int,
    chosen: int,
    *,
    dtype: torch.dtype,
    change: Callable[[Any], object],
    options: argparse.Namespace,
) -> dict[str, float]:
    """Decode and prefill the same tokens, and compare what the routers chose."""
    rng = random.Random(1)
    prompts = [tuple(rng.choices(range(3, VOCABULARY), k=PROMPT)) for _ in range(ROWS)]
    steps = [rng.choices(range(3, VOCABULARY), k=ROWS) for _ in range(options.tokens)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy")
        model = spread(mixture(family, experts, chosen, layers=options.layers))
        save_policy(cast(model, dtype), make_tokenizer(), path)
        policy, reference = (load_policy(path, dtype=dtype) for _ in range(2))
    change(policy.model)
    change(reference.model)
    with torch.inference_mode():
        decoder = Decoder(policy, columns=PROMPT + options.tokens)
        decoder.join(prompts)
        decoded = watched(policy.model, lambda: torch.stack([decoder.step(tokens) for tokens in steps], 1))
        ids = torch.tensor([[*prompt, *(tokens[row] for tokens in steps)] for row, prompt in enumerate(prompts)])
        base = partial(reference.model.base_model, input_ids=ids, use_cache=False)
        whole = watched(reference.model, lambda: base().last_hidden_state)
    ours = decoded.experts.view(len(decoded.experts), options.tokens, ROWS, chosen).transpose(1, 2)
    theirs = whole.experts.view(len(whole.experts), ROWS, -1, chosen)[:, :, PROMPT:]
    is_other = (ours != theirs).any(-1)
    states = whole.states[:, PROMPT:].float()
    off = (decoded.states.float() - states).norm(dim=-1) / states.norm(dim=-1)
    is_any = is_other.any(0)
    return {
        "other_experts": float(is_other.float().mean()),
        "tokens_with_any": float(is_any.float().mean()),
        "state_off_with": float(off[is_any].mean()) if is_any.any() else 0.0,
        "state_off_without": float(off[~is_any].mean()),
    }


def mixture(family: str, experts: int, chosen: int, *, layers: int, **fields: Any) -> PreTrainedModel:
    """Make a small model with experts in every layer, with the weights that transformers begins with."""
    sizes = {"moe_intermediate_size": 64, "intermediate_size": 128, "mlp_only_layers": [], "first_k_dense_replace": 0}
    named = {ATTENTION_FAMILIES[family].experts or "": experts, "num_experts_per_tok": chosen, "head_dim": 32}
    plain = {"n_group": 1, "routed_scaling_factor": 1.0, "sliding_window": None, "attention_bias": False}
    wanted = {"hidden_size": TINY_HIDDEN, "num_hidden_layers": layers} | sizes | named | plain | fields
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = small_config(family, **wanted)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, experts_implementation=SORTED)
    return model.eval()


@torch.no_grad()
def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Draw weights with which routers' logits, and layers' outputs, are of the size of their inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, 1 if "embed" in name else weight.shape[-1] ** -0.5)
    return model


def watched(model: PreTrainedModel, run: Callable[[], Tensor]) -> Choices:
    """Call `run`, and return what the routers of `model` chose meanwhile, with the states that it returns."""
    with noted_choices(routers(model)) as noted:
        states = run()
    return Choices(torch.stack([torch.cat(passes) for passes in noted]).sort(-1).values, states)


def _in_float32(model: PreTrainedModel) -> None:
    """Have routers that compute in the model's dtype do so in float32."""
    for router in routers(model):
        router.register_forward_hook(_again_in_float32)


def _again_in_float32(router: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> Any:
    logits = F.linear(inputs[0].reshape(-1, router.hidden_dim).float(), router.weight.float())
    weights, chosen = logits.softmax(-1).topk(router.top_k, -1)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(output[1].dtype), chosen


def all_replayed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each of CASES for each kind of run and of trainer."""
    rows = []
    for family, experts, chosen in CASES:
        model = spread(mixture(family, experts, chosen, layers=options.layers))
        for run, readings, trainer in TRAINERS:
            say(f"replay: {family}, {chosen} of {experts}, {run}, {trainer}")
            spec = run_spec(run, readings=readings)
            training = msgspec.structs.replace(spec.training, learning_rate=1e-6, warmup_steps=0)
            spec = msgspec.structs.replace(spec, training=training)
            autocast = None if trainer == "float32" else torch.bfloat16
            found = measure_replay(model, spec=spec, autocast=autocast, groups=options.replay_groups, steps=1)
            known = {"family": family, "experts": f"{chosen} of {experts}", "run": run, "readings": readings}
            rows += [known | {"trainer": trainer} | row for row in found]
            say(f"replay: {found}")
    return rows


def run_spec(dtype: str, *, readings: int) -> RunSpec:
    """Return the rules of a run of arithmetic."""
    return RunSpec(
        name="routing",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype=dtype),
        proofs=ProofSpec(scheme="toploc/1+sketch/1"),
        sampling=SamplingSpec(max_prompt_tokens=64, max_new_tokens=48),
        limits=LimitsSpec(readings=readings),
    )


def all_caught(
    family: str, experts: int, chosen: int, layers: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Warm a mixture up, calibrate it, and return a row for each honest kernel and each cheat."""
    say(f"warming up {family}, {chosen} of {experts}")
    model = mixture(family, experts, chosen, layers=layers, tie_word_embeddings=True)
    rng, tokenizer = Random(1), make_tokenizer()
    steps = max(1, round(240 * options.warm_start))
    stages = [replace(WORKED_STAGE, steps=steps), replace(GUESSING_STAGE, steps=max(1, steps // 6))]
    learn(model, tokenizer, stages, lambda stage: demonstration(rng, stage))
    spec = run_spec("bfloat16", readings=2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "policy")
        save_policy(cast(model, torch.bfloat16), tokenizer, path)
        settings = CalibrationSettings(policy=path, groups=options.groups, cheat_groups=options.cheat_groups)
        say(f"calibrating {family}, {chosen} of {experts}")
        result = asyncio.run(calibrate(spec, settings))
    honest = {one.name for one in result.honest}
    for one in (*result.honest, *result.cheats):
        say(f"{one.name}: {one.rejected_groups} of {one.caught.groups} rejected")
    return [
        {
            "family": family,
            "experts": f"{chosen} of {experts}",
            "worker": one.name,
            "is_honest": one.name in honest,
            "groups": one.caught.groups,
            "rejected": one.rejected_groups,
            "with_drift": one.caught.drifted_groups,
            "by": dict(one.by),
            "tokens": one.tokens,
        }
        for one in (*result.honest, *result.cheats)
    ]


if __name__ == "__main__":
    main()
