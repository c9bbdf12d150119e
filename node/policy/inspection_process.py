"""The process of `node.policy.inspection.inspect_folder`: validate the folder given, print one line of JSON.

Its memory and its processor time are limited, since a tokenizer and a chat template may ask for any amount.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Final

import msgspec
import torch

from node.policy.errors import MalformedPolicy
from node.policy.folder import check_chat_template, validate_folder
from node.policy.inspection import Inspected

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


def limit_resources(*, cpu_seconds: int | None = CPU_SECONDS) -> None:
    """Limit this process's memory and, unless that is None, its processor time for good."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    for kind, most in (
        (resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_CORE, 0),
    ):
        if most is None:
            continue
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    torch.set_num_threads(1)
    limit_resources()
    sys.stdout.write(msgspec.json.encode(inspect(Path(sys.argv[1]))).decode() + "\n")
