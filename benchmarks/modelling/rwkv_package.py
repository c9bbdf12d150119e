"""The same weights through the authors' own package: `rwkv` on PyPI (Apache-2.0), in plain torch on the CPU.

It reads checkpoints of torch.save, so one is written for it, in a folder that is deleted at once. It prints, sets
torch's global switches and reads its settings from the environment, and so runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

CHILD_SECONDS = 120.0
_CHILD = """
import json, sys
import numpy as np
from rwkv.model import RWKV
model = RWKV(model=sys.argv[1], strategy="cpu fp32")
found = [model.forward(ids, None, full_output=True)[0].numpy() for ids in json.loads(sys.argv[2])]
np.save(sys.argv[3], np.stack(found))
"""


def package_logits(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Return the package's logits [S, T, vocabulary] of sequences of one length above 1, by an Eagle or Finch.

    Raises CalledProcessError where the package fails, or is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, found = Path(folder) / "model.pth", Path(folder) / "logits.npy"
        torch.save(_renamed(model), checkpoint)  # noqa: TID251  (the package reads nothing else)
        subprocess.run(
            [sys.executable, "-c", _CHILD, str(checkpoint), json.dumps([list(each) for each in sequences]), str(found)],
            check=True,
            capture_output=True,
            timeout=CHILD_SECONDS,
            env={**os.environ, "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": "0"},
        )
        return torch.from_numpy(np.load(found))


def _renamed(model: Any) -> dict[str, Tensor]:
    """Return the state dict under the package's names, in an order from which it tells the version."""
    body, finch = model.model, model.config.model_type == "finch"
    found = {"emb.weight": body.embeddings.weight}
    for index, layer in enumerate(body.layers):
        at = f"blocks.{index}"
        norms = {"ln1": layer.time_norm, "ln2": layer.channel_norm, "att.ln_x": layer.time_mix.norm}
        if index == 0:
            norms["ln0"] = body.first_norm
        for name, norm in norms.items():
            found |= {f"{at}.{name}.weight": norm.weight, f"{at}.{name}.bias": norm.bias}
        time, channel = layer.time_mix, layer.channel_mix
        for name in ("receptance", "key", "value", "gate", "output"):
            found[f"{at}.att.{name}.weight"] = getattr(time, name).weight
        for name in ("receptance", "key", "value"):
            found[f"{at}.ffn.{name}.weight"] = getattr(channel, name).weight
        found |= {f"{at}.{name}": weight for name, weight in (_finch if finch else _eagle)(time, channel).items()}
        heads = time.norm.num_groups
        found[f"{at}.att.time_faaaa"] = time.bonus.view(heads, -1)
        found[f"{at}.att.time_decay"] = time.decay.view(1, 1, -1) if finch else time.decay.view(heads, -1)
    found |= {"ln_out.weight": body.last_norm.weight, "ln_out.bias": body.last_norm.bias}
    found["head.weight"] = model.lm_head.weight
    return {name: weight.detach().clone().contiguous() for name, weight in found.items()}


def _eagle(time: Any, channel: Any) -> dict[str, Tensor]:
    """Mix the other way round, as the package does: the share of the token itself."""
    shares = {"k": time.mix_key, "v": time.mix_value, "r": time.mix_receptance, "g": time.mix_gate}
    mixed = {f"att.time_mix_{name}": 1 - share for name, share in shares.items()}
    return mixed | {"ffn.time_mix_k": 1 - channel.mix_key, "ffn.time_mix_r": 1 - channel.mix_receptance}


def _finch(time: Any, channel: Any) -> dict[str, Tensor]:
    return {
        "att.time_maa_x": time.mix_first,
        **{f"att.time_maa_{name}": share for name, share in zip("wkvrg", time.mix, strict=True)},
        "att.time_maa_w1": time.mix_down,
        "att.time_maa_w2": time.mix_up,
        "att.time_decay_w1": time.decay_down,
        "att.time_decay_w2": time.decay_up,
        "ffn.time_maa_k": channel.mix_key,
        "ffn.time_maa_r": channel.mix_receptance,
    }
