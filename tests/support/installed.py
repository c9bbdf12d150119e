"""What installing this project brings along, of the packages that are there: nothing is downloaded twice."""

from __future__ import annotations

import contextlib
import tomllib
from importlib import metadata
from pathlib import Path

from locations import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def brought_by(*extras: str) -> set[str]:
    """Return the distributions that an installation with the extras has, ours aside; an unknown extra adds nothing."""
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    waiting += [Requirement(line) for extra in extras for line in PROJECT["optional-dependencies"].get(extra, ())]
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        one = waiting.pop()
        if (key := (canonicalize_name(one.name), frozenset(one.extras))) in seen:
            continue
        seen.add(key)
        with contextlib.suppress(metadata.PackageNotFoundError):
            needed = map(Requirement, metadata.requires(one.name) or ())
            found.add(key[0])
            names = {"", *one.extras}
            waiting += [r for r in needed if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in names)]
    return found


def link_packages(names: set[str], folder: Path) -> set[Path]:
    """Put links to the files of the distributions into `folder`; return the folders in which they are installed."""
    origins = set()
    for name in names:
        distribution = metadata.distribution(name)
        origins.add(Path(str(distribution.locate_file(""))))
        for path in {Path(file.parts[0]) for file in distribution.files or () if file.parts[0] != ".."}:
            source, link = Path(str(distribution.locate_file(path))), folder / path
            if source.exists() and not link.exists() and path.suffix != ".pth" and path.name != "__pycache__":
                link.symlink_to(source)
    return origins
