"""The machine a figure was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

CPUINFO = Path("/proc/cpuinfo")


def describe() -> dict[str, str | int]:
    """CPU model, cores usable by this process, and versions of what the figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }


def _cpu_model() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
