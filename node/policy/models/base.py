"""Common base of the recurrent policies, as used by the engines, the verifier and the trainer.

A family's model reads tokens into a state and predicts the next one. The engine steps with `state`, the verifier reads
whole sequences, the trainer rows of several: `RecurrentModel.forward` does all three, and a family implements only
`_run` and `_begin`. A head on top makes logits, with nothing after it (`node.policy.file.Policy.logits` relies on
that).

Modules that declare a configuration must not postpone annotations: `strict` does not check types given as strings.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils.generic import ModelOutput

from node.policy.models.wkv import WKV_CHUNK

State = dict[str, Tensor]
"""State of B sequences: each tensor has B as dimension 0. LENGTH is always among them."""

LENGTH = "length"
"""[B], int64: tokens read by each sequence."""


@strict
class RecurrentConfig(PreTrainedConfig):
    """Fields of every family: `vocab_size` logits, `hidden_size` of the last norm."""

    vocab_size: int = 65536
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 0
    tie_word_embeddings: bool = False
    use_cache: bool = False


@dataclass
class RecurrentOutput(ModelOutput):
    """`last_hidden_state` [B, T, hidden]; `state` after the last column, if requested."""

    last_hidden_state: Tensor | None = None
    state: State | None = None


class RecurrentModel(PreTrainedModel):
    """A family's model without its head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True

    def _begin(self, batch: int) -> State:
        """Return the initial state of `batch` sequences, without LENGTH."""
        raise NotImplementedError

    def _run(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
        """Compute the hidden states [B, T, hidden] of further tokens, and the state after them, without LENGTH.

        `start` is the first column's position, modulo WKV_CHUNK; with T = 1 it is ignored. Must not modify `state`. No
        column may depend on a later one: padding is on the right.
        """
        raise NotImplementedError

    def _run_end(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
        """Run like `_run`, when only the last column's hidden state is needed."""
        return self._run(ids_BT, state, start=start)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        state: State | None = None,
        use_cache: bool = False,
        last_alone: bool = False,
        **_: object,
    ) -> RecurrentOutput:
        """Read `input_ids` [B, T], continuing from `state` if given.

        A zero in `position_ids` [B, T] begins another sequence, independent of those before it in its row. Sequences
        that continue with more than one token must have equal offsets to the grid. Raises ValueError otherwise. With
        `last_alone`, only the last column's hidden state may be returned, which is less work for some families.
        """
        begins = None if position_ids is None or state is not None else _sequence_starts(position_ids)
        if begins is not None:
            if use_cache:
                raise ValueError("a row of several sequences has no single final state")
            return RecurrentOutput(last_hidden_state=self._packed(input_ids, begins))
        batch, tokens = input_ids.shape
        known = self.initial_state(batch) if state is None else state
        start = 0 if state is None or tokens == 1 else _offset(known[LENGTH])
        run = self._run_end if last_alone else self._run
        hidden_BTD, after = run(input_ids, known, start=start)
        if not use_cache:
            return RecurrentOutput(last_hidden_state=hidden_BTD)
        return RecurrentOutput(last_hidden_state=hidden_BTD, state={**after, LENGTH: known[LENGTH] + tokens})

    def initial_state(self, batch: int) -> State:
        """Return the initial state of `batch` sequences."""
        return {**self._begin(batch), LENGTH: torch.zeros(batch, dtype=torch.int64, device=self.device)}

    def _packed(self, ids_BT: Tensor, begins_BT: Tensor) -> Tensor:
        """Compute hidden states [B, T, hidden] of rows of several sequences, each in its own right-padded row."""
        firsts = begins_BT.flatten().nonzero().flatten()
        lengths = torch.diff(firsts, append=firsts.new_tensor([ids_BT.numel()]))
        rows = pad_sequence(ids_BT.flatten().split(lengths.tolist()), batch_first=True)
        hidden, _ = self._run(rows, self.initial_state(len(rows)), start=0)
        filled = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        return hidden[filled].view(*ids_BT.shape, -1)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module by its own `init_weights` if it has one, else as transformers does."""
        begin = getattr(module, "init_weights", None)
        if isinstance(module, PreTrainedModel) or begin is None:
            super()._init_weights(module)
        else:
            begin()


class RecurrentForCausalLM(PreTrainedModel):
    """A family's model, `body`, with its head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  (declared as transformers does)
    body: ClassVar[type[RecurrentModel]]

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.model = self.body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,  # noqa: ARG002  (padding is on the right, and nothing sees it)
        use_cache: bool = False,  # noqa: ARG002  (a state is the base model's to give)
        **_: object,
    ) -> CausalLMOutput:
        """Compute logits [B, T, vocabulary]."""
        hidden_BTD = self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden_BTD))

    def get_output_embeddings(self) -> nn.Linear:
        head: nn.Linear = self.lm_head
        return head

    def _init_weights(self, module: nn.Module) -> None:
        self.model._init_weights(module)  # noqa: SLF001  (one rule for both)


def select(state: State, places: Sequence[int] | Tensor) -> State:
    """Copy the states of the sequences at `places`, in that order."""
    index = torch.as_tensor(places, dtype=torch.int64)
    return {name: each[index.to(each.device)] for name, each in state.items()}


def join(states: Sequence[State]) -> State:
    """Concatenate states; shorter tensors are zero-padded."""
    return {name: _concatenate_padded([each[name] for each in states]) for name in states[0]}


def state_bytes(state: State) -> int:
    """Return the bytes a state holds."""
    return sum(each.numel() * each.element_size() for each in state.values())


def _concatenate_padded(parts: list[Tensor]) -> Tensor:
    if parts[0].ndim > 1 and len({part.shape[1] for part in parts}) > 1:
        width = max(part.shape[1] for part in parts)
        parts = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, width - part.shape[1])) for part in parts]
    return torch.cat(parts)


def _sequence_starts(position_ids_BT: Tensor) -> Tensor | None:
    """Mark where sequences begin, [B, T]; None if each row is one sequence."""
    begins_BT = position_ids_BT == 0
    if not bool(begins_BT[:, 1:].any()):
        return None
    begins_BT[:, 0] = True
    return begins_BT


def _offset(lengths: Tensor) -> int:
    """Return the common offset of all sequences to the grid."""
    offsets: Any = (lengths % WKV_CHUNK).unique().tolist()
    if len(offsets) != 1:
        raise ValueError("sequences that continue together must have equal offsets to the grid")
    return int(offsets[0])
