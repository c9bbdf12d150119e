"""Reduce the chat template of a model's folder, in a process of its own with a deadline.

A stranger's template stays out of whoever asks, and so do torch and transformers: this module imports none of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from node.chat.errors import Irreducible
from node.protocol.chat import ChatFormat

REDUCTION_SECONDS: Final = 180.0

CHILD_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Reduced(msgspec.Struct, frozen=True):
    """The answer of `node.chat.reduction_process`: a format, or why there is none.

    `is_dated`: the template writes the date, and the format the date of its reduction.
    """

    chat: ChatFormat | None = None
    is_dated: bool = False
    refusal: str = "its reduction said nothing"


def reduce_folder(folder: Path, *, thinking: bool, seconds: float = REDUCTION_SECONDS) -> Reduced:
    """Reduce the chat template in `folder`, with its thinking mode on or off; raise Irreducible with the reason."""
    switch = "thinking" if thinking else "no-think"
    command = [sys.executable, "-P", "-m", "node.chat.reduction_process", str(folder.absolute()), switch]
    try:
        done = subprocess.run(  # noqa: S603  (this interpreter, a module of ours, and a path as one argument)
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            env={**os.environ, **CHILD_ENVIRONMENT},
        )
    except subprocess.TimeoutExpired as error:
        raise Irreducible(f"{folder}: its chat template could not be reduced within {seconds:.0f} s") from error
    try:
        found = msgspec.json.decode(done.stdout.strip().rpartition(b"\n")[2], type=Reduced)
    except msgspec.MsgspecError as error:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2][:300] or f"exit code {done.returncode}"
        raise Irreducible(f"{folder}: the reduction of its chat template ended with: {said}") from error
    if found.chat is None:
        raise Irreducible(f"{folder}: its chat template cannot be reduced to data: {found.refusal}")
    return found
