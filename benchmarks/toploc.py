"""What proofs cost: time per 32-token chunk, against nothing but the top-k of the same chunks.

`python -m benchmarks.toploc [--json] [--threads N] [--rounds N]`. Everything is timed in turn within each round,
so that another process on the machine slows all of it alike; figures are medians over rounds. A ratio is the
median of the rounds' own ratios: above 1 costs more than the bare `torch.topk`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import toploc
from benchmarks import machine
from toploc import VerificationResult

CHUNKS, TOKENS, TOPK = 32, 32, 128
COMPLETIONS, COMPLETION_TOKENS, SMALL_HIDDEN = 64, 20, 128
HONEST_ROUNDS = 8
EXACT = VerificationResult(0, 0.0, 0.0)

PEER_KEYS = (
    "build_speedup_vs_peer",
    "verify_speedup_vs_peer_tensor",
    "verify_speedup_vs_peer_list",
    "honest_chunks_rejected_peer",
)
PEER_REASON = "needs the package toploc 0.1.6, whose compiled modules do not load under this torch"


def rounds_ms(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call in each round, the calls alternating; one round more warms up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: times[1:] for name, times in taken.items()}


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def sequence(hidden: int, seed: int) -> Tensor:
    """Gaussian final hidden states [CHUNKS * TOKENS, hidden], bfloat16."""
    return torch.randn(CHUNKS * TOKENS, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def wide_figures(hidden: int, rounds: int) -> dict[str, float]:
    """Build and verify a sequence of 32 chunks, and the bare top-k of the same chunks."""
    activations = sequence(hidden, seed=hidden)
    magnitudes = activations.view(CHUNKS, -1).abs()
    rows = list(activations)
    proofs = toploc.build_proofs_bytes(activations, TOKENS, TOPK, skip_prefill=True)
    taken = rounds_ms(
        {
            "topk": lambda: torch.topk(magnitudes, TOPK, dim=1),
            "build": lambda: toploc.build_proofs_bytes(activations, TOKENS, TOPK, skip_prefill=True),
            "verify": lambda: toploc.verify_proofs_bytes(activations, proofs, TOKENS, TOPK, skip_prefill=True),
            "build_list": lambda: toploc.build_proofs_bytes(rows, TOKENS, TOPK, skip_prefill=True),
            "verify_list": lambda: toploc.verify_proofs_bytes(rows, proofs, TOKENS, TOPK, skip_prefill=True),
        },
        rounds,
    )
    figures = {f"{name}_ms_per_chunk_h{hidden}": statistics.median(t) / CHUNKS for name, t in taken.items()}
    figures["build_over_bare_topk"] = median_ratio(taken["build"], taken["topk"])
    figures["verify_over_bare_topk"] = median_ratio(taken["verify"], taken["topk"])
    return figures


def small_figures(rounds: int) -> dict[str, float]:
    """One chunk each of many short completions of a tiny model, in one call."""
    shape = (COMPLETION_TOKENS, SMALL_HIDDEN)
    generator = torch.Generator().manual_seed(0)
    chunks = [torch.randn(*shape, generator=generator).bfloat16() for _ in range(COMPLETIONS)]
    proofs = toploc.build_chunk_proofs(chunks, TOPK)
    taken = rounds_ms(
        {
            "build": lambda: toploc.build_chunk_proofs(chunks, TOPK),
            "verify": lambda: toploc.verify_chunk_proofs(chunks, proofs, TOPK),
        },
        rounds,
    )
    label = f"ms_{COMPLETIONS}_completions_{COMPLETION_TOKENS}x{SMALL_HIDDEN}"
    return {f"{name}_{label}": statistics.median(times) for name, times in taken.items()}


def honest_figures() -> dict[str, int]:
    """Bit-identical chunks at hidden 4096 whose result is anything but 0, 0, 0."""
    rejected = searched = 0
    for seed in range(HONEST_ROUNDS):
        activations = sequence(4096, seed)
        proofs = toploc.build_proofs(activations, TOKENS, TOPK, skip_prefill=True)
        searched += sum(proof.modulus != 65497 for proof in proofs)
        for form in (activations, list(activations)):
            results = toploc.verify_proofs(form, proofs, TOKENS, TOPK, skip_prefill=True)
            rejected += sum(result != EXACT for result in results)
    return {
        "honest_chunks": HONEST_ROUNDS * CHUNKS,
        "honest_chunks_with_smaller_modulus": searched,
        "honest_chunks_rejected": rejected,
    }


def measure(rounds: int) -> dict[str, float | None]:
    """All figures. The ratios over the bare top-k are those of hidden 5120."""
    figures: dict[str, float | None] = dict.fromkeys(PEER_KEYS)
    for hidden in (4096, 5120):
        figures |= wide_figures(hidden, rounds)
    return figures | small_figures(rounds) | honest_figures()


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and exactness of TOPLOC proofs.")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default 30)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = measure(options.rounds)
    notes = dict.fromkeys(PEER_KEYS, PEER_REASON) | {
        "threads": str(options.threads),
        "honest_chunks_rejected": "a result other than 0, 0, 0 counts: stricter than the published limits",
        "build_over_bare_topk": f"hidden 5120, {CHUNKS} chunks, median of {options.rounds} alternating rounds",
    }
    if options.json:
        result = {"benchmark": "toploc", "machine": machine.describe(), "figures": figures, "notes": notes}
        print(json.dumps(result))
        return
    for key, value in machine.describe().items():
        print(f"{key:>42}  {value}")
    print(f"{'threads':>42}  {options.threads}\n")
    for name, figure in figures.items():
        print(f"{name:>42}  {'-' if figure is None else f'{figure:.3f}'.rstrip('0').rstrip('.')}")
    print(f"\n-: {PEER_REASON}")


if __name__ == "__main__":
    main()
