"""Memory and time of the trainer's output head over a real vocabulary: `python -m benchmarks.head [--json]`.

Forward and backward passes from random states and weights to their gradients, each in a process of its own, one thread.
Memory is a process's peak beyond what states, weight and their gradients took before.

- `chunked_head_extra_gib`: the trainer's head over `--tokens`; `chunked_head_extra_gib_entropy`: with an entropy term;
- `chunked_head_growth`: the former over the same with `--tokens-whole`; 1: independent of the tokens;
- `whole_head_extra_gib`: all logits at once by autograd, over `--tokens-whole`; it grows with the tokens;
- `seconds`, `seconds_whole`, `seconds_products`: processor time over `--tokens-whole` of both, and of the floor: the
  three products of states, weight and logits' gradient that no head can do without;
- `head_vs_whole`, `head_over_products`: ratios of these;
- `gradient_difference`: the largest difference of a gradient from that of all logits at once, over its largest element.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import make_parser, report, say
from coordinator.training.head import CHUNK_BYTES, head_backward
from node.policy.products import OutputHead

STATUS = Path("/proc/self/status")
ENTROPY_COEFFICIENT = 0.01


@dataclass(frozen=True)
class Inputs:
    """States, weight, targets and a coefficient for each token."""

    states: Tensor
    weight: Tensor
    targets: Tensor
    advantages: Tensor

    @staticmethod
    def draw(tokens: int, options: argparse.Namespace) -> Inputs:
        """Draw them from a fixed seed, with gradients that are in memory already."""
        torch.manual_seed(0)
        weight = (torch.randn(options.vocabulary, options.hidden) / options.hidden**0.5).requires_grad_()
        states = torch.randn(tokens, options.hidden).requires_grad_()
        for each in (weight, states):
            each.grad = torch.empty_like(each).fill_(0)
        return Inputs(states, weight, torch.randint(options.vocabulary, (tokens,)), torch.randn(tokens))

    def loss(self, part: slice, logp: Tensor, entropy: Tensor | None) -> Tensor:
        """Compute a loss that is curved in the log-probabilities."""
        loss = (self.advantages[part] * logp.exp() + logp).sum()
        return loss if entropy is None else loss - ENTROPY_COEFFICIENT * entropy.sum()


def chunked(inputs: Inputs, *, entropy: bool = False) -> None:
    """Run the trainer's head."""
    head_backward(
        inputs.states,
        OutputHead(inputs.weight),
        inputs.targets,
        temperature=1.0,
        loss=lambda part, logp_n, entropy_n: inputs.loss(part, logp_n, entropy_n if entropy else None),
    )


def whole(inputs: Inputs) -> None:
    """Run it with all logits at once, as it is usually written."""
    logprobs = torch.log_softmax(torch.nn.functional.linear(inputs.states, inputs.weight).float(), -1)
    logp = logprobs.gather(-1, inputs.targets[:, None])[:, 0]
    with torch.no_grad():
        (logprobs.exp() * logprobs).sum(-1)  # the entropy, for statistics
    inputs.loss(slice(None), logp, None).backward()  # type: ignore[no-untyped-call]


@torch.no_grad()
def products(inputs: Inputs) -> None:
    """Compute the three products, in the same chunks."""
    assert inputs.states.grad is not None
    assert inputs.weight.grad is not None
    size = max(1, CHUNK_BYTES // (4 * len(inputs.weight)))
    for start in range(0, len(inputs.states), size):
        part = slice(start, start + size)
        logits = inputs.states[part] @ inputs.weight.t()
        torch.mm(logits, inputs.weight, out=inputs.states.grad[part])
        inputs.weight.grad.addmm_(logits.t(), inputs.states[part])


def measure(run: Callable[[Inputs], None], tokens: int, options: argparse.Namespace) -> tuple[float, float]:
    """Run once in this process; return GiB beyond the inputs, and seconds of the processor."""
    torch.set_num_threads(1)
    inputs = Inputs.draw(tokens, options)
    before, started = peak_gib(), time.process_time()
    run(inputs)
    return peak_gib() - before, time.process_time() - started


def difference(options: argparse.Namespace) -> float:
    """Compare the gradients of both."""
    torch.set_num_threads(1)
    ours, theirs = (Inputs.draw(options.tokens_whole, options) for _ in range(2))
    chunked(ours)
    whole(theirs)
    pairs = ((ours.states.grad, theirs.states.grad), (ours.weight.grad, theirs.weight.grad))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs if a is not None and b is not None)


def peak_gib() -> float:
    """Return this process's largest resident size so far."""
    (kib,) = (int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return kib / 2**20


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--tokens-whole", type=int, default=1024, help="all logits at once take 3 MB each")
    options = parser.parse_args()
    few, runs = options.tokens_whole, {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for name, run, tokens in (
            ("chunked", chunked, options.tokens),
            ("entropy", partial(chunked, entropy=True), few),
            ("chunked_few", chunked, few),
            ("whole", whole, few),
            ("products", products, few),
        ):
            runs[name] = pool.submit(measure, run, tokens, options).result()
            say(f"{name}: {tokens} tokens, {runs[name][0]:.3f} GiB, {runs[name][1]:.1f} s")
        gradients = pool.submit(difference, options).result()
    memory, seconds = ({name: figures[at] for name, figures in runs.items()} for at in range(2))
    figures = {
        "chunked_head_extra_gib": round(memory["chunked"], 3),
        "chunked_head_extra_gib_entropy": round(memory["entropy"], 3),
        "chunked_head_growth": round(memory["chunked"] / memory["chunked_few"], 3),
        "whole_head_extra_gib": round(memory["whole"], 3),
        "seconds": round(seconds["chunked_few"], 3),
        "seconds_whole": round(seconds["whole"], 3),
        "seconds_products": round(seconds["products"], 3),
        "head_vs_whole": round(seconds["whole"] / seconds["chunked_few"], 3),
        "head_over_products": round(seconds["chunked_few"] / seconds["products"], 3),
        "gradient_difference": gradients,
    }
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    report("head", options, figures, {"options": settings})


if __name__ == "__main__":
    main()
