"""A node that has links and nothing else, to be compared with one that has GossipSub (`networking.gossip`).

It speaks in lines of JSON: {"publish": envelope in base64} makes it the first to know it, {"report": true} has it say
when it knew of which head.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.broadcasting.lines import requests, say
from benchmarks.networking.meters import cpu_seconds, memory_mib
from benchmarks.networking.node import SeenHeads
from node.discovery.descriptor import DescriptorStore
from node.p2p import PeerNetwork, PeerSettings
from node.protocol.peers import parse_address


async def run(options: argparse.Namespace) -> None:
    """Run until standard input ends."""
    store, seen = DescriptorStore(options.run_id), SeenHeads()
    store.listen(seen.note)
    bootstrap = tuple(map(parse_address, options.call))
    settings = PeerSettings(bootstrap=bootstrap, state=options.state, host="127.0.0.1")
    async with PeerNetwork(settings, key=Ed25519PrivateKey.generate(), store=store) as network:
        say(address=str((await network.ready())[0]))
        async for request in requests():
            if "publish" in request:
                envelope, at = base64.b64decode(request["publish"]), time.monotonic()
                await asyncio.to_thread(store.offer, envelope, source="the benchmark")
                say(at=at)
            else:
                neighbours = len(network.status()["neighbours"])
                say(heads=seen.heads, neighbours=neighbours, cpu_s=cpu_seconds(), memory_mib=memory_mib())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--call", action="append", default=[], help="the multiaddr of a node that runs already")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
