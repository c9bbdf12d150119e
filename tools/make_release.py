"""Make a release's files in dist/ of the commit that is checked out (`make release`, docs/releasing.md).

It publishes nothing and tags nothing: it ends with the commands that do.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SBOM_TOOL = "cyclonedx-bom==7.5.0"
NOT_SHIPPED = {"dev", "docs", "vllm"}
"""Extras that the bill of materials leaves out: vLLM brings its own torch, for GPUs."""


class Unready(click.ClickException):
    """The tree is not one to release; the message says what to do."""


def check_changelog(changelog: str, version: str) -> None:
    """Raise Unready unless the newest section of the changelog is that of `version`, with a date."""
    newest = re.search(r"(?m)^## (.*)$", changelog)
    heading = newest[1] if newest is not None else "nothing"
    if re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading) is None:
        raise Unready(f"CHANGELOG.md begins with '{heading}': write '## {version} - YYYY-MM-DD' there.")


def commit_of_clean_tree(root: Path) -> tuple[str, int]:
    """Return the commit that is checked out, and when it was made in seconds since 1970; Unready if files differ."""
    if changed := _output("git", "status", "--porcelain", cwd=root):
        raise Unready(f"These files differ from the commit:\n{changed}")
    commit, seconds = _output("git", "log", "-1", "--format=%H %ct", cwd=root).split()
    return commit, int(seconds)


def build(source: Path, out: Path, *, epoch: int) -> dict[str, str]:
    """Build sdist and wheel of the tree `source` into `out`; return the SHA-256 of each file, by its name.

    The same tree gives the same bytes, whenever, wherever and by whomever it is built with the same setuptools: times
    are `epoch` (seconds since 1970), and modes and owners nobody's in particular.
    """
    for path in sorted(source.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch)}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(  # noqa: S603  (no shell, and every argument is this program's)
        command, env=environment, umask=0o022, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Unready(f"It does not build:\n{done.stdout}{done.stderr}")
    for sdist in out.glob("*.tar.gz"):
        sdist.write_bytes(_without_circumstances(sdist.read_bytes(), epoch=epoch))
    return digests(out)


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file in `folder`, by its name, in the order of names."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def _without_circumstances(sdist: bytes, *, epoch: int) -> bytes:
    """Write a source distribution again: setuptools leaves in it when and by whom it was built."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as old,
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            # Files that setuptools writes have the modes of the machine's umask.
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def write_bill_of_materials(wheel: Path, extras: list[str], folder: Path, *, epoch: int) -> Path:
    """Install the wheel with its extras into `folder`, and write beside it, as CycloneDX, what that brought."""
    installed, tool = folder / "installed", folder / "cyclonedx"
    for place, packages in (
        (installed, ["-c", str(ROOT / "constraints.txt"), f"{wheel}[{','.join(extras)}]"]),
        (tool, [SBOM_TOOL]),
    ):
        _run(sys.executable, "-m", "venv", "--without-pip", str(place))
        pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", "--quiet"]
        _run(*pip, "--disable-pip-version-check", *packages)
    bill = wheel.parent / f"{wheel.name.split('-py3')[0]}.cdx.json"
    options = ["--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", "--short-PURLs", "--validate"]
    command = [str(tool / "bin" / "cyclonedx-py"), "environment", *options, "--output-file", str(bill), str(installed)]
    _run(*command, SOURCE_DATE_EPOCH=str(epoch))
    return bill


def _run(*command: str, **environment: str) -> None:
    subprocess.run(command, env=os.environ | environment, check=True)  # noqa: S603


def _output(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout.strip()


def _extracted(commit: str, folder: Path) -> Path:
    """Put the files of the commit into `folder`, and nothing that the working tree has beside them."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout  # noqa: S603, S607
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@click.command()
@click.option("--sbom/--no-sbom", default=True, help="Leave out the bill of materials, which takes minutes.")
def main(*, sbom: bool) -> None:
    """Check the commit, build it twice, compare, and write digests and a bill of materials to dist/."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    check_changelog((ROOT / "CHANGELOG.md").read_text(), version)
    commit, epoch = commit_of_clean_tree(ROOT)
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = build(_extracted(commit, folder / "one"), DIST, epoch=epoch)
        second = build(_extracted(commit, folder / "two"), folder / "again", epoch=epoch)
        if first != second:
            raise Unready(f"Two builds of one commit differ:\n{first}\n{second}")
        if sbom:
            extras = sorted(project["optional-dependencies"].keys() - NOT_SHIPPED)
            (wheel,) = DIST.glob("*.whl")
            write_bill_of_materials(wheel, extras, folder, epoch=epoch)
    sums = "".join(f"{digest}  {name}\n" for name, digest in digests(DIST).items())
    (DIST / "SHA256SUMS").write_text(sums)
    click.echo(f"{sums}\nTwo builds of {commit} gave one sdist and one wheel. To tag it, with these digests signed:\n")
    click.echo(f'  git tag -s v{version} -m "swarmproof {version}" -m "$(cat dist/SHA256SUMS)" {commit}')


if __name__ == "__main__":
    main()
