"""Cost of forced sampling, a token and its log-probability from logits, against torch's ordinary sampling.

`python -m benchmarks.sampling [--json] [--rounds N] [--vocabulary V ...]`. All contenders take the same float32 logits,
in turn within each round, so that another process on the machine slows all of them alike; figures are medians over
rounds.

- `ours`: `node.sampling.forced.choose`, in one thread and in two. Logits are normal, with a standard deviation of 3:
  noise is needed for every token. `ours_sharp` is the other extreme, one token far above the others in each row,
  where almost every block is passed over without noise.
- `reference`: `node.protocol.sampling`'s noise, argmax and log-softmax, on a few rows, scaled to all of them.
- `torch`: what an engine does that is free to choose: softmax, exponential numbers, the argmax of their ratio, and a
  log-softmax for the log-probability (the exponential race, as in vLLM's sampler).
- `triton`: `choose` on a CUDA device, where there is one.

`*_mib` is the most memory that was resident beyond what was there before: of `ours`, of `reference` on its few rows,
and of a verifier (`verifier`) that samples VERIFIED_TOKENS tokens again, from hidden states and an output head in
bfloat16. With `--vocabulary` the rows are ENGINE_ROWS, the most of the torch engine, and the vocabularies those.

The floor: ten Philox rounds make 4 values with 20 multiplications of 32 by 32 bits, 5 for each value. AVX-512 does 8
at once: at one such instruction per cycle and 4 GHz that is 0.16 ns per value, and the rounds' shifts and exclusive
ors double it. The rest of `ours` is a division, a gather from a table of 176 KiB, and an exponential for the
log-probability.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.report import make_parser, report
from benchmarks.resident import resident, settle
from benchmarks.timing import Call, rounds_ms, synchronised
from node.policy.products import OutputHead
from node.protocol.sampling import gumbel_noise
from node.sampling.forced import choose, warm_up
from node.sampling.types import Choice
from node.verification.spans import Span, appraise_spans

SHAPES = ((256, 152_064), (64, 32_000))
ENGINE_ROWS = 128
VERIFIED_TOKENS, VERIFIED_HIDDEN = 2048, 256
REFERENCE_ROWS = 4
TEMPERATURE = 0.7
NO_GPU = "no CUDA device on this machine"


def ordinary(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Sample ordinarily; return tokens and log-probabilities."""
    scaled = logits / TEMPERATURE
    token = (scaled.softmax(-1) / torch.empty_like(logits).exponential_()).argmax(-1)
    return token, scaled.log_softmax(-1).gather(1, token[:, None])


def defined(logits: Tensor, seeds: list[bytes], positions: list[int]) -> tuple[Tensor, Tensor]:
    """Sample by the definition of forced sampling; return tokens and log-probabilities."""
    scaled = logits / TEMPERATURE
    token = (scaled + torch.from_numpy(gumbel_noise(seeds, positions, vocabulary=logits.shape[1]))).argmax(-1)
    return token, scaled.log_softmax(-1).gather(1, token[:, None])


def verified(vocabulary: int) -> Call:
    """Return what a verifier does with the hidden states of the tokens of one rollout."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, VERIFIED_HIDDEN, generator=generator).bfloat16()
    states = torch.randn(VERIFIED_TOKENS, VERIFIED_HIDDEN, generator=generator)
    tokens = [token % vocabulary for token in range(VERIFIED_TOKENS)]
    span = Span(0, bytes(16), context_ids=[0], position=0, token_ids=tokens, proofs=[], first_proof=0)
    return lambda: appraise_spans([span], [states], OutputHead(weight), temperature=TEMPERATURE)


def peak_mib(call: Call) -> float:
    """Return the most memory resident in the course of a call, beyond what was before."""
    before = settle()
    call()
    return (resident("VmHWM") - before) / 2**20


def in_threads(threads: int, call: Call) -> Call:
    def run() -> object:
        torch.set_num_threads(threads)
        return call()

    return run


def shape_figures(rows: int, vocabulary: int, rounds: int) -> dict[str, float | None]:
    """Measure milliseconds for all rows, and nanoseconds for each logit."""
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    sharp = logits.clone()
    sharp[:, 7] = 60.0
    seeds, positions = [bytes([row % 256]) * 16 for row in range(rows)], list(range(rows))
    few = min(rows, REFERENCE_ROWS)

    def forced(values: Tensor) -> Choice:
        return choose(values, seeds, positions, temperature=TEMPERATURE)

    calls: dict[str, Call] = {
        "ours_1_thread": in_threads(1, lambda: forced(logits)),
        "ours_2_threads": in_threads(2, lambda: forced(logits)),
        "ours_sharp_1_thread": in_threads(1, lambda: forced(sharp)),
        "torch_1_thread": in_threads(1, lambda: ordinary(logits)),
        "torch_2_threads": in_threads(2, lambda: ordinary(logits)),
        "reference_1_thread": in_threads(1, lambda: defined(logits[:few], seeds[:few], positions[:few])),
    }
    if torch.cuda.is_available():
        on_gpu = logits.cuda()
        calls |= {
            "triton": synchronised(lambda: forced(on_gpu)),
            "torch_cuda": synchronised(lambda: ordinary(on_gpu)),
        }
    memory = {
        "ours": peak_mib(calls["ours_1_thread"]),
        "reference": peak_mib(calls["reference_1_thread"]),
        "verifier": peak_mib(verified(vocabulary)),
    }
    taken = {name: statistics.median(times) for name, times in rounds_ms(calls, rounds).items()}
    taken["reference_1_thread"] *= rows / few
    figures: dict[str, float | None] = {f"{name}_mib_{rows}x{vocabulary}": mib for name, mib in memory.items()}
    for name in (*calls, "triton", "torch_cuda"):
        figures[f"{name}_ms_{rows}x{vocabulary}"] = taken.get(name)
        figures[f"{name}_ns_per_value_{rows}x{vocabulary}"] = (
            taken[name] * 1e6 / logits.numel() if name in taken else None
        )
    return figures


def measure(rounds: int, shapes: Sequence[tuple[int, int]]) -> dict[str, float | None]:
    """Measure all figures; the first is what the first call in a process costs."""
    start = time.perf_counter()
    warm_up("cpu")
    figures: dict[str, float | None] = {"warm_up_seconds": time.perf_counter() - start}
    for rows, vocabulary in shapes:
        figures |= shape_figures(rows, vocabulary, rounds)
    return figures


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    parser.add_argument("--vocabulary", type=int, nargs="+", metavar="V", help="ids (default 152064 and 32000)")
    options = parser.parse_args()
    figures = measure(options.rounds, [(ENGINE_ROWS, each) for each in options.vocabulary or ()] or SHAPES)
    notes = {name: NO_GPU for name, figure in figures.items() if figure is None} | {
        "warm_up_seconds": "import of numba and compilation, once in a process",
        "reference": f"measured on {REFERENCE_ROWS} rows, scaled to all",
        "ours_sharp": "best case: one token far above all others in each row",
    }
    report("sampling", options, figures, notes)


if __name__ == "__main__":
    main()
