"""A process that joins a run as a new node, each time it is told to; says how long that took. See p2p_attacker.py."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from node.discovery.descriptor import DescriptorStore
from node.p2p import PeerNetwork, PeerSettings
from node.protocol.peers import parse_address


async def join(asked: dict) -> tuple[float | None, int]:
    """Seconds until the run's descriptor was here, or None, and its version."""
    store = DescriptorStore(asked["run_id"])
    news = asyncio.Event()
    loop = asyncio.get_running_loop()
    store.listen(lambda _: loop.call_soon_threadsafe(news.set))
    with tempfile.TemporaryDirectory() as folder:
        settings = PeerSettings(
            bootstrap=tuple(map(parse_address, asked["addresses"])), state=Path(folder), host="127.0.0.1"
        )
        started = time.monotonic()
        async with PeerNetwork(settings, key=Ed25519PrivateKey.generate(), store=store):
            try:
                async with asyncio.timeout(asked["seconds"]):
                    await news.wait()
            except TimeoutError:
                return None, -1
            took = time.monotonic() - started
    return took, store.last.descriptor.version


def main() -> None:
    """One question a line, one answer a line."""
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asyncio.run(join(json.loads(line)))), flush=True)


main()
