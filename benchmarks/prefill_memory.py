"""Memory of one verdict, with the policy held whole and streamed from its file.

`python -m benchmarks.prefill_memory [--json]`. A policy of random weights (153 million parameters by default, in
bfloat16) draws one group, and each way of judging it does so in a process of its own:

- `whole`: the policy loaded, as a verifier with room for it does;
- `streamed`: layer by layer from its file, as with `--policy-memory 0`;
- `look`: a second look at int8 weights, streamed, as every verifier takes it;
- `look_loaded`: the same from a loaded policy and two copies in float32.

`*_over_policy` is the largest resident size while it does so, beyond what the process had before (after a verdict under
a tiny policy: Python, torch and its threads), over the bytes of the policy's file. The first look through a file for
faults is part of it. `*_seconds` is processor time, with the file in the page cache. `streamed_floor_over_policy` is
the largest part of the model alone: a layer, or the output head; `look_floor_over_policy` a layer in float32. A
streamed way that measures other bits than the loaded one ends the benchmark.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks import workload
from benchmarks.workload import Size
from node.policy.file import Policy, load_policy
from node.policy.reading import OpenPolicy
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.submission.reader import read_rollouts
from node.submission.writer import write_rollouts
from node.verification.prefill import TransformersPrefill, TransformersPrefills
from node.verification.second_look import altered, exact_states, int8
from node.verification.spans import Span, spans_of

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Written to CLEAR_REFS, it makes VmHWM begin anew."""


@dataclass(frozen=True)
class Cost:
    """What one way of judging took, seconds of the processor, and a digest of what it found."""

    peak_bytes: int
    seconds: float
    digest: str


def resident(field: str) -> int:
    """Return this process's VmRSS or VmHWM in bytes."""
    (kib,) = (int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return kib * 1024


def whole(path: Path, spans: Sequence[Span], spec: RunSpec, *, streamed: bool = False) -> bytes:
    prefill = asyncio.run(TransformersPrefills(dtype=spec.model.dtype).prefill(path, version=0, streamed=streamed))
    return msgspec.json.encode(prefill.measure(spans, spec=spec))


def look(path: Path, spans: Sequence[Span], spec: RunSpec) -> bytes:
    file, dtype = OpenPolicy(path), getattr(torch, spec.model.dtype)
    states = [exact_states(file, spans, dtype=dtype), exact_states(file, spans, dtype=dtype, alter=int8)]
    return b"".join(state.numpy().tobytes() for each in states for state in each)


def look_loaded(path: Path, spans: Sequence[Span], spec: RunSpec) -> bytes:
    policy = load_policy(path, dtype=getattr(torch, spec.model.dtype))
    eight_bits = altered(policy, int8)
    states = [TransformersPrefill(each).states(spans) for each in (policy.in_float32(), eight_bits)]
    return b"".join(state.numpy().tobytes() for each in states for state in each)


WAYS: dict[str, Callable[[Path, Sequence[Span], RunSpec], bytes]] = {
    "whole": whole,
    "streamed": partial(whole, streamed=True),
    "look": look,
    "look_loaded": look_loaded,
}


def cost(way: str, folder: Path, tokens: int, dtype: str, threads: int) -> Cost:
    """Judge the group in `folder` one way, in a process that has done so under the tiny policy before."""
    torch.set_num_threads(threads)
    spec = workload.make_spec(dtype=dtype, tokens=tokens)
    for name in ("tiny", "policy"):
        rollouts = read_rollouts((folder / f"{name}.group").read_bytes(), spec=spec)
        CLEAR_REFS.write_text(RESET_PEAK)
        before, started = resident("VmRSS"), time.process_time()
        found = WAYS[way](folder / f"{name}.safetensors", spans_of_group(rollouts, spec), spec)
        seconds = time.process_time() - started
    return Cost(resident("VmHWM") - before, seconds, hashlib.sha256(found).hexdigest())


def spans_of_group(rollouts: Sequence[Rollout], spec: RunSpec) -> list[Span]:
    return [
        span
        for row, rollout in enumerate(rollouts)
        for _, span in spans_of(rollout, row=row, chunk_tokens=spec.proofs.chunk_tokens)
    ]


async def draw(options: argparse.Namespace, spec: RunSpec, path: Path) -> bytes:
    """Return the file of one group by the policy in `path`."""
    rules = workload.make_rules(spec)
    async with workload.running(options, spec, path) as engine:
        return write_rollouts(await engine.generate(workload.slot_requests(rules, engine.policy, [0])))


def floors(policy: Policy) -> dict[str, int]:
    """Return the bytes of the largest part that must be in memory, of a prefill and of a second look."""
    model: Any = policy.model
    layer = max(sum(weight.numel() for weight in each.parameters()) for each in model.base_model.layers)
    table, item = policy.vocabulary * policy.hidden, model.dtype.itemsize
    return {
        "streamed_floor": max(layer, table) * item,
        "look_floor": layer * 4,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures."""
    dtype, spec = getattr(torch, options.dtype), workload.make_spec(dtype=options.dtype, tokens=options.tokens)
    tiny = Size(options.family, 128, 2, 1000)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for which, size in (("tiny", tiny), ("policy", workload.size_of(options))):
            path = folder / f"{which}.safetensors"
            workload.save_random_policy(path, size, dtype=dtype)
            (folder / f"{which}.group").write_bytes(asyncio.run(draw(options, spec, path)))
        size_bytes, policy = path.stat().st_size, load_policy(path, dtype=dtype)
        parameters, parts = policy.parameters, floors(policy)
        del policy
        found: dict[str, Cost] = {}
        with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
            for way in WAYS:
                arguments = (way, folder, options.tokens, options.dtype, options.threads)
                found[way] = pool.submit(cost, *arguments).result()
                workload.say(f"{way}: {found[way].peak_bytes / 2**20:.0f} MiB, {found[way].seconds:.1f} s")
    for one, other in (("whole", "streamed"), ("look_loaded", "look")):
        if found[one].digest != found[other].digest:
            raise SystemExit(f"{one} and {other} measure different numbers")
    figures: dict[str, Any] = {"parameters": parameters, "policy_mib": round(size_bytes / 2**20, 1)}
    for way, each in found.items():
        figures |= {f"{way}_over_policy": each.peak_bytes / size_bytes, f"{way}_seconds": each.seconds}
    figures |= {f"{part}_over_policy": count / size_bytes for part, count in parts.items()}
    return figures | {"streamed_over_whole_seconds": found["streamed"].seconds / found["whole"].seconds}


def main() -> None:
    parser = workload.make_parser(__doc__, tokens=64, hidden=768, layers=16)
    parser.set_defaults(engine="torch")
    options = workload.parse(parser)
    workload.report("prefill_memory", options, measure(options), {})


if __name__ == "__main__":
    main()
