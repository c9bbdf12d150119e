"""The peer beside a coordinator, in a process of its own: it deals with strangers' bytes, and holds no key of the run.

It is started again, after a pause that doubles, for as long as the coordinator runs, and ends with it whatever ends it:
the child watches its standard input, which the kernel closes for the dead.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from node.discovery.addresses import reachable_hosts
from node.joining.way import address_at
from node.keys.identity import load_or_create_key
from node.protocol.peers import Address
from node.runtime.logs import as_here

log = logging.getLogger(__name__)

PEER_FOLDER = "peer"
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0
STOP_SECONDS = 5.0


def has_libp2p() -> bool:
    """Whether a peer can be started here."""
    return importlib.util.find_spec("libp2p") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """Where the peer listens, where others reach it (host and port), and the folder for its key and what it knows."""

    state: Path
    host: str
    port: int
    reached: tuple[tuple[str, int], ...] = ()

    def addresses(self) -> tuple[Address, ...]:
        """What to tell those who join; makes the peer's key if there is none."""
        node = load_or_create_key(self.state / "key").public_key().public_bytes_raw()
        reached = self.reached or tuple((host, self.port) for host in reachable_hosts(self.host))
        return tuple(address_at(host, port, node) for host, port in reached)

    def command(self, *, coordinator: str, run_id: str) -> list[str]:
        """What to run."""
        reached = [part for host, port in self.reached for part in ("--peer-address", f"{bracketed(host)}:{port}")]
        return [
            *(sys.executable, "-m", "node.cli", *as_here()),
            *("peer", "--coordinator", coordinator, "--run-id", run_id),
            *("--state", str(self.state), "--peer-listen", f"{bracketed(self.host)}:{self.port}"),
            *(*reached, "--until-parent-ends"),
        ]


class PeerChild:
    """Keeps one process running while the block is active."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="peer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()
        self._thread.join(STOP_SECONDS)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            how = self._run_once()
            if self._stopping.is_set():
                return
            failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16))
            log.warning("the peer %s; starting it again in %.1f s", how, pause)
            self._stopping.wait(pause)

    def _run_once(self) -> str:
        """Start the process and wait for its end; in words, what became of it."""
        try:
            # In a session of its own: a terminal's Ctrl-C is the coordinator's, which ends the peer when it ends.
            process = subprocess.Popen(  # noqa: S603  (our own interpreter and module, no shell)
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            return f"could not be started ({error.strerror})"
        with process:
            self._process = process
            if self._stopping.is_set():
                process.terminate()
            return f"ended with exit code {process.wait()}"


def bracketed(host: str) -> str:
    """As it stands before a port."""
    return f"[{host}]" if ":" in host else host
