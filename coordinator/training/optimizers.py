"""Optimizers of a run: AdamW, or Muon for the layers' matrices and AdamW for all else.

Muon orthogonalises each update (Jordan et al. 2024), as in INTELLECT-3. It is torch's own, scaled so that its updates
are as large as AdamW's (arXiv 2502.16982, section 2.2), so that one learning rate serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from node.protocol.run import TrainingSpec

_NOT_LAYERS = ("embed", "lm_head")
"""Name parts of lookup tables, which Muon is not meant for."""


class Optimizers:
    """One or two optimizers that share out a model's parameters, used as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)

    @property
    def has_state(self) -> bool:
        """Whether a step was taken."""
        return any(part.state for part in self.parts)

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of later steps."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return a parameter's optimizer state; empty before the first step."""
        return next((part.state[parameter] for part in self.parts if parameter in part.state), {})


def make_optimizer(model: nn.Module, training: TrainingSpec) -> Optimizers:
    """Make the run's optimizer over all of the model's parameters that are trained."""
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if training.optimizer == "adamw":
        return Optimizers([_adamw([parameter for _, parameter in named], training)])
    matrices = [parameter for name, parameter in named if is_layer_matrix(name, parameter)]
    others = [parameter for name, parameter in named if not is_layer_matrix(name, parameter)]
    muon = _Muon(
        matrices,
        lr=training.learning_rate,
        momentum=training.muon_momentum,
        weight_decay=training.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return Optimizers([muon, _adamw(others, training)])


class _Muon(torch.optim.Muon):
    """torch's Muon, but that a sharded update is gathered once and orthogonalised whole by every process.

    torch's own gathers an operand for each of the iteration's 15 products, and rounds otherwise than one process does.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            iteration = group["ns_coefficients"], group["ns_steps"], group["eps"]
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                moment = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(moment, group["momentum"])
                if isinstance(update, DTensor):
                    whole = _zeropower_via_newtonschulz(update.full_tensor(), *iteration)
                    update = distribute_tensor(whole, update.device_mesh, update.placements, src_data_rank=None)
                else:
                    update = _zeropower_via_newtonschulz(update, *iteration)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
                parameter.add_(update, alpha=-rate)


def _adamw(parameters: list[nn.Parameter], training: TrainingSpec) -> torch.optim.AdamW:
    """Make AdamW (arXiv 1711.05101)."""
    return torch.optim.AdamW(
        parameters,
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        fused=True,
    )


def is_layer_matrix(name: str, parameter: Tensor) -> bool:
    """Tell whether Muon trains a parameter, where it is the run's optimizer."""
    return parameter.ndim == 2 and not any(part in name for part in _NOT_LAYERS)
