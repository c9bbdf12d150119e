"""Eagle, RWKV-5.2 (arXiv 2404.05892, section 4): a matrix-valued state whose channels decay at fixed rates."""

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init

from node.policy.models.base import RecurrentForCausalLM
from node.policy.models.rwkv import Projected, RwkvConfig, RwkvModel, TimeMix, channel_fractions
from node.policy.models.wkv import log_decay


@strict
class EagleConfig(RwkvConfig):
    """Sizes of an Eagle model."""

    model_type = "eagle"


class EagleTimeMix(TimeMix):
    """Time mix with a learned, fixed interpolation between a token and the previous one for each input."""

    def __init__(self, config: EagleConfig, depth: float) -> None:
        super().__init__(config, depth)
        width = config.hidden_size
        self.mix_receptance = nn.Parameter(torch.empty(width))
        self.mix_key = nn.Parameter(torch.empty(width))
        self.mix_value = nn.Parameter(torch.empty(width))
        self.mix_gate = nn.Parameter(torch.empty(width))

    def init_weights(self) -> None:
        """Initialise like `TimeMix`; later layers take more of the previous token."""
        super().init_weights()
        later = channel_fractions(len(self.mix_key)) ** (1 - self.depth)
        init.copy_(self.mix_key, 1 - later)
        init.copy_(self.mix_value, 1 - later)
        init.copy_(self.mix_receptance, 1 - later.sqrt())
        init.copy_(self.mix_gate, 1 - later.sqrt())

    def project(self, x_BTD: Tensor, gap_BTD: Tensor) -> Projected:
        return Projected(
            receptance=self.receptance(x_BTD + gap_BTD * self.mix_receptance),
            key=self.key(x_BTD + gap_BTD * self.mix_key),
            value=self.value(x_BTD + gap_BTD * self.mix_value),
            gate=self.gate(x_BTD + gap_BTD * self.mix_gate),
            log_decay=log_decay(self.decay).expand_as(x_BTD),
        )


class EagleModel(RwkvModel):
    """Eagle without its head."""

    config_class = EagleConfig
    time_mix = EagleTimeMix


class EagleForCausalLM(RecurrentForCausalLM):
    """Eagle with its head."""

    config_class = EagleConfig
    body = EagleModel
