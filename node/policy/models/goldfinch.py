"""GoldFinch (arXiv 2407.12077): a recurrence that compresses what it has read, and attention over what it compressed.

The first two thirds of the layers are Finch-C2: Finch (RWKV-6) without gate and bonus, whose keys shrink where they
decay slowly. After the last of them each token leaves c_t, a sixteenth of the width. The last third are GOLD layers:
attention whose keys and values are made from c_t and the token's id (TokenCat), by each layer in its own way:

    c_t = W_a x_t                                    x_t: the residual stream after the last Finch-C2 layer
    K_t = rms(W_b [e_t; c_t]),  V_t = rms(e_t)       e_t: the normalised embedding of the token
    q_t = LN(W_q ddlerp(x_t, x_t-1))                 x_t: here the layer's input, normalised
    k_t = LN(adapt(lerp(K_t, K_t-1))),  v_t = LN(adapt(lerp(V_t, V_t-1))),  adapt(x) = x + tanh(x A) B

One cache serves all layers and holds c_t and the id, no more: d / 16 values and four bytes a token, as the paper counts
them; its public code keeps decompressed keys. The price is that every step decompresses the keys of all tokens again,
O(T d^2) work. They exist while a layer looks at them, never between steps.

A prefill that is asked for the next token alone costs a constant per token. A token looks at the one before it twice in
each GOLD layer, for the query and in the channel mix, so with G such layers the last 2 G + 1 positions decide about the
last one, exactly (`last_alone`). A verifier needs a hidden state for each token of a completion: it runs all positions.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init

from node.policy.models.base import LENGTH, RecurrentForCausalLM, RecurrentModel, State, join
from node.policy.models.rwkv import (
    ChannelMix,
    Layer,
    RwkvConfig,
    channel_fractions,
    initial_layer_state,
    run_layers,
    shift_tokens,
)
from node.policy.models.wkv import HEAD_SIZE, WKV_CHUNK, log_decay, wkv_chunked, wkv_step

EPSILON = 1e-5
"""For root mean squares, as for all layer norms; torch's default depends on the dtype."""
COMPRESSION = 16
"""Ratio of the model's width to that of c_t."""
PREFILL_TOKENS = 32 * WKV_CHUNK
"""Columns the Finch-C2 layers read at a time when few hidden states are needed."""
DECOMPRESSED_TOKENS = 2**16
"""Tokens whose keys and values exist at once over a batch; a longer sequence is processed alone."""
CACHE = ("compressed", "token_ids")
"""State entries that grow with a sequence."""


@strict
class GoldFinchConfig(RwkvConfig):
    """Sizes of a GoldFinch model. `adapt_rank` None is the paper's max(d / 16, 64); other ranks are the paper's."""

    model_type = "goldfinch"

    shift_rank: int = 32
    decay_rank: int = 64
    value_rank: int = 64
    adapt_rank: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.adapt_rank is None:
            self.adapt_rank = max(self.hidden_size // COMPRESSION, 64)
        super().__post_init__(**kwargs)
        if self.num_hidden_layers < 3:
            raise ValueError(f"a third of {self.num_hidden_layers} layers is none")
        if min(self.shift_rank, self.decay_rank, self.value_rank, self.adapt_rank) < 1:
            raise ValueError("a rank is at least 1")

    @property
    def gold_layers(self) -> int:
        """Number of GOLD layers: the last third, rounded down."""
        return self.num_hidden_layers // 3

    @property
    def finch_layers(self) -> int:
        """Number of Finch-C2 layers: the first two thirds, rounded up."""
        return self.num_hidden_layers - self.gold_layers

    @property
    def window(self) -> int:
        """Number of final positions the GOLD layers need for the very last one."""
        return 2 * self.gold_layers + 1


class LowRank(nn.Module):
    """Compute tanh(x A) B, [..., D] to [..., D]."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def init_weights(self) -> None:
        """Initialise to add nothing."""
        init.normal_(self.down.weight, std=self.down.in_features**-0.5)
        init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.up(torch.tanh(self.down(x)))
        return added


class DataShift(nn.Module):
    """Finch's data-dependent token shift for several inputs at once."""

    def __init__(self, width: int, rank: int, inputs: int, depth: float) -> None:
        super().__init__()
        self.depth = depth
        self.mix_first = nn.Parameter(torch.empty(width))
        self.mix = nn.Parameter(torch.empty(inputs, width))
        self.mix_down = nn.Parameter(torch.empty(width, inputs * rank))
        self.mix_up = nn.Parameter(torch.empty(inputs, rank, width))

    def init_weights(self) -> None:
        """Initialise: later layers take more of the previous token; no data dependence yet."""
        mix = 1 - channel_fractions(len(self.mix_first)) ** (1 - self.depth)
        init.copy_(self.mix_first, mix)
        init.copy_(self.mix, mix.expand_as(self.mix))
        init.zeros_(self.mix_down)
        init.uniform_(self.mix_up, -0.01, 0.01)

    def forward(self, x_BTD: Tensor, last_BD: Tensor) -> tuple[Tensor, ...]:
        """Return each shifted input, [B, T, D]."""
        gap_BTD = shift_tokens(x_BTD, last_BD) - x_BTD
        low = torch.tanh((x_BTD + gap_BTD * self.mix_first) @ self.mix_down).unflatten(-1, (len(self.mix), -1))
        more = torch.einsum("btir,ird->ibtd", low, self.mix_up)
        return tuple((x_BTD + gap_BTD * (self.mix[:, None, None] + more)).unbind())


class FinchC2(nn.Module):
    """The time mix of a Finch-C2 layer."""

    def __init__(self, config: GoldFinchConfig, depth: float) -> None:
        super().__init__()
        width = config.hidden_size
        self.depth, self.layers = depth, config.num_hidden_layers
        self.shift = DataShift(width, config.shift_rank, 5, depth)
        self.decay = nn.Parameter(torch.empty(width))
        self.decay_adapt = LowRank(width, config.decay_rank)
        self.value_adapt = LowRank(width, config.value_rank)
        self.receptance, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm = nn.LayerNorm(width)

    def init_weights(self) -> None:
        """Initialise like Finch."""
        init.copy_(self.decay, -6 + 5 * channel_fractions(len(self.decay)) ** (0.7 + 1.3 * self.depth))
        init_linear(self.receptance, self.key, self.value)
        init_linear(self.output, layers=self.layers)

    def forward(self, x_BTD: Tensor, last_BD: Tensor, state_BHNN: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return the addition to the residual stream, and the heads' states after it."""
        receptance, key, value, decay, own = self.shift(x_BTD, last_BD)
        fading = log_decay(self.decay.float() + self.decay_adapt(decay).float())
        keys = self.key(key).float() * -torch.expm1(fading)
        made = (self.receptance(receptance), keys, self.value(value), fading)
        r, k, v, decay = (each.unflatten(-1, (-1, HEAD_SIZE)) for each in made)
        bonus_HN = decay.new_zeros(decay.shape[2:])
        if x_BTD.shape[1] == 1:
            first = (each[:, 0] for each in (r, k, v, decay))
            read, state_BHNN = wkv_step(*first, bonus_HN=bonus_HN, state_BHNN=state_BHNN)
        else:
            read, state_BHNN = wkv_chunked(r, k, v, decay, bonus_HN=bonus_HN, state_BHNN=state_BHNN, start=start)
        # Without a bonus the recurrence does not see this token: its own value is added, from a separate shift.
        own = self.value(own) + self.value_adapt(own)
        return self.output(self.norm(read.reshape_as(own).to(own.dtype) + own)), state_BHNN


@dataclass(frozen=True, slots=True)
class Memory:
    """What GOLD queries attend to: `keys` and `values` [B, C, D], before each layer's own shift and low-rank part.
    `visible` [B, 1, Q, C] masks them per query; None if C = Q (causal).
    """

    keys: Tensor
    values: Tensor
    visible: Tensor | None


class Gold(nn.Module):
    """Attention of a GOLD layer: no positions, no key or value matrices."""

    def __init__(self, config: GoldFinchConfig, depth: float) -> None:
        super().__init__()
        width, rank = config.hidden_size, config.adapt_rank
        assert rank is not None
        self.depth, self.layers = depth, config.num_hidden_layers
        self.shift = DataShift(width, config.shift_rank, 1, depth)
        self.mix_key = nn.Parameter(torch.empty(width))
        self.mix_value = nn.Parameter(torch.empty(width))
        self.key_adapt = LowRank(width, rank)
        self.value_adapt = LowRank(width, rank)
        self.query = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.query_norm, self.key_norm, self.value_norm, self.norm = (nn.LayerNorm(width) for _ in range(4))

    def init_weights(self) -> None:
        """Initialise like the mixes of the layers before."""
        mix = 1 - channel_fractions(len(self.mix_key)) ** (1 - self.depth)
        init.copy_(self.mix_key, mix)
        init.copy_(self.mix_value, mix)
        init_linear(self.query)
        init_linear(self.output, layers=self.layers)

    def forward(self, x_BQD: Tensor, last_BD: Tensor, memory: Memory, start: int) -> tuple[Tensor, Memory]:  # noqa: ARG002
        """Return the addition to the residual stream, and the unchanged memory."""
        (asking,) = self.shift(x_BQD, last_BD)
        query = self.query_norm(self.query(asking))
        key = self.key_norm(_adapted(memory.keys, self.mix_key, self.key_adapt))
        value = self.value_norm(_adapted(memory.values, self.mix_value, self.value_adapt))
        q, k, v = (each.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for each in (query, key, value))
        read = F.scaled_dot_product_attention(q, k, v, attn_mask=memory.visible, is_causal=memory.visible is None)
        return self.output(self.norm(read.transpose(1, 2).reshape_as(x_BQD))), memory


class GoldFinchModel(RecurrentModel):
    """GoldFinch without its head. Of B sequences it remembers, beside the Finch-C2 layers' states and what each mix saw
    last, the cache of C columns, as many as the longest sequence has tokens:

        compressed  [B, C, D / 16]: c_t, in the model's dtype
        token_ids   [B, C], int32

    A sequence's tokens are in its first columns; zeros fill it up.
    """

    config_class = GoldFinchConfig

    def __init__(self, config: GoldFinchConfig) -> None:
        super().__init__(config)
        width, count, finch = config.hidden_size, config.num_hidden_layers, config.finch_layers
        self.embeddings = nn.Embedding(config.vocab_size, width)
        self.first_norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            Layer((FinchC2 if index < finch else Gold)(config, index / count), ChannelMix(config, index / count), width)
            for index in range(count)
        )
        self.compress = nn.Linear(width, width // COMPRESSION, bias=False)
        self.decompress = nn.Linear(width + width // COMPRESSION, width, bias=False)
        self.last_norm = nn.LayerNorm(width)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def _begin(self, batch: int) -> State:
        weights = self.first_norm.weight
        state = initial_layer_state(len(self.layers), batch, weights)
        for index in range(self.config.finch_layers, len(self.layers)):
            del state[f"heads_{index}"]
        state["compressed"] = weights.new_zeros(batch, 0, self.compress.out_features)
        state["token_ids"] = weights.new_zeros(batch, 0, dtype=torch.int32)
        return state

    def _run(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
        return self._read(ids_BT, state, start=start, last=ids_BT.shape[1])

    def _run_end(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
        hidden_BQD, after = self._read(ids_BT, state, start=start, last=min(ids_BT.shape[1], self.config.window))
        return hidden_BQD[:, -1:], after

    def _read(self, ids_BT: Tensor, state: State, *, start: int, last: int) -> tuple[Tensor, State]:
        """Run like `_run`, with the GOLD layers limited to the `last` columns: hidden states [B, last, D]. If those are
        not all, the first 2 G are wrong; the others and the state are exact.
        """
        x_BQD, compressed, after = self._compress(ids_BT, state, start=start, last=last)
        after |= extend_cache(state, compressed, ids_BT)
        seen = {**state, **{name: after[name] for name in CACHE}, LENGTH: state[LENGTH] + ids_BT.shape[1]}
        rows = max(1, DECOMPRESSED_TOKENS // after["token_ids"].shape[1])
        hidden, gold = [], []
        for first in range(0, len(ids_BT), rows):
            places = slice(first, first + rows)
            part = {name: each[places] for name, each in seen.items()}
            read, left = self._attend(x_BQD[places], part, is_cut=last < ids_BT.shape[1])
            hidden.append(read)
            gold.append(left)
        return torch.cat(hidden), after | join(gold)

    def _attend(self, x_BQD: Tensor, seen: State, *, is_cut: bool) -> tuple[Tensor, State]:
        """Run the GOLD layers on the last columns, [B, Q, D]; return the output and their part of the state."""
        memory = self._memory(seen, last=x_BQD.shape[1])
        after: State = {}
        for index, layer in enumerate(self.layers[self.config.finch_layers :], start=self.config.finch_layers):
            names = (f"time_{index}", f"channel_{index}")
            before = [torch.zeros_like(seen[name]) if is_cut else seen[name] for name in names]
            x_BQD, left = layer(x_BQD, (*before, memory), 0)
            after.update(zip(names, left[:2], strict=True))
        return self.last_norm(x_BQD), after

    def _compress(self, ids_BT: Tensor, state: State, *, start: int, last: int) -> tuple[Tensor, Tensor, State]:
        """Run the Finch-C2 layers; return the `last` columns [B, last, D], c_t [B, T, D / 16] of all, and the layers'
        state. When few columns are needed, the text is read in pieces to bound memory.
        """
        tokens = ids_BT.shape[1]
        cuts = range(PREFILL_TOKENS - start % WKV_CHUNK, tokens, PREFILL_TOKENS) if last < tokens else []
        compressed, ending, after = [], None, state
        for piece in ids_BT.tensor_split(list(cuts), dim=1):
            x_BTD = self.first_norm(self.embeddings(piece))
            x_BTD, after = run_layers(self.layers[: self.config.finch_layers], x_BTD, after, start=start)
            compressed.append(self.compress(x_BTD))
            ending = (x_BTD if ending is None else torch.cat([ending, x_BTD], dim=1))[:, -last:]
            start = 0
        assert ending is not None
        return ending, torch.cat(compressed, dim=1), after

    def _memory(self, seen: State, *, last: int) -> Memory:
        """Build what the `last` tokens attend to (TokenCat), from the cache and LENGTH in `seen`."""
        embedded = self.first_norm(self.embeddings(seen["token_ids"]))
        columns, width = embedded.shape[1], embedded.shape[2:]
        keys = F.rms_norm(self.decompress(torch.cat([embedded, seen["compressed"]], dim=-1)), width, eps=EPSILON)
        visible = None
        if last < columns:
            position = seen[LENGTH][:, None] - torch.arange(last, 0, -1, device=embedded.device)
            visible = (torch.arange(columns, device=embedded.device) <= position[..., None])[:, None]
        return Memory(keys, F.rms_norm(embedded, width, eps=EPSILON), visible)


class GoldFinchForCausalLM(RecurrentForCausalLM):
    """GoldFinch with its head."""

    config_class = GoldFinchConfig
    body = GoldFinchModel


def extend_cache(state: State, compressed: Tensor, ids_BT: Tensor) -> State:
    """Extend the cache of `state` by T tokens per sequence: `compressed` [B, T, D / 16] of `ids_BT`."""
    batch, tokens = ids_BT.shape
    if not state["token_ids"].shape[1]:
        return {"compressed": compressed, "token_ids": ids_BT.int()}
    lengths = state[LENGTH]
    columns = int(lengths.max()) + tokens
    row = torch.arange(batch, device=ids_BT.device)[:, None]
    column = lengths[:, None] + torch.arange(tokens, device=ids_BT.device)
    longer = {}
    for name, new in zip(CACHE, (compressed, ids_BT.int()), strict=True):
        held = state[name][:, : columns - tokens]
        longer[name] = held.new_zeros(batch, columns, *held.shape[2:])
        longer[name][:, : held.shape[1]] = held
        longer[name][row, column] = new
    return longer


def init_linear(*linears: nn.Linear, layers: int | None = None) -> None:
    """Initialise for outputs as large as inputs, or smaller where each of `layers` adds them to the residual stream."""
    for linear in linears:
        init.normal_(linear.weight, std=((2 * layers if layers else 1) * linear.in_features) ** -0.5)


def _adapted(x_BCD: Tensor, mix: Tensor, low_rank: LowRank) -> Tensor:
    """Apply a GOLD layer's own shift and low-rank part to the shared memory."""
    shifted = x_BCD + (shift_tokens(x_BCD, torch.zeros_like(x_BCD[:, 0])) - x_BCD) * mix
    adapted: Tensor = shifted + low_rank(shifted)
    return adapted
