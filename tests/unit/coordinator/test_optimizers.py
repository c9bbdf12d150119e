"""The optimizers that a run may ask for."""

from __future__ import annotations

import pytest
import torch

from coordinator.training.optimizers import make_optimizer
from node.protocol.run import TrainingSpec
from node.tiny import make_model


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
