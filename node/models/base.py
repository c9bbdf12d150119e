"""What every recurrent policy is to the engines, the verifier and the trainer.

A family's model reads tokens into a state and says what comes next. The engine steps with `state`, the verifier reads
whole sequences, the trainer rows of several: `RecurrentModel.forward` does all three, and a family writes `_run` and
`_begin` alone. A head on top makes logits, and nothing comes after it (`node.policy.Policy.logits` relies on that).

No module that declares a configuration postpones its annotations: of a type that is a string, `strict` checks nothing.
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

from node.models.wkv import WKV_CHUNK

State = dict[str, Tensor]
"""What a model remembers of B sequences: each tensor has B as dimension 0. LENGTH is always among them."""

LENGTH = "length"
"""[B], int64: the tokens that each sequence has had."""


@strict
class RecurrentConfig(PreTrainedConfig):
    """What every family has: `vocab_size` logits, `hidden_size` of the last norm."""

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
    """`last_hidden_state` [B, T, hidden]; `state` after the last column, where it was asked for."""

    last_hidden_state: Tensor | None = None
    state: State | None = None


class RecurrentModel(PreTrainedModel):
    """A family's model without its head."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True

    def _begin(self, batch: int) -> State:
        """The state of `batch` sequences before their first token, without LENGTH."""
        raise NotImplementedError

    def _run(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
        """The hidden states [B, T, hidden] of further tokens, and the state after them, without LENGTH.

        `start` is the first column's position, or as far beyond a multiple of WKV_CHUNK as it is; with T = 1 it says
        nothing. Changes nothing of `state`. No column may depend on a later one: padding is on the right.
        """
        raise NotImplementedError

    def _run_end(self, ids_BT: Tensor, state: State, *, start: int) -> tuple[Tensor, State]:
        """As `_run`, where of the hidden states the last column's is all that is wanted."""
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
        """Read `input_ids` [B, T], behind `state` if one is given.

        A zero in `position_ids` [B, T] begins another sequence, which sees nothing of those before it in its row.
        Sequences that go on with more than one token stand equally far beyond the grid. Raises ValueError otherwise.
        With `last_alone`, hidden states may be those of the last column alone: for some families that is less work.
        """
        begins = None if position_ids is None or state is not None else _begins(position_ids)
        if begins is not None:
            if use_cache:
                raise ValueError("a row of several sequences has no one state after it")
            return RecurrentOutput(last_hidden_state=self._packed(input_ids, begins))
        batch, tokens = input_ids.shape
        known = self.started(batch) if state is None else state
        start = 0 if state is None or tokens == 1 else _offset(known[LENGTH])
        run = self._run_end if last_alone else self._run
        hidden_BTD, after = run(input_ids, known, start=start)
        if not use_cache:
            return RecurrentOutput(last_hidden_state=hidden_BTD)
        return RecurrentOutput(last_hidden_state=hidden_BTD, state={**after, LENGTH: known[LENGTH] + tokens})

    def started(self, batch: int) -> State:
        """The state of `batch` sequences before their first token."""
        return {**self._begin(batch), LENGTH: torch.zeros(batch, dtype=torch.int64, device=self.device)}

    def _packed(self, ids_BT: Tensor, begins_BT: Tensor) -> Tensor:
        """Hidden states [B, T, hidden] of rows of several sequences: each in a row of its own, padded on the right."""
        firsts = begins_BT.flatten().nonzero().flatten()
        lengths = torch.diff(firsts, append=firsts.new_tensor([ids_BT.numel()]))
        rows = pad_sequence(ids_BT.flatten().split(lengths.tolist()), batch_first=True)
        hidden, _ = self._run(rows, self.started(len(rows)), start=0)
        filled = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        return hidden[filled].view(*ids_BT.shape, -1)

    def _init_weights(self, module: nn.Module) -> None:
        """A module with weights of its own says how they begin (`init_weights`); transformers knows the others."""
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
        logits_to_keep: int | Tensor = 0,
        **_: object,
    ) -> CausalLMOutput:
        """Logits [B, kept, vocabulary] of the last `logits_to_keep` columns (0: of all), or of those it names."""
        hidden_BTD = self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self.lm_head(hidden_BTD[:, kept]))

    def get_output_embeddings(self) -> nn.Linear:
        head: nn.Linear = self.lm_head
        return head

    def _init_weights(self, module: nn.Module) -> None:
        self.model._init_weights(module)  # noqa: SLF001  (one rule for both)


def select(state: State, places: Sequence[int] | Tensor) -> State:
    """The state of the sequences at `places`, in their order, copied."""
    index = torch.as_tensor(places, dtype=torch.int64)
    return {name: each[index.to(each.device)] for name, each in state.items()}


def join(states: Sequence[State]) -> State:
    """The states of all sequences, one behind the other; what is shorter than another's is padded with zeros."""
    return {name: _concatenated([each[name] for each in states]) for name in states[0]}


def state_bytes(state: State) -> int:
    """What a state holds."""
    return sum(each.numel() * each.element_size() for each in state.values())


def _concatenated(parts: list[Tensor]) -> Tensor:
    if parts[0].ndim > 1 and len({part.shape[1] for part in parts}) > 1:
        width = max(part.shape[1] for part in parts)
        parts = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, width - part.shape[1])) for part in parts]
    return torch.cat(parts)


def _begins(position_ids_BT: Tensor) -> Tensor | None:
    """[B, T]: where a sequence begins; None where each row is one."""
    begins_BT = position_ids_BT == 0
    if not bool(begins_BT[:, 1:].any()):
        return None
    begins_BT[:, 0] = True
    return begins_BT


def _offset(lengths: Tensor) -> int:
    """How far beyond the grid all sequences are."""
    offsets: Any = (lengths % WKV_CHUNK).unique().tolist()
    if len(offsets) != 1:
        raise ValueError("sequences that go on together stand equally far beyond the grid")
    return int(offsets[0])
