"""Layers shared by the RWKV families (arXiv 2404.05892, section 4).

Embedding, norm, then per layer x += time_mix(norm(x)), x += channel_mix(norm(x)), and a final norm. A layer's memory
has constant size: two vectors (each mix sees the previous token, too) and a matrix per head. A family defines how its
time mix computes receptance, key, value, gate and decay. Shapes: D hidden, H heads, N = 64.
"""

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from node.policy.models.base import RecurrentConfig, RecurrentModel, State
from node.policy.models.wkv import HEAD_SIZE, wkv_chunked, wkv_step

GROUP_NORM_EPSILON = 64e-5
"""1e-5 for outputs divided by 8 first, as in the papers."""


@strict
class RwkvConfig(RecurrentConfig):
    """Sizes; `intermediate_size` is the channel mix's."""

    intermediate_size: int = 7168

    def __post_init__(self, **kwargs: object) -> None:
        super().__post_init__(**kwargs)
        if self.hidden_size < HEAD_SIZE or self.hidden_size % HEAD_SIZE:
            raise ValueError(f"{self.hidden_size} hidden units do not divide into heads of {HEAD_SIZE}")


class Projected(NamedTuple):
    """Projections of a time mix, [B, T, D] each; `log_decay` is float32."""

    receptance: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    log_decay: Tensor


def shift_tokens(x_BTD: Tensor, last_BD: Tensor) -> Tensor:
    """Shift tokens by one, [B, T, D]; `last_BD` precedes the first."""
    return torch.cat([last_BD[:, None], x_BTD[:, :-1]], dim=1)


def channel_fractions(width: int) -> Tensor:
    """Return 0 to 1 over the channels."""
    return torch.arange(width) / max(1, width - 1)


class TimeMix(nn.Module):
    """Reads and writes the heads' states; a family implements `project`. `depth` is 0 in the first layer, below 1."""

    def __init__(self, config: RwkvConfig, depth: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.depth, self.layers = depth, config.num_hidden_layers
        self.receptance = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.decay = nn.Parameter(torch.empty(width))
        self.bonus = nn.Parameter(torch.empty(width))
        self.norm = nn.GroupNorm(width // HEAD_SIZE, width, eps=GROUP_NORM_EPSILON)

    def init_weights(self) -> None:
        """Initialise slow and fast channels in each head, as in the papers."""
        share = channel_fractions(len(self.decay))
        init.copy_(self.decay, -6 + 5 * share ** (0.7 + 1.3 * self.depth))
        init.copy_(self.bonus, self.depth * (1 - share))
        for linear in (self.receptance, self.key, self.value, self.gate):
            init.normal_(linear.weight, std=linear.in_features**-0.5)
        init.normal_(self.output.weight, std=(2 * self.layers * self.output.in_features) ** -0.5)

    def project(self, x_BTD: Tensor, gap_BTD: Tensor) -> Projected:
        """Compute the projections of each token `x_BTD`, given its difference from the previous one."""
        raise NotImplementedError

    def forward(self, x_BTD: Tensor, last_BD: Tensor, state_BHNN: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the addition to the residual stream, and the heads' states after it."""
        projected = self.project(x_BTD, shift_tokens(x_BTD, last_BD) - x_BTD)
        r, k, v, decay = (each.unflatten(-1, (-1, HEAD_SIZE)) for each in (*projected[:3], projected.log_decay))
        bonus_HN = self.bonus.view(-1, HEAD_SIZE)
        # With several processes each weight needs a gradient in each, also from a row of one token.
        if x_BTD.shape[1] == 1 and not torch.is_grad_enabled():
            out, state_BHNN = wkv_step(r[:, 0], k[:, 0], v[:, 0], decay[:, 0], bonus_HN=bonus_HN, state_BHNN=state_BHNN)
        else:
            out, state_BHNN = wkv_chunked(r, k, v, decay, bonus_HN=bonus_HN, state_BHNN=state_BHNN, start=start)
        return self.output(self._normed(out.reshape_as(x_BTD)).to(x_BTD.dtype) * F.silu(projected.gate)), state_BHNN

    def _normed(self, out_BTD: Tensor) -> Tensor:
        """Normalise each head by itself, in float32."""
        norm = self.norm
        flat = out_BTD.flatten(0, 1)
        normed = F.group_norm(flat, norm.num_groups, norm.weight.float(), norm.bias.float(), norm.eps)
        return normed.view_as(out_BTD)


class ChannelMix(nn.Module):
    """Compute sigmoid(W_r x_r) * W_v relu(W_k x_k)^2, with x_s between a token and the previous one."""

    def __init__(self, config: RwkvConfig, depth: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.depth, self.layers = depth, config.num_hidden_layers
        self.mix_key = nn.Parameter(torch.empty(width))
        self.mix_receptance = nn.Parameter(torch.empty(width))
        self.key = nn.Linear(width, config.intermediate_size, bias=False)
        self.receptance = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(config.intermediate_size, width, bias=False)

    def init_weights(self) -> None:
        """Initialise as in the papers: later layers take more of the previous token."""
        mix = 1 - channel_fractions(len(self.mix_key)) ** (1 - self.depth)
        init.copy_(self.mix_key, mix)
        init.copy_(self.mix_receptance, mix)
        init.normal_(self.key.weight, std=self.key.in_features**-0.5)
        init.normal_(self.receptance.weight, std=self.receptance.in_features**-0.5)
        init.normal_(self.value.weight, std=(2 * self.layers * self.value.in_features) ** -0.5)

    def forward(self, x_BTD: Tensor, last_BD: Tensor) -> Tensor:
        gap_BTD = shift_tokens(x_BTD, last_BD) - x_BTD
        key = F.relu(self.key(x_BTD + gap_BTD * self.mix_key)).square()
        gated: Tensor = self.receptance(x_BTD + gap_BTD * self.mix_receptance).sigmoid() * self.value(key)
        return gated


LayerState = tuple[Tensor, Tensor, Tensor]
"""State of one layer: last input of each mix [B, D] (time, channel), and the heads' states [B, H, N, N], float32."""


class Layer(GradientCheckpointingLayer):
    """A time mix and a channel mix, each after a norm and added to the residual stream."""

    def __init__(self, time_mix: nn.Module, channel_mix: ChannelMix, width: int) -> None:
        super().__init__()
        self.time_norm = nn.LayerNorm(width)
        self.time_mix = time_mix
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mix = channel_mix

    def forward(self, x_BTD: Tensor, state: LayerState, start: int) -> tuple[Tensor, LayerState]:
        last_time_BD, last_channel_BD, heads_BHNN = state
        read_BTD = self.time_norm(x_BTD)
        added_BTD, heads_BHNN = self.time_mix(read_BTD, last_time_BD, heads_BHNN, start)
        x_BTD = x_BTD + added_BTD
        mixed_BTD = self.channel_norm(x_BTD)
        x_BTD = x_BTD + self.channel_mix(mixed_BTD, last_channel_BD)
        # Cloned: a view would keep all tokens' tensors alive.
        return x_BTD, (read_BTD[:, -1].clone(), mixed_BTD[:, -1].clone(), heads_BHNN)


class RwkvModel(RecurrentModel):
    """Eagle or Finch without its head."""

    time_mix: ClassVar[type[TimeMix]]

    def __init__(self, config: RwkvConfig) -> None:
        super().__init__(config)
        width, count = config.hidden_size, config.num_hidden_layers
        self.embeddings = nn.Embedding(config.vocab_size, width)
        self.first_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            Layer(self.time_mix(config, index / count), ChannelMix(config, index / count), width)
            for index in range(count)
        )
        self.last_norm = nn.LayerNorm(width)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def _begin(self, batch: int) -> State:
        return initial_layer_state(len(self.layers), batch, self.first_norm.weight)

    def _run(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
        x_BTD = self.first_norm(self.embeddings(ids_BT))
        x_BTD, after = run_layers(self.layers, x_BTD, state, start=start)
        return self.last_norm(x_BTD), after


def initial_layer_state(count: int, batch: int, template: Tensor) -> State:
    """Return the initial state of `count` layers; dtype, device and width as the weights `template` [..., D]."""
    width = template.shape[-1]
    state: State = {}
    for index in range(count):
        state[f"time_{index}"] = template.new_zeros(batch, width)
        state[f"channel_{index}"] = template.new_zeros(batch, width)
        state[f"heads_{index}"] = template.new_zeros(
            batch, width // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE, dtype=torch.float32
        )
    return state


def run_layers(layers: nn.ModuleList, x_BTD: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
    """Run `layers` over [B, T, D]; return the output and their state."""
    after: State = {}
    for index, layer in enumerate(layers):
        names = (f"time_{index}", f"channel_{index}", f"heads_{index}")
        x_BTD, left = layer(x_BTD, tuple(state[name] for name in names), start)
        after.update(zip(names, left, strict=True))
    return x_BTD, after
