"""Ctrl-C while modules are being imported: one line, and no traceback from the middle of somebody's package.

Imports nothing that takes time: it is the first that a command runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

EXIT_INTERRUPTED = 130
"""128 + SIGINT, as a shell says of a program that the signal ended."""


@contextlib.contextmanager
def exiting_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process within the block, unless somebody handles it already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(_number: int, _frame: object) -> None:
    # Nothing is cleaned up: an exception in the middle of an import ends as another one, if it is caught at all.
    os.write(2, b"Interrupted.\n")
    os._exit(EXIT_INTERRUPTED)
