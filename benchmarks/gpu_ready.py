"""What forced sampling and proofs ask of a device, counted on a machine that has none.

`python -m benchmarks.gpu_ready [--engine torch] [--json]`. The figures:

- `blocking_copies_per_step`: operations of a decoding step that wait for the device, by forced sampling and recording,
  over steps in which rows join, leave, fill a chunk and change their policy. The device is torch's "meta", whose
  tensors nobody can read; Triton's kernel is left out. `engine_waits_per_step`: those of the torch engine's own step,
  which has to read the tokens that were drawn to know who is at an end.
- `bytes_moved_per_token`: from the device to the host, while chunks are proved where their states are. `..._states`: by
  the same recorder, the same steps and the same proofs, when all states are moved and proved on the host.
  `bytes_moved_per_token_share` is the first over the second.
- `proofs_on_over_off_c64_*`: tokens a second of processor time (of this process and its children) with forced sampling
  and proofs, over the same engine with its own sampler, 64 completions at a time; in turn, another one first each time;
  the median of the rounds' ratios. `..._over_greedy`: over the same engine that takes the largest logit. The figure
  without an engine's name is the smallest of those over `off`.

Of a GPU's time these figures say nothing: `benchmarks/gpu.sh` measures it where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import generate, workload
from benchmarks.lagging import META, Away, CountedBytes, counted_waits, cuda_sampling_on_meta
from benchmarks.report import report
from benchmarks.timing import median_ratio
from node.engines import recorder as recorders
from node.engines.recorder import DecodeRow, Recorder
from node.engines.streams import OneAfterAnother
from node.engines.torch_decoder import Decoder
from node.protocol.run import ProofSpec

CONCURRENCY = 64
STEPS = 70
"""Steps of the counts: two chunks of 32 tokens, and a part of a third."""
SWITCH = 40
"""The step from which on another policy draws."""


def seed_of(name: str) -> bytes:
    return name.encode().ljust(16, b"\0")


def waits_of_recording(*, hidden: int, vocabulary: int) -> int:
    """Count the operations that wait for the device in `STEPS` steps of forced sampling and recording."""
    recorder = Recorder(
        hidden=hidden, proofs=ProofSpec(), temperature=0.7, version=7, device=META, streams=OneAfterAnother()
    )
    with (
        patch.object(recorders, "_complete_chunks", lambda *_, **__: None),
        cuda_sampling_on_meta(),
        counted_waits() as waits,
    ):
        for position in range(STEPS):
            recorder.version = 7 if position < SWITCH else 8
            names = ["a", "b", None, "c"] if position % 2 else ["a", "b", "c"]
            rows = [name and DecodeRow(name, seed_of(name), position) for name in names]
            recorder.begin(rows, torch.empty(len(rows), hidden, device=META))
            recorder.sample(torch.empty(len(rows), vocabulary, device=META))
            recorder.end()
        recorder.drop(["a", "b", "c"])
    return len(waits)


def waits_of_the_torch_engine(*, hidden: int, vocabulary: int) -> int:
    """Count those of the torch engine's decoder in one step, its reading of the tokens included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(workload.Size("llama", hidden, 2, vocabulary).config())
    policy: Any = SimpleNamespace(model=model.eval(), hidden=hidden)
    decoder = Decoder(policy, columns=16)
    with torch.inference_mode():
        decoder.join([(1, 2, 3), (1, 2)])
        with counted_waits() as waits:
            states = decoder.step([4, 5])
            model.lm_head(states).argmax(-1).tolist()
    return len(waits)


class _ProvedOnDevice:
    """Streams whose other thread gets tensors of a device, and proves them there."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextlib.contextmanager
    def hand_over(self, tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        with CountedBytes() as device:
            yield self.offered([tensor.as_subclass(Away) for tensor in tensors])
        self.bytes += device.to_host

    def offered(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return tensors


class _ProvedOnHost(_ProvedOnDevice):
    """Streams whose other thread takes all states to the host first."""

    def offered(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.cpu() for tensor in tensors]


def bytes_moved(*, hidden: int) -> tuple[float, float]:
    """Return the bytes that come to the host for a token, when its states are proved on the device and on the host.

    Raises SystemExit if the two ways have other proofs.
    """
    found, records = [], []
    for streams in (_ProvedOnDevice(), _ProvedOnHost()):
        generator = torch.Generator().manual_seed(0)
        recorder = Recorder(
            hidden=hidden, proofs=ProofSpec(), temperature=0.7, version=7, device=torch.device("cpu"), streams=streams
        )
        names = ["a", "b", "c"]
        for position in range(STEPS):
            recorder.version = 7 if position < SWITCH else 8
            rows = [DecodeRow(name, seed_of(name), position) for name in names]
            recorder.begin(rows, torch.randn(len(rows), hidden, generator=generator))
            recorder.sample(torch.randn(len(rows), 64, generator=generator))
            recorder.end()
        records.append(recorder.collect([(name, STEPS) for name in names]))
        found.append(streams.bytes / (STEPS * len(names)))
    if records[0] != records[1] or any(record.fault for record in records[0]):
        raise SystemExit("states are proved otherwise on the device than on the host")
    return found[0], found[1]


def processor_seconds() -> float:
    """Processor time of this process and of its children, the running ones and those that have ended."""
    own = psutil.Process()
    times = [own.cpu_times(), *(child.cpu_times() for child in own.children(recursive=True))]
    ended = times[0].children_user + times[0].children_system
    return sum(each.user + each.system for each in times) + ended


async def ratios(engine_name: str, options: argparse.Namespace) -> dict[str, float]:
    """Measure an engine's tokens per second of processor time in pairs with and without proofs."""
    options.engine = engine_name
    rules = workload.make_rules(workload.make_spec(dtype=options.dtype, tokens=options.tokens))
    spent: dict[str, list[float]] = {"on": [], "off": [], "greedy": []}
    group = rules.spec.sampling.group_size
    async with workload.running_random(options, rules) as (engine, _):
        calls = generate.contenders(engine, tokens=options.tokens)
        for turn in range(options.rounds + 1):
            slots = range(turn * CONCURRENCY, turn * CONCURRENCY + -(-CONCURRENCY // group))
            requests = workload.slot_requests(rules, engine.policy, slots)[:CONCURRENCY]
            first = turn % len(calls)
            for name in [*list(calls)[first:], *list(calls)[:first]]:
                start = processor_seconds()
                drawn = await calls[name](requests)
                seconds = processor_seconds() - start
                if drawn != options.tokens * CONCURRENCY:
                    raise SystemExit(f"{name} drew {drawn} tokens where {options.tokens * CONCURRENCY} were due")
                workload.say(f"{engine_name}, round {turn}, {name}: {drawn / seconds:.0f} tokens a processor second")
                if turn:
                    spent[name].append(seconds)
    return {
        f"tokens_per_processor_s_c64_{engine_name}": options.tokens * CONCURRENCY / statistics.median(spent["on"]),
        f"proofs_on_over_off_c64_{engine_name}": median_ratio(spent["off"], spent["on"]),
        f"proofs_on_over_greedy_c64_{engine_name}": median_ratio(spent["greedy"], spent["on"]),
    }


def counts(*, hidden: int, vocabulary: int) -> dict[str, float]:
    """Count what waits for a device and what comes from it, by a policy's sizes."""
    moved, states = bytes_moved(hidden=hidden)
    return {
        "blocking_copies_per_step": waits_of_recording(hidden=hidden, vocabulary=vocabulary) / STEPS,
        "engine_waits_per_step": waits_of_the_torch_engine(hidden=hidden, vocabulary=vocabulary),
        "bytes_moved_per_token": moved,
        "bytes_moved_per_token_states": states,
        "bytes_moved_per_token_share": moved / states,
    }


def main() -> None:
    parser = workload.make_parser(__doc__, tokens=33, hidden=512, layers=6)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    # A vocabulary of the share that it has of a model; and both engines, unless one is named.
    parser.set_defaults(vocabulary=8000, threads=1, engine=None)
    options = workload.parse(parser)
    engines = [options.engine] if options.engine else ["torch", "vllm"]
    figures = counts(hidden=options.hidden, vocabulary=options.vocabulary)
    for engine in engines:
        figures |= asyncio.run(ratios(engine, options))
    figures["proofs_on_over_off_c64"] = min(figures[f"proofs_on_over_off_c64_{engine}"] for engine in engines)
    notes = {
        "blocking_copies_per_step": f"over {STEPS} steps, with the code for CUDA on tensors without values",
        "bytes_moved_per_token": f"hidden size {options.hidden}, bfloat16, chunks of 32 tokens and parts of some",
        "proofs_on_over_off": f"median of {options.rounds} rounds; {options.threads} threads, {options.dtype}",
    }
    report("gpu_ready", options, figures, notes)


if __name__ == "__main__":
    main()
