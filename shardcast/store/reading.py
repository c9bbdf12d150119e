"""Read-only access to a store's folder beside the process that owns it.

The folder is not changed and its lock not taken. Data has the digests of its manifest; whoever stored the manifest has
checked its signature.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from shardcast.errors import CorruptChunk, LocalFault, PeerFault
from shardcast.files import as_local_fault, read_bounded
from shardcast.manifest import DEFAULT_LIMITS, Limits, Payload, SignedManifest, open_manifest
from shardcast.store.patching import patch
from shardcast.store.payload_file import PayloadFile

ENVELOPE_OVERHEAD_BYTES = 1024
MANIFESTS, VERSIONS, DELTAS, REWINDS = "manifests", "versions", "deltas", "rewinds"
_REWIND_NAME = re.compile(r"(\d{1,16})-(\d{1,16})\.delta", re.ASCII)


def payload_path(root: Path, signed: SignedManifest, payload: Payload) -> Path:
    """Return the path of a complete, verified payload of a version."""
    version = signed.manifest.version
    if payload is signed.manifest.full:
        return root / VERSIONS / f"{version}-{signed.digest[:16]}.bin"
    return root / DELTAS / f"{version}-{payload.digest[:16]}.delta"


def load_manifest(path: Path, *, run_id: str | None, limits: Limits) -> SignedManifest:
    """Read a stored manifest, whose signer was verified before. Raises PeerFault and OSError."""
    data = read_bounded(path, max_bytes=limits.max_manifest_bytes + ENVELOPE_OVERHEAD_BYTES)
    return open_manifest(data, run_id=run_id, publisher_key=None, limits=limits)


def rewind_files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (version, base, path) of every delta back from a later version (`shardcast.store.rewind`)."""
    folder = root / REWINDS
    for path in folder.iterdir() if folder.is_dir() else ():
        if (found := _REWIND_NAME.fullmatch(path.name)) is not None:
            yield int(found[1]), int(found[2]), path


class StoredVersions:
    """Versions found in the folder `root` at construction."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._signed: dict[int, SignedManifest] = {}
        self._rewinds = {version: (base, path) for version, base, path in rewind_files(root)}
        try:
            for path in sorted((root / MANIFESTS).iterdir()):
                # Unreadable files are being written, or are the owner's to drop.
                with contextlib.suppress(PeerFault, FileNotFoundError):
                    signed = load_manifest(path, run_id=None, limits=DEFAULT_LIMITS)
                    self._signed[signed.manifest.version] = signed
        except OSError as error:
            raise as_local_fault(error, root) from error

    def versions(self) -> list[int]:
        """List the versions that `write` can produce, oldest first."""
        return [version for version in sorted(self._signed) if self._find_route(version) is not None]

    def write(self, version: int, path: Path) -> None:
        """Write `version` to the new file `path`, verifying every chunk; leaves no file on failure.

        Raises LocalFault: "not_held", "damaged", "disk_full".
        """
        route = self._find_route(version)
        if route is None:
            raise LocalFault(f"{self._root} does not hold version {version}", code="not_held")
        base, steps = route
        result = PayloadFile(self._signed[version].manifest.full, final=path, part=path.with_name(f"{path.name}.part"))
        try:
            base_part = path.with_name(f"{path.name}.base")
            wrong = self._patch(base, steps, result, base_part) if steps else self._copy(base, result)
            if not wrong:
                result.finish()
        finally:
            if result.path is None:
                result.delete()
            result.close()
        if wrong:
            raise LocalFault(f"version {version} in {self._root} is damaged", code="damaged")

    def _find_route(self, version: int) -> tuple[SignedManifest, list[Path]] | None:
        """Find the nearest complete version and the deltas from it to `version`, in order; None if there is none.

        Nearest in deltas, of those that lead forward from an earlier version and back from a later one.
        """
        frontier: list[tuple[int, list[Path]]] = [(version, [])]
        seen = {version}
        while frontier:
            reached, steps = frontier.pop(0)
            signed = self._signed.get(reached)
            if signed is None:
                continue
            if self._is_stored(signed, signed.manifest.full):
                return signed, steps
            if reached in self._rewinds and self._rewinds[reached][0] not in seen:
                later, path = self._rewinds[reached]
                seen.add(later)
                frontier.append((later, [path, *steps]))
            for delta in signed.manifest.deltas:
                base = self._signed.get(delta.base_version)
                if base is None or base.manifest.result_digest != delta.base or delta.base_version in seen:
                    continue
                if self._is_stored(signed, delta.payload):
                    seen.add(delta.base_version)
                    frontier.append((delta.base_version, [payload_path(self._root, signed, delta.payload), *steps]))
        return None

    def _is_stored(self, signed: SignedManifest, payload: Payload) -> bool:
        try:
            return payload_path(self._root, signed, payload).stat().st_size == payload.payload_bytes
        except OSError:
            return False

    def _copy(self, base: SignedManifest, result: PayloadFile) -> int:
        """Copy the base's chunks and return how many are damaged."""
        wrong, source = 0, payload_path(self._root, base, base.manifest.full)
        try:
            with source.open("rb") as file:
                for index in range(result.payload.chunk_count):
                    try:
                        result.write(index, file.read(result.payload.chunk_length(index)))
                    except CorruptChunk:
                        wrong += 1
        except OSError as error:
            raise as_local_fault(error, source) from error
        return wrong

    def _patch(self, base: SignedManifest, steps: list[Path], result: PayloadFile, part: Path) -> int:
        full = base.manifest.full
        source = PayloadFile(full, final=payload_path(self._root, base, full), part=part)
        try:
            if source.path is None:  # dropped by the owner meanwhile
                source.delete()
                raise LocalFault(f"{self._root} no longer holds version {base.manifest.version}", code="not_held")
            return patch(source, steps, result)
        except PeerFault as error:
            raise LocalFault(f"a delta in {self._root} is damaged: {error}", code="damaged") from error
        finally:
            source.close()
