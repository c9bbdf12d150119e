"""The architectures that forgers attack, transformers' own and recurrent ones, behind the same few functions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from benchmarks.modelling.families import small_config
from coordinator.calibration.workers import without_onednn
from node.engines.torch_decoder import cache_keyword
from node.policy.models.base import RecurrentForCausalLM
from node.policy.models.eagle import EagleConfig, EagleForCausalLM
from node.policy.models.finch import FinchConfig, FinchForCausalLM
from node.policy.models.frame_action import FrameActionConfig, FrameActionForCausalLM
from node.policy.models.goldfinch import GoldFinchConfig, GoldFinchForCausalLM

ATTENTION = ("llama", "qwen3", "olmo2")
SPECIAL = ("gemma3_text", "qwen3_moe")
"""With windows, and with experts."""
_PLAIN: dict[str, Any] = {"attention_dropout": 0.0, "final_logit_softcapping": None, "moe_intermediate_size": 256}
"""What they train and decode without, and their experts' width."""
RECURRENT = ("eagle", "finch", "goldfinch", "frame-action")
FAMILIES = ATTENTION + SPECIAL + RECURRENT
VOCABULARY = 128
LAYERS = 4
_RWKV: dict[str, tuple[Any, Any]] = {
    "eagle": (EagleConfig, EagleForCausalLM),
    "finch": (FinchConfig, FinchForCausalLM),
    "goldfinch": (GoldFinchConfig, GoldFinchForCausalLM),
}
_TOKENS: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}


def make(family: str, *, hidden: int, layers: int = LAYERS) -> Any:
    """Make an untrained policy in float32; the layers of `frame-action` are its frame head's blocks.

    GoldFinch's last third are GOLD layers, and it has at least three.
    """
    sizes = _TOKENS | {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": 3 * hidden}
    if family == "frame-action":
        return FrameActionForCausalLM(_frame_action(sizes))
    if family in _RWKV:
        config_class, model_class = _RWKV[family]
        return model_class(config_class(**sizes))
    heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 128, "head_dim": 64}
    fields = sizes | heads | {"max_position_embeddings": 512, "tie_word_embeddings": False}
    if family in SPECIAL:
        return build(small_config(family, **fields | _PLAIN))
    make_config: Any = CONFIG_MAPPING[family]
    return build(make_config(**fields))


def build(config: Any) -> Any:
    """Build one of transformers' own policies."""
    from_config: Any = AutoModelForCausalLM.from_config
    return from_config(config)


def _frame_action(sizes: dict[str, Any]) -> FrameActionConfig:
    """Return a configuration with a screen as the tiny policy's; the tokens are ASCII."""
    return FrameActionConfig(
        **sizes | {"intermediate_size": 256},
        frame_size=64,
        cell_size=24,
        convolution_size=32,
        rows=8,
        columns=16,
        codepoints=VOCABULARY,
        foregrounds=3,
        backgrounds=2,
        token_codepoints=list(range(VOCABULARY)),
        initializer_range=0.1,
    )


def sees_frames(model: Any) -> bool:
    """Whether its policy looks at a terminal, which is fed the tokens."""
    return isinstance(model, FrameActionForCausalLM)


def decode(model: Any, ids: Tensor, memory: Any) -> tuple[Tensor, Any]:
    """Decode further tokens behind `memory`; return their final states [rows, tokens, hidden], and the new memory."""
    if isinstance(model, RecurrentForCausalLM):
        after = model.base_model(input_ids=ids, state=memory, use_cache=True)
        return after.last_hidden_state, after.state
    base = model.base_model
    after = base(input_ids=ids, use_cache=True, **{cache_keyword(base): memory})
    return after.last_hidden_state, after.past_key_values


@contextmanager
def other_kernel(model: Any) -> Iterator[None]:
    """Use a worker's kernels, other than a verifier's: attention's, or those of convolutions and of an LSTM.

    RWKV's decoding and its prefill differ as they are.
    """
    if sees_frames(model):
        with without_onednn():
            yield
    elif isinstance(model, RecurrentForCausalLM):
        yield
    else:
        model.set_attn_implementation("sdpa")
        yield
        model.set_attn_implementation("eager")


def first_layers(model: Any, count: int) -> Any:
    """Return the body with its first `count` layers only."""
    body = copy.deepcopy(model.base_model)
    part = body.frame_head if sees_frames(model) else body
    part.layers = part.layers[:count]
    return body


def embedding(model: Any) -> Tensor:
    """Return a vector for each token; where none is embedded, tokens are as different as can be."""
    if sees_frames(model):
        return model.lm_head.weight.new_ones(VOCABULARY).diag()
    table: nn.Embedding = model.base_model.get_input_embeddings()
    return table.weight.detach()


def make_student(model: Any) -> Any:
    """Make one layer of the policy's own kind, begun from its first; of GoldFinch's reading part, Finch."""
    if isinstance(model, RecurrentForCausalLM):
        family = {GoldFinchConfig: "finch"}.get(type(model.config), model.config.model_type.replace("_", "-"))
        student = make(family, hidden=model.config.hidden_size, layers=1)
    else:
        student = build(type(model.config)(**(model.config.to_dict() | {"num_hidden_layers": 1, "layer_types": None})))
    own = student.state_dict()
    same = {name: value for name, value in model.state_dict().items() if name in own and own[name].shape == value.shape}
    student.load_state_dict(same, strict=False)
    return student.float()
