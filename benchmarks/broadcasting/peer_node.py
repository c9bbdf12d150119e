"""A node of shardcast 0.3.2: `python -I peer_node.py ROLE [URL ...] --package F --folder F [--interval S]`.

Runs in an environment of its own, with a copy of the package in `--package` for this process alone: it keeps a
temporary file beside itself. Speaks as `benchmarks.broadcasting.node` does. A worker looks for a new version every
`--interval` seconds and fetches the newest, as the peer's users do; unlike them it tries again after a wrong file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from http.server import HTTPServer
from pathlib import Path
from typing import Any


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def on_loopback(package: Any) -> None:
    """Bind the peer's servers to loopback, where it would listen at all addresses of the machine."""

    def bind(server: HTTPServer) -> None:
        server.server_address = ("127.0.0.1", server.server_address[1])
        HTTPServer.server_bind(server)

    package.server.ShardcastServer.server_bind = bind


def origin(package: Any, arguments: argparse.Namespace) -> None:
    _prepare(arguments.folder)
    server = package.OriginServer(str(arguments.folder), port=0)
    say(port=server.http_server.server_port)
    for line in sys.stdin:
        say(published=server.broadcast(json.loads(line)["publish"]))


def relay(package: Any, arguments: argparse.Namespace) -> None:
    _prepare(arguments.folder)
    node = package.MiddleNode(arguments.urls, str(arguments.folder), port=0, check_interval=arguments.interval)
    say(port=node.http_server.server_port)
    sys.stdin.read()


def _prepare(folder: Path) -> None:
    """Put down the file that everyone who connects fetches first, which the peer leaves to its user."""
    folder.mkdir(parents=True)
    (folder / "data1.bin").write_bytes(bytes(1024))


def worker(package: Any, arguments: argparse.Namespace) -> None:
    client = package.ClientNode(arguments.urls, str(arguments.folder))
    say(ready=True)
    threading.Thread(target=_end_with_input, daemon=True).start()
    served = None
    while True:
        newest = max(client.list_available_versions(), key=lambda name: int(name[1:]), default=None)
        if newest != served:
            path = client.download_version(newest)
            if path is not None:
                served = newest
                say(served=newest, path=path, at=time.monotonic())
        time.sleep(arguments.interval)


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("origin", "relay", "worker"))
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--package", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--interval", type=int, default=30)
    arguments = parser.parse_args()
    sys.path.insert(0, arguments.package)
    # The package is this process's copy of the peer, not this project's of the same name.
    import shardcast  # noqa: PLC0415

    on_loopback(shardcast)
    {"origin": origin, "relay": relay, "worker": worker}[arguments.role](shardcast, arguments)
    os._exit(0)


if __name__ == "__main__":
    main()
