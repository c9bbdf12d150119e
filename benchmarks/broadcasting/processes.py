"""Processes of one broadcast: started in a folder of their own, spoken to, metered, and ended whatever happens.

Meters are those of Linux: `/proc/PID/stat`, `status` and `io`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
START_S = 60.0

_REASON_CHARACTERS = 300


class NodeEnded(Exception):
    """A process ended, or said nothing in time; the message has the last line of its log."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of a process and its ended children; `cpu_s` is user and system time."""

    cpu_s: float
    peak_bytes: int
    written_bytes: int


class Node:
    """One process, in a process group of its own, that speaks in lines of JSON. Its log is `<name>.log`."""

    def __init__(
        self, name: str, command: Sequence[str], *, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name=f"lines of {name}", daemon=True)
        self._reader.start()
        self._greeting: dict[str, Any] | None = None

    def send(self, **request: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)

    def reply(self, timeout_s: float = START_S) -> dict[str, Any]:
        """Return the next line, decoded. Raise NodeEnded when there is none within `timeout_s`."""
        try:
            line = self._lines.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise NodeEnded(f"{self.name} said nothing in {timeout_s:.1f} s: {self._last_words()}") from None
        if not line:
            self._lines.put(line)
            raise NodeEnded(f"{self.name} ended: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ready(self) -> Self:
        """Wait until it can be used."""
        self._greet()
        return self

    @property
    def url(self) -> str:
        """Return a server's URL once it is ready."""
        return f"http://127.0.0.1:{self._greet()['port']}"

    def _greet(self) -> dict[str, Any]:
        """Return the process's first line, which of a server has the port."""
        if self._greeting is None:
            self._greeting = self.reply()
        return self._greeting

    @property
    def exit_code(self) -> int | None:
        """Return None while it runs, and the negative number of a signal that ended it."""
        return self._process.poll()

    def usage(self) -> Usage:
        pid = self._process.pid
        times, written = psutil.Process(pid).cpu_times(), _fields(pid, "io")
        cpu_s = times.user + times.system + times.children_user + times.children_system
        # A file system in memory counts no bytes written, a mapped file no calls that write.
        written_bytes = max(written.get("write_bytes", 0), written.get("wchar", 0))
        return Usage(cpu_s, _fields(pid, "status").get("VmHWM", 0) * 1024, written_bytes)

    def kill(self) -> None:
        """Kill the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _last_words(self) -> str:
        said = self._log.read_text(errors="replace").split("\n")
        return next((line for line in reversed(said) if line.strip()), "")[:_REASON_CHARACTERS]


def _fields(pid: int, name: str) -> dict[str, int]:
    """Return the numbers in `/proc/PID/NAME` by their labels; a process that has ended has no memory."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/{name}").read_text().splitlines())
    values = {key: value.split() for key, _, value in lines}
    return {key: int(value[0]) for key, value in values.items() if value and value[0].isdigit()}


class NodeSwarm:
    """All processes of one broadcast and the folder that they write to; both are gone after `with`."""

    def __init__(self, within: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="broadcast-", dir=within))
        self.nodes: list[Node] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.kill()
        for node in self.nodes:
            node.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, role: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> Node:
        node = Node(self.name(role), command, folder=self.folder, environment=environment)
        self.nodes.append(node)
        return node

    def name(self, role: str) -> str:
        """Return the name of the next process."""
        return f"{len(self.nodes):02d}-{role}"
