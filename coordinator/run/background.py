"""A thread that runs as long as a block does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def background_thread(run: Callable[[threading.Event], None], *, name: str) -> Iterator[None]:
    """Context manager during which `run(stop)` runs in a thread; at the end `stop` is set and the thread joined."""
    stop = threading.Event()
    # A daemon, so that a second interrupt, which ends the join, ends the process too.
    thread = threading.Thread(target=run, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
