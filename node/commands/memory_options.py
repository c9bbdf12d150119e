"""`--policy-memory` of the commands that verify."""

from __future__ import annotations

from typing import Final

import click

GIB: Final = 2**30
SHARE: Final = 0.5
"""Of the memory that is free at the start, where nothing else is said."""

policy_memory_option = click.option(
    "--policy-memory",
    type=click.FloatRange(min=0),
    metavar="GIB",
    help="Most memory for policies, of --device; one that takes more is read from disk layer by layer, which takes "
    "longer. Not vLLM's memory.  [default: half of what is free]",
)


def policy_memory_bytes(gib: float | None, *, engine: str, device: str) -> int:
    """Return the bytes that `--policy-memory` gives to policies; raises ConfigError for a device that is not there."""
    if gib is not None:
        return int(gib * GIB)
    if engine == "torch":
        import torch

        from node.engines.device import find_device

        if (found := find_device(device)).type == "cuda":
            return int(torch.cuda.mem_get_info(found)[0] * SHARE)
    from node.doctor.machine import free_memory

    return int(free_memory() * SHARE)
