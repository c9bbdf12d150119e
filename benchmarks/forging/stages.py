"""The steps of the benchmark, each for one architecture and in its own process; states pass through files."""

from __future__ import annotations

import contextlib
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
from benchmarks.toploc import beyond_published_limits
from benchmarks.toploc_peer import ToplocPeer
from node.protocol.admission import Figures
from node.protocol.run import ProofSpec

LENGTHS = (1, 4, 32, 64)
"""Tokens of a rollout; 32 are a full chunk."""
FULL = 32
POSITIONS = 132
"""States of each row: 100 windows of 32 tokens in each."""
TOGETHER = 64
HONEST_PROMPTS = 64
"""Prompts whose rollouts limits are fitted to, and tried on."""
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


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the command line.

    Of each rung and architecture, `forgeries` are of full chunks and `short` of each other length; `default` of each
    are judged by the default limits too. `prompts` is at least 4.
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
    """Return how far the proved states are from those of the rollout."""
    return relative(source.of(states), window.of(verifier))


def make_surrogates(model: Any, drawn: policies.Drawn, folder: Path, settings: Settings) -> dict[str, float]:
    """Write the states that forgers prove into files; return how far each is from the verifier's."""
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
    """Return the root mean square, over tokens, of the difference's length over that of the right state."""
    off = (states.float() - right.float()).square().sum(-1)
    return float((off / right.float().square().sum(-1)).mean().sqrt())


def honest_windows(prompts: int) -> list[list[Window]]:
    """Return rollouts of every length from every row, in groups by prompt."""
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
    """Return every rung's forger."""
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
    """Forge and judge numbers `part` of `tokens` tokens by every rung; return the counts, and the seconds."""
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
    """Whether the proved states are as near as honest work: at most twice as far as its worst rollout.

    Two samples of a prompt that both go on repeating one character end in the same state.
    """
    if isinstance(forger, forgers.ByteForger):
        return False
    own = batch[index]
    return error(forger.source(batch, index), forger.states, own, verifier) <= 2 * prepared.farthest[own.tokens]


def targets_of(prepared: Prepared, settings: Settings, tokens: int) -> list[Window]:
    """Return the rollouts of `tokens` tokens that are forged, the same for each rung."""
    count = settings.count(tokens)
    return forgers.windows(settings.rows, POSITIONS, tokens=tokens, count=count, label=prepared.family)


def compare(prepared: Prepared, settings: Settings, python: Path, count: int) -> dict[str, int]:
    """Count by rung the forgeries, of the first `count` full chunks, that toploc 0.1.6 takes at its published limits.

    Raise PeerUnavailable.
    """
    torch.set_num_threads(1)
    spec = judging.DEFAULT.proofs
    verifier = forgers.load(prepared.folder / "verifier.npy")
    targets, size = targets_of(prepared, settings, FULL)[:count], 2 + 2 * spec.top_k
    rungs, taken = ladder(prepared.folder, spec), dict.fromkeys(RUNGS, 0)
    with contextlib.closing(ToplocPeer(python, threads=1)) as peer:
        for begin in range(0, len(targets), TOGETHER):
            batch = targets[begin : begin + TOGETHER]
            peer.load(torch.cat([window.of(verifier) for window in batch]), FULL, spec.top_k)
            for rung, proofs in forgers.prove_all(rungs, batch, spec).items():
                results = peer.verify([proof[:size] for (proof,) in proofs])
                taken[rung] += sum(not beyond_published_limits(result) for result in results)
    return taken
