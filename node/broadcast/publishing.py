"""`swarmproof publish`: sign and serve the versions of one file until stopped.

<state>/key       the publisher's key, unless --key names another
<state>/origin/   the versions (`shardcast.store.versions`)
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import shlex
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.filesize import decimal

from node.protocol.run import run_id_of
from shardcast import Manifest, Origin, OriginServer, ServerLimits
from shardcast.content import file_digest
from shardcast.errors import LocalFault

log = logging.getLogger(__name__)

KEPT_VERSIONS = 3
POLL_SECONDS = 1.0
MANIFEST_LIFETIME_SECONDS = 10 * 365 * 86400
"""A file may stay the newest for years; freshness is shown by the short-lived head."""

LARGE_BYTES = 10**9
"""From here on, reading the file is logged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishSettings:
    """Settings of a publisher; `version` None takes the next.

    Of versions beyond `keep` nothing stays (None: all stay), beyond `keep_whole` only deltas do, as of `Origin`.
    """

    file: Path
    state: Path
    host: str
    port: int
    version: int | None = None
    keep: int | None = KEPT_VERSIONS
    keep_whole: int | None = None
    watch: bool = False
    limits: ServerLimits = field(default_factory=ServerLimits)


def default_state(file: Path) -> Path:
    """Return the default folder of a file's versions: its name, for people, and a digest of its path."""
    path = file.resolve()
    return Path.home() / ".swarmproof" / "publish" / f"{path.name[:32]}-{blake3(bytes(path)).hexdigest()[:8]}"


async def run_publish(
    settings: PublishSettings, *, key: Ed25519PrivateKey, stop: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Publish, then serve until `stop` is set; raises LocalFault."""
    public_key = key.public_key().public_bytes_raw()
    origin = Origin(
        settings.state / "origin",
        key,
        run_id_of(public_key),
        keep=settings.keep,
        keep_whole=settings.keep_whole,
        manifest_lifetime_s=MANIFEST_LIFETIME_SECONDS,
    )
    server = OriginServer(origin, settings.host, settings.port, limits=settings.limits)
    try:
        port = await asyncio.to_thread(server.start)
        before = _mark(settings.file)
        if before is not None and before[1] >= LARGE_BYTES:
            log.info("reading %s, %s", settings.file.name, decimal(before[1]))
        manifest = await asyncio.to_thread(_publish, origin, server, settings.file, settings.version)
        say(_published(settings.file, manifest))
        say(_invitation(settings, _reachable(settings.host, port), public_key))
        if settings.watch:
            await _watch(settings.file, before, lambda: _publish(origin, server, settings.file, None), stop, say)
        await stop.wait()
    finally:
        await asyncio.to_thread(server.stop)
        origin.close()


def _publish(origin: Origin, server: OriginServer, file: Path, version: int | None) -> Manifest:
    """Return the manifest of what `file` holds now, publishing it if it is not the newest version."""
    wanted = _version_for(origin, file) if version is None else version
    server.publish(file, version=wanted)
    signed = origin.store.get(wanted)
    if signed is None:
        raise LocalFault(f"version {wanted} is no longer here", code="not_held")
    return signed.manifest


def _version_for(origin: Origin, file: Path) -> int:
    held = origin.store.versions()
    if not held:
        return 1
    newest = held[-1].manifest
    same = file.stat().st_size == newest.full.payload_bytes and file_digest(file) == newest.result_digest
    return newest.version + (not same)


Mark = tuple[int, int, int]


def _mark(file: Path) -> Mark | None:
    """Return a value that changes with the file; None if it does not exist now."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


async def _watch(
    file: Path,
    published: Mark | None,
    publish: Callable[[], Manifest],
    stop: asyncio.Event,
    say: Callable[[str], None],
) -> None:
    """Publish the file whenever it has changed and then stayed the same for a second; logs failures and goes on."""
    last = published
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), POLL_SECONDS)
            return
        last, now = _mark(file), last
        if last is None or last != now or last == published:
            continue
        published = last
        try:
            # Not cancelled on stop: the store must be idle before it is closed.
            say(_published(file, await asyncio.to_thread(publish)))
        except (LocalFault, OSError) as error:
            log.warning("%s not published (%s); retrying when it changes", file, error)


# -- messages


def _published(file: Path, manifest: Manifest) -> str:
    """Format a version's size, and what it costs those who have an earlier one."""
    deltas = (
        f", or {decimal(delta.payload.payload_bytes)} from version {delta.base_version}" for delta in manifest.deltas
    )
    return f"{file.name} is version {manifest.version}: {decimal(manifest.full.payload_bytes)}{''.join(deltas)}"


def _invitation(settings: PublishSettings, url: str, public_key: bytes) -> str:
    """Format the `swarmproof fetch` command for others, within 80 columns."""
    again = "; when it is replaced, it is published again" if settings.watch else ""
    who = "On this machine alone (--host 0.0.0.0 is for others)" if _is_loopback(settings.host) else "Elsewhere"
    return (
        f"serving it until Ctrl-C{again}\n\n"
        f"{who}, fetch it by:\n\n"
        f"  swarmproof fetch {url} \\\n"
        f"    --run-id {run_id_of(public_key)} \\\n"
        f"    --key {public_key.hex()} \\\n"
        f"    -o {shlex.quote(settings.file.name)}\n"
    )


def _reachable(host: str, port: int) -> str:
    """Return a URL for others, with this machine's source address in place of a wildcard address."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            host = _own_address(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _own_address(wildcard: str) -> str:
    """Return the source address of a packet to the internet; connecting a datagram socket sends none."""
    family, far = (socket.AF_INET6, "2001:db8::1") if ":" in wildcard else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _is_loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
