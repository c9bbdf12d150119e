"""The command that installs an optional part of this program where it is read: in a clone, a wheel or an image.

PyPI's `swarmproof` is another project's: no hint names it.
"""

from __future__ import annotations

import os
import re
import shlex
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = "SWARMPROOF_IMAGE"
"""The environment variable in which an image of deploy/images has its extras."""
_OF_AN_EXTRA: Final = re.compile(r"(?P<needed>[^;]+?)\s*;\s*extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]")


def install_hint(extra: str) -> str:
    """Return the command that installs the extra of pyproject.toml here; what follows it in a sentence begins anew."""
    if (built := os.environ.get(IMAGE)) is not None:
        return f"build the image with --build-arg EXTRAS={built},{extra}"
    if (ROOT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{ROOT}[{extra}]')}"
    return f"pip install {shlex.join(requirements(extra))}"


def overwritten_toploc() -> str | None:
    """Return a sentence if `toploc` here is another distribution's of that name, such as PyPI's; imports nothing."""
    try:
        other = metadata.distribution("toploc")
    except metadata.PackageNotFoundError:
        return None
    found = find_spec("toploc")
    if found is None or found.origin is None or Path(found.origin).parent != Path(str(other.locate_file("toploc"))):
        return None
    return (
        f"toploc {other.version} of another project took the place of this program's package: pip uninstall toploc, "
        "and install swarmproof again"
    )


def requirements(extra: str) -> list[str]:
    """Return what the installed wheel says that an extra needs."""
    found = map(_OF_AN_EXTRA.fullmatch, metadata.requires("swarmproof") or ())
    return [one["needed"] for one in found if one is not None and one["extra"] == extra]
