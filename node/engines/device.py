"""Which device the torch engine and the reference prefill compute on."""

from __future__ import annotations

import os

import torch

from node.errors import ConfigError


def find_device(name: str) -> torch.device:
    """Return the device that --device calls "cpu", "cuda" or "auto" (a GPU where torch sees one).

    For a GPU, set what torch has to do alike in all of a run's processes: call it before anything is computed there.
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
    add_products_in_float32()
    # cuDNN's attention plans anew for each length, so for every token that is drawn; and its gradients vary.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # For a trainer's repeatable products: read at the first product; torch takes no other one.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return torch.device("cuda")


def add_products_in_float32() -> None:
    """Have a GPU add the parts of a 16-bit product in float32 in this process, from its next product or graph on.

    Else what is split among blocks, as with the few rows of decoding, is rounded to 16 bits before it is added: honest
    work deviates more from a verifier's, which reads many rows at once.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
