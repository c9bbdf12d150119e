"""Hundreds of connections that ask nothing, against the operator's own command, with few places and few descriptors."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from pathlib import Path

import pytest
from waiting import until

from benchmarks.loading.coordinator import RUN_TOML, running_command, wait_for_port
from node.keys.identity import create_key

HALF_OPEN = 300
STATUS = b"GET /v1/status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def connect(port: int, source: str) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(5)
    connection.bind((source, 0))
    connection.connect(("127.0.0.1", port))
    return connection


def status_is_told(port: int) -> bool:
    with contextlib.suppress(OSError), connect(port, "127.0.0.99") as connection:
        connection.sendall(STATUS)
        return connection.recv(1024).startswith(b"HTTP/1.1 200 ")
    return False


@pytest.mark.parametrize(
    ("files", "flags"), [(64, ()), (None, ("--max-connections", "100"))], ids=["64 descriptors", "100 connections"]
)
def test_half_open_connections_do_not_silence_the_status(
    tmp_path: Path, files: int | None, flags: tuple[str, ...]
) -> None:
    """They have 10 s for a request, and are replaced faster. Without a descriptor left, leases did not even end."""
    (tmp_path / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    create_key(tmp_path / "run.key")
    run = ("--run", "run.toml", "--key", "run.key", "--uncalibrated")
    command = ("coordinator", "--no-peer", *run, "--port", "0", "--data", "data")
    with running_command(tmp_path, "api", [*command, *flags]) as (output, process), contextlib.ExitStack() as stack:
        if files is not None:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
        port = wait_for_port(output, process)
        for number in range(HALF_OPEN):
            half_open = stack.enter_context(connect(port, f"127.0.0.{2 + number % 4}"))
            half_open.sendall(b"GET /v1/status HTTP/1.1\r\n" if number % 2 else b"")
        answered = 0
        began = time.monotonic()
        while time.monotonic() - began < 6:  # heartbeat and leases need descriptors of their own meanwhile
            answered += until(lambda: status_is_told(port), seconds=8)
            with contextlib.suppress(OSError):
                stack.enter_context(connect(port, "127.0.0.5"))
            time.sleep(0.2)
        assert answered > 5
    assert "Too many open files" not in output.read_text(encoding="utf-8")
