"""What an environment's virtual environment holds, as a text with a digest that a run can name.

One line for each distribution, so that two machines agree on it, and see where they do not:

    swarmproof environment 1
    python 3.11
    wordle==0.1.4
    blake3:5d41… wordle==0.1.4
    native numpy==2.3.1

A distribution of Python alone is bound by the digest of its files; one with machine code, whose files differ from
platform to platform, by its version.
"""

from __future__ import annotations

import base64
import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from node.environments.base import EnvironmentFault
from node.protocol.environment_spec import MAX_LOCK_BYTES, PACKAGE_NAME, PACKAGE_VERSION, FileSpec, PackageSpec

HEAD: Final = "swarmproof environment 1"
MAX_DISTRIBUTIONS: Final = 1000
MAX_RECORD_BYTES: Final = 16 * 1024 * 1024
NATIVE: Final = "native"
_PYTHON = re.compile(r"python (3\.[0-9]{1,2})")
_REQUIREMENT = re.compile(f"({PACKAGE_NAME})==({PACKAGE_VERSION})")
_LINE = re.compile(f"(blake3:[0-9a-f]{{64}}|{NATIVE}) ({PACKAGE_NAME})==({PACKAGE_VERSION})")
_ENTRY_POINTS = "entry_points.txt"
"""The one file of a dist-info folder that counts: the others say how it was built and came here."""


@dataclass(frozen=True, slots=True)
class Locked:
    """A distribution: `content` is the digest of its files ("blake3:…"), or "native"."""

    name: str
    version: str
    content: str

    @property
    def requirement(self) -> str:
        """The distribution as pip names it."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class Lock:
    """The content of a virtual environment: Python's version, the environment's package, and all distributions."""

    python: str
    name: str
    version: str
    held: tuple[Locked, ...]

    def encode(self) -> bytes:
        """Return the canonical text."""
        lines = [HEAD, f"python {self.python}", f"{self.name}=={self.version}"]
        lines += [f"{one.content} {one.requirement}" for one in self.held]
        return ("\n".join(lines) + "\n").encode()

    @property
    def file(self) -> FileSpec:
        """Digest and size of the text."""
        text = self.encode()
        return FileSpec(digest=blake3(text).hexdigest(), bytes=len(text))

    @property
    def package(self) -> PackageSpec:
        """What a run names."""
        return PackageSpec(name=self.name, version=self.version, lock=self.file)


def read_lock(text: bytes) -> Lock:
    """Parse the bytes of a lock; raises EnvironmentFault (bad_lock) for anything but the canonical text of one."""
    lines = text[:MAX_LOCK_BYTES].decode("ascii", "replace").split("\n", MAX_DISTRIBUTIONS + 3)
    if len(lines) > 3 and (version := _PYTHON.fullmatch(lines[1])) and (package := _REQUIREMENT.fullmatch(lines[2])):
        matches = [_LINE.fullmatch(line) for line in lines[3:]]
        held = [Locked(match[2], match[3], match[1]) for match in matches if match is not None]
        lock = Lock(version[1], package[1], package[2], tuple(sorted(held, key=lambda one: one.name)))
        is_single = len({one.name for one in held}) == len(held)
        if lock.encode() == text and is_single and any(one.requirement == package[0] for one in held):
            return lock
    raise EnvironmentFault("this is no lock of an environment", code="bad_lock")


def lock_of(site_packages: Path, *, python: str, name: str) -> Lock:
    """Return the lock of what is installed in `site_packages`, which is there for the distribution `name`.

    `python` is major and minor version. Raises EnvironmentFault (bad_lock) where that cannot be told.
    """
    try:
        held = sorted((_locked(folder) for folder in site_packages.glob("*.dist-info")), key=lambda one: one.name)
    except (ValueError, csv.Error) as error:
        raise EnvironmentFault(f"{site_packages} has a damaged RECORD: {error}", code="bad_lock") from error
    own = [one for one in held if one.name == name]
    if len(own) != 1 or len(held) > MAX_DISTRIBUTIONS or len({one.name for one in held}) < len(held):
        raise EnvironmentFault(f"{site_packages} does not hold one distribution {name}", code="bad_lock")
    # A name or version that no lock can have is refused here, and not by whoever reads it later.
    return read_lock(Lock(python, name, own[0].version, tuple(held)).encode())


def normalised(name: str) -> str:
    """Return a distribution's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _locked(folder: Path) -> Locked:
    parser = BytesHeaderParser()
    metadata = parser.parsebytes((folder / "METADATA").read_bytes())
    wheel = parser.parsebytes((folder / "WHEEL").read_bytes())
    name, version = normalised(str(metadata["Name"])), str(metadata["Version"])
    if str(wheel["Root-Is-Purelib"]).strip().lower() != "true":
        return Locked(name, version, NATIVE)
    hasher: Any = blake3()
    for path, content in sorted(_content(folder)):
        hasher.update(f"{path}\t{content}\n".encode())
    return Locked(name, version, f"blake3:{hasher.hexdigest()}")


def _content(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (path, digest) of a distribution's files by its RECORD, which pip wrote of what it unpacked."""
    record = folder / "RECORD"
    if record.stat().st_size > MAX_RECORD_BYTES:
        raise EnvironmentFault(f"{record} is larger than {MAX_RECORD_BYTES} bytes", code="bad_lock")
    with record.open(encoding="utf-8", newline="") as lines:
        for path, content, _ in csv.reader(lines):
            inside, _, name = path.partition("/")
            # Without a digest: what was compiled here. Above the folder: scripts, whose first line names this machine.
            if content and inside != ".." and (inside != folder.name or name == _ENTRY_POINTS):
                yield path, content


def changed_files(site_packages: Path) -> list[str]:
    """Return the files below `site_packages` that are no longer what their RECORD says, or are gone; reads all."""
    import hashlib  # noqa: PLC0415  (only here)

    changed = []
    for folder in sorted(site_packages.glob("*.dist-info")):
        for path, content in _content(folder):
            algorithm, _, wanted = content.partition("=")
            try:
                digest = hashlib.new(algorithm, (site_packages / path).read_bytes()).digest()
            except (OSError, ValueError):
                changed.append(path)
                continue
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != wanted:
                changed.append(path)
    return changed
