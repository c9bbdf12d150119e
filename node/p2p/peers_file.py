"""Known peers, saved for the next start as signed envelopes, each verified when read."""

from __future__ import annotations

import base64
import logging
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from node.discovery.peer_book import MAX_PEERS
from node.protocol.peers import MAX_PEER_BYTES, Peer, open_peer
from shardcast.errors import LocalFault, PeerFault, Stale
from shardcast.files import read_bounded, write_atomically
from shardcast.wire import Wire, decode, encode

log = logging.getLogger(__name__)

FILE: Final = "peers.json"
MAX_BYTES: Final = 2 * MAX_PEERS * MAX_PEER_BYTES


class KeptPeers(Wire, frozen=True):
    """Envelopes of peers' records; those that responded come first."""

    peers: Annotated[tuple[str, ...], Meta(max_length=MAX_PEERS)]


def save_peers(state: Path, envelopes: list[bytes]) -> None:
    """Replace the saved peers; log and go on if the disk fails."""
    kept = KeptPeers(peers=tuple(base64.b64encode(envelope).decode() for envelope in envelopes[:MAX_PEERS]))
    try:
        state.mkdir(parents=True, exist_ok=True)
        write_atomically(state / FILE, encode(kept))
    except (OSError, LocalFault) as error:
        log.warning("cannot save known peers: %s", error)


def load_peers(state: Path, *, run_id: str, now: float) -> list[Peer]:
    """Load the saved peers, expired ones included; [] if the file is missing or damaged."""
    try:
        kept = decode(KeptPeers, read_bounded(state / FILE, max_bytes=MAX_BYTES), max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return []
    except (OSError, PeerFault) as error:
        log.warning("ignoring %s: %s", state / FILE, error)
        return []
    peers = []
    for text in kept.peers:
        try:
            peers.append(open_peer(base64.b64decode(text, validate=True), run_id=run_id, now=now, expired_too=True))
        except Stale:
            continue
        except (ValueError, PeerFault) as error:
            log.warning("ignoring a peer in %s: %s", state / FILE, error)
    return peers
