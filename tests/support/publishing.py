"""Publishers and fetchers as processes, and slow lines between them: for tests of the two commands."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from locations import ROOT
from waiting import until

# What a shell starts in the background ignores SIGINT, and so would these.
SWARMPROOF = ["env", "--default-signal=INT", sys.executable, "-m", "node.cli"]
WAIT_SECONDS = 60.0


def weights(size: int, *, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(size))


def trained(data: bytearray, *, every: int = 5000) -> bytearray:
    """What one step of training leaves: a few bytes here and there are others."""
    data = bytearray(data)
    for at in range(0, len(data), every):
        data[at] ^= 1
    return data


def replace(path: Path, data: bytes | bytearray) -> None:
    path.with_name("next").write_bytes(data)
    path.with_name("next").replace(path)


class Process:
    """A command under way; what it writes goes to files."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        folder.mkdir()
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [*SWARMPROOF, *arguments], stdout=out, stderr=err, cwd=ROOT, env={**os.environ, "HOME": str(folder)}
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def until_said(self, text: str) -> None:
        until(lambda: text in self.out + self.err or self._process.poll() is not None, what=lambda: self.out + self.err)
        assert text in self.out + self.err, self.out + self.err

    def end(self, number: int = signal.SIGINT) -> int:
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        return self._process.wait(WAIT_SECONDS)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass(frozen=True)
class Address:
    """What the other side is told."""

    url: str
    run_id: str
    key: str

    @property
    def arguments(self) -> list[str]:
        return [self.url, "--run-id", self.run_id, "--key", self.key]


class Shop:
    """Publishers and fetchers of a test, all of which end with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[Process] = []

    def start(self, *arguments: str) -> Process:
        process = Process(self.folder / f"process-{len(self._processes)}", *arguments)
        self._processes.append(process)
        return process

    def publish(self, file: Path, *options: str, state: str = "publisher") -> tuple[Process, Address]:
        process = self.start("publish", str(file), "--port", "0", "--state", str(self.folder / state), *options)
        process.until_said("    -o ")
        words = shlex.split(process.out[process.out.index("swarmproof fetch") :].replace("\\\n", " "))
        assert words[:2] == ["swarmproof", "fetch"]
        assert words[7:9] == ["-o", file.name]
        return process, Address(url=words[2], run_id=words[4], key=words[6])

    def fetch(self, *arguments: str, state: str = "fetcher", **limits: int) -> subprocess.CompletedProcess[str]:
        def limit() -> None:
            if "largest_file" in limits:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limits["largest_file"], limits["largest_file"]))

        return subprocess.run(
            [*SWARMPROOF, "fetch", *arguments, "--state", str(self.folder / state)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=WAIT_SECONDS,
            check=False,
            preexec_fn=limit,
        )

    def close(self) -> None:
        for process in self._processes:
            process.kill()


@contextlib.contextmanager
def slow(url: str, *, bytes_per_s: int) -> Iterator[str]:
    """A line that carries so much and no more, to whatever listens at `url`."""
    host, port = url.removeprefix("http://").split(":")
    listener = socket.create_server(("127.0.0.1", 0))
    lock, opened = threading.Lock(), list[socket.socket]()

    def pump(source: socket.socket, target: socket.socket, *, throttled: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(16 * 1024):
                if throttled:
                    with lock:
                        time.sleep(len(data) / bytes_per_s)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                opened.extend((near, far))
                threading.Thread(target=pump, args=(near, far), kwargs={"throttled": False}, daemon=True).start()
                threading.Thread(target=pump, args=(far, near), kwargs={"throttled": True}, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for each in opened:
            each.close()
