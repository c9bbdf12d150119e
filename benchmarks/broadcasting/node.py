"""A process around one of shardcast's public classes: `python -m benchmarks.broadcasting.node ROLE ...`.

    origin --folder F --key SEED                            {"port"}; {"publish", "version"} gives {"published", "at"}
    relay URL ... --folder F --publisher KEY                {"port"}; {"stripes"} says from whom to fetch
    worker URL ... --folder F --publisher KEY [--count N]   {"ready"}, then {"served", "path", "at"} for each version

`at` is the time of `time.monotonic`, which on Linux all processes share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.broadcasting.lines import requests, say
from shardcast import Client, Origin, OriginServer, Relay
from shardcast.errors import ShardcastError

RUN_ID = "b" * 64

_HEAD_S = 30.0
_AGAIN_S = 0.1

logger = logging.getLogger(__name__)


async def origin(arguments: argparse.Namespace) -> None:
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(arguments.key))
    server = OriginServer(Origin(arguments.folder, key, RUN_ID))
    say(port=server.start())
    async for request in requests():
        await asyncio.to_thread(server.publish, Path(request["publish"]), version=request["version"])
        say(published=request["version"], at=time.monotonic())
    server.stop()


async def relay(arguments: argparse.Namespace) -> None:
    publisher_key = bytes.fromhex(arguments.publisher)
    node = Relay(arguments.urls, store_dir=arguments.folder, run_id=RUN_ID, publisher_key=publisher_key)
    say(port=await node.start())
    async for request in requests():
        node.set_upstreams([], stripes=request["stripes"])
        say(following=True)
    await node.stop()


async def worker(arguments: argparse.Namespace) -> None:
    """Run as many workers as asked for; those that are not metered may share a process."""
    following = [asyncio.create_task(follow(index, arguments)) for index in range(arguments.count)]
    say(ready=True)
    async for _ in requests():
        pass
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)


async def follow(index: int, arguments: argparse.Namespace) -> None:
    """Fetch every new version, and try again whatever happens: who waits for it has a limit of its own."""
    publisher_key, folder = bytes.fromhex(arguments.publisher), arguments.folder / f"worker-{index}"
    async with Client(RUN_ID, publisher_key, arguments.urls, folder) as client:
        if arguments.stripes:
            client.set_sources([], stripes=json.loads(arguments.stripes))
        after = -1
        while True:
            try:
                head = await client.wait_head(after=after, timeout_s=_HEAD_S)
                if head is None:
                    continue
                path = await client.fetch(head)
            except ShardcastError as error:
                logger.info("worker %d: %s (%s)", index, error, error.code)
                await asyncio.sleep(_AGAIN_S)
                continue
            after = head.version
            say(served=after, path=str(path), at=time.monotonic())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("origin", "relay", "worker"))
    parser.add_argument("urls", nargs="*")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--key", help="the publisher's private key, in hexadecimal")
    parser.add_argument("--publisher", help="the publisher's public key, in hexadecimal")
    parser.add_argument("--stripes", help="of a worker: the candidates of each stripe, as JSON")
    parser.add_argument("--count", type=int, default=1)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    asyncio.run({"origin": origin, "relay": relay, "worker": worker}[arguments.role](arguments))


if __name__ == "__main__":
    main()
