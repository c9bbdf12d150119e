"""The optimizers that a run may ask for."""

from __future__ import annotations

import pytest
import torch

from coordinator.training.optimizers import make_optimizer
from node.policy.models.tiny_llama import make_model
from node.protocol.run import TrainingSpec


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_is_trained_by_exactly_one_optimizer(name):
    """One that is left out would stay at its first value for the whole run."""
    model = make_model(0)
    parts = make_optimizer(model, TrainingSpec(optimizer=name)).parts
    held = [parameter for part in parts for group in part.param_groups for parameter in group["params"]]
    assert len(held) == len({id(parameter) for parameter in held}) == len(list(model.parameters()))


def test_muon_gets_the_matrices_of_the_layers_and_no_table():
    model = make_model(0)
    muon, adamw = make_optimizer(model, TrainingSpec(optimizer="muon")).parts
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_muon = [names[id(parameter)] for group in muon.param_groups for parameter in group["params"]]
    by_adamw = [names[id(parameter)] for group in adamw.param_groups for parameter in group["params"]]
    assert all(".layers." in name and "norm" not in name for name in by_muon)
    assert len(by_muon) == 2 * 7
    assert any("embed" in name for name in by_adamw)


def test_two_updates_of_adamw_are_those_computed_by_hand():
    """beta1 0.9, beta2 0.99, decay 0.1, rate 0.01: 1 * (1 - 0.001) - 0.01, as the first step is the gradient's sign."""
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(1.0)
    training = TrainingSpec(learning_rate=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1)
    optimizer = make_optimizer(layer, training)
    layer.weight.grad = torch.tensor([[2.0]])
    optimizer.step()
    assert layer.weight.item() == pytest.approx(0.989, abs=1e-6)
    layer.weight.grad = torch.tensor([[-1.0]])
    optimizer.step()
    # m = (0.9 * 0.2 - 0.1) / 0.19 = 0.421053; v = (0.99 * 0.04 + 0.01) / 0.0199 = 2.492462, its root 1.578753.
    assert layer.weight.item() == pytest.approx(0.989 * 0.999 - 0.01 * 0.421053 / 1.578753, abs=1e-6)


def test_an_update_of_muon_turns_every_direction_of_a_gradient_by_as_much():
    """What tells it from AdamW and from momentum: singular values of 1 to 100 all come out alike, directions kept."""
    model = make_model(0)
    optimizer = make_optimizer(model, TrainingSpec(optimizer="muon", learning_rate=1.0, weight_decay=0.0))
    matrix = model.model.layers[0].self_attn.q_proj.weight
    before = matrix.detach().clone()
    left, _, right = torch.linalg.svd(torch.randn(128, 128, generator=torch.Generator().manual_seed(1)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    matrix.grad = left @ torch.diag(torch.linspace(1, 100, 128)) @ right
    optimizer.step()
    turned = left.T @ (before - matrix.detach()) @ right.T
    # 0.2 * sqrt(128) times an orthogonal matrix, as well as five Newton-Schulz steps find it.
    scaled = turned / (0.2 * 128**0.5)
    assert scaled.diagonal().min() > 0.5
    assert scaled.diagonal().max() < 1.3
    assert (scaled - torch.diag(scaled.diagonal())).abs().max() < 0.1


def test_an_update_of_muon_is_as_large_as_one_of_adamw():
    """So that a run can change optimizers and keep its learning rate: 0.2 root mean square, as AdamW's mostly is."""
    model = make_model(0)
    optimizer = make_optimizer(model, TrainingSpec(optimizer="muon", learning_rate=1.0))
    matrix = model.model.layers[0].mlp.up_proj.weight
    before = matrix.detach().clone()
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    assert (matrix.detach() - before).square().mean().sqrt().item() == pytest.approx(0.2, rel=0.25)


def test_the_learning_rate_reaches_both():
    model = make_model(0)
    optimizer = make_optimizer(model, TrainingSpec(optimizer="muon"))
    optimizer.set_learning_rate(0.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.has_state


def test_muon_steps_as_torchs_own_does():
    """It is torch's algorithm, whose update is gathered otherwise where it is sharded."""
    theirs, ours = make_model(0), make_model(0)
    training = TrainingSpec(optimizer="muon", learning_rate=0.01, weight_decay=0.1)
    muon, _ = make_optimizer(ours, training).parts
    held = {id(parameter) for group in muon.param_groups for parameter in group["params"]}
    pairs = [pair for pair in zip(theirs.parameters(), ours.parameters(), strict=True) if id(pair[1]) in held]
    reference = torch.optim.Muon(
        [pair[0] for pair in pairs],
        lr=0.01,
        momentum=training.muon_momentum,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for one, other in pairs:
            one.grad = torch.randn(one.shape, generator=generator)
            other.grad = one.grad.clone()
        reference.step()
        muon.step()
    assert all(torch.equal(one, other) for one, other in pairs)
