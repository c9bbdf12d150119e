"""Which environments an installed package offers, by what it says of itself; nothing of it is imported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Final

from node.environments.isolated.lock import normalised
from node.environments.isolated.store import InstalledEnvironment

GROUP: Final = "swarmproof.environments"
VERIFIERS: Final = "verifiers:"
REASONING_GYM: Final = "reasoning_gym:"
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_REQUIRES = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def offers(installed: InstalledEnvironment) -> list[str]:
    """Return the names of a package's environments: its entry points, or its modules where it is made for verifiers."""
    for folder in installed.site_packages.glob("*.dist-info"):
        metadata = BytesHeaderParser().parsebytes((folder / "METADATA").read_bytes())
        if normalised(str(metadata["Name"])) == installed.lock.name:
            names = sorted(_entry_points(folder)) or sorted(_of_verifiers(folder, metadata))
            if installed.lock.name == "reasoning-gym":
                names.append(f"{REASONING_GYM}<dataset>")
            return names
    return []


def _entry_points(folder: Path) -> Iterator[str]:
    names = (one.name for one in PathDistribution(folder).entry_points if one.group == GROUP)
    yield from filter(_NAME.fullmatch, names)


def _of_verifiers(folder: Path, metadata: Message) -> Iterator[str]:
    needed = (_REQUIRES.match(line) for line in metadata.get_all("Requires-Dist", ()))
    if not any(match and normalised(match[1]) == "verifiers" for match in needed):
        return
    record = (folder / "RECORD").read_text(encoding="utf-8")
    files = (line.partition(",")[0] for line in record.splitlines())
    tops = {file.partition("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}
    yield from (VERIFIERS + top for top in tops if top.isidentifier())
