"""Honest machines that differ, and limits fitted to their recordings: `python -m benchmarks.machines [--json]`.

Five machines are simulated on this one: torch with oneDNN and without (then MKL and torch's own kernels compute), each
with one and with two threads, and, with `--vllm`, vLLM, whose work torch with oneDNN measures. The first is the
operator's. All draw honest groups of the warm-started policy of the demonstration, a torch machine with fused attention
and with plain matrix products, as `swarmproof calibrate` has it.

`pairs`: how far the work of each machine is from the prefill of each torch machine: means of chunks and tokens.
Then limits are fitted in three ways, each to every other group, and judge the other ones as the operator's verifier
measures them:

- `own`: to the operator's machine alone;
- `recorded`: to that and to the recordings (`calibrate --record`) that these limits admit (`--from`);
- `accepted`: to that and to all recordings (`--accept`).

Of each: `rejected_HOW`, the share of honest groups of the other machines that are rejected, and `stopped_HOW`, how many
of the other workers (a machine with a kernel) a drift stops; `int8_HOW` and `noise_HOW`, the share of groups with 8-bit
weights and with 1 % of noise that are. A recording is made where its work was drawn: it says how far a machine is from
itself, and `rejected_accepted` whether that is enough for it to be verified elsewhere.

- `left_out`: recordings, of those of the other machines, that `--from` does not fit to.
- `liar_left_out`: 1 if that is so for a recording of three times the operator's deviations; `liar_int8` and
  `liar_noise`: what would still be rejected of these cheats if it were accepted.
- `recording_bytes_per_token`: of the recordings' files.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.report import make_parser, report, say
from benchmarks.warm_start import add_warm_start, warmed_up
from coordinator.calibration.attempts import Attempts
from coordinator.calibration.fit import Group, fit_limits, rounded
from coordinator.calibration.measure import measure
from coordinator.calibration.recorded import choose
from coordinator.calibration.recording import (
    ReadRecording,
    describe_machine,
    make_recording,
    open_recording,
    seal_recording,
)
from coordinator.calibration.sketch_step import find_step
from coordinator.calibration.slots import SyntheticSlots
from coordinator.calibration.trial import try_groups
from coordinator.calibration.workers import IN_FLIGHT, EagerEngine, HonestWorker, make_workers, without_onednn
from coordinator.lab.processes.layout import family_run_toml
from node.engines.torch import TorchEngine
from node.policy.file import load_policy, save_policy
from node.protocol.run import LimitsSpec, RunSpec, parse_run_toml
from node.protocol.submission import Rollout
from node.verification.deviations import Deviations
from node.verification.readings import read_by_transformers

GROUPS, CHEAT_GROUPS, STEP_GROUPS = 48, 32, 12
CHEATS = {"int8": "int8 weights", "noise": "1 % noise on weights"}
LIE = 3.0
KERNELS = {"torch sdpa": TorchEngine, "torch eager": EagerEngine}


@dataclass(frozen=True)
class Machine:
    """What this machine does like another one. One with vLLM is measured by torch with oneDNN and a thread."""

    name: str
    onednn: bool = True
    threads: int = 1
    vllm: bool = False

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        """Compute within the context as this machine does."""
        torch.set_num_threads(self.threads)
        with contextlib.nullcontext() if self.onednn else without_onednn():
            yield

    @property
    def workers(self) -> list[HonestWorker]:
        if self.vllm:
            return make_workers(["vllm"], device="cpu", threads=1, kv_cache_gib=0.5, max_num_seqs=256)
        return [
            HonestWorker(name, lambda spec, _, made=made: made(spec, threads=self.threads))
            for name, made in KERNELS.items()
        ]


OPERATOR = Machine("oneDNN, 1 thread")
TORCH = (
    OPERATOR,
    Machine("oneDNN, 2 threads", threads=2),
    Machine("no oneDNN, 1 thread", onednn=False),
    Machine("no oneDNN, 2 threads", onednn=False, threads=2),
)
VLLM = Machine("vLLM, 1 thread", vllm=True)

Drawn = Mapping[tuple[str, str], Sequence[Sequence[Rollout]]]
"""Groups by machine and worker."""


class Simulation:
    """One policy in one dtype, drawn and measured by each machine."""

    def __init__(self, spec: RunSpec, path: Path, options: argparse.Namespace) -> None:
        self.spec, self.path, self.options = spec, path, options
        self.policy = load_policy(path, dtype=getattr(torch, spec.model.dtype))
        self.slots = SyntheticSlots(spec, self.policy)
        self.machines = [*TORCH, *([VLLM] if options.vllm else [])]

    async def run(self) -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Return figures and rows."""
        self.spec = await find_step(self.spec, self._distances, hidden=self.policy.hidden)
        drawn = {}
        for machine in self.machines:
            for worker in machine.workers:
                with machine.simulated():
                    groups = self.options.groups
                    drawn[machine.name, worker.name] = await worker.draw(
                        self.spec, self.path, self.slots, groups=groups
                    )
                say(f"{groups} groups by {machine.name}, {worker.name}")
        measured = {verifier.name: self._measured(drawn, verifier) for verifier in TORCH}
        cheats = {name: self._measure(groups, OPERATOR) for name, groups in (await self._cheats()).items()}
        say("measured")
        return self._figures(measured, cheats), list(self._rows(measured))

    async def _distances(self, spec: RunSpec) -> list[float]:
        (worker, _) = OPERATOR.workers
        with OPERATOR.simulated():
            drawn = await worker.draw(spec, self.path, self.slots, groups=STEP_GROUPS, in_flight=(8,))
            prefill = read_by_transformers(self.path, spec=spec)
            found = measure(prefill, drawn, spec=spec, at_once=spec.sampling.group_size)
        return [value for group in found for one in group for value in one.sketch_distances]

    async def _cheats(self) -> Drawn | dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder, OPERATOR.simulated():
            attempts = Attempts(
                self.spec,
                policy=self.policy,
                path=self.path,
                folder=Path(folder),
                slots=self.slots,
                groups=self.options.cheat_groups,
                threads=1,
                only=set(CHEATS.values()),
            )
            return {name: groups async for name, groups in attempts.groups()}

    def _measured(self, drawn: Drawn, verifier: Machine) -> dict[tuple[str, str], list[Group]]:
        return {who: self._measure(groups, verifier) for who, groups in drawn.items()}

    def _measure(self, groups: Sequence[Sequence[Rollout]], verifier: Machine) -> list[Group]:
        with verifier.simulated():
            prefill = read_by_transformers(self.path, spec=self.spec)
            return list(measure(prefill, groups, spec=self.spec, at_once=self.spec.sampling.group_size))

    def _recording(self, machine: Machine, measured: Mapping[str, Any]) -> tuple[bytes, ReadRecording]:
        """Make what `calibrate --record` writes on the machine, and read it as the operator does."""
        itself = measured[OPERATOR.name if machine.vllm else machine.name]
        groups = {worker: groups for (where, worker), groups in itself.items() if where == machine.name}
        return self._sealed(groups, machine)

    def _sealed(self, groups: Mapping[str, Sequence[Group]], machine: Machine) -> tuple[bytes, ReadRecording]:
        info = describe_machine(self.spec, torch.device("cpu"), threads=machine.threads, vllm=machine.vllm)
        recording = make_recording(self.spec, groups, policy="0" * 64, verifier="torch", machine=info)
        data = seal_recording(recording, Ed25519PrivateKey.generate())
        return data, open_recording(data, spec=self.spec, verifier="torch")

    def _figures(self, measured: Mapping[str, Any], cheats: Mapping[str, Sequence[Group]]) -> dict[str, float]:
        at_operator = measured[OPERATOR.name]
        own = [groups for (where, _), groups in at_operator.items() if where == OPERATOR.name]
        others = [groups[1::2] for (where, _), groups in at_operator.items() if where != OPERATOR.name]
        files = [self._recording(machine, measured) for machine in self.machines if machine != OPERATOR]
        recordings = [read for _, read in files]
        lie = {"torch sdpa": [[_stretched(one) for one in group] for group in own[0]]}
        _, liar = self._sealed(lie, OPERATOR)

        def fit(workers: Sequence[Sequence[Group]]) -> LimitsSpec:
            chance, parts = self.spec.limits.false_rejections, len(IN_FLIGHT)
            halves = [groups[::2] for groups in workers]
            return rounded(fit_limits(*halves, false_rejections=chance, parts=parts))

        def chosen(recorded: Sequence[ReadRecording], accepted: Sequence[ReadRecording] = ()) -> tuple[Any, Any]:
            return choose(own, recorded, accepted, fit=fit, proofs=self.spec.proofs)

        taken, outcomes = chosen(recordings)
        ways = {"own": own, "recorded": taken, "accepted": chosen([], recordings)[0]}
        figures: dict[str, float] = {"workers": len(others), "groups_of_a_worker": self.options.groups}
        for way, workers in ways.items():
            limits = fit(workers)
            counts = [try_groups(groups, limits) for groups in others]
            figures[f"rejected_{way}"] = sum(one.rejected_groups for one in counts) / sum(one.groups for one in counts)
            figures[f"stopped_{way}"] = sum(one.first_drifted is not None for one in counts)
            figures |= {f"{name}_{way}": _caught(cheats[cheat], limits) for name, cheat in CHEATS.items()}
        figures["left_out"] = len({one.node for one in outcomes if not one.fitted})
        figures["liar_left_out"] = float(not any(one.fitted for one in chosen([liar])[1]))
        lied = fit(chosen([], [liar])[0])
        figures |= {f"liar_{name}": _caught(cheats[cheat], lied) for name, cheat in CHEATS.items()}
        tokens = sum(len(one.margins) for read in recordings for g in read.workers.values() for r in g for one in r)
        figures["recording_bytes_per_token"] = sum(len(data) for data, _ in files) / tokens
        return figures

    def _rows(self, measured: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for verifier, works in measured.items():
            for (machine, worker), groups in works.items():
                every = [one for group in groups for one in group]
                yield {
                    "dtype": self.spec.model.dtype,
                    "verifier": verifier,
                    "machine": machine,
                    "worker": worker,
                    **{field: _mean(getattr(one, field) for one in every) for field in _MEANS},
                    "largest_margin": max(max(one.margins) for one in every),
                }


_MEANS = ("exponent_mismatches", "mantissa_means", "sketch_distances", "errors")


def _mean(columns: Iterator[Sequence[float]]) -> float:
    return statistics.fmean(value for column in columns for value in column)


def _stretched(one: Deviations) -> Deviations:
    """Return LIE times the deviations."""
    return Deviations(**{each.name: [LIE * value for value in getattr(one, each.name)] for each in fields(one)})


def _caught(groups: Sequence[Group], limits: LimitsSpec) -> float:
    return try_groups(groups, limits).group_share


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16", "float32"])
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"honest groups of each worker (default {GROUPS})")
    parser.add_argument(
        "--cheat-groups", type=int, default=CHEAT_GROUPS, help=f"of each cheat (default {CHEAT_GROUPS})"
    )
    parser.add_argument("--vllm", action="store_true", help="with vLLM as one of the machines")
    add_warm_start(parser)
    options = parser.parse_args()
    figures: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    model, tokenizer = warmed_up(options.warm_start)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            spec = parse_run_toml(family_run_toml("tiny", dtype=f'"{dtype}"'))
            path = Path(folder, dtype)
            save_policy(copy.deepcopy(model).to(getattr(torch, dtype)), tokenizer, path)
            found, pairs = asyncio.run(Simulation(spec, path, options).run())
            figures |= {f"{name}_{dtype}": value for name, value in found.items()}
            rows += pairs
    report("machines", options, figures, {"vllm": options.vllm}, pairs=rows)


if __name__ == "__main__":
    main()
