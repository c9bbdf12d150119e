"""The process of `swarmproof doctor --try`: draw a group, verify it, print a `Trial` as one line of JSON.

Its only argument is a `Wanted` in JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from node.commands.engine_options import engine_maker
from node.doctor.trial import Trial
from node.engines.base import Engine, EngineError, requests_for
from node.engines.device import find_device
from node.environments import load_environments
from node.episodes.expected import expected_of
from node.errors import NodeError
from node.policy.errors import PolicyError
from node.policy.file import Blueprint, PolicySource, write_policy
from node.policy.folder import open_folder
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer
from node.policy.reading import OpenPolicy
from node.protocol.run import EnvironmentSpec, RunSpec, SamplingSpec
from node.protocol.submission import Rollout
from node.submission.writer import write_rollouts
from node.verification.plan import Rules
from node.verification.prefill import Prefill, TransformersPrefills
from node.verification.verify import verify

GROUP: Final = 8
TOKENS: Final = 64
RUN_ID: Final = "0" * 64
MANIFEST: Final = "1" * 64
WARM, TIMED = 0, 1
"""Slots: an engine compiles, or fills its caches, during the first."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to try: an engine with its settings, and the run's rules and a policy file or folder where there are any."""

    engine: str
    device: str
    threads: int | None
    settings: dict[str, Any]
    spec: RunSpec | None = None
    policy: str | None = None


def rules_of(spec: RunSpec | None) -> RunSpec:
    """Return rules for a group of short questions that any policy can be asked, with proofs and limits of `spec`."""
    sampling = SamplingSpec(group_size=GROUP, max_new_tokens=TOKENS)
    rules = RunSpec(name="trial", environments=(EnvironmentSpec(name="arithmetic"),), sampling=sampling)
    if spec is None:
        return rules
    sampling = msgspec.structs.replace(sampling, temperature=spec.sampling.temperature)
    return msgspec.structs.replace(rules, sampling=sampling, model=spec.model, proofs=spec.proofs, limits=spec.limits)


@dataclass(frozen=True, slots=True)
class _OnePolicy:
    """`node.verification.measure.Policies` of the policy that is tried, by the reference on the CPU."""

    path: Path
    held: Prefill

    async def blueprint(self, version: int) -> Blueprint:  # noqa: ARG002  (there is one)
        return self.held.blueprint

    async def prefill(self, version: int) -> Prefill:  # noqa: ARG002
        return self.held

    async def file(self, version: int) -> OpenPolicy:  # noqa: ARG002
        return OpenPolicy(self.path)


async def try_engine(wanted: Wanted, folder: Path) -> Trial:
    """Draw two groups and verify the second; a failure is a value here."""
    spec = rules_of(wanted.spec)
    tried = Trial(engine=wanted.engine, device=wanted.device, limits=spec.limits)
    try:
        if wanted.engine == "torch":
            tried = msgspec.structs.replace(tried, device=str(find_device(wanted.device)))
        path = _policy_file(wanted.policy, spec, folder)
        make = engine_maker(
            wanted.engine, device=wanted.device, threads=wanted.threads, state=folder, **wanted.settings
        )
        engine = make(spec)
        try:
            begun = time.monotonic()
            await engine.load(path, version=0)
            await _draw(engine, spec, WARM)
            warm = time.monotonic()
            rollouts = await _draw(engine, spec, TIMED)
            seconds = time.monotonic() - warm
        finally:
            await engine.close()
        prefills = TransformersPrefills(dtype=spec.model.dtype)
        held = await prefills.prefill(path, version=0, streamed=wanted.policy is not None)
        judged = await verify(
            write_rollouts(rollouts),
            version=0,
            manifest_digest=MANIFEST,
            slot=TIMED,
            policies=_OnePolicy(path, held),
            published=[0],
            rules=Rules(RUN_ID, spec, load_environments(spec)),
        )
    except (EngineError, PolicyError, NodeError, OSError) as error:
        return msgspec.structs.replace(tried, failure=str(error))
    return msgspec.structs.replace(
        tried,
        tokens=sum(len(rollout.completion_ids) for rollout in rollouts),
        seconds=seconds,
        starting_seconds=warm - begun,
        memory_bytes=_most_memory(),
        verdict=judged.verdict,
    )


async def _draw(engine: Engine, spec: RunSpec, slot: int) -> list[Rollout]:
    expected = expected_of(
        spec,
        engine.policy,
        load_environments(spec),
        run_id=RUN_ID,
        version=0,
        manifest_digest=MANIFEST,
        slot=slot,
    )
    return await engine.generate(requests_for(expected))


def _policy_file(policy: str | None, spec: RunSpec, folder: Path) -> Path:
    """Return the file of the policy that was named, or of the tiny one with random weights."""
    if policy is not None and not Path(policy).is_dir():
        return Path(policy)
    if policy is None:
        source = PolicySource.of_model(MAKERS["tiny"](0), make_tokenizer())
    else:
        source = open_folder(Path(policy)).source()
    path = folder / "policy.safetensors"
    write_policy(source, path, dtype=getattr(torch, spec.model.dtype))
    return path


def _most_memory() -> int:
    """Return the most that this process and its largest child had in memory."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return 1024 * sum(resource.getrusage(each).ru_maxrss for each in who)


@contextlib.contextmanager
def _answers_alone() -> Iterator[int]:
    """Have whatever an engine prints go to the errors; yields the descriptor of the answers."""
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        yield answers
    finally:
        os.close(answers)


if __name__ == "__main__":
    with _answers_alone() as answers, tempfile.TemporaryDirectory() as temporary:
        found = asyncio.run(try_engine(msgspec.json.decode(sys.argv[1], type=Wanted), Path(temporary)))
        os.write(answers, msgspec.json.encode(found) + b"\n")
