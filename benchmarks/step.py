"""Time and memory of a training step: `python -m benchmarks.step [--device cuda] [--json]`.

Groups of 8 completions on policies of random weights, prompts of one length and completions of many, through the
trainer's own step: packed rows, each prompt once for its group, attention sample by sample. The reference, in the same
run and alternating, is a step as it is usually written: each group as a batch padded to its longest sample, with an
attention mask, through the same model, loss and optimizer. Both train from the same weights, and how far their first
losses are apart is printed (`loss_difference`).

- `seconds`, `tokens_per_s`: the median step, and how many tokens of samples it trains on in a second, prompts counted
  with every sample;
- `step_vs_padded`: the reference's median over ours;
- `peak_bytes`, `peak_bytes_padded`: on a GPU torch's peak beside model and optimizer; on a CPU 0;
- `model_flops_per_s`: 6 floating point operations for each parameter and each token that ours computes.

`--recompute`, `--autocast` and `--row-tokens` are the trainer's options; the reference has the first two as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.report import make_parser, report
from benchmarks.workload import Size
from coordinator.training import recipe
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import Execution, score, train_step
from coordinator.training.lora import recompute_activations
from coordinator.training.optimizers import make_optimizer
from coordinator.training.packing import ROW_TOKENS, Scored, pack
from coordinator.training.world import World
from node.engines.device import find_device
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec, TrainingSpec

SAMPLES = 8
LEAST = 0.25
"""Length of the shortest completion over that of the longest."""


def make_groups(options: argparse.Namespace) -> list[Group]:
    """Draw random tokens with the log-probability of a uniform choice; half of a group earns 1."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(3, options.vocabulary), k=count))

    groups = []
    for _ in range(options.groups):
        prompt = tokens(options.prompt)
        lengths = [rng.randint(int(LEAST * options.completion), options.completion) for _ in range(SAMPLES)]
        logprob = -float(torch.tensor(float(options.vocabulary)).log())
        samples = tuple(Sample(prompt, tokens(length), (logprob,) * length) for length in lengths)
        groups.append(Group(0, tuple(float(at % 2) for at in range(SAMPLES)), samples))
    return groups


class Contender:
    """A model with its optimizer on the device, which takes packed and padded steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        build: Any = AutoModelForCausalLM.from_config
        size = Size(options.family, options.hidden, options.layers, options.vocabulary)
        self.model = build(size.config(), dtype=torch.float32).to(find_device(options.device))
        if options.recompute:
            recompute_activations(self.model)
        training = TrainingSpec(minibatches=1, learning_rate=1e-6)
        sampling = SamplingSpec(max_prompt_tokens=options.prompt, max_new_tokens=options.completion)
        environments = (EnvironmentSpec(name="arithmetic"),)
        self.spec = RunSpec(name="step", environments=environments, sampling=sampling, training=training)
        self.optimizer = make_optimizer(self.model, training)
        self.dtype = getattr(torch, options.autocast) if options.autocast else None
        self.device = torch.device(options.device)
        self.row_tokens, self.recompute = options.row_tokens, options.recompute

    def packed(self, groups: Sequence[Group]) -> float:
        """Take the trainer's own step; return the loss."""
        execution = Execution(World(device=self.device), self.row_tokens, self.dtype, self.recompute)
        return train_step(self.model, self.optimizer, groups, spec=self.spec, step=0, execution=execution)["loss"]

    def padded(self, groups: Sequence[Group]) -> float:
        """Take a step of a padded batch for each group; return the loss."""
        scored = [score(group, spec=self.spec, step=0) for group in groups]
        drawn = sum(len(each.sample.completion_ids) for samples in scored for each in samples)
        self.model.train()
        self.optimizer.zero_grad()
        losses = [self._backward(samples, drawn) for samples in scored]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.training.gradient_clip)
        self.optimizer.step()
        return float(torch.stack(losses).sum())

    def _backward(self, samples: Sequence[Scored], drawn: int) -> Tensor:
        prompt, longest = samples[0].sample.prompt_ids, max(len(each.sample.completion_ids) for each in samples)
        ids = torch.zeros(len(samples), len(prompt) + longest, dtype=torch.int64)
        mask, behaviour = torch.zeros_like(ids), torch.zeros(len(samples), longest)
        for line, each in enumerate(samples):
            sequence = (*prompt, *each.sample.completion_ids)
            ids[line, : len(sequence)], mask[line, : len(sequence)] = torch.tensor(sequence), 1
            behaviour[line, : len(each.sample.completion_ids)] = torch.tensor(each.sample.logprobs)
        advantage = torch.tensor([each.advantage for each in samples])[:, None].expand(-1, longest)
        ids, mask, behaviour, advantage = (each.to(self.device) for each in (ids, mask, behaviour, advantage))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=longest + 1).logits[
                :, :-1
            ]
        logprobs = torch.log_softmax(logits.float(), -1)
        chosen = logprobs.gather(-1, ids[:, len(prompt) :, None]).squeeze(-1)
        seen = mask[:, len(prompt) :].bool()
        token_losses = recipe.token_losses(
            chosen[seen],
            recipe.token_ratios(chosen, behaviour)[seen],
            advantage[seen],
            training=self.spec.training,
            kl_N=None,
            entropy_N=-(logprobs.detach().exp() * logprobs.detach()).sum(-1)[seen],
        )
        loss = token_losses.sum() / drawn
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time both in turn, and compute the figures."""
    groups = make_groups(options)
    contender = Contender(options)
    steps: dict[str, Callable[[Sequence[Group]], float]] = {"packed": contender.packed, "padded": contender.padded}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    peaks = dict.fromkeys(steps, 0)
    losses: dict[str, float] = {}
    start = {name: tensor.clone() for name, tensor in contender.model.state_dict().items()}
    for turn in range(options.rounds + 1):
        for name in sorted(steps, reverse=bool(turn % 2)):
            if not turn:
                contender.model.load_state_dict(start)
            taken, peak, loss = timed(steps[name], groups, contender.device)
            losses.setdefault(name, loss)
            if turn:  # the first makes the optimizer's state
                seconds[name].append(taken)
                peaks[name] = max(peaks[name], peak)
    ours, theirs = (statistics.median(seconds[name]) for name in ("packed", "padded"))
    samples = sum(len(each.prompt_ids) + len(each.completion_ids) for group in groups for each in group.rollouts)
    scored = [each for group in groups for each in score(group, spec=contender.spec, step=0)]
    computed = sum(row.ids.numel() for row in pack(scored, row_tokens=options.row_tokens))
    parameters = sum(each.numel() for each in contender.model.parameters())
    return {
        "parameters": parameters,
        "seconds": round(ours, 4),
        "seconds_padded": round(theirs, 4),
        "step_vs_padded": round(theirs / ours, 3),
        "tokens_per_s": round(samples / ours, 1),
        "tokens_of_samples": samples,
        "tokens_computed": computed,
        "model_flops_per_s": round(6 * parameters * computed / ours),
        "peak_bytes": peaks["packed"],
        "peak_bytes_padded": peaks["padded"],
        "loss_difference": abs(losses["packed"] - losses["padded"]),
    }


def timed(step: Callable[[Sequence[Group]], float], groups: Sequence[Group], device: torch.device) -> tuple[Any, ...]:
    """Return a step's seconds, its peak of bytes beyond those before it, and its loss."""
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    started = time.perf_counter()
    loss = step(groups)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    taken = time.perf_counter() - started
    return taken, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0, loss


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--family", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64 (default 256)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--groups", type=int, default=4, help=f"of {SAMPLES} completions (default 4)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens (default 128)")
    parser.add_argument("--completion", type=int, default=128, help="tokens of the longest (default 128)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--row-tokens", type=int, default=ROW_TOKENS)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--autocast", choices=("bfloat16",))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    settings = {name: value for name, value in vars(options).items() if name != "json"}
    report("step", options, measure(options), {"options": settings})


if __name__ == "__main__":
    main()
