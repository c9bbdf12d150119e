"""Environments' packages as pip leaves them, without pip: a folder of site-packages with a dist-info for each."""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

from node.environments.isolated.lock import lock_of
from node.environments.isolated.store import LOCK, VENV, EnvironmentStore, InstalledEnvironment, site_packages

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def distribution(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    *,
    version: str = "1.0",
    pure: bool = True,
    entry_points: str = "",
    requires: tuple[str, ...] = (),
) -> None:
    """Unpack a wheel's worth of `files` into site-packages, with its RECORD."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    written = {
        **files,
        f"{info}/METADATA": "".join(
            [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", *(f"Requires-Dist: {r}\n" for r in requires)]
        ),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\nTag: py3-none-any\n",
        **({f"{info}/entry_points.txt": entry_points} if entry_points else {}),
    }
    record = ""
    for path, text in written.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    (folder / info / "RECORD").write_text(f"{record}{info}/RECORD,,\n../../../bin/{name},sha256=x,1\n")


def install(store: EnvironmentStore, name: str, files: Mapping[str, str], **given: object) -> InstalledEnvironment:
    """Put a package into `store`, with an interpreter that has no packages but this one."""
    staging = store.folder / ".made"
    venv = staging / VENV
    (venv / "bin").mkdir(parents=True)
    base = Path(sys.base_prefix)
    (venv / "bin" / "python").symlink_to(base / "bin" / f"python{PYTHON}")
    (venv / "pyvenv.cfg").write_text(f"home = {base / 'bin'}\ninclude-system-site-packages = false\n")
    packages = site_packages(venv, python=PYTHON)
    distribution(packages, name, files, **given)  # type: ignore[arg-type]
    lock = lock_of(packages, python=PYTHON, name=name)
    (staging / LOCK).write_bytes(lock.encode())
    final = store.folder / lock.file.digest
    staging.rename(final)
    return InstalledEnvironment(final, lock)


def wheel(folder: Path, name: str, files: Mapping[str, str], *, version: str = "1.0", **given: object) -> Path:
    """Write a wheel of `files` into `folder`."""
    unpacked = folder / "unpacked"
    distribution(unpacked, name, files, version=version, **given)  # type: ignore[arg-type]
    module = name.replace("-", "_")
    record = unpacked / f"{module}-{version}.dist-info" / "RECORD"
    record.write_text("".join(line for line in record.read_text().splitlines(keepends=True) if "/bin/" not in line))
    path = folder / f"{module}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(unpacked.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(unpacked))
    return path
