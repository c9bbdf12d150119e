"""Finch, RWKV-6 (arXiv 2404.05892, section 4): as Eagle, but what a channel keeps, and how much of the token before
each input takes, follow from the data, through matrices of low rank.
"""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init

from node.models.base import RecurrentForCausalLM
from node.models.rwkv import Projected, RwkvConfig, RwkvModel, TimeMix, shares
from node.models.wkv import log_decay

INPUTS = 5
"""Inputs of a time mix: for the decay, key, value, receptance and gate, in this order."""


@strict
class FinchConfig(RwkvConfig):
    """A Finch model's sizes; the ranks are those of the shift's five matrices, and of the decay's."""

    model_type = "finch"

    shift_rank: int = 32
    decay_rank: int = 64


class FinchTimeMix(TimeMix):
    """Each input lies between a token and the one before, by a share that the data add to; so does the decay."""

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
        """As `TimeMix`; the later the layer, the more of the token before, and nothing of the data's yet."""
        super().init_weights()
        share = shares(len(self.mix_first))
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
    """Finch."""

    config_class = FinchConfig
    body = FinchModel
