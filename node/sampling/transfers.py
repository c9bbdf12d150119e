"""Copies between a host and its device for which no thread has to wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[np.integer[Any]], device: torch.device) -> Tensor:
    """Copy `values` to `device`, in the order of its current stream; a CPU's tensor shares their memory.

    From ordinary memory a copy would wait for all that the device has been given to do.
    """
    host = torch.from_numpy(values)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
