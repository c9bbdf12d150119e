"""Generation throughput with proofs and forced sampling, against the same engine without.

`python -m benchmarks.generate [--engine vllm|torch] [--json]`. A policy of random weights (125 million by default)
draws completions of one length, 1, 16 and 64 at a time, from the prompts of a run's slots (groups of 8 share one).
Within each round the contenders take the same requests in turn, another one first each time; figures are medians
over rounds, and a ratio is the median of the rounds' own ratios.

- `on`: `Engine.generate`, all that a worker waits for: forced sampling, log-probabilities, hidden states, proofs,
  and under vLLM fetching and comparing the record.
- `off`: under vLLM the same processes and model, asked past our engine with vLLM's own sampler at temperature 1 and
  no log-probabilities. Our hook sees these requests in each step and leaves them alone. Under torch the same decoder
  with an exponential race.
- `greedy`: as `off`, but the largest logit is taken. On a CPU a stock sampler's random numbers cost more than ours, so
  that `on` over `off` can exceed 1; `on` over `greedy` is what everything that `on` does costs.

Each draws exactly as many tokens: the policy's end mark is out of reach by its weights (`benchmarks.workload`), and
the others ignore it besides. The prefix cache is emptied before each run.

The breakdown is measured in this process after the engine has ended, with the same number of threads, on logits and
hidden states of the same shapes: what choosing costs for a step, ours and the exponential race that a stock sampler
runs; our bookkeeping around it; and a chunk's proofs, which another thread builds beside the steps. What these do
not explain of `step_ms_on` - `step_ms_greedy` is the way of the records and waiting for the last proofs.

The floor: `greedy` does nothing that `on` does not, so a ratio of 1 to it is the most. On a CPU a step reads all
weights once (2 bytes each in bfloat16), and from some tens of rows on is bound by 2 FLOP per weight and row. Choosing
takes one or two nanoseconds for each logit of a row (`benchmarks.sampling`), as long as a few hundred weights: the
smaller a policy is beside its vocabulary, the more it shows.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks import workload
from benchmarks.timing import median_ratio, rounds_ms, synchronised
from node.engines.base import Engine, SampleRequest
from node.engines.recorder import DecodeRow, Recorder
from node.engines.torch_decoder import Decoder
from node.protocol.run import RunSpec
from node.sampling.forced import choose, warm_up
from node.verification.plan import Rules
from node.verification.proofs import build_proofs

STEPS = 10
"""Timed steps of the breakdown, all within one chunk."""

Contender = Callable[[Sequence[SampleRequest]], Awaitable[int]]
"""Draws a completion for each request; returns how many tokens these have."""


async def forced(engine: Engine, requests: Sequence[SampleRequest]) -> int:
    """Generate as a worker does."""
    return sum(len(rollout.completion_ids) for rollout in await engine.generate(requests))


async def stock_vllm(llm: Any, requests: Sequence[SampleRequest], *, tokens: int, temperature: float) -> int:
    """Generate by vLLM alone; `llm` is its AsyncLLM."""
    vllm = importlib.import_module("vllm")
    parameters = vllm.SamplingParams(
        temperature=temperature,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
    )

    async def one(index: int, request: SampleRequest) -> int:
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        count = 0
        async for output in llm.generate(prompt, parameters, f"stock-{time.monotonic_ns()}-{index}"):
            count += len(output.outputs[0].token_ids)
        return count

    return sum(await asyncio.gather(*(one(index, request) for index, request in enumerate(requests))))


@torch.inference_mode()
def stock_torch(engine: Any, requests: Sequence[SampleRequest], *, tokens: int, temperature: float) -> int:
    """Generate by the torch engine's decoder, with nothing recorded."""
    sample = race if temperature else greedy
    decoder = Decoder(engine.policy, columns=max(len(request.prompt_ids) for request in requests) + tokens)
    drawn = 0
    hidden = decoder.join([request.prompt_ids for request in requests])
    while True:
        chosen = sample(engine.policy.logits(hidden)).tolist()
        drawn += len(chosen)
        if drawn == tokens * len(requests):
            return drawn
        hidden = decoder.step(chosen)


def race(logits: Tensor) -> Tensor:
    """Sample each row as stock samplers do: no seed, no log-probability."""
    return (logits.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)


def greedy(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def contenders(engine: Any, *, tokens: int) -> dict[str, Contender]:
    """Return all three contenders, each with an empty prefix cache."""
    if engine.name == "torch":

        async def stock(requests: Sequence[SampleRequest], temperature: float) -> int:
            return await asyncio.to_thread(stock_torch, engine, requests, tokens=tokens, temperature=temperature)

        async def on(requests: Sequence[SampleRequest]) -> int:
            return await forced(engine, requests)

    else:
        llm = engine._host.llm  # noqa: SLF001  (the engine has no way to sample without proofs, and needs none)

        async def stock(requests: Sequence[SampleRequest], temperature: float) -> int:
            await llm.reset_prefix_cache()
            return await stock_vllm(llm, requests, tokens=tokens, temperature=temperature)

        async def on(requests: Sequence[SampleRequest]) -> int:
            await llm.reset_prefix_cache()
            return await forced(engine, requests)

    return {"on": on, "off": lambda requests: stock(requests, 1.0), "greedy": lambda requests: stock(requests, 0.0)}


async def speeds(engine: Engine, rules: Rules, options: argparse.Namespace) -> dict[str, float]:
    """Measure tokens per second of the contenders at each concurrency, and their ratios."""
    tokens, group = rules.spec.sampling.max_new_tokens, rules.spec.sampling.group_size
    calls = contenders(engine, tokens=tokens)
    found: dict[tuple[str, int], list[float]] = {(name, c): [] for name in calls for c in options.concurrency}
    for turn in range(options.rounds + 1):
        for concurrency in options.concurrency:
            first = turn * concurrency
            slots = range(first, first + -(-concurrency // group))
            requests = workload.slot_requests(rules, engine.policy, slots)[:concurrency]
            first_name = turn % len(calls)
            for name in [*list(calls)[first_name:], *list(calls)[:first_name]]:
                start = time.perf_counter()
                drawn = await calls[name](requests)
                speed = drawn / (time.perf_counter() - start)
                if drawn != tokens * concurrency:
                    raise SystemExit(f"{name} drew {drawn} tokens where {tokens * concurrency} were due")
                workload.say(f"round {turn}: {concurrency} at a time, proofs {name}: {speed:.0f} tokens/s")
                if turn:
                    found[name, concurrency].append(speed)
    figures: dict[str, float] = {}
    for c in options.concurrency:
        on = found["on", c]
        figures[f"tokens_per_s_c{c}"] = statistics.median(on)
        for name in ("off", "greedy"):
            figures[f"tokens_per_s_{name}_c{c}"] = statistics.median(found[name, c])
            figures[f"proofs_on_over_{name}_c{c}"] = median_ratio(on, found[name, c])
        for name in calls:
            # A step gives each row a token; the prompts' prefill is spread over them.
            figures[f"step_ms_{name}_c{c}"] = c * 1e3 / statistics.median(found[name, c])
    return figures


def breakdown(spec: RunSpec, *, rows: int, hidden: int, vocabulary: int) -> dict[str, float]:
    """Time each part of one step of `rows` rows, and a token's share of its chunk's proofs, in milliseconds."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    temperature, span = spec.sampling.temperature, spec.proofs.chunk_tokens
    generator = torch.Generator().manual_seed(0)
    original = (torch.randn(rows, vocabulary, generator=generator) * workload.SPREAD).to(device)
    # Recording changes the logits, so that each of its steps needs its own.
    fresh = iter([original.clone() for _ in range(STEPS + 1)])
    states = torch.randn(rows, hidden, generator=generator).bfloat16().to(device)
    chunks = [torch.randn(span, hidden, generator=generator).bfloat16() for _ in range(rows)]
    seeds = [bytes([row]) * 16 for row in range(rows)]
    steps = iter(range(STEPS + 1))
    recorder = Recorder(
        hidden=hidden,
        proofs=msgspec.structs.replace(spec.proofs, chunk_tokens=STEPS + 1),
        temperature=temperature,
        version=0,
        device=device,
    )

    def record() -> None:
        position = next(steps)
        recorder.begin([DecodeRow(f"{row}", seeds[row], position) for row in range(rows)], states)
        recorder.sample(next(fresh))

    calls: dict[str, Callable[[], object]] = {
        "stock": lambda: race(original),
        "choose": lambda: choose(original, seeds, [5] * rows, temperature=temperature),
        "proofs": lambda: build_proofs(chunks, seeds, spec=spec.proofs),
    }
    if device.type == "cuda":
        calls = {name: synchronised(call) for name, call in calls.items()}
    with torch.inference_mode():
        taken = rounds_ms(calls, STEPS)
        record()
        with workload.clocks({"choose": (recorder, "_choose"), "step": (recorder, "sample")}) as spent:
            for _ in range(STEPS):
                record()
    return {
        f"stock_sampling_ms_per_step_c{rows}": statistics.median(taken["stock"]),
        f"choose_ms_per_step_c{rows}": statistics.median(taken["choose"]),
        f"bookkeeping_ms_per_step_c{rows}": (spent["step"] - spent["choose"]) * 1e3 / STEPS,
        f"proofs_ms_per_token_c{rows}": statistics.median(taken["proofs"]) / (rows * span),
        f"proofs_ms_per_step_c{rows}": statistics.median(taken["proofs"]) / span,
    }


async def measure(options: argparse.Namespace) -> dict[str, float]:
    """Measure all figures."""
    spec = workload.make_spec(dtype=options.dtype, tokens=options.tokens)
    rules = workload.make_rules(spec)
    async with workload.running_random(options, rules) as (engine, _):
        figures: dict[str, float] = {"parameters": engine.policy.parameters}
        figures |= await speeds(engine, rules, options)
    warm_up("cuda" if torch.cuda.is_available() else "cpu")
    for concurrency in options.concurrency:
        figures |= breakdown(spec, rows=concurrency, hidden=options.hidden, vocabulary=options.vocabulary)
    return figures


def main() -> None:
    parser = workload.make_parser(__doc__, tokens=64, hidden=768, layers=12)
    workload.add_rounds(parser, rounds=5)
    options = workload.parse(parser)
    figures = asyncio.run(measure(options))
    notes = {
        "lengths": f"every completion has {options.tokens} tokens: the policy's weights put the end mark out of reach",
        "proofs_on_over_off": f"median of {options.rounds} rounds, all contenders in one engine, in turn",
        "proofs_ms_per_step": "built by another thread beside the steps",
    }
    workload.report("generate", options, figures, notes)


if __name__ == "__main__":
    main()
