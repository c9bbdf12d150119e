"""Run a program of ours in a process of its own, with a deadline and a limit on what it says.

So torch, a stranger's tokenizer and a stranger's chat template stay out of whoever asks: this module imports none of
them.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Final, NamedTuple, TypeVar

import msgspec

ANSWER_SECONDS: Final = 180.0
MAX_OUTPUT_BYTES: Final = 16 * 2**20
"""Of all that a process prints."""
CHILD_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}

_KEPT_ERROR_BYTES: Final = 4096
_PIECE_BYTES: Final = 2**16

T = TypeVar("T")


class NoAnswer(Exception):
    """The process gave no answer; the message says what it did instead."""


class EndedChild(NamedTuple):
    """A process that has ended: its exit code, all that it printed, and the end of its errors."""

    code: int
    output: bytes
    errors: bytes


def ask_child(module: str, *arguments: str, answer: type[T], seconds: float) -> T:
    """Run `module` with `arguments` in a new Python process, and return the `answer` that it prints as a line of JSON.

    Raises NoAnswer as `run_child`, and for anything but an answer.
    """
    ended = run_child("-m", module, *arguments, seconds=seconds, environment=CHILD_ENVIRONMENT)
    try:
        return msgspec.json.decode(last_line(ended.output), type=answer)
    except msgspec.MsgspecError as error:
        said = last_line(ended.errors).decode(errors="replace")[:300] or f"exit code {ended.code}"
        raise NoAnswer(f"ended with: {said}") from error


def run_child(*arguments: str, seconds: float, environment: Mapping[str, str]) -> EndedChild:
    """Run a new Python process until it ends, with these environment variables besides this process's.

    Raises NoAnswer after `seconds` or MAX_OUTPUT_BYTES, with the process and its descendants killed.
    """
    with subprocess.Popen(  # noqa: S603  (this interpreter, and a program of ours)
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, **environment},
        start_new_session=True,
    ) as child:
        until = time.monotonic() + seconds
        try:
            output, errors = _read(child, until)
            code = child.wait(max(0.0, until - time.monotonic()))
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # it is not reaped yet; its children would keep the pipes open
            if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
                raise NoAnswer(f"did not end within {seconds:.0f} s") from error
            raise
    return EndedChild(code, output, errors)


def last_line(text: bytes) -> bytes:
    """Return the last line that is not empty."""
    return text.strip().rpartition(b"\n")[2]


def _read(child: subprocess.Popen[bytes], until: float) -> tuple[bytes, bytes]:
    """Read all of the output and the end of the errors. Raises TimeoutError, and NoAnswer for too much output."""
    assert child.stdout is not None
    assert child.stderr is not None
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as open_pipes:
        open_pipes.register(child.stdout, selectors.EVENT_READ, output)
        open_pipes.register(child.stderr, selectors.EVENT_READ, errors)
        while open_pipes.get_map():
            ready = open_pipes.select(max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                piece = os.read(key.fd, _PIECE_BYTES)
                key.data.extend(piece)
                if not piece:
                    open_pipes.unregister(key.fileobj)
            if len(output) > MAX_OUTPUT_BYTES:
                raise NoAnswer(f"printed more than {MAX_OUTPUT_BYTES} bytes")
            del errors[:-_KEPT_ERROR_BYTES]
    return bytes(output), bytes(errors)
