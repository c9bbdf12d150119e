"""Models without memory for their weights, and what shows that one computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from node.policy.attention import kernel_of, layer_masks
from node.policy.config import ATTENTION
from node.policy.errors import MalformedPolicy
from node.policy.experts import SORTED, use_exact_routers
from node.policy.families import FUSED_PROJECTIONS, LONGROPE, PROJECTIONS
from node.policy.memory import is_out_of_memory
from node.policy.norms import use_short_norms
from node.policy.products import use_blocks


def build_skeleton(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model on the meta device, from this machine's classes only; raises MalformedPolicy."""
    build: Any = AutoModelForCausalLM.from_config
    has_attention = config.model_type in ATTENTION
    kernel = {"attn_implementation": kernel_of(config), "experts_implementation": SORTED} if has_attention else {}
    try:
        with torch.device("meta"):
            # transformers makes the dtype it is given that of all threads meanwhile: whoever computes beside this
            # would get tensors of 16 bits.
            model: PreTrainedModel = build(config, dtype=torch.float32, **kernel)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            model.config.dtype = dtype
    except Exception as error:
        raise MalformedPolicy(f"no model has its configuration: {error}", code="bad_config") from error
    if has_attention:
        _check_buffers(model)
        _pin_positions(model)
    use_blocks(model)
    use_short_norms(model)
    use_exact_routers(model)
    return model


def _pin_positions(model: PreTrainedModel) -> None:
    """Have transformers keep the frequencies that it begins with, whatever the longest sequence of a batch is."""
    rotary: Any = model.base_model.rotary_emb
    if rotary.rope_type == LONGROPE:
        rotary.rope_type = "default"


def _check_buffers(model: PreTrainedModel) -> None:
    """Refuse a model with numbers that no file carries, and that `fill_buffers` would leave arbitrary."""
    filled = (f"{model.base_model_prefix}.rotary_emb.", f"{model.base_model_prefix}.embed_tokens.embed_scale")
    unknown = {name for name, _ in model.named_buffers()} - model.state_dict().keys()
    if left := sorted(name for name in unknown if not name.startswith(filled)):
        raise MalformedPolicy(f"its numbers {left[0]!r} are in no file", code="bad_config")


def unique_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict, shared weights once."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name] for name in first.values()}


def layer_matrices(model: nn.Module) -> Iterator[Tensor]:
    """Yield views of the layers' matrices [rows, in], those of a layer's experts as one."""
    for name, weight in model.named_parameters():
        if ".layers." in name and is_matrix(name, weight.shape):
            yield weight.flatten(0, -2)


def is_matrix(name: str, shape: torch.Size) -> bool:
    """Tell whether a tensor of a layer is a matrix, or those of its experts, and no kernel of a convolution."""
    return len(shape) == 2 or (len(shape) == 3 and ".experts." in name)


def projections(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that can have adapters, by their full names."""
    found = ((name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear))
    return {name: each for name, each in found if name.rpartition(".")[2] in (*PROJECTIONS, *FUSED_PROJECTIONS)}


def projection_widths(model: nn.Module) -> dict[str, int]:
    """Return, by short name, the inputs and outputs of those layers together: what adapters of rank 1 have."""
    widths = Counter[str]()
    for name, layer in projections(model).items():
        widths[name.rpartition(".")[2]] += layer.in_features + layer.out_features
    return dict(widths)


def materialise(skeleton: PreTrainedModel, device: torch.device) -> None:
    """Give the model memory for its weights, which are arbitrary, and the numbers that no file carries."""
    skeleton.to_empty(device=device)
    skeleton.tie_weights()  # `to_empty` makes two weights of a shared one
    if skeleton.config.model_type in ATTENTION:
        fill_buffers(skeleton, device)
    skeleton.train(False)


def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute, in float32, the rotary frequencies of a model with attention, and the scale of its embedding."""
    base: Any = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config=model.config).to(device)
    _pin_positions(model)
    embedding = base.embed_tokens
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, dtype=torch.float32, device=device)


def probe_shapes(skeleton: PreTrainedModel) -> None:
    """Run a forward pass on meta tensors, which reveals e.g. head counts that do not divide."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    # Masks and positions are given, since computing them reads values; a recurrence would read given positions.
    given: dict[str, Any] = {}
    if skeleton.config.model_type in ATTENTION:
        masks = layer_masks(skeleton.config, ids, columns=2, dtype=skeleton.dtype)
        given = {"attention_mask": masks, "position_ids": ids}
    try:
        with torch.inference_mode():
            skeleton(input_ids=ids, use_cache=False, **given)
    except Exception as error:
        raise MalformedPolicy(f"its forward pass fails: {error}", code="broken_model") from error


def probe(model: PreTrainedModel) -> None:
    """Run one forward pass, which reveals head counts that do not divide and non-finite results.

    On the last token, then the first: the first is often padding, whose zeros would hide what the layers hold.
    """
    ids = torch.tensor([[model.config.vocab_size - 1, 0]], device=model.device)
    try:
        # Not in inference mode: FSDP would keep inference tensors for the training that follows.
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        finite = bool(logits.isfinite().all())
    except Exception as error:
        if is_out_of_memory(error):
            raise  # says nothing of the policy
        raise MalformedPolicy(f"its forward pass fails: {error}", code="broken_model") from error
    if not finite:
        raise MalformedPolicy("its logits are not finite", code="broken_model")
