"""Recordings: a stranger's file breaks no parser, and its wide deviations widen no limit that nobody sees."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from honest_groups import CHUNK, ROLLOUTS, TOKENS, worker_groups
from rich.console import Console

from coordinator.calibration import recording as recordings
from coordinator.calibration.fit import HEADROOM, fit_limits
from coordinator.calibration.recorded import choose
from coordinator.calibration.recording import (
    DOMAIN,
    MachineInfo,
    make_recording,
    open_recording,
    seal_recording,
)
from coordinator.calibration.result import CalibrationResult
from coordinator.calibration.view import render
from coordinator.errors import BadConfiguration
from node.protocol.run import EnvironmentSpec, LimitsSpec, ProofSpec, RunSpec, SamplingSpec
from shardcast.envelope import seal
from shardcast.errors import BadSignature, Malformed
from shardcast.wire import encode

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(1, 5)]
SPEC = RunSpec(
    name="machines",
    environments=(EnvironmentSpec(name="arithmetic"),),
    sampling=SamplingSpec(group_size=ROLLOUTS, max_new_tokens=TOKENS),
    proofs=ProofSpec(scheme="toploc/1+sketch/1", chunk_tokens=CHUNK),
)
MACHINE = MachineInfo(
    device="NVIDIA H100",
    instructions="sm_90",
    threads=1,
    dtype="float32",
    torch="2.13.0",
    vllm="-",
    swarmproof="0.1.0",
)
GROUPS = worker_groups(12, seed=1)


def recorded(*workers, machine=MACHINE, spec=SPEC):
    named = {f"torch {number}": groups for number, groups in enumerate(workers)}
    return make_recording(spec, named, policy="ab" * 32, verifier="torch", machine=machine)


def opened(recording, key=KEYS[0], spec=SPEC):
    return open_recording(seal_recording(recording, key), spec=spec, verifier="torch")


def test_an_operator_fits_to_a_recording_as_the_volunteer_would():
    read = opened(recorded(GROUPS, worker_groups(12, seed=2)))
    assert read.node == KEYS[0].public_key().public_bytes_raw().hex()
    ours, theirs = (fit_limits(each, false_rejections=1e-6) for each in (GROUPS, read.workers["torch 0"]))
    assert theirs.honest.sketch.mean == pytest.approx(ours.honest.sketch.mean)
    assert theirs.token_margin == pytest.approx(ours.token_margin)


def test_only_the_limits_of_a_run_may_have_changed_since():
    limits = LimitsSpec(token_margin=0.01, false_rejections=1e-9)
    opened(recorded(GROUPS), spec=msgspec.structs.replace(SPEC, limits=limits))
    for changed in (
        {"limits": LimitsSpec(readings=2)},
        {"proofs": msgspec.structs.replace(SPEC.proofs, sketch_step=0.03)},
        {"sampling": msgspec.structs.replace(SPEC.sampling, temperature=0.9)},
    ):
        with pytest.raises(Malformed) as refused:
            opened(recorded(GROUPS), spec=msgspec.structs.replace(SPEC, **changed))
        assert refused.value.code == "other_rules"


def test_bytes_that_were_not_signed_as_a_recording_are_refused():
    recording = recorded(GROUPS)
    data, payload = seal_recording(recording, KEYS[0]), encode(recording)
    at = data.index(b"NVIDIA")
    cases = {
        "bad_signature": data[:at] + b"M" + data[at + 1 :],
        "malformed": data[:-1],
        "wrong_domain": seal(payload, domain="swarmproof/receipt", version=1, key=KEYS[0]),
        "not_canonical": seal(payload + b" ", domain=DOMAIN, version=1, key=KEYS[0]),
        "oversized": bytes(recordings.MAX_BYTES + 1000),
    }
    for code, file in cases.items():
        with pytest.raises((Malformed, BadSignature)) as refused:
            open_recording(file, spec=SPEC, verifier="torch")
        assert refused.value.code == code
    with pytest.raises(Malformed) as refused:
        open_recording(data, spec=SPEC, verifier="vllm")
    assert refused.value.code == "other_verifier"


def _with_value(value):
    return lambda worker: {"errors": struct.pack("<f", value) + worker.errors[4:]}


@pytest.mark.parametrize(
    "change",
    [
        _with_value(float("nan")),
        _with_value(float("inf")),
        _with_value(-1.0),
        lambda worker: {"margins": worker.margins[4:]},
        lambda worker: {"margins": worker.margins[1:]},
        lambda worker: {"tokens": worker.tokens[4:]},
        lambda worker: {"tokens": struct.pack("<I", 0) + worker.tokens[4:]},
        lambda worker: {"tokens": struct.pack("<I", 2**32 - 1) + worker.tokens[4:]},
        lambda worker: {"chunks": bytes(len(worker.chunks))},
        # A statistic that one worker lacks would have no level at all.
        lambda _: {"sketch_distances": b""},
        lambda worker: {"sketch_disagreements": worker.margins},
        # It is shown on a terminal.
        lambda _: {"name": "\x1b[2J"},
    ],
)
def test_values_that_no_verifier_measures_are_refused(change):
    recording = recorded(GROUPS)
    worker = msgspec.structs.replace(recording.workers[0], **change(recording.workers[0]))
    with pytest.raises(Malformed):
        opened(msgspec.structs.replace(recording, workers=(worker,)))


def test_a_recording_that_could_not_be_read_is_not_written(monkeypatch):
    monkeypatch.setattr(recordings, "MAX_BYTES", 4000)
    with pytest.raises(BadConfiguration, match=r"take \d groups"):
        seal_recording(recorded(GROUPS), KEYS[0])


# -- which recordings count

OWN = worker_groups(64, seed=3)
LIKE = opened(recorded(worker_groups(24, seed=4)), KEYS[0])
WIDE = [opened(recorded(worker_groups(24, seed=seed, scale=3.0)), KEYS[seed - 10]) for seed in (11, 12, 13)]


def fit(workers):
    return fit_limits(*workers, false_rejections=1e-6)


def chosen(recorded=(), accepted=()):
    return choose([OWN], recorded, accepted, fit=fit, proofs=SPEC.proofs)


def test_a_machine_like_the_operators_is_fitted_and_one_that_deviates_is_not():
    taken, found = chosen([LIKE, WIDE[0]])
    assert taken == [OWN, *LIKE.workers.values()]
    assert [one.fitted for one in found] == [True, False]
    assert found[1].judged.rejected_groups > 12


def test_many_keys_with_the_same_lie_widen_nothing():
    taken, found = chosen(WIDE)
    assert taken == [OWN]
    assert not any(one.fitted for one in found)


def test_what_an_accepted_machine_widens_is_told_and_another_of_its_kind_is_fitted():
    taken, found = chosen(WIDE[1:], accepted=WIDE[:1])
    assert len(taken) == 4
    assert [(one.accepted, one.fitted) for one in found] == [(True, True), (False, True), (False, True)]
    assert found[0].ratio > 1.5 > max(one.ratio for one in found[1:])


@pytest.mark.parametrize(("reached", "fitted"), [(0.99, True), (1.01, False)])
def test_a_single_value_below_its_limit_widens_that_at_most_by_the_headroom(reached, fitted):
    """As a liar would send it who knows the limits."""
    groups = [list(group) for group in worker_groups(24, seed=5)]
    error = reached * fit([OWN]).logprob_error
    groups[0][0] = replace(groups[0][0], errors=[error, *groups[0][0].errors[1:]])
    _, (found,) = chosen([opened(recorded(groups))])
    assert found.fitted == fitted
    assert (found.ratio <= HEADROOM) == fitted


def test_the_operator_sees_who_is_left_out():
    _, found = chosen([LIKE, WIDE[0]])
    limits = fit([OWN])
    result = CalibrationResult(
        spec=msgspec.structs.replace(SPEC, limits=limits),
        swarmproof="0.1.0",
        policy="ab" * 32,
        verifier="torch",
        groups=64,
        least_groups=64,
        largest=dict.fromkeys(msgspec.structs.asdict(limits), 0.0),
        honest=[],
        recorded=found,
        cheats=[],
        measured={},
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(render(result, written=[]))
    shown = console.export_text()
    assert f"The recording of {WIDE[0].node[:16]} (NVIDIA H100) is left out" in shown
    assert LIKE.node[:16] in " ".join(result.remarks)
    assert WIDE[0].node[:16] not in " ".join(result.remarks)
