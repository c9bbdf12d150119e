"""A witness in a thread, and a log that it can be told of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.storage.log_tree import LogTree
from node.client.witness import WitnessAddress
from node.protocol.checkpoints import Checkpoint, log_key, origin_of, seal_checkpoint
from node.protocol.merkle import consistency_proof, leaf_hash, node_hash
from node.protocol.notes import VerifierKey
from node.protocol.run import run_id_of
from node.witness.server import WitnessSettings, run_witness
from node.witness.state import WitnessState


class SmallLog:
    """A log of these leaves, which signs any of its sizes."""

    def __init__(self, leaves: Sequence[bytes], *, key: Ed25519PrivateKey) -> None:
        self.leaves, self.key = list(leaves), key
        public_key = key.public_key().public_bytes_raw()
        self.run_id = run_id_of(public_key)
        self.verifier = log_key(self.run_id, public_key)

    def checkpoint(self, size: int) -> bytes:
        tree = LogTree()
        for leaf in self.leaves[:size]:
            tree.append(leaf)
        return seal_checkpoint(Checkpoint(origin_of(self.run_id), size, tree.root()), key=self.key)

    def proof(self, first: int, second: int) -> tuple[bytes, ...]:
        return tuple(consistency_proof(first, second, self._node))

    def _node(self, level: int, index: int) -> bytes:
        if level == 0:
            return leaf_hash(self.leaves[index])
        return node_hash(self._node(level - 1, 2 * index), self._node(level - 1, 2 * index + 1))


@contextmanager
def witnessing(
    folder: Path, logs: Sequence[VerifierKey], *, name: str = "witness.example/w1", requests_per_minute: int = 100_000
) -> Iterator[WitnessAddress]:
    """A witness on a free port, with a key of its own that stays in its folder."""
    folder.mkdir(exist_ok=True)
    seed = folder / "seed"
    if not seed.exists():
        seed.write_bytes(Ed25519PrivateKey.generate().private_bytes_raw())
    key = Ed25519PrivateKey.from_private_bytes(seed.read_bytes())
    state = WitnessState(folder, name=name, key=key, logs=logs)
    loop, stop, ports, ready = asyncio.new_event_loop(), asyncio.Event(), list[int](), threading.Event()
    settings = WitnessSettings(host="127.0.0.1", port=0, requests_per_minute=requests_per_minute)

    def serving(port: int) -> None:
        ports.append(port)
        ready.set()

    thread = threading.Thread(
        target=lambda: loop.run_until_complete(run_witness(state, settings, stop=stop, serving=serving)), daemon=True
    )
    thread.start()
    assert ready.wait(30)
    try:
        yield WitnessAddress(state.verifier, f"http://127.0.0.1:{ports[0]}")
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
        state.close()
