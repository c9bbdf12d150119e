"""A family's step of training in two processes that share the model (FSDP2 over gloo).

Processes are forks of one that has imported everything, since importing takes longer than a step of a tiny policy.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.modelling.family_checks import relative, run_of, step_gradients
from coordinator.training.distributed_learner import write_gathered
from coordinator.training.groups import Group
from coordinator.training.lora import load_trained
from coordinator.training.world import open_world

PROCESSES: Final = 2
SECONDS: Final = 300.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def ranks_difference(path: Path, groups: Sequence[Group], expected: Mapping[str, Tensor], folder: Path) -> float:
    """Return how far the gradients of a step of PROCESSES processes are from those of one.

    Before the step they publish the policy, which has to be the file that they read, byte for byte. Raises
    RuntimeError with what went wrong.
    """
    folder.mkdir()
    (folder / "groups").write_bytes(msgspec.msgpack.encode(list(groups)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = [_FORKS.Process(target=_rank, args=(path, folder, rank, port)) for rank in range(PROCESSES)]
    for process in started:
        process.start()
    end = time.monotonic() + SECONDS
    while any(process.exitcode is None for process in started) and time.monotonic() < end:
        if any(process.exitcode for process in started):
            break  # the other one waits for it
        started[0].join(0.1)
    for process in started:
        if process.exitcode is None:
            process.kill()
        process.join()
    if any(process.exitcode for process in started):
        told = sorted(folder.glob("error-*"))
        raise RuntimeError(told[0].read_text() if told else f"no result after {SECONDS:.0f} s")
    if (folder / "published").read_bytes() != path.read_bytes():
        raise RuntimeError("the processes published another policy file than they read")
    return relative(load_file(folder / "gradients"), expected)


def _rank(path: Path, folder: Path, rank: int, port: int) -> None:
    """Do one process's part; an error goes into a file, and ends the process."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(PROCESSES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    groups = msgspec.msgpack.decode((folder / "groups").read_bytes(), type=list[Group])
    try:
        with open_world(device="cpu") as world:
            policy = load_trained(path, lora=None, seed=0, recompute=False, world=world)
            stored: Any = policy.config.dtype
            write_gathered(policy.model, policy.tokenizer, folder / "published", dtype=stored, world=world)
            found = step_gradients(policy, groups, run_of("float32"), world=world)
            if world.is_first:
                save_file(found, folder / "gradients")
    except Exception as error:  # noqa: BLE001  (told to the process that waits)
        (folder / f"error-{rank}").write_text(f"{type(error).__name__}: {str(error)[:300]}")
        os._exit(1)  # without waiting for the other process
