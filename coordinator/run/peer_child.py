"""The coordinator's peer as a child process: it parses untrusted input, and holds no key of the run.

It is restarted with exponential backoff while the coordinator runs, and ends with it even on SIGKILL: the child
watches its standard input, which the kernel then closes.
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
from typing import Self

from node.discovery.addresses import reachable_hosts
from node.joining.options import address_at
from node.keys.identity import load_or_create_key
from node.protocol.peers import Address
from node.runtime.logs import log_format_args

log = logging.getLogger(__name__)

PEER_FOLDER = "peer"
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 60.0
STOP_SECONDS = 5.0


def has_libp2p() -> bool:
    """Return whether libp2p is installed, so that a peer can run here."""
    return importlib.util.find_spec("libp2p") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerPlan:
    """The peer's listen address, the (host, port) pairs at which others reach it, and its state folder."""

    state: Path
    host: str
    port: int
    reached: tuple[tuple[str, int], ...] = ()

    def addresses(self) -> tuple[Address, ...]:
        """Return the addresses to publish; creates the peer's key if there is none."""
        node = load_or_create_key(self.state / "key").public_key().public_bytes_raw()
        reached = self.reached or tuple((host, self.port) for host in reachable_hosts(self.host))
        return tuple(address_at(host, port, node) for host, port in reached)

    def command(self, *, coordinator: str, run_id: str) -> list[str]:
        """Return the command line of the peer process."""
        reached = [part for host, port in self.reached for part in ("--peer-address", f"{bracketed(host)}:{port}")]
        return [
            *(sys.executable, "-m", "node.cli", *log_format_args()),
            *("peer", "--coordinator", coordinator, "--run-id", run_id),
            *("--state", str(self.state), "--peer-listen", f"{bracketed(self.host)}:{self.port}"),
            *(*reached, "--until-parent-ends"),
        ]


class PeerChild:
    """Context manager that keeps one process running, restarting it with backoff."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="peer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
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
            outcome = self._run_once()
            if self._stopping.is_set():
                return
            failures = 1 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            pause = min(MAX_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 16))
            log.warning("the peer %s; restarting it in %.1f s", outcome, pause)
            self._stopping.wait(pause)

    def _run_once(self) -> str:
        """Start the process and wait for its exit; return the outcome in words."""
        try:
            # In its own session: Ctrl-C in a terminal goes to the coordinator, which ends the peer.
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
    """Return `host` as it is written before a port: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host
