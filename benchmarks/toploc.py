"""Time to build and verify proofs per 32-token chunk, against toploc 0.1.6 and the bare top-k of the chunks.

`python -m benchmarks.toploc [--json] [--threads N ...] [--rounds N] [--no-peer | --peer-python PATH]`. Everything is
timed in turn within each round, ours and the peer's, in an order that is drawn anew, so that another process on the
machine and what a call leaves behind slow all of it alike; times are medians over rounds, and a ratio is the median of
the rounds' own ratios. A ratio whose name has no hidden size is the worst of all shapes, thread counts and forms of the
activations that were measured: one tensor, a list of its rows, and for us also a list of tensors that lie apart
(`_apart`), as an engine keeps them that takes them step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import toploc
from benchmarks import toploc_peer
from benchmarks.peers import PeerUnavailable, add_peer_options
from benchmarks.report import make_parser, report
from benchmarks.timing import Call, alternate, median_ratio, milliseconds, rounds_ms
from benchmarks.toploc_peer import ToplocPeer
from toploc import VerificationResult
from toploc.chunks import checked_sizes, top_points

TOKENS, TOPK = 32, 128
SHAPES = ((1024, 4096), (1000, 5120))  # tokens, hidden; of the second the last chunk has 8 tokens
COMPLETIONS, COMPLETION_TOKENS, SMALL_HIDDEN = 64, 20, 128
HONEST_ROUNDS, HONEST_SHAPE = 8, (1024, 4096)
EXACT = VerificationResult(0, 0.0, 0.0)
# arXiv 2501.16007: exponent mismatches, mean and median mantissa error.
PUBLISHED_LIMITS = (38, 10.0, 8.0)

# Ratio: (above, below), one pair for each form of the activations.
OVER_TOPK = {"build_over_bare_topk": [("build", "topk")], "verify_over_bare_topk": [("verify", "topk")]}
OVER_PEER = {
    "build_speedup_vs_peer": [
        ("peer_build", "build"),
        ("peer_build_list", "build_list"),
        ("peer_build_list", "build_apart"),
    ],
    "verify_speedup_vs_peer_tensor": [("peer_verify", "verify")],
    "verify_speedup_vs_peer_list": [("peer_verify_list", "verify_list"), ("peer_verify_list", "verify_apart")],
}
PEER_KEYS = (*OVER_PEER, "honest_chunks_rejected_peer")


def sequence(tokens: int, hidden: int, seed: int) -> Tensor:
    """Draw Gaussian final hidden states [tokens, hidden], bfloat16."""
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bare_topk(activations: Tensor) -> Call:
    """Make a call of `torch.topk` over the magnitudes of all full chunks at once, and of the last, shorter one."""
    magnitudes = activations.abs()
    full = len(activations) // TOKENS * TOKENS
    batches = [magnitudes[:full].view(full // TOKENS, -1), magnitudes[full:].view(1, -1)]
    return lambda: [torch.topk(batch, TOPK, dim=1) for batch in batches if batch.numel()]


def wide_times(tokens: int, hidden: int, rounds: int, peer: ToplocPeer | None) -> dict[str, list[float]]:
    """Time building and verifying a sequence, the peer's too, and the bare top-k: milliseconds of each round."""
    activations = sequence(tokens, hidden, seed=hidden)
    forms = {"": activations, "_list": list(activations), "_apart": [row.clone() for row in activations]}
    proofs = toploc.build_proofs_bytes(activations, TOKENS, TOPK, skip_prefill=True)
    build, verify = toploc.build_proofs_bytes, toploc.verify_proofs_bytes
    calls: dict[str, Call] = {"topk": bare_topk(activations)}
    for name, form in forms.items():
        calls[f"build{name}"] = partial(build, form, TOKENS, TOPK, skip_prefill=True)
        calls[f"verify{name}"] = partial(verify, form, proofs, TOKENS, TOPK, skip_prefill=True)
    timed: dict[str, Callable[[], float]] = {name: partial(milliseconds, call) for name, call in calls.items()}
    if peer is not None:
        peer.load(activations, TOKENS, TOPK)
        for name, form in (("", "tensor"), ("_list", "list")):
            timed[f"peer_build{name}"] = partial(peer.ms, f"build_{form}")
            timed[f"peer_verify{name}"] = partial(peer.ms, f"verify_{form}")
    return alternate(timed, rounds)


@contextlib.contextmanager
def limited_to(threads: int) -> Iterator[None]:
    """Limit torch's threads and, where the system can, the cores of this process and of those that it starts."""
    before = torch.get_num_threads()
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    torch.set_num_threads(threads)
    if usable:
        os.sched_setaffinity(0, usable[:threads])
    try:
        yield
    finally:
        if usable:
            os.sched_setaffinity(0, usable)
        torch.set_num_threads(before)


def wide_figures(threads: Sequence[int], rounds: int, python: Path | None) -> dict[str, float | None]:
    """Measure times and ratios of every shape and thread count; names of all but the first count end in it."""
    figures: dict[str, float | None] = {}
    ratios = OVER_TOPK | (OVER_PEER if python else {})
    found: dict[str, list[float]] = {name: [] for name in ratios}
    for count in threads:
        with limited_to(count), open_peer(python, count) as peer:
            for tokens, hidden in SHAPES:
                label = f"h{hidden}" if count == threads[0] else f"h{hidden}_{count}_threads"
                taken = wide_times(tokens, hidden, rounds, peer)
                chunks = -(-tokens // TOKENS)
                figures |= {f"{name}_ms_per_chunk_{label}": statistics.median(t) / chunks for name, t in taken.items()}
                for name, pairs in ratios.items():
                    each = [median_ratio(taken[above], taken[below]) for above, below in pairs]
                    figures[f"{name}_{label}"] = worst(name, each)
                    found[name] += each
    return {name: worst(name, each) for name, each in found.items()} | figures


def open_peer(python: Path | None, threads: int) -> contextlib.AbstractContextManager[ToplocPeer | None]:
    return contextlib.nullcontext() if python is None else contextlib.closing(ToplocPeer(python, threads))


def worst(name: str, ratios: Sequence[float]) -> float:
    """Return the smallest speed-up, or the largest cost."""
    return min(ratios) if name in OVER_PEER else max(ratios)


def small_figures(rounds: int) -> dict[str, float]:
    """Time one chunk each of many short completions of a tiny model, in one call."""
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


def honest_figures(peer: ToplocPeer | None) -> dict[str, int]:
    """Count bit-identical chunks at hidden 4096 whose result is anything but 0, 0, 0.

    The peer's are those that it rejects against its own proofs, at the published limits.
    """
    chunks = searched = rejected = rejected_peer = 0
    for seed in range(HONEST_ROUNDS):
        activations = sequence(*HONEST_SHAPE, seed)
        proofs = toploc.build_proofs(activations, TOKENS, TOPK, skip_prefill=True)
        chunks += len(proofs)
        searched += sum(proof.modulus != 65497 for proof in proofs)
        for form in (activations, list(activations)):
            results = toploc.verify_proofs(form, proofs, TOKENS, TOPK, skip_prefill=True)
            rejected += sum(result != EXACT for result in results)
        if peer is not None:
            peer.load(activations, TOKENS, TOPK)
            rejected_peer += sum(map(beyond_published_limits, peer.results("verify_list")))
    figures = {
        "honest_chunks": chunks,
        "honest_chunks_with_smaller_modulus": searched,
        "honest_chunks_rejected": rejected,
    }
    return figures if peer is None else figures | {"honest_chunks_rejected_peer": rejected_peer}


def tie_figures() -> dict[str, int]:
    """Count, of the same chunks, those whose k-th and next magnitudes tie, and those of which `torch.topk` takes ours.

    The peer takes those of `torch.topk`, which leaves the choice among equal ones open; where none are equal, its bytes
    and ours are the same. `honest_chunks_most_other_elements` is the largest number of a proof's that are others.
    """
    tied = same = most_other = 0
    for seed in range(HONEST_ROUNDS):
        for chunk in torch.split(sequence(*HONEST_SHAPE, seed), TOKENS):
            magnitudes = chunk.flatten().abs()
            values, _ = magnitudes.topk(TOPK + 1)
            ours, _ = top_points([[chunk]], checked_sizes([[chunk]], TOPK), TOPK)
            other = len(set(ours[0].tolist()) - set(magnitudes.topk(TOPK).indices.tolist()))
            tied += bool(values[-1] == values[-2])
            same += not other
            most_other = max(most_other, other)
    return {
        "honest_chunks_tied": tied,
        "honest_chunks_with_elements_of_topk": same,
        "honest_chunks_most_other_elements": most_other,
    }


def beyond_published_limits(result: tuple[float, ...]) -> bool:
    return any(found > limit for found, limit in zip(result, PUBLISHED_LIMITS, strict=True))


def measure(threads: Sequence[int], rounds: int, python: Path | None) -> dict[str, float | None]:
    """Measure all figures; those of the peer, which the interpreter `python` has, are null without one."""
    figures: dict[str, float | None] = dict.fromkeys(PEER_KEYS)
    figures |= wide_figures(threads, rounds, python)
    with limited_to(threads[0]), open_peer(python, threads[0]) as peer:
        return figures | small_figures(rounds) | honest_figures(peer) | tie_figures()


def find_peer(options: argparse.Namespace) -> tuple[Path, dict[str, str]]:
    """Return an interpreter that has the peer, and its versions. Raise PeerUnavailable."""
    if options.no_peer:
        raise PeerUnavailable("not asked for (--no-peer)")
    python = options.peer_python or toploc_peer.installed(options.peer_folder)
    with contextlib.closing(ToplocPeer(python, threads=1)) as peer:
        return python, peer.versions


def main() -> None:
    parser = make_parser(__doc__)
    default = list(dict.fromkeys((1, torch.get_num_threads())))
    parser.add_argument("--threads", type=int, nargs="+", default=default, help="of torch, in turn (1 and its own)")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default 30)")
    add_peer_options(parser, f"toploc {toploc_peer.VERSION}")
    options = parser.parse_args()
    try:
        python, versions = find_peer(options)
        notes = {"peer": ", ".join(f"{name} {version}" for name, version in versions.items())}
    except PeerUnavailable as error:
        python, notes = None, dict.fromkeys(PEER_KEYS, str(error))
    figures = measure(options.threads, options.rounds, python)
    notes |= {
        "threads": " and ".join(map(str, options.threads)) + ", on as many cores, for both sides alike",
        "honest_chunks_rejected": "a result other than 0, 0, 0 counts: stricter than the published limits",
        "ratios": f"medians of {options.rounds} alternating rounds; without a hidden size, the worst measured",
    }
    report("toploc", options, figures, notes)


if __name__ == "__main__":
    main()
