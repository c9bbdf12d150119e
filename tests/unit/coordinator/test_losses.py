"""A loss of somebody's own package: trained with as it says, or refused in a sentence before anything is trained."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from locations import ROOT
from trainers import groups_of, spec_with

from coordinator.training.distributed_learner import Team
from coordinator.training.grpo import Execution, train_step
from coordinator.training.losses import LossFault, load_loss
from coordinator.training.optimizers import make_optimizer
from node.policy.models.tiny import MAKERS
from node.protocol.algorithms import ALGORITHMS
from node.protocol.run import RunSpec, TrainingSpec

DOCUMENT = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOCUMENT.partition("### Losses of your own")[2], re.DOTALL)
BROKEN = """
import torch

calls = []

def no_tensor(tokens, training): return 1.0
def scalar(tokens, training): return tokens.logprobs.sum()
def constant(tokens, training): return tokens.advantages
def infinite(tokens, training): return tokens.logprobs / 0
def steep(tokens, training): return (tokens.logprobs - tokens.logprobs.detach()).sqrt()
def mixing(tokens, training): return tokens.logprobs * tokens.lengths.sum()
def remembering(tokens, training):
    calls.append(1)
    return tokens.logprobs * len(calls)
def raising(tokens, training): raise ValueError("no")
class Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, slope): raise ValueError("no slope")
def cut(tokens, training): return Cut.apply(tokens.logprobs)
def rising(tokens, training): return torch.where(tokens.logprobs < -4, torch.inf, tokens.logprobs)
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a package with one module and one loss, as pip would leave it."""

    def installed(package: str, target: str, *, name: str = "my-loss", module: str = BROKEN) -> None:
        metadata = tmp_path / package / f"{package}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[swarmproof.losses]\n{name} = {package}:{target}\n")
        (tmp_path / package / f"{package}.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path / package)
        load_loss.cache_clear()

    yield installed
    load_loss.cache_clear()
    for package in [name for name in sys.modules if name.startswith("loss_of_")]:
        del sys.modules[package]


def trained(spec: RunSpec, *, steps: int = 2, row_tokens: int = 512) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The weights of a tiny policy after some steps towards rewards, and the statistics of the last one."""
    model = MAKERS["tiny"](1)
    reference = copy.deepcopy(model) if spec.training.kl_coefficient else None
    optimizer, stats = make_optimizer(model, spec.training), dict[str, float]()
    for step in range(steps):
        stats = train_step(
            model,
            optimizer,
            groups_of(step),
            spec=spec,
            step=step,
            reference=reference,
            execution=Execution(row_tokens=row_tokens),
        )
    return [each.detach() for each in model.parameters()], stats


def test_the_documented_example_trains_as_grpo_does(install: Callable[..., None]) -> None:
    """Whoever begins with it changes one thing at a time, and knows what he has before."""
    install("loss_of_docs", "grpo", module=EXAMPLE)
    switches = {**ALGORITHMS["grpo"], "learning_rate": 1e-2, "warmup_steps": 0, "minibatches": 3}
    wanted, stats = trained(spec_with(**switches))
    found, own_stats = trained(spec_with(**switches, loss="my-loss==1.0"))
    assert stats["kl"] > 0
    assert stats["clip_fraction"] > 0
    assert own_stats == pytest.approx(stats, rel=1e-5, abs=1e-7)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_rows_of_another_length_train_alike(install: Callable[..., None]) -> None:
    install("loss_of_docs", "grpo", module=EXAMPLE)
    spec = spec_with(**{**ALGORITHMS["grpo"], "loss": "my-loss", "entropy_coefficient": 0.01, "ratio": "sequence"})
    (found, _), (other, _) = (trained(spec, row_tokens=tokens) for tokens in (16, 512))
    for one, two in zip(found, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_a_loss_that_is_not_finite_skips_its_minibatch(install: Callable[..., None]) -> None:
    """A trial of a few tokens finds no pole that a run meets once: then weights stay as they are."""
    install("loss_of_a", "rising")
    weights, stats = trained(spec_with(loss="my-loss", minibatches=1), steps=1)
    assert stats["minibatches_skipped"] == 1
    assert all(torch.equal(one, other) for one, other in zip(weights, MAKERS["tiny"](1).parameters(), strict=True))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_tensor", "returned float, and not each token's loss, "),
        ("scalar", r"returned shape \(\), and not each token's loss"),
        ("constant", "does not follow from tokens.logprobs"),
        ("infinite", "not finite"),
        ("steep", "not finite"),
        ("mixing", "depends on more than that completion"),
        ("remembering", "depends on more than that completion"),
        ("raising", "'my-loss' failed: ValueError: no"),
        ("cut", "'my-loss' failed: ValueError: no slope"),
        ("missing", "of loss_of_a cannot be imported: AttributeError"),
    ],
)
def test_what_is_no_loss_is_refused_before_training(install: Callable[..., None], target: str, said: str) -> None:
    install("loss_of_a", target)
    with pytest.raises(LossFault, match=f"^training.loss: .*{said}"):
        load_loss(TrainingSpec(loss="my-loss"))


def test_a_trainer_without_the_package_says_so_before_it_loads_a_policy(tmp_path: Path) -> None:
    with pytest.raises(LossFault, match="no installed package offers the loss 'my-loss'"):
        Team(tmp_path, Execution()).restore(spec_with(loss="my-loss==1.0"))


def test_the_signed_version_is_the_one_that_trains(install: Callable[..., None]) -> None:
    install("loss_of_a", "grpo", module=EXAMPLE)
    with pytest.raises(LossFault, match=r"'my-loss' of loss_of_a is version 1\.0, not 1\.1"):
        load_loss(TrainingSpec(loss="my-loss==1.1"))


def test_a_loss_that_two_packages_claim_is_neithers(install: Callable[..., None]) -> None:
    """The order of a path must not decide what a run is trained with."""
    install("loss_of_a", "grpo", module=EXAMPLE)
    install("loss_of_b", "grpo", module=EXAMPLE)
    with pytest.raises(LossFault, match="claimed by loss_of_a and loss_of_b"):
        load_loss(TrainingSpec(loss="my-loss"))
