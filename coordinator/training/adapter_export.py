"""Export the adapters of a policy as a folder that PEFT loads; its first policy is the model that they are for.

PEFT's layout (its documentation, "PEFT checkpoint format"): adapter_config.json, and adapter_model.safetensors with
`base_model.model.<layer>.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank]. They are as trained, in float32,
and come from a checkpoint of a trainer or of `swarmproof sft`, since a policy has them merged.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors.torch import save_file

from coordinator.training.checkpoint import checkpoints, read_checkpoint
from coordinator.training.export import ExportError, written_folder
from coordinator.training.lora import A, B
from node.protocol.run import LoraSpec
from shardcast.wire import decode

_MAX_LORA_BYTES: Final = 4096


class AdapterNotHeld(ExportError):
    """The state folder has no adapters of this version."""

    code = "adapter_not_held"


@dataclass(frozen=True, slots=True)
class ExportedAdapter:
    """What was written."""

    folder: Path
    version: int
    parameters: int
    lora: LoraSpec


def export_adapter(state: Path, version: int | None, folder: Path) -> ExportedAdapter:
    """Export the adapters of a policy of which `state`, a trainer's or fine-tuning's, has a checkpoint.

    `version` is the number of steps that led to it; None takes the newest. The folder's owner may be running. Raises
    ExportError, CheckpointError, OSError.
    """
    held = {int(path.name.partition("-")[2]): path for path in checkpoints(state / "checkpoints")}
    chosen = max(held, default=0) if version is None else version
    if chosen not in held:
        there = ", ".join(map(str, held)) or "none"
        raise AdapterNotHeld(f"{state} has no checkpoint of policy {chosen}; of these there are some: {there}")
    saved, tensors = read_checkpoint(held[chosen])
    if "lora" not in saved.counters:
        raise AdapterNotHeld(f"{held[chosen]} has all weights: trained without [training.lora], or sft's --lora")
    lora = decode(LoraSpec, str(saved.counters["lora"]).encode(), max_bytes=_MAX_LORA_BYTES)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": saved.counters["initial"],
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    named = {f"base_model.model.{name}.weight": each for name, each in tensors.items() if name.endswith((A, B))}
    with written_folder(folder) as partial:
        (partial / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(named, partial / "adapter_model.safetensors", metadata={"format": "pt"})
    return ExportedAdapter(folder, chosen, sum(each.numel() for each in named.values()), lora)
