"""Reward gain of a policy that may run code: `python -m benchmarks.tool [--json] [--seeds 3]`.

Sums of two numbers of two digits, of one turn (`arithmetic`), with the tool `python`: the tiny policy (0.4 million
parameters) was never taught to add, and Python can. In one process and without a network: the torch engine draws
groups over what the tool says, as a worker does, the environment judges the last turn, and the trainer's own step
learns.

The warm start teaches the form, and then to do without: first demonstrations that copy the sum into a call, with
mistakes, or read the answer off what the tool said; then a few steps in which three of four answer at once with a
number of the right length. What is measured is what reinforcement learning adds: `before` and `after` are the mean
reward of one completion, drawn at temperature 1, of each of `--problems` problems that are not learned from, `calls_`
the share of these completions that call the tool. `gain_min` is the least of all seeds. `call_cpu_ms`,
`budget_cpu_ms` and `doubt_cpu_ms`: what one reply takes of a processor, for a short call, one that uses up its
instructions, and one that is ended in doubt. Needs bubblewrap.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.report import make_parser, report, say
from benchmarks.warm_start import add_warm_start, shortened
from coordinator.training.groups import Group, Sample
from coordinator.training.grpo import train_step
from coordinator.training.optimizers import make_optimizer
from coordinator.training.warm_start import WarmStartStage, learn
from node.engines.base import SampleRequest
from node.engines.torch import TorchEngine
from node.environments import Problem, load_environments
from node.environments.base import INDEX_LIMIT
from node.episodes.conversation import asking, graded
from node.policy.file import render_prompt, save_policy
from node.policy.models.tiny_llama import make_model, make_tokenizer
from node.protocol.environment_spec import END_OF_THOUGHT, ToolSpec
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec, TrainingSpec
from node.protocol.turns import replay
from node.sandbox import SandboxFailed
from node.sandbox.cells import run_cells
from node.sandbox.root import PYTHON_VERSION

DIGITS, GROUPS, GROUP_SIZE, STEPS = 2, 16, 8, 12
NOISE = 0.03
STAGES = (
    WarmStartStage(400, NOISE, NOISE, guesses=0.0, learning_rate=3e-3, warmup_steps=20),
    WarmStartStage(40, NOISE, NOISE, guesses=0.75, learning_rate=5e-4, warmup_steps=1),
)
END_OF_TURN = "<eos>"
LEARNED, HELD_OUT = "training", "held out"


def spec_of(steps: int) -> RunSpec:
    """Return a run on one environment with the tool."""
    tool = ToolSpec(python=PYTHON_VERSION, steps=10_000, characters=64)
    return RunSpec(
        name="tool",
        environments=(EnvironmentSpec(name="arithmetic", arguments={"digits": DIGITS}, tool=tool),),
        sampling=SamplingSpec(
            group_size=GROUP_SIZE, max_prompt_tokens=24, max_new_tokens=24, max_turns=3, max_reply_tokens=96
        ),
        proofs=ProofSpec(scheme="sketch/1"),
        training=TrainingSpec(steps=steps, learning_rate=2e-4),
    )


class ToolTrial:
    """One seed."""

    def __init__(self, seed: int, *, steps: int, threads: int, folder: Path) -> None:
        self.seed, self.folder, self.version = seed, folder, -1
        self.spec = spec_of(steps)
        (self.environment,) = load_environments(self.spec)
        self.model, self.tokenizer = make_model(seed), make_tokenizer()
        self.engine = TorchEngine(self.spec, threads=threads, max_rows=GROUPS * GROUP_SIZE)

    def problems(self, purpose: str, count: int) -> list[Problem]:
        """Draw problems; those of another purpose or seed are others."""
        rng = Random(f"{purpose} {self.seed}")
        return [self.environment.problem(rng.randrange(INDEX_LIMIT)) for _ in range(count)]

    def warm_up(self, stages: Sequence[WarmStartStage]) -> None:
        """Teach the policy what a turn looks like."""
        rng = Random(self.seed)

        def demonstrate(stage: WarmStartStage) -> tuple[str, str]:
            problem = self.environment.problem(rng.randrange(INDEX_LIMIT))
            left, right = problem.data["terms"]
            call = _spoilt(f"{left}+{right}", rng)
            if rng.random() < stage.guesses:
                return problem.prompt, f"{END_OF_THOUGHT}{rng.randrange(2 * 10 ** (DIGITS - 1), 2 * 10**DIGITS)}"
            if rng.random() < 0.5:
                return problem.prompt, call
            said = str(left + right)
            return f"{problem.prompt}{call}{END_OF_TURN}{said}\n", f"{END_OF_THOUGHT}{_spoilt(said, rng)}"

        learn(self.model, self.tokenizer, stages, demonstrate)

    async def publish(self) -> None:
        """Load the policy as it is now into the engine."""
        self.version += 1
        path = self.folder / "policy.safetensors"
        save_policy(self.model, self.tokenizer, path)
        await self.engine.load(path, version=self.version)

    async def draw(self, problems: Sequence[Problem], *, size: int, name: str) -> list[Group]:
        """Draw and grade `size` completions of each of `problems`; `name` chooses the seeds."""
        rng, policy, sampling = Random(f"{self.seed} {name}"), self.engine.policy, self.spec.sampling
        asks = [asking(policy, self.environment, problem, sampling=sampling) for problem in problems]
        requests = [
            SampleRequest(tuple(render_prompt(policy, problem.prompt)), rng.randbytes(16), ask=ask)
            for problem, ask in zip(problems, asks, strict=True)
            for _ in range(size)
        ]
        rollouts = await self.engine.generate(requests)
        groups = []
        for at, (problem, ask) in enumerate(zip(problems, asks, strict=True)):
            own = rollouts[at * size : (at + 1) * size]
            samples = tuple(
                Sample(
                    tuple(one.prompt_ids),
                    tuple(one.completion_ids),
                    tuple(one.logprobs),
                    replies=replay(one.completion_ids, eos_ids=policy.eos_ids, sampling=sampling, ask=ask).replies,
                )
                for one in own
            )
            rewards = tuple(graded(policy, self.environment, problem, one.completion_ids) for one in own)
            groups.append(Group(self.version, rewards, samples))
        return groups

    async def measure(self, count: int) -> tuple[float, float]:
        """Return the mean reward and the share with a call of one completion of each held-out problem."""
        groups = await self.draw(self.problems(HELD_OUT, count), size=1, name=HELD_OUT)
        return (
            statistics.fmean(group.rewards[0] for group in groups),
            statistics.fmean(bool(group.rollouts[0].replies) for group in groups),
        )

    async def train(self) -> list[float]:
        """Train all steps; return the mean reward of each."""
        optimizer, rewards = make_optimizer(self.model, self.spec.training), []
        problems = self.problems(LEARNED, self.spec.training.steps * GROUPS)
        for step in range(self.spec.training.steps):
            own = problems[step * GROUPS : (step + 1) * GROUPS]
            groups = await self.draw(own, size=GROUP_SIZE, name=f"{LEARNED} {step}")
            rewards.append(train_step(self.model, optimizer, groups, spec=self.spec, step=step)["reward"])
            self.model.train(mode=False)
            await self.publish()
        return rewards


def _spoilt(text: str, rng: Random) -> str:
    """Return `text`, of which each digit is another one with the probability NOISE."""
    return "".join(rng.choice("0123456789") if each.isdigit() and rng.random() < NOISE else each for each in text)


def call_costs() -> dict[str, float]:
    """Return the processor time of a reply, in milliseconds: of a short call, of one that uses up its instructions, and
    of one that is ended in doubt.
    """
    costs = {}
    for name, code in (
        ("call", "1 + 1"),
        ("budget", "i = 0\nwhile True: i = i * 3 % 1000003"),
        ("doubt", "10**10**10"),
    ):
        before = sum(os.times()[:4])
        with contextlib.suppress(SandboxFailed):
            run_cells((code,), wanted=1, steps=500_000, characters=64)
        costs[f"{name}_cpu_ms"] = round(1000 * (sum(os.times()[:4]) - before), 1)
    return costs


async def run_trial(trial: ToolTrial, stages: Sequence[WarmStartStage], *, problems: int) -> dict[str, Any]:
    """Warm up, train, and return the row of what was gained."""
    started = time.monotonic()
    await asyncio.to_thread(trial.warm_up, stages)
    await trial.publish()
    before, calls_before = await trial.measure(problems)
    rewards = await trial.train()
    after, calls_after = await trial.measure(problems)
    await trial.engine.close()
    return {
        "seed": trial.seed,
        "before": round(before, 4),
        "after": round(after, 4),
        "gain": round(after - before, 4),
        "calls_before": round(calls_before, 4),
        "calls_after": round(calls_after, 4),
        "rewards": [round(reward, 4) for reward in rewards],
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="how many times it is learned (3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"training steps ({STEPS})")
    parser.add_argument("--problems", type=int, default=200, help="held-out problems (200)")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads (1)")
    add_warm_start(parser)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    stages, rows = shortened(STAGES, chosen.warm_start), []
    for seed in range(chosen.seeds):
        with tempfile.TemporaryDirectory() as folder:
            trial = ToolTrial(seed, steps=chosen.steps, threads=chosen.threads, folder=Path(folder))
            row = asyncio.run(run_trial(trial, stages, problems=chosen.problems))
        rows.append(row)
        change = f"{row['before']:.3f} -> {row['after']:.3f}"
        say(f"seed {seed}  {change}  calls {row['calls_before']:.2f} -> {row['calls_after']:.2f}")
    figures = {name: round(statistics.fmean(row[name] for row in rows), 4) for name in
               ("before", "after", "gain", "calls_before", "calls_after")}  # fmt: skip
    figures["gain_min"] = min(row["gain"] for row in rows)
    figures["seconds"] = round(sum(row["seconds"] for row in rows), 1)
    report("tool", chosen, figures | call_costs(), rows=rows)


if __name__ == "__main__":
    main()
