"""The process of `node.policy.inspection.inspect_folder`: validate the folder given, print one line of JSON.

Its memory and its processor time are limited, since a tokenizer and a chat template may ask for any amount.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
import torch

from node.policy.errors import MalformedPolicy
from node.policy.folder import validate_folder
from node.policy.inspection import Inspected
from node.policy.tokenizer_files import check_chat_template

CPU_SECONDS: Final = 120
MEMORY_BYTES: Final = 8 * 2**30
"""Of address space beyond what the imports take."""


def inspect(folder: Path) -> Inspected:
    """Validate `folder` and render its chat template; a fault is a value here."""
    try:
        policy = validate_folder(folder)
        if policy.has_chat_template:
            check_chat_template(folder)
    except MalformedPolicy as error:
        return Inspected(code=error.code, message=str(error))
    return Inspected(policy=policy)


def limit_resources(*, cpu_seconds: int = CPU_SECONDS) -> None:
    """Limit this process's memory for good, and its processor time until `allow_cpu_time` allows more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)
    _limit(resource.RLIMIT_CPU, cpu_seconds)
    _limit(resource.RLIMIT_CORE, 0)


def allow_cpu_time(seconds: float) -> None:
    """Have this process end once it has used so much more processor time: as an orphan, nobody else ends it."""
    _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    torch.set_num_threads(1)
    limit_resources()
    sys.stdout.write(msgspec.json.encode(inspect(Path(sys.argv[1]))).decode() + "\n")
