"""Ctrl-C on a coordinator that others listen to: it ends at once, in peace, and its log shows no failure."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from node.protocol.run import DESCRIPTOR_DOMAIN, DESCRIPTOR_VERSION
from shardcast.envelope import open_envelope

RUN_TOML = 'name = "ending"\n\n[model]\ninitial = "random-tiny"\n\n[[environments]]\nname = "arithmetic"\n'


def asked(port: int, path: str) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    return connection


def descriptor(port: int, *, seconds: float) -> bytes:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with closing(asked(port, "/v1/run")) as connection:
                return connection.getresponse().read()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_coordinator_that_is_stopped_breaks_nobody_off(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    swarmproof = [sys.executable, "-m", "node.cli"]
    subprocess.run([*swarmproof, "keys", "new", "run.key"], cwd=tmp_path, check=True, capture_output=True)
    run = ["--run", "run.toml", "--key", "run.key", "--uncalibrated"]
    command = [*swarmproof, "coordinator", *run, "--data", "run", "--port", "0"]
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen([*command, "--no-peer"], cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"serving at http://127\.0\.0\.1:(\d+)", output.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        port = int(found[1])
        first = descriptor(port, seconds=30)
        opened = open_envelope(first, domain=DESCRIPTOR_DOMAIN, versions=(DESCRIPTOR_VERSION,), max_payload_bytes=2**20)
        version = json.loads(opened.payload)["version"]
        waiting = f"/v1/run?after={version}&wait=25"
        with closing(asked(port, waiting)) as listening, closing(asked(port, "/v1/events")) as page:
            with page.getresponse() as stream:
                stream.readline()
                time.sleep(0.5)
                process.send_signal(number)
                assert listening.getresponse().read() == first, "who waits is told what there is"
            assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in output.read_text()
    assert "Cancel" not in output.read_text()
