"""The steps of the benchmark, each for one architecture and in a process of its own; states pass through files."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.forging import forgers, judging, policies
from benchmarks.forging.architectures import LAYERS, embedding
from benchmarks.forging.forgers import Forger, Window
from benchmarks.forging.judging import Terms
from node.protocol.admission import Figures
from node.protocol.run import ProofSpec

LENGTHS = (1, 4, 32, 64)
"""Tokens of a rollout; 32 are a full chunk."""
FULL = 32
POSITIONS = 132
"""States of each row: 100 windows of 32 tokens in each."""
TOGETHER = 64
HONEST_PROMPTS = 64
"""Whose rollouts limits are fitted to, and tried on."""
SURROGATES = ("linear", "half_depth", "all_but_last_layer", "distilled")
RUNGS = (
    "random_bytes",
    "constant",
    "searched_constant",
    "dimension_mean",
    *SURROGATES,
    "other_prompt",
    "other_sample",
    "half_the_tokens",
)
PEER_WORKER = Path(__file__).with_name("peer_worker.py")
_PEER_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says. `prompts`: at least 4; of each rung and architecture, `forgeries` are of
    full chunks and `short` of each of the other lengths, and `default` of each are judged by the default limits too.
    """

    dtype: str
    hidden: int
    training_steps: int
    prompts: int
    forgeries: int
    short: int
    default: int

    def count(self, tokens: int) -> int:
        return self.forgeries if tokens == FULL else self.short

    @property
    def rows(self) -> int:
        return self.prompts * policies.SAMPLES


@dataclass(frozen=True, slots=True)
class Prepared:
    """An architecture, ready to be attacked: files in `folder`, and what honest work is like.

    `terms` are the default and the calibrated ones, by name, `most` the largest figures of honest rollouts under the
    latter's proofs. `judged` honest rollouts are of the half that the limits were not fitted on, and so many of them
    were `rejected`, by limits and scheme. `errors`: how far each surrogate's states, and honest ones under the worker's
    kernel, are from the verifier's, relative to their length; `farthest`: that of the worst honest rollout, by tokens.
    """

    family: str
    folder: Path
    loss: float
    terms: dict[str, Terms]
    most: Figures
    judged: int
    rejected: dict[tuple[str, str], int]
    errors: dict[str, float]
    farthest: dict[int, float]


@dataclass(frozen=True, slots=True)
class Counted:
    """Forgeries of one rung, length and architecture: how many were judged by each limits, and how many taken by
    (limits, scheme). `same`: those taken of states that are the right ones, which count as no forgery.
    """

    family: str
    rung: str
    tokens: int
    forgeries: Counter[str] = field(default_factory=Counter)
    taken: Counter[tuple[str, str]] = field(default_factory=Counter)
    same: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __add__(self, other: Counted) -> Counted:
        return replace(
            self,
            forgeries=self.forgeries + other.forgeries,
            taken=self.taken + other.taken,
            same=self.same + other.same,
        )


def prepare(family: str, folder: Path, settings: Settings) -> Prepared:
    """Train a policy, let it work honestly, fit limits to half of that, and make what the forgers prove."""
    torch.set_num_threads(1)
    folder.mkdir()
    dtype = getattr(torch, settings.dtype)
    model, loss = policies.train(family, hidden=settings.hidden, steps=settings.training_steps, dtype=dtype)
    drawn = policies.draw(model, prompts=settings.prompts, tokens=POSITIONS, seed=2)
    errors = make_surrogates(model, drawn, folder, settings)
    groups = honest_windows(min(settings.prompts, HONEST_PROMPTS))
    at_default = judging.prove_and_measure(groups, drawn.worker, drawn.verifier, spec=judging.DEFAULT.proofs)
    proofs = msgspec.structs.replace(judging.DEFAULT.proofs, sketch_step=judging.fitting_step(at_default[::2]))
    measured = judging.prove_and_measure(groups, drawn.worker, drawn.verifier, spec=proofs)
    terms = {"default": judging.DEFAULT, "calibrated": Terms(proofs, judging.fitted(measured[::2]))}
    rejected = {
        (name, scheme): count
        for name, own in (("default", at_default), ("calibrated", measured))
        for scheme, count in judging.refused(own[1::2], terms[name].limits).items()
    }
    judged = sum(len(group) for group in groups[1::2])
    farthest = {
        tokens: max(
            error(one, drawn.worker, one, drawn.verifier) for group in groups for one in group if one.tokens == tokens
        )
        for tokens in LENGTHS
    }
    return Prepared(family, folder, loss, terms, judging.honest_most(measured), judged, rejected, errors, farthest)


def error(source: Window, states: Tensor, window: Window, verifier: Tensor) -> float:
    """How far the states that are proved are from those of the rollout."""
    return relative(source.of(states), window.of(verifier))


def make_surrogates(model: Any, drawn: policies.Drawn, folder: Path, settings: Settings) -> dict[str, float]:
    """The states that forgers prove, into files, and how far they are from the verifier's."""
    known = policies.draw(model, prompts=max(2, settings.prompts // 4), tokens=POSITIONS, seed=1)
    half, all_but_last = policies.depths(model, drawn.ids, (LAYERS // 2, LAYERS - 1))
    student = policies.distil(model, known, steps=settings.training_steps)
    states = {
        "linear": forgers.linear(embedding(model), known.ids, known.verifier, drawn.ids),
        "half_depth": half,
        "all_but_last_layer": all_but_last,
        "distilled": policies.prefill(student, drawn.ids),
        "worker": drawn.worker,
    }
    states["half_the_tokens"] = forgers.every_other(drawn.worker, states["linear"])
    for name, each in (states | {"known": known.verifier, "verifier": drawn.verifier}).items():
        forgers.save(folder / f"{name}.npy", each)
    np.save(folder / "ids.npy", drawn.ids.numpy())
    mean = forgers.mean_state(known.verifier).expand_as(drawn.verifier)
    return {name: relative(each, drawn.verifier) for name, each in (states | {"dimension_mean": mean}).items()}


def relative(states: Tensor, right: Tensor) -> float:
    """The root mean square, over tokens, of the difference's length over that of the right state."""
    off = (states.float() - right.float()).square().sum(-1)
    return float((off / right.float().square().sum(-1)).mean().sqrt())


def honest_windows(prompts: int) -> list[list[Window]]:
    """Rollouts of every length from every row, in groups by prompt."""
    return [
        [
            Window(row, start, tokens, f"{tokens:3}{row:6}{start:7}".encode())
            for row in range(prompt * policies.SAMPLES, (prompt + 1) * policies.SAMPLES)
            for tokens in LENGTHS
            for start in range(0, POSITIONS - tokens + 1, max(tokens, FULL))
        ]
        for prompt in range(prompts)
    ]


def ladder(folder: Path, spec: ProofSpec) -> dict[str, Forger]:
    """Every rung."""
    known, worker = forgers.load(folder / "known.npy"), forgers.load(folder / "worker.npy")
    ids = torch.from_numpy(np.load(folder / "ids.npy"))
    rungs: dict[str, Forger] = {
        "random_bytes": forgers.RandomBytes(spec),
        "constant": forgers.Zero(spec),
        "searched_constant": forgers.Searched(spec, known),
        "dimension_mean": forgers.Everywhere(forgers.mean_state(known), tokens=POSITIONS),
        "other_prompt": forgers.OtherPrompt(worker),
        "other_sample": forgers.OtherSample(worker, ids),
    }
    alone = (*SURROGATES, "half_the_tokens")
    rungs |= {name: forgers.StateForger(forgers.load(folder / f"{name}.npy")) for name in alone}
    return {name: rungs[name] for name in RUNGS}


def attack(prepared: Prepared, settings: Settings, tokens: int, part: range) -> tuple[list[Counted], float]:
    """Forgeries number `part` of so many tokens, by every rung: what was taken, and the seconds that it took."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    targets = targets_of(prepared, settings, tokens)
    verifier = forgers.load(prepared.folder / "verifier.npy")
    counted = {rung: Counted(prepared.family, rung, tokens) for rung in RUNGS}
    for name, terms in prepared.terms.items():
        own = targets[part.start : min(part.stop, settings.default if name == "default" else part.stop)]
        rungs = ladder(prepared.folder, terms.proofs)
        for begin in range(0, len(own), TOGETHER):
            batch = own[begin : begin + TOGETHER]
            proofs = forgers.prove_all(rungs, batch, terms.proofs)
            every = [proof for each in proofs.values() for proof in each]
            # All rungs in one call, which then needs each seed's projections once.
            measured = iter(judging.measure(batch * len(rungs), verifier, every, spec=terms.proofs))
            for rung, forger in rungs.items():
                taken = judging.accepted([next(measured) for _ in batch], terms.limits)
                counted[rung].forgeries[name] += len(batch)
                for scheme, each in taken.items():
                    passed = [index for index, one in enumerate(each) if one]
                    same = sum(proves_the_right(forger, batch, index, verifier, prepared) for index in passed)
                    counted[rung].taken[name, scheme] += len(passed) - same
                    counted[rung].same[name, scheme] += same
    return list(counted.values()), time.perf_counter() - start


def proves_the_right(forger: Forger, batch: Sequence[Window], index: int, verifier: Tensor, prepared: Prepared) -> bool:
    """Whether the states that are proved are as near as honest work is: at most twice as far as its worst rollout.

    Two samples of a prompt that both go on repeating one character end in the same state.
    """
    if isinstance(forger, forgers.ByteForger):
        return False
    own = batch[index]
    return error(forger.source(batch, index), forger.states, own, verifier) <= 2 * prepared.farthest[own.tokens]


def targets_of(prepared: Prepared, settings: Settings, tokens: int) -> list[Window]:
    """The rollouts of so many tokens that are forged, the same for each rung."""
    count = settings.count(tokens)
    return forgers.windows(settings.rows, POSITIONS, tokens=tokens, count=count, label=prepared.family)


def compare(prepared: Prepared, settings: Settings, python: Path, count: int) -> dict[str, int]:
    """Of the first `count` forgeries of full chunks, how many toploc 0.1.6 takes at its published limits, by rung."""
    torch.set_num_threads(1)
    spec = judging.DEFAULT.proofs
    verifier = forgers.load(prepared.folder / "verifier.npy")
    targets = forgers.windows(settings.rows, POSITIONS, tokens=FULL, count=settings.count(FULL), label=prepared.family)[
        :count
    ]
    size = 2 + 2 * spec.top_k
    with tempfile.TemporaryDirectory(dir=prepared.folder) as folder:
        rows = torch.cat([window.of(verifier) for window in targets])
        Path(folder, "states.bf16").write_bytes(rows.contiguous().view(torch.int16).numpy().tobytes())
        rungs = ladder(prepared.folder, spec)
        for begin in range(0, len(targets), TOGETHER):
            for rung, proofs in forgers.prove_all(rungs, targets[begin : begin + TOGETHER], spec).items():
                with Path(folder, f"{rung}.proofs").open("ab") as file:
                    file.writelines(proof[:size] for (proof,) in proofs)
        numbers = [str(number) for number in (rows.shape[1], FULL, spec.top_k)]
        ended = subprocess.run(
            [str(python), "-I", str(PEER_WORKER), folder, *numbers],
            capture_output=True,
            text=True,
            timeout=_PEER_SECONDS,
            check=True,
        )
    found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    return found
