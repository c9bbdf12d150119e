"""Recurrent policy architectures; importing this registers them with transformers by `model_type`."""

from __future__ import annotations

from typing import Final

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from node.policy.models.base import RecurrentForCausalLM
from node.policy.models.eagle import EagleForCausalLM
from node.policy.models.finch import FinchForCausalLM
from node.policy.models.frame_action import FrameActionForCausalLM
from node.policy.models.goldfinch import GoldFinchForCausalLM

_MODELS: Final = (EagleForCausalLM, FinchForCausalLM, GoldFinchForCausalLM, FrameActionForCausalLM)
RECURRENT: Final[dict[str, type[RecurrentForCausalLM]]] = {model.config_class.model_type: model for model in _MODELS}
"""By `model_type`."""

for _name, _model in RECURRENT.items():
    AutoConfig.register(_name, _model.config_class)
    AutoModel.register(_model.config_class, _model.body)
    AutoModelForCausalLM.register(_model.config_class, _model)
