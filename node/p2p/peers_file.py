"""The peers that a node met, kept for its next start: one signed envelope after another, each checked when read."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from node.peer_book import MAX_PEERS
from node.protocol.peers import MAX_PEER_BYTES, Peer, open_peer
from shardcast.errors import LocalFault, PeerFault, Stale
from shardcast.files import read_bounded, write_atomically
from shardcast.wire import Wire, decode, encode

log = logging.getLogger(__name__)

FILE: Final = "peers.json"
MAX_BYTES: Final = 2 * MAX_PEERS * MAX_PEER_BYTES


class KeptPeers(Wire, frozen=True):
    """Envelopes of peers' records, those first that have answered."""

    peers: Annotated[tuple[str, ...], Meta(max_length=MAX_PEERS)]


def save_peers(state: Path, envelopes: list[bytes]) -> None:
    """Replace what is kept; a full disk costs only the memory of them."""
    kept = KeptPeers(peers=tuple(base64.b64encode(envelope).decode() for envelope in envelopes[:MAX_PEERS]))
    try:
        state.mkdir(parents=True, exist_ok=True)
        write_atomically(state / FILE, encode(kept))
    except (OSError, LocalFault) as error:
        log.warning("the known peers are not kept: %s", error)


def load_peers(state: Path, *, run_id: str, now: float) -> list[Peer]:
    """Those that are kept, expired or not; nothing where the file is missing or damaged."""
    try:
        kept = decode(KeptPeers, read_bounded(state / FILE, max_bytes=MAX_BYTES), max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return []
    except (OSError, PeerFault) as error:
        log.warning("not using %s: %s", state / FILE, error)
        return []
    peers = []
    for text in kept.peers:
        try:
            peers.append(open_peer(base64.b64decode(text, validate=True), run_id=run_id, now=now, expired_too=True))
        except Stale:
            continue
        except (ValueError, PeerFault) as error:
            log.warning("not using a peer in %s: %s", state / FILE, error)
    return peers
