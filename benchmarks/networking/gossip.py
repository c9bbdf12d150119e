"""A node of GossipSub (py-libp2p 0.8.1), to be compared with our links: the same host, the same check of messages.

Settings: heartbeats every second (the default is 120 s), degree 6 (4 to 12), signed messages, and one topic, whose
validator is the check that our own node does. Without the two guards below, one malformed message ends the process.
The limit of 10 messages a second of one topic and forwarder is GossipSub's protection against spam, and stays.

It speaks in lines of JSON as `networking.plain_links` does.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import time
from typing import Any, Final

import trio  # noqa: TID251  (the reference, which is not ours)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from libp2p.custom_types import TProtocol  # noqa: TID251
from libp2p.peer.id import ID  # noqa: TID251
from libp2p.pubsub.gossipsub import GossipSub  # noqa: TID251
from libp2p.pubsub.pb import rpc_pb2  # noqa: TID251
from libp2p.pubsub.pubsub import Pubsub  # noqa: TID251
from libp2p.tools.anyio_service import background_trio_service  # noqa: TID251

from benchmarks.broadcasting.lines import say
from benchmarks.networking.meters import cpu_seconds, memory_mib
from benchmarks.networking.node import SeenHeads
from node.discovery.descriptor import DescriptorStore
from node.p2p.host import HostLimits, connect, listening_port, reset, running_host
from node.protocol.peers import Address, parse_address
from node.protocol.run import open_descriptor
from shardcast.errors import PeerFault

PROTOCOL: Final = "/meshsub/1.1.0"
TOPIC: Final = "head"
HOST: Final = "127.0.0.1"
CALL_SECONDS: Final = 10.0


class Guarded(Pubsub):
    """Nothing that a peer sends leaves the service."""

    async def push_msg(self, msg_forwarder: ID, msg: rpc_pb2.Message) -> None:
        """Handle one message; blacklist whoever brought one that fails."""
        try:
            await super().push_msg(msg_forwarder, msg)
        except Exception:  # noqa: BLE001  (whatever it was, the forwarder is to blame)
            self.add_to_blacklist(msg_forwarder)

    async def continuously_read_stream(self, stream: Any) -> None:
        """Read all that one peer sends; blacklist it when that fails."""
        try:
            await super().continuously_read_stream(stream)
        except Exception:  # noqa: BLE001
            self.add_to_blacklist(stream.muxed_conn.peer_id)
            await reset(stream)


async def run(options: argparse.Namespace) -> None:
    """Run until standard input ends."""
    store, seen = DescriptorStore(options.run_id), SeenHeads()
    store.listen(seen.note)
    key = Ed25519PrivateKey.generate()
    router = GossipSub([TProtocol(PROTOCOL)], 6, 4, 12, heartbeat_interval=1)
    async with running_host(key, f"/ip4/{HOST}/tcp/0", HostLimits()) as host:
        pubsub = Guarded(host, router, strict_signing=True)
        async with (
            background_trio_service(pubsub),
            background_trio_service(router),
            trio.open_nursery() as nursery,
        ):
            await pubsub.wait_until_ready()
            pubsub.set_topic_validator(TOPIC, lambda _peer, message: _is_good(message.data, options.run_id), False)
            subscription = await pubsub.subscribe(TOPIC)
            own = Address("ip4", HOST, listening_port(host), key.public_key().public_bytes_raw())

            messages: list[float] = []

            async def receive() -> None:
                while True:
                    message = await subscription.get()
                    messages.append(time.monotonic())
                    store.offer(message.data, source="gossip")

            nursery.start_soon(receive)
            say(address=str(own))
            lines = trio.lowlevel.FdStream(os.dup(0))
            waiting = b""
            while piece := await lines.receive_some():
                *complete, waiting = (waiting + piece).split(b"\n")
                for line in complete:
                    request = json.loads(line)
                    if "publish" in request:
                        data, at = base64.b64decode(request["publish"]), time.monotonic()
                        await pubsub.publish(TOPIC, data)
                        say(at=at)
                    elif "call" in request:
                        for text in request["call"]:
                            await connect(host, parse_address(text), seconds=CALL_SECONDS)
                        say(called=len(request["call"]))
                    else:
                        mesh = len(router.mesh.get(TOPIC, ()))
                        used = {"cpu_s": cpu_seconds(), "memory_mib": memory_mib()}
                        say(heads=seen.heads, messages=messages, neighbours=mesh, **used)
            nursery.cancel_scope.cancel()


def _is_good(data: bytes, run_id: str) -> bool:
    try:
        open_descriptor(data, run_id=run_id, now=time.time())
    except PeerFault:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-id", required=True)
    trio.run(run, parser.parse_args())


if __name__ == "__main__":
    main()
