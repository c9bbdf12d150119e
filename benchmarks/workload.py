"""What the benchmarks of engines share: options, a random policy, a run's slots, an engine, and a verifier.

The policy has random weights, because speed does not depend on what they say; its logits are spread like those of
`benchmarks.sampling`. Where lengths have to be equal, its end mark cannot be drawn, whoever samples.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks import report as reports
from benchmarks.report import say, usable_cores
from node.engines.base import Engine, SampleRequest, requests_for
from node.engines.device import find_device
from node.engines.torch import TorchEngine
from node.engines.vllm import VllmEngine
from node.engines.vllm_settings import VllmSettings
from node.environments import load_environments
from node.episodes.expected import expected_of
from node.policy.file import Blueprint, Policy, load_policy, save_policy
from node.policy.models.tiny_llama import EOS, PAD, make_tokenizer
from node.policy.reading import OpenPolicy
from node.protocol.admission import Outcome, Verdict
from node.protocol.run import EnvironmentSpec, ModelSpec, RunSpec, SamplingSpec
from node.protocol.submission import Expected
from node.verification.plan import Rules
from node.verification.prefill import Prefill, TransformersPrefill
from node.verification.verify import verify

RUN_ID, MANIFEST = "01" * 32, "02" * 32
CONSTANT = 0.06
"""Value of channel 0 of every hidden state before the last norm: of the size of the others."""
END_WEIGHT = -1000.0
SPREAD = 3.0
"""Standard deviation of the logits: a few hundred tokens share most of the probability."""
CONCURRENCIES = (1, 16, 64)
"""Completions at a time."""
ENVIRONMENTS = (EnvironmentSpec(name="arithmetic"), EnvironmentSpec(name="reverse"))


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a random policy; heads are 64 wide, a key and value head serves two of them where that divides."""

    family: str
    hidden: int
    layers: int
    vocabulary: int

    def config(self) -> Any:
        """Return the configuration; the head has weights of its own."""
        heads = max(1, self.hidden // 64)
        config_class: Any = CONFIG_MAPPING[self.family]
        return config_class(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 8 // 3 // 64 * 64,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
            head_dim=self.hidden // heads,
            max_position_embeddings=4096,
            pad_token_id=PAD,
            bos_token_id=None,
            eos_token_id=EOS,
            tie_word_embeddings=False,
        )


def save_random_policy(path: Path, size: Size, *, dtype: torch.dtype, ends: bool = False) -> None:
    """Save a policy of random weights; unless `ends`, its end mark is never drawn."""
    torch.manual_seed(0)
    build: Any = AutoModelForCausalLM.from_config
    model = build(size.config(), dtype=torch.float32)
    with torch.no_grad():
        # The last norm's output has a mean square of 1.
        model.lm_head.weight *= SPREAD / (model.lm_head.weight.std() * size.hidden**0.5)
        if not ends:
            _rule_out_the_end(model)
    save_policy(model.to(dtype), make_tokenizer(), path)


def _rule_out_the_end(model: Any) -> None:
    """Make the head's row of the end mark read channel 0 alone, which the embedding sets and no layer writes to."""
    model.model.embed_tokens.weight[:, 0] = CONSTANT
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    model.lm_head.weight[EOS] = 0.0
    model.lm_head.weight[EOS, 0] = END_WEIGHT


def make_spec(*, dtype: str, tokens: int) -> RunSpec:
    """Make a run of default limits, groups and proofs, whose completions have at most `tokens` tokens."""
    return RunSpec(
        name="benchmark",
        environments=ENVIRONMENTS,
        model=ModelSpec(dtype=dtype),  # type: ignore[arg-type]
        sampling=SamplingSpec(max_prompt_tokens=64, max_new_tokens=tokens),
    )


def make_rules(spec: RunSpec) -> Rules:
    return Rules(RUN_ID, spec, load_environments(spec))


def expected(rules: Rules, policy: Blueprint, slot: int) -> Expected:
    """Return what a submission for `slot` of version 0 must contain."""
    return expected_of(
        rules.spec,
        policy,
        rules.environments,
        run_id=RUN_ID,
        version=0,
        manifest_digest=MANIFEST,
        slot=slot,
        published=(0,),
    )


def slot_requests(rules: Rules, policy: Blueprint, slots: Sequence[int]) -> list[SampleRequest]:
    """Return the requests of a worker that holds `slots`: a group for each, one prompt and many seeds."""
    wanted = [expected(rules, policy, slot) for slot in slots]
    return [request for each in wanted for request in requests_for(each)]


@dataclass(frozen=True, slots=True)
class HeldPolicies:
    """`node.verification.measure.Policies` of the one policy that there is."""

    prefills: Mapping[int, Prefill]
    files: Mapping[int, Path]

    async def blueprint(self, version: int) -> Blueprint:
        return self.prefills[version].blueprint

    async def prefill(self, version: int) -> Prefill:
        return self.prefills[version]

    async def file(self, version: int) -> OpenPolicy:
        return OpenPolicy(self.files[version])


@dataclass(frozen=True, slots=True)
class WorkloadVerifier:
    """Rules and policies of a verifier."""

    rules: Rules
    policies: HeldPolicies

    async def verdict(self, body: bytes, *, slot: int) -> Verdict:
        """Judge the file `body` for `slot` of version 0. A verifier that cannot decide ends the benchmark."""
        judgement = await verify(
            body,
            version=0,
            manifest_digest=MANIFEST,
            slot=slot,
            policies=self.policies,
            published=(0,),
            rules=self.rules,
        )
        if judgement.verdict.outcome is Outcome.INDETERMINATE:
            raise SystemExit(f"the verifier failed: {judgement.verdict.detail}")
        return judgement.verdict


def verifier_policy(path: Path, *, dtype: torch.dtype) -> Policy:
    """Load a policy as a verifier holds it: on the GPU where there is one."""
    return load_policy(path, dtype=dtype, device=find_device("auto"))


def held(path: Path, *, dtype: torch.dtype) -> HeldPolicies:
    return HeldPolicies({0: TransformersPrefill(verifier_policy(path, dtype=dtype))}, {0: path})


@contextlib.asynccontextmanager
async def running(options: argparse.Namespace, spec: RunSpec, path: Path) -> AsyncIterator[Engine]:
    """Run the engine that `options` name with the policy in `path`, on `options.threads` threads."""
    with tempfile.TemporaryDirectory() as state:
        engine: Engine
        if options.engine == "vllm":
            # Half of a GPU's memory: the other half is the verifier's, which takes turns with the engine.
            settings = VllmSettings(
                cpu_threads=options.threads, max_num_seqs=options.max_num_seqs, gpu_memory_utilization=0.5
            )
            engine = VllmEngine(spec, settings, state=Path(state))
        else:
            engine = TorchEngine(spec, device=find_device("auto"), threads=options.threads)
        say(f"starting {engine.name}")
        try:
            await engine.load(path, version=0)
            yield engine
        finally:
            await engine.close()


@contextlib.asynccontextmanager
async def running_random(options: argparse.Namespace, rules: Rules) -> AsyncIterator[tuple[Engine, Path]]:
    """Run the engine with a random policy whose completions all have one length; yield it and the policy's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.safetensors"
        save_random_policy(path, size_of(options), dtype=getattr(torch, options.dtype))
        async with running(options, rules.spec, path) as engine:
            yield engine, path


@contextlib.contextmanager
def clocks(parts: Mapping[str, tuple[Any, str]]) -> Iterator[dict[str, float]]:
    """Sum the seconds within the block of each function (object, attribute name), callees included."""
    taken: dict[str, float] = defaultdict(float)

    def clocked(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                result = call(*arguments, **named)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                return result
            finally:
                taken[name] += time.perf_counter() - start

        return run

    with contextlib.ExitStack() as stack:
        for name, (owner, attribute) in parts.items():
            stack.enter_context(patch.object(owner, attribute, clocked(name, getattr(owner, attribute))))
        yield taken


def make_parser(description: str | None, *, tokens: int, hidden: int, layers: int) -> argparse.ArgumentParser:
    """Make a parser with the options of every benchmark of an engine."""
    parser = reports.make_parser(description)
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--family", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--hidden", type=int, default=hidden, help=f"hidden size, a multiple of 64 (default {hidden})")
    parser.add_argument("--layers", type=int, default=layers, help=f"layers (default {layers})")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="logits (default 32000)")
    parser.add_argument("--tokens", type=int, default=tokens, help=f"tokens of each completion (default {tokens})")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="of vLLM and of torch each (default: all cores)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=64, help="completions that vLLM decodes together")
    return parser


def add_rounds(parser: argparse.ArgumentParser, *, rounds: int, concurrency: str = "completions at a time") -> None:
    """Add the options of a benchmark in rounds at several concurrencies; `concurrency` says what these are."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds (default {rounds})")
    parser.add_argument("--concurrency", type=int, nargs="+", default=CONCURRENCIES, help=concurrency)


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse, give torch its threads, and vLLM room for the largest concurrency."""
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.max_num_seqs = max([options.max_num_seqs, *getattr(options, "concurrency", ())])
    return options


def size_of(options: argparse.Namespace) -> Size:
    return Size(options.family, options.hidden, options.layers, options.vocabulary)


def report(name: str, options: argparse.Namespace, figures: Mapping[str, Any], notes: Mapping[str, str]) -> None:
    """Print the result, with what was run as notes."""
    threads = f"{options.threads} for the engine and as many for torch in this process, which take turns"
    reports.report(
        name, options, figures, {"engine": options.engine, "threads": threads, "dtype": options.dtype, **notes}
    )
