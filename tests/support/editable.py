"""What `pip install -e FOLDER` comes to, without fetching setuptools: metadata and a path to import from."""

from __future__ import annotations

import sys
import sysconfig
import tomllib
from pathlib import Path

folder = Path(sys.argv[1]).resolve()
described = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
packages = Path(sysconfig.get_path("purelib"))
metadata = packages / f"{described['name']}-{described['version']}.dist-info"
metadata.mkdir()
(metadata / "METADATA").write_text(
    f"Metadata-Version: 2.1\nName: {described['name']}\nVersion: {described['version']}\n"
)
lines = [
    line
    for group, entries in described["entry-points"].items()
    for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
]
(metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
(packages / f"{described['name']}.pth").write_text(f"{folder}\n")
