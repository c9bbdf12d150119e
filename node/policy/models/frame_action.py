"""The recurrence-complete frame-based action model (arXiv 2510.06828): it sees a terminal's frames, and no tokens.

The frame at a position is the screen after all tokens up to it (`node.protocol.terminal`): a model that is given token
ids replays the terminal and has the frames. Each frame becomes one vector by a head that sees all of it at once; one
LSTM goes through the vectors, and its outputs are the hidden states that keys are chosen from.

    cell      e_codepoint + e_foreground + e_background + e_row + e_column; 0 where nothing is seen
    2 x       RMSNorm, 3x3 convolution of dilation 2, GELU, 2x2 average pool
    L x       x + attention(RMSNorm(x)), x + mlp(RMSNorm(x)); every token sees every other
    frame     linear map of the mean of RMSNorm(tokens)
    LSTM      learned h_0 and c_0; its output is in (-1, 1)

Equal frames are embedded once: a cursor that comes back, a prompt that is printed unseen, a group of one problem. In
training their activations are computed again in the backward pass (arXiv 1604.06174), so what is kept grows with the
LSTM's width and not with the screen. The norms' epsilon is large: where nothing is seen they divide by its root, and a
few in a row would make gradients of any size.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from node.policy.models.base import RecurrentConfig, RecurrentForCausalLM, RecurrentModel, State
from node.protocol.terminal import (
    BACKGROUND_BIT,
    FOREGROUND_BIT,
    LEAST_BACKGROUNDS,
    LEAST_FOREGROUNDS,
    MAX_CODEPOINTS,
    MAX_COLOURS,
    MAX_COLUMNS,
    MAX_ROWS,
    Cells,
    Phase,
    Terminal,
)

POOLED = 4
"""Cells of a row, and of a column, per token: two pools of two."""
PASS_FRAMES = 16
"""Frames per pass of the frame head, padded with empty ones: kernels round differently for other numbers of frames, and
a decoding worker has fewer than a verifier.
"""
MAX_TRAINED_CELLS = 2**17
"""Cells per pass when gradients are needed and rounding does not matter."""
MAX_FRAME_NUMBERS = 2**21
"""Numbers a stage of the frame head may compute per frame: bounds the memory a small file can demand."""
MAX_FRAME_WORK = 2**33
"""Multiplications per frame of the frame head: bounds the time a small file can demand."""
SOFTMAX_WORK = 32
"""Extra cost of an attention weight, in multiplications, as heads may be narrow."""
_DIGEST_BYTES = 16


@strict
class FrameActionConfig(RecurrentConfig):
    """`hidden_size` is the LSTM's width, `frame_size` that of the frame head's tokens; `num_hidden_layers` counts its
    blocks. `token_codepoints` maps token ids to what the terminal receives, 0 for no character; ids beyond it map to
    0.
    """

    model_type = "frame_action"

    vocab_size: int = 256
    hidden_size: int = 1024
    frame_size: int = 256
    cell_size: int = 64
    convolution_size: int = 128
    intermediate_size: int = 1024
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    rows: int = 48
    columns: int = 160
    codepoints: int = 256
    foregrounds: int = 16
    backgrounds: int = 16
    token_codepoints: list[int] | None = None
    rms_norm_eps: float = 1e-2
    initializer_range: float = 0.02
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 0
    tie_word_embeddings: bool = False

    def validate_architecture(self) -> None:
        """Raise ValueError for a screen that is too large or not divisible, code points without an embedding, or a zero
        epsilon.
        """
        if not (0 < self.rows <= MAX_ROWS and 0 < self.columns <= MAX_COLUMNS):
            raise ValueError(f"a screen of {self.rows} x {self.columns}; {MAX_ROWS} x {MAX_COLUMNS} cells are the most")
        if self.rows % POOLED or self.columns % POOLED:
            raise ValueError(f"a screen of {self.rows} x {self.columns} is not of whole patches of {POOLED}")
        if not 1 < self.codepoints <= MAX_CODEPOINTS:
            raise ValueError(f"{self.codepoints} code points")
        if not LEAST_FOREGROUNDS <= self.foregrounds <= MAX_COLOURS:
            raise ValueError(f"{self.foregrounds} foregrounds, {LEAST_FOREGROUNDS} to {MAX_COLOURS} can be")
        if not LEAST_BACKGROUNDS <= self.backgrounds <= MAX_COLOURS:
            raise ValueError(f"{self.backgrounds} backgrounds, {LEAST_BACKGROUNDS} to {MAX_COLOURS} can be")
        if self.frame_size % self.num_attention_heads:
            raise ValueError(f"{self.num_attention_heads} heads do not divide {self.frame_size}")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps of {self.rms_norm_eps}")
        tokens = self.rows * self.columns // POOLED**2
        cell = max(self.cell_size, self.convolution_size)
        numbers = tokens * max(POOLED**2 * cell, POOLED * self.frame_size, self.intermediate_size)
        if numbers > MAX_FRAME_NUMBERS:
            raise ValueError(f"{numbers} numbers for a frame; {MAX_FRAME_NUMBERS} are the most")
        size = self.frame_size
        attention = tokens**2 * (2 * size + SOFTMAX_WORK * self.num_attention_heads)
        block = tokens * size * (4 * size + 2 * self.intermediate_size) + attention
        work = 9 * tokens * self.convolution_size * (POOLED**2 * self.cell_size + POOLED * size)
        work += self.num_hidden_layers * block
        if work > MAX_FRAME_WORK:
            raise ValueError(f"a frame costs {work} multiplications; {MAX_FRAME_WORK} are the most")
        shown = self.token_codepoints or []
        if len(shown) > self.vocab_size or not all(0 <= codepoint < self.codepoints for codepoint in shown):
            raise ValueError("token_codepoints has more entries than the vocabulary, or code points than embeddings")


class Convolution(nn.Module):
    """Stage of the frame head: [N, R, C, size] to [N, R / 2, C / 2, out]."""

    def __init__(self, size: int, out: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size, eps=eps)
        self.conv = nn.Conv2d(size, out, kernel_size=3, padding=2, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        """Apply norm, convolution, GELU and average pool."""
        found = F.gelu(self.conv(self.norm(x).permute(0, 3, 1, 2)))
        return F.avg_pool2d(found, 2).permute(0, 2, 3, 1)


class Block(nn.Module):
    """Pre-norm block over a frame's tokens [N, S, size], with full attention."""

    def __init__(self, config: FrameActionConfig) -> None:
        super().__init__()
        size, eps = config.frame_size, config.rms_norm_eps
        self.heads = config.num_attention_heads
        self.attention_norm = nn.RMSNorm(size, eps=eps)
        self.qkv = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        self.mlp_norm = nn.RMSNorm(size, eps=eps)
        self.up = nn.Linear(size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return found


class FrameHead(nn.Module):
    """Maps frames [N, rows, columns] to vectors [N, hidden]."""

    def __init__(self, config: FrameActionConfig) -> None:
        super().__init__()
        size, eps = config.cell_size, config.rms_norm_eps
        self.embed_codepoint = nn.Embedding(config.codepoints, size)
        self.embed_foreground = nn.Embedding(config.foregrounds, size)
        self.embed_background = nn.Embedding(config.backgrounds, size)
        self.embed_row = nn.Embedding(config.rows, size)
        self.embed_column = nn.Embedding(config.columns, size)
        self.first = Convolution(size, config.convolution_size, eps)
        self.second = Convolution(config.convolution_size, config.frame_size, eps)
        # Not a ModuleList: FSDP would gather each block by itself, but processes run different numbers of passes.
        self.layers = nn.Sequential(*(Block(config) for _ in range(config.num_hidden_layers)))
        self.norm = nn.RMSNorm(config.frame_size, eps=eps)
        self.out = nn.Linear(config.frame_size, config.hidden_size)

    def forward(self, frames: Tensor) -> Tensor:
        """Embed each frame; cells are encoded as in `node.protocol.terminal`."""
        cells = (
            self.embed_codepoint(frames & (1 << FOREGROUND_BIT) - 1)
            + self.embed_foreground(frames >> FOREGROUND_BIT & MAX_COLOURS - 1)
            + self.embed_background(frames >> BACKGROUND_BIT)
            + self.embed_row.weight[:, None]
            + self.embed_column.weight
        )
        tokens: Tensor = self.second(self.first(cells * (frames != 0)[..., None])).flatten(1, 2)
        found: Tensor = self.out(self.norm(self.layers(tokens)).mean(1))
        return found


class Integrator(nn.Module):
    """The LSTM, with gates in the order input, forget, cell, output; 1 is added in the forget gate, so that it starts
    open (Jozefowicz et al., 2015).

    Plain parameters, because `nn.LSTM` keeps a second list of its own that sharding does not update.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.input_weight = nn.Parameter(torch.empty(4 * size, size))
        self.hidden_weight = nn.Parameter(torch.empty(4 * size, size))
        self.bias = nn.Parameter(torch.empty(4 * size))

    def init_weights(self) -> None:
        """Initialise the parameters."""
        for weight in (self.input_weight, self.hidden_weight):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        # Not zeros: no state may be all zeros, however long nothing is seen.
        nn.init.normal_(self.bias, std=0.1)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs [B, T, size] of inputs `x` [B, T, size], and h and c after the last."""
        rows, size = len(x), x.shape[-1]
        if rows == 1 and not torch.is_grad_enabled():
            # A single row is duplicated: kernels round differently for a vector, and workers decode many rows together.
            x, h, c = (each.expand(2, *each.shape[1:]) for each in (x, h, c))
        opening = torch.zeros_like(self.bias)
        opening[size : 2 * size] = 1
        weights = (self.input_weight, self.hidden_weight, self.bias, opening)
        start = (h[None].contiguous(), c[None].contiguous())
        outputs, h, c = torch.lstm(x, start, weights, True, 1, 0.0, self.training, False, True)
        return outputs[:rows], h[0][:rows], c[0][:rows]


class FrameActionModel(RecurrentModel):
    """The model without its keystroke head.

    State: h and c [B, hidden], the screen [B, rows, columns], and the terminal's row, column and phase [B, 3].
    """

    config_class = FrameActionConfig

    def __init__(self, config: FrameActionConfig) -> None:
        super().__init__(config)
        self.frame_head = FrameHead(config)
        self.layers = nn.ModuleDict({"lstm": Integrator(config.hidden_size)})
        self.embed_start = nn.Embedding(2, config.hidden_size)  # h and c before the first frame
        self.gradient_checkpointing = False  # for transformers to set; frames are embedded again in any case
        self._codepoints = list(config.token_codepoints or [])
        self.post_init()

    def _begin(self, batch: int) -> State:
        h, c = (first.expand(batch, -1) for first in self.embed_start.weight)
        screen = torch.zeros(batch, self.config.rows, self.config.columns, dtype=torch.int32, device=h.device)
        return {"h": h, "c": c, "screen": screen, "terminal": screen.new_zeros(batch, 3)}

    def _run(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:  # noqa: ARG002  (there is no grid)
        if ids_BT.is_meta:  # shape inference: there are no tokens to feed
            screens = state["screen"].repeat_interleave(ids_BT.shape[1], 0)
            seen = self.frame_head(screens).unflatten(0, ids_BT.shape)
            hidden, h, c = self.layers["lstm"](seen, state["h"], state["c"])
            return hidden, {**state, "h": h, "c": c}
        terminals = [
            Terminal(screen, row, column, Phase(phase))
            for screen, (row, column, phase) in zip(
                state["screen"].cpu().numpy().copy(), state["terminal"].tolist(), strict=True
            )
        ]
        hidden, h, c = self.layers["lstm"](self._embed_frames(ids_BT, terminals), state["h"], state["c"])
        screens = torch.from_numpy(np.stack([terminal.screen for terminal in terminals]))
        places = torch.tensor([[*terminal.cursor, terminal.phase] for terminal in terminals], dtype=torch.int32)
        return hidden, {"h": h, "c": c, "screen": screens.to(h.device), "terminal": places.to(h.device)}

    def _embed_frames(self, ids_BT: Tensor, terminals: Sequence[Terminal]) -> Tensor:
        """Feed the tokens to the terminals; return the vectors [B, T, hidden] of the frames after each."""
        distinct = _FrameCache(self._embed, limit=self._pass_frames)
        shown = [
            distinct.add(frame)
            for tokens, terminal in zip(ids_BT.tolist(), terminals, strict=True)
            for frame in self.watch(tokens, terminal)
        ]
        vectors = distinct.vectors()[torch.tensor(shown, device=ids_BT.device)]
        return vectors.view(*ids_BT.shape, -1)

    def watch(self, tokens: Sequence[int], terminal: Terminal) -> Iterator[Cells]:
        """Feed `tokens` to the terminal and yield the frame after each."""
        for token in tokens:
            terminal.feed(self._codepoints[token] if token < len(self._codepoints) else 0)
            yield terminal.frame()

    @property
    def _is_training(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @property
    def _pass_frames(self) -> int:
        return (
            max(1, MAX_TRAINED_CELLS // (self.config.rows * self.config.columns)) if self._is_training else PASS_FRAMES
        )

    def _embed(self, frames: Sequence[Cells]) -> Tensor:
        """Embed at most `_pass_frames` frames as [N, hidden]."""
        numbers = torch.from_numpy(np.stack(frames)).to(self.device)
        if self._is_training:
            learning: Tensor = checkpoint(self.frame_head, numbers, use_reentrant=False)
            return learning
        full = F.pad(numbers, (0, 0, 0, 0, 0, PASS_FRAMES - len(frames)))
        vectors: Tensor = self.frame_head(full)
        return vectors[: len(frames)]


class _FrameCache:
    """Embeds each distinct frame once, holding at most `limit` frames at a time."""

    def __init__(self, embed: Callable[[Sequence[Cells]], Tensor], *, limit: int) -> None:
        self._embed = embed
        self._limit = limit
        self._places: dict[bytes, int] = {}
        self._held: list[Cells] = []
        self._vectors: list[Tensor] = []

    def add(self, frame: Cells) -> int:
        """Add a frame and return the index of its vector."""
        key = hashlib.blake2b(frame.tobytes(), digest_size=_DIGEST_BYTES).digest()
        place = self._places.setdefault(key, len(self._places))
        if place == len(self._vectors) * self._limit + len(self._held):
            self._held.append(frame)
            if len(self._held) == self._limit:
                self._flush()
        return place

    def vectors(self) -> Tensor:
        """Return the vectors of all distinct frames [distinct, hidden]."""
        if self._held:
            self._flush()
        return torch.cat(self._vectors)

    def _flush(self) -> None:
        self._vectors.append(self._embed(self._held))
        self._held = []


class FrameActionForCausalLM(RecurrentForCausalLM):
    """With the keystroke head, which is never tied: no token is embedded."""

    config_class = FrameActionConfig
    body = FrameActionModel
    _tied_weights_keys = {}  # noqa: RUF012  (declared as transformers does)
