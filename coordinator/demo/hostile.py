"""Two dishonest workers: `python -m coordinator.demo.hostile --kind KIND`, otherwise with a worker's options.

Each is the released daemon with another producer in it, so everything about it is honest but the rollouts:

    other-model  tokens, log-probabilities and proofs of another model than the run's policy, all consistent
    colluder     one constant answer to every problem, with the policy's true log-probabilities and proofs

The first is somebody who saves the cost of the real weights. The second needs the real weights, and passes
every check but the one that a node has no choice of tokens: with a reward that it could claim itself, it
would teach the policy its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from coordinator.demo.layout import STRATEGIES, WORKER_KEY
from node.engines.base import Engine, SampleRequest
from node.engines.torch import TorchEngine
from node.identity import load_or_create_key
from node.policy import Policy, save_policy
from node.protocol.run import RunSpec
from node.protocol.submission import Rollout
from node.signals import stop_on_signals
from node.tiny import make_model, make_tokenizer
from node.worker import WorkerSettings, run_worker
from node.worker_engine import Producer
from toploc import build_chunk_proofs

CONSTANT_ANSWER = "<think></think>0"
OTHER_SEED = 0x0DD


class OtherModel:
    """Answers with a model of the policy's shape and other weights."""

    def __init__(self, spec: RunSpec, folder: Path) -> None:
        self._engine = TorchEngine(spec)
        self._file = folder / "other.safetensors"

    async def __call__(self, _engine: Engine, requests: Sequence[SampleRequest]) -> list[Rollout]:
        if self._engine.version is None:
            await asyncio.to_thread(save_policy, make_model(OTHER_SEED), make_tokenizer(), self._file)
            await self._engine.load(self._file, version=0)
        return await self._engine.generate(requests)


class Colluder:
    """Answers CONSTANT_ANSWER, truthfully saying how likely the policy found it."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec

    async def __call__(self, engine: Engine, requests: Sequence[SampleRequest]) -> list[Rollout]:
        return await asyncio.to_thread(self._answer, engine.policy, requests)

    def _answer(self, policy: Policy, requests: Sequence[SampleRequest]) -> list[Rollout]:
        answers = {request.prompt_ids: constant_answer(policy, request.prompt_ids, self._spec) for request in requests}
        return [
            Rollout(
                seed=request.seed,
                prompt_ids=list(request.prompt_ids),
                completion_ids=completion_ids,
                logprobs=logprobs,
                proofs=proofs,
            )
            for request in requests
            for completion_ids, logprobs, proofs in [answers[request.prompt_ids]]
        ]


@torch.inference_mode()
def constant_answer(
    policy: Policy, prompt_ids: Sequence[int], spec: RunSpec
) -> tuple[list[int], list[float], list[bytes]]:
    """The constant completion of a prompt, its true log-probabilities, and its true proofs."""
    answer: list[int] = policy.tokenizer.backend_tokenizer.encode(CONSTANT_ANSWER).ids
    completion = [*answer, min(policy.eos_ids)]
    ids = torch.tensor([[*prompt_ids, *completion[:-1]]])
    model: Any = policy.model
    hidden_TH = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt_ids) - 1 :]
    logits_TV = model.get_output_embeddings()(hidden_TH).float() / spec.sampling.temperature
    logprobs_T = logits_TV.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    chunks = list(torch.split(hidden_TH.bfloat16(), spec.proofs.chunk_tokens))
    return completion, logprobs_T.tolist(), build_chunk_proofs(chunks, spec.proofs.top_k)


def make_producer(kind: str, spec: RunSpec, folder: Path) -> Producer:
    """The producer of a strategy."""
    return OtherModel(spec, folder) if kind == "other-model" else Colluder(spec)


class Deferred:
    """A producer that is made when the daemon has learnt the run's rules and asks for an engine."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind = kind
        self._folder = folder
        self._producer: Producer | None = None

    def make_engine(self, spec: RunSpec) -> Engine:
        """What the daemon calls once; the engine is the honest one."""
        self._producer = make_producer(self._kind, spec, self._folder)
        return TorchEngine(spec)

    async def __call__(self, engine: Engine, requests: Sequence[SampleRequest]) -> list[Rollout]:
        assert self._producer is not None, "the daemon makes its engine before it generates"
        return await self._producer(engine, requests)


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
    strategy = Deferred(kind, state)

    async def work() -> None:
        await run_worker(
            settings,
            key=load_or_create_key(state / WORKER_KEY),
            make_engine=strategy.make_engine,
            stop=stop_on_signals(),
            produce=strategy,
        )

    asyncio.run(work())


if __name__ == "__main__":
    main()
