"""Two dishonest workers: `python -m coordinator.demo.hostile --kind KIND`, otherwise with a worker's options.

Each is the released daemon with another engine in it, so everything about it is honest but the rollouts:

    other-model  tokens, log-probabilities and proofs of another model than the run's policy, all consistent
    colluder     one constant answer to every problem, with the policy's true log-probabilities and proofs

The first is somebody who saves the cost of the real weights. The second needs the real weights, and passes
every check but the one that a node has no choice of tokens: with a reward that it could claim itself, it
would teach the policy its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch

from coordinator.demo.layout import STRATEGIES, WORKER_KEY
from node.engines.base import Engine, NoPolicy, SampleRequest
from node.engines.torch import TorchEngine
from node.identity import load_or_create_key
from node.policy import Policy, save_policy
from node.proofs import build_proofs
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.signals import stop_on_signals
from node.tiny import make_model, make_tokenizer
from node.worker import WorkerSettings, run_worker

CONSTANT_ANSWER = "<think></think>0"
OTHER_SEED = 0x0DD


class OtherModelEngine(TorchEngine):
    """Loads a model of the policy's shape and other weights, whatever policy it is given."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        super().__init__(spec)
        self._other = folder / "other-model.safetensors"
        save_policy(make_model(OTHER_SEED), make_tokenizer(), self._other)

    async def load(self, path: Path, *, version: int) -> None:  # noqa: ARG002  (what it was given)
        await super().load(self._other, version=version)


class ColludingEngine(TorchEngine):
    """Answers CONSTANT_ANSWER, truthfully saying how likely the policy finds it."""

    def __init__(self, spec: RunSpec) -> None:
        super().__init__(spec)
        self._rules = spec

    async def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        ended: Callable[[], None] | None = None,  # noqa: ARG002  (all of them end together)
    ) -> list[Rollout]:
        policy, version = self.policy, self.version
        if version is None:
            raise NoPolicy("no policy was loaded yet")
        return await asyncio.to_thread(lambda: [self._answer(policy, version, request) for request in requests])

    def _answer(self, policy: Policy, version: int, request: SampleRequest) -> Rollout:
        completion_ids, logprobs, proofs = constant_answer(policy, request, self._rules)
        return Rollout(
            seed=request.seed,
            prompt_ids=list(request.prompt_ids),
            completion_ids=completion_ids,
            logprobs=logprobs,
            segment_versions=[version],
            segment_tokens=[len(completion_ids)],
            proofs=proofs,
        )


@torch.inference_mode()
def constant_answer(
    policy: Policy, request: SampleRequest, spec: RunSpec
) -> tuple[list[int], list[float], list[bytes]]:
    """The constant completion of a prompt, its true log-probabilities, and its true proofs."""
    answer: list[int] = policy.tokenizer.backend_tokenizer.encode(CONSTANT_ANSWER).ids
    completion = [*answer, min(policy.eos_ids)]
    ids = torch.tensor([[*request.prompt_ids, *completion[:-1]]])
    model: Any = policy.model
    hidden_TH = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(request.prompt_ids) - 1 :]
    logits_TV = policy.logits(hidden_TH) / spec.sampling.temperature
    logprobs_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    chunks = list(torch.split(hidden_TH.bfloat16(), spec.proofs.chunk_tokens))
    return completion, logprobs_T.tolist(), build_proofs(chunks, [request.seed] * len(chunks), spec=spec.proofs)


def make_engine(kind: str, spec: RunSpec, folder: Path) -> Engine:
    """The engine of a strategy."""
    return OtherModelEngine(spec, folder) if kind == "other-model" else ColludingEngine(spec)


@click.command()
@click.option("--kind", type=click.Choice(STRATEGIES), required=True, help="How to cheat.")
@click.option("--coordinator", required=True, help="The coordinator's URL.")
@click.option("--run-id", required=True, help="The run to attack.")
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), required=True, help="This node's folder.")
@click.option("--slots", type=click.IntRange(1, 64), default=2, show_default=True, help="Slots to lease at once.")
def main(*, kind: str, coordinator: str, run_id: str, state: Path, slots: int) -> None:
    """Join a run dishonestly, to see it refuse what this worker sends."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    settings = WorkerSettings(coordinator=coordinator, run_id=run_id, state=state, slots=slots)

    async def work() -> None:
        await run_worker(
            settings,
            key=load_or_create_key(state / WORKER_KEY),
            make_engine=lambda spec: make_engine(kind, spec, state),
            stop=stop_on_signals(),
        )

    asyncio.run(work())


if __name__ == "__main__":
    main()
