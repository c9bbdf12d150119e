"""Recordings of deviations, which volunteers send and an operator fits limits to."""

from __future__ import annotations

from contextlib import ExitStack
from random import Random

from benchmarks.fuzzing.mutation import bytes_mutator, json_mutator, mixed
from benchmarks.fuzzing.target import Harness, Target
from benchmarks.fuzzing.targets.messages import NODE_KEY
from coordinator.calibration.recording import (
    DOMAIN,
    MIN_GROUPS,
    VERSION,
    MachineInfo,
    make_recording,
    open_recording,
)
from node.protocol.run import EnvironmentSpec, ProofSpec, RunSpec, SamplingSpec
from node.verification.deviations import Deviations
from shardcast.envelope import seal
from shardcast.errors import PeerFault
from shardcast.wire import encode

SPEC = RunSpec(
    name="fuzz",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=2, max_new_tokens=4),
    proofs=ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=2),
)
MACHINE = MachineInfo(
    device="Fuzz", instructions="AVX2", threads=1, dtype="float32", torch="2.13.0", vllm="-", swarmproof="0.1.0"
)


def _seed() -> bytes:
    rng = Random(1)

    def rollout(tokens: int) -> Deviations:
        chunks = -(-tokens // 2)
        columns = [[rng.random() for _ in range(count)] for count in (chunks, chunks, chunks, tokens, tokens, tokens)]
        return Deviations(*columns)

    groups = [[rollout(rng.randint(1, 4)) for _ in range(2)] for _ in range(MIN_GROUPS)]
    recording = make_recording(SPEC, {"torch": groups}, policy="0" * 64, verifier="torch", machine=MACHINE)
    return encode(recording)


def _recording(_: ExitStack) -> Harness:
    """Feed recordings that are really signed, by a node that writes what it likes."""

    def run(data: bytes) -> None:
        envelope = seal(data, domain=DOMAIN, version=VERSION, key=NODE_KEY)
        read = open_recording(envelope, spec=SPEC, verifier="torch")
        assert encode(read.recording) == data
        assert all(len(groups) == read.recording.groups for groups in read.workers.values())

    return Harness([_seed()], run, (PeerFault,), mixed((3, json_mutator()), (1, bytes_mutator())))


TARGETS = (Target("recording", "a volunteer", 1, _recording),)
