"""Losses of other packages, which name theirs as entry points of the group `swarmproof.losses` (docs/training.md).

A loss is a function of `LossTokens` and the run's `TrainingSpec` that returns each token's loss [S, T]. It has to be
pure, and to treat each completion by itself: which completions stand in one row depends on how a step is computed. A
package is imported when a run names its loss, by the trainer alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Final

import torch
from torch import Tensor

from coordinator.errors import BadConfiguration
from coordinator.training.groups import Sample
from coordinator.training.packing import PackedRow, Scored, pack
from node.protocol.run import TrainingSpec

log = logging.getLogger(__name__)

GROUP: Final = "swarmproof.losses"
_TRIAL: Final = ((-0.5, -2.0, -1.0), (-3.0,), (-0.25, -1.5))
"""Log-probabilities of the completions that a loss is tried on; drawn with others, and others in the reference."""
_TRIAL_ADVANTAGES: Final = (1.0, -0.5, 0.25)
_TOLERANCE: Final = 1e-5


class LossFault(BadConfiguration):
    """The loss that `training.loss` names is not here, or is none."""

    code = "bad_loss"


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The drawn tokens of S completions, of at most T each; tensors are float32 [S, T], and 0 behind an end.

    `logprobs` are natural log-probabilities now, with gradients, `behaviour` those that the tokens were drawn with, as
    verifiers measured them, and `reference` the first policy's, None unless `training.kl_coefficient` is above 0.
    `mask` is True where there is a token; `lengths` [S] counts them.
    """

    logprobs: Tensor
    behaviour: Tensor
    reference: Tensor | None
    advantages: Tensor
    mask: Tensor
    lengths: Tensor


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """A loaded loss; messages call it `name`."""

    name: str
    function: Callable[[LossTokens, TrainingSpec], Tensor]

    def by_token(
        self, logp_N: Tensor, row: PackedRow, reference_N: Tensor | None, *, training: TrainingSpec, divisor: float
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of each of a row's tokens [N], and the slopes [N] of their weighted sum by `divisor`.

        Slopes are along log-probabilities; all are NaN where a loss is not finite. Raises LossFault.
        """
        lengths_S = torch.bincount(row.completion)
        mask_ST = torch.arange(int(lengths_S.max()), device=logp_N.device) < lengths_S[:, None]

        def padded(values_N: Tensor) -> Tensor:
            return values_N.new_zeros(mask_ST.shape).masked_scatter(mask_ST, values_N)

        with torch.enable_grad():
            now_N = logp_N.detach().requires_grad_()
            tokens = LossTokens(
                logprobs=padded(now_N),
                behaviour=padded(row.behaviour),
                reference=None if reference_N is None else padded(reference_N),
                advantages=padded(row.advantage),
                mask=mask_ST,
                lengths=lengths_S,
            )
            try:
                loss_N = self._checked(self.function(tokens, training), tokens)[mask_ST]
                total = (loss_N * row.weight).sum() / divisor
                (slope_N,) = torch.autograd.grad(total, now_N, materialize_grads=True)
            except LossFault:
                raise
            except Exception as error:  # a package runs whatever its author wrote
                raise LossFault(f"training.loss: {self.name!r} failed: {type(error).__name__}: {error}") from error
        return loss_N.detach(), slope_N if loss_N.isfinite().all() else torch.full_like(slope_N, torch.nan)

    def _checked(self, found: Any, tokens: LossTokens) -> Tensor:
        """Return what the function `found`; raises LossFault unless it is each token's loss, with gradients."""
        wanted = tuple(tokens.logprobs.shape)
        if not isinstance(found, Tensor) or tuple(found.shape) != wanted or not found.is_floating_point():
            said = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise LossFault(f"training.loss: {self.name!r} returned {said}, and not each token's loss, {wanted}")
        if not found.requires_grad:
            raise LossFault(f"training.loss: {self.name!r} does not follow from tokens.logprobs by torch's operations")
        return found

    def try_out(self, training: TrainingSpec) -> None:
        """Raise LossFault unless made-up completions have finite losses, the same in one row and each in its own."""
        scored = [
            Scored(Sample((0,), (0,) * len(now), tuple(each + 0.1 * at for each in now)), advantage, (0,) * len(now))
            for at, (now, advantage) in enumerate(zip(_TRIAL, _TRIAL_ADVANTAGES, strict=True))
        ]

        def tried(row_tokens: int) -> Tensor:
            """Return losses and slopes [2, N] of all completions, in rows of so many tokens."""
            rows, parts, left = pack(scored, row_tokens=row_tokens), [], torch.tensor(sum(_TRIAL, ()))
            for row in rows:
                logp_N, left = left[: len(row.targets)], left[len(row.targets) :]
                reference_N = logp_N - 0.2 if training.kl_coefficient else None
                parts.append(torch.stack(self.by_token(logp_N, row, reference_N, training=training, divisor=1.0)))
            return torch.cat(parts, dim=1)

        together = tried(64)
        if not together.isfinite().all():
            raise LossFault(f"training.loss: {self.name!r} has losses or gradients that are not finite")
        if not torch.allclose(together, tried(1), rtol=_TOLERANCE, atol=_TOLERANCE):
            raise LossFault(f"training.loss: {self.name!r} of a completion depends on more than that completion")


@functools.cache
def load_loss(training: TrainingSpec) -> CustomLoss | None:
    """Return the loss that `training.loss` names, after a trial; None if it names none. Raises LossFault."""
    if not isinstance(training.loss, str):
        return None
    name, _, version = training.loss.partition("==")
    entries = sorted(metadata.entry_points(group=GROUP, name=name), key=_package)
    if not entries:
        raise LossFault(f"training.loss: no installed package offers the loss {name!r}")
    if len(entries) > 1:
        raise LossFault(f"training.loss: {name!r} is claimed by {' and '.join(map(_package, entries))}")
    (entry,) = entries
    installed = entry.dist.version if entry.dist is not None else "unknown"
    if version not in ("", installed):
        raise LossFault(f"training.loss: {name!r} of {_package(entry)} is version {installed}, not {version}")
    try:
        function = entry.load()
    except Exception as error:  # an import runs whatever its author wrote
        raise LossFault(
            f"training.loss: {name!r} of {_package(entry)} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    loss = CustomLoss(name, function)
    loss.try_out(training)
    log.info("training with the loss %r of %s %s", name, _package(entry), installed)
    return loss


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else entry.value
