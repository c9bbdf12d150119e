"""Finch, RWKV-6 (arXiv 2404.05892, section 4): Eagle with data-dependent decay and token shift, through low-rank
matrices.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init

from node.policy.models.base import RecurrentForCausalLM
from node.policy.models.rwkv import Projected, RwkvConfig, RwkvModel, TimeMix, channel_fractions
from node.policy.models.wkv import log_decay

INPUTS = 5
"""Inputs of a time mix: decay, key, value, receptance and gate, in this order."""


@strict
class FinchConfig(RwkvConfig):
    """Sizes of a Finch model; the ranks are those of the token shift's five matrices, and of the decay's."""

    model_type = "finch"

    shift_rank: int = 32
    decay_rank: int = 64


class FinchTimeMix(TimeMix):
    """Time mix whose token shift and decay depend on the data."""

    def __init__(self, config: FinchConfig, depth: float) -> None:
        super().__init__(config, depth)
        width, rank = config.hidden_size, config.shift_rank
        self.mix_first = nn.Parameter(torch.empty(width))
        self.mix = nn.Parameter(torch.empty(INPUTS, width))
        self.mix_down = nn.Parameter(torch.empty(width, INPUTS * rank))
        self.mix_up = nn.Parameter(torch.empty(INPUTS, rank, width))
        self.decay_down = nn.Parameter(torch.empty(width, config.decay_rank))
        self.decay_up = nn.Parameter(torch.empty(config.decay_rank, width))

    def init_weights(self) -> None:
        """Initialise like `TimeMix`; later layers take more of the previous token; no data dependence yet."""
        super().init_weights()
        share = channel_fractions(len(self.mix_first))
        powers = torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5])[:, None] * (1 - self.depth)
        init.copy_(self.mix_first, 1 - share ** (1 - self.depth))
        init.copy_(self.mix, 1 - share**powers)
        init.zeros_(self.mix_down)
        init.zeros_(self.decay_down)
        init.uniform_(self.mix_up, -0.01, 0.01)
        init.uniform_(self.decay_up, -0.01, 0.01)

    def project(self, x_BTD: Tensor, gap_BTD: Tensor) -> Projected:
        low = torch.tanh((x_BTD + gap_BTD * self.mix_first) @ self.mix_down).unflatten(-1, (INPUTS, -1))
        more = torch.einsum("btir,ird->ibtd", low, self.mix_up)
        decay, key, value, receptance, gate = x_BTD + gap_BTD * (self.mix[:, None, None] + more)
        fading = torch.tanh(decay @ self.decay_down) @ self.decay_up
        return Projected(
            receptance=self.receptance(receptance),
            key=self.key(key),
            value=self.value(value),
            gate=self.gate(gate),
            log_decay=log_decay(self.decay.float() + fading.float()),
        )


class FinchModel(RwkvModel):
    """Finch without its head."""

    config_class = FinchConfig
    time_mix = FinchTimeMix


class FinchForCausalLM(RecurrentForCausalLM):
    """Finch with its head."""

    config_class = FinchConfig
    body = FinchModel
