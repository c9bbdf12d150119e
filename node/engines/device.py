"""Which device the torch engine and the reference prefill compute on."""

from __future__ import annotations

import torch

from node.errors import ConfigError


def find_device(name: str) -> torch.device:
    """Return the device that --device calls "cpu", "cuda" or "auto" (a GPU where torch sees one).

    Raises ConfigError if it is not there.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cpu" or (name == "auto" and not has_gpu):
        return torch.device("cpu")
    if not has_gpu:
        built = "sees no GPU here" if torch.version.cuda or torch.version.hip else "is built for the CPU"
        raise ConfigError(f"There is no device cuda: torch {torch.__version__} {built}.", code="device_missing")
    # cuDNN would round the operands of float32 convolutions and LSTMs to TF32; matrix products stay exact by default.
    torch.backends.cudnn.allow_tf32 = False
    return torch.device("cuda")
