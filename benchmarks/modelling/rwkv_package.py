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

from coordinator.importing.rwkv_names import published_names
from node.policy.models.wkv import HEAD_SIZE

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
        save_published(model, checkpoint)
        subprocess.run(
            [sys.executable, "-c", _CHILD, str(checkpoint), json.dumps([list(each) for each in sequences]), str(found)],
            check=True,
            capture_output=True,
            timeout=CHILD_SECONDS,
            env={**os.environ, "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "RWKV_V7_ON": "0"},
        )
        return torch.from_numpy(np.load(found))


def save_published(model: Any, path: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Save an Eagle or Finch in `path` as its authors publish one."""
    found: dict[str, Tensor] = {}
    names = published_names(model.config.model_type, model.config.num_hidden_layers)
    state = model.state_dict()
    for ours, published in names.items():
        rows = [state[ours]] if len(published.names) == 1 else list(state[ours])
        for name, row in zip(published.names, rows, strict=True):
            weight = 1 - row if published.is_complement else row
            found[name] = _shaped(name, weight, model.config).to(dtype, copy=True).contiguous()
    torch.save(found, path)  # noqa: TID251  (the package reads nothing else)


def _shaped(name: str, weight: Tensor, config: Any) -> Tensor:
    """Return a weight in its published shape: what each head has apart, other vectors of a mix behind two ones."""
    if name.endswith("time_faaaa") or (name.endswith("time_decay") and config.model_type == "eagle"):
        return weight.view(-1, HEAD_SIZE)
    return weight.view(1, 1, -1) if weight.ndim == 1 and "time_" in name else weight
