"""The images of deploy/images, built by buildah from a fresh Debian in place of their base, and run by podman.

No registry is asked. What is installed in them comes from where this machine's pip takes it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from locations import ROOT

CONTAINERFILE = ROOT / "deploy" / "images" / "Containerfile"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_TOOLS = ("buildah", "mmdebstrap", "podman", "runc")


class Tool:
    """buildah or podman, with a store of its own; raise CalledProcessError for what it refuses."""

    def __init__(self, folder: Path, name: str, *options: str) -> None:
        self.command = [name, "--root", str(folder / "store"), "--runroot", str(folder / "run"), *options]
        # podman wants systemd's timers for health checks, which are run by hand here.
        self.environment = os.environ | {"DISABLE_HC_SYSTEMD": "true"}

    def __call__(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self.command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT, env=self.environment
        )
        if done.returncode:
            said = f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            raise subprocess.CalledProcessError(done.returncode, arguments, said)
        return done.stdout.strip()


class Images:
    """A store of images, which is filled on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buildah = Tool(folder, "buildah")
        self.podman = Tool(folder, "podman", "--cgroup-manager", "cgroupfs", "--runtime", "runc")
        self._built = set[str]()

    def build(self, target: str) -> str:
        """The name of the image of a target."""
        name = f"localhost/swarmproof-{target}"
        if target not in self._built:
            arguments = ["--build-arg", "BASE=localhost/base", "--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
            options = ["--isolation", "chroot", "--layers", "--format", "docker", *pip_settings(self.folder)]
            self.buildah("build", *options, *arguments, "--target", target, "-t", name, "-f", str(CONTAINERFILE), ".")
            self._built.add(target)
        return name

    def make_base(self) -> None:
        """Make an image of Debian's smallest root, which has no Python; skip the test where there is none to be had."""
        root = self.folder / "root.tar"
        made = subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", root], capture_output=True, check=False)
        if made.returncode:
            pytest.skip(f"no Debian can be had here: {made.stderr.decode()[-300:]}")
        container = self.buildah("from", "scratch")
        self.buildah("add", container, str(root), "/")
        self.buildah("config", "--env", f"PATH={_PATH}", container)
        self.buildah("commit", "--rm", container, "base")
        root.unlink()


def pip_settings(folder: Path) -> list[str]:
    """buildah's options that give pip in a build this machine's settings, and the files that these name below /host."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    lines, volumes = ["[global]"], {f"{folder / 'pip.conf'}:/etc/pip.conf:ro"}
    for key, value in dict(re.findall(r"(?m)^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.stdout)).items():
        for path in map(Path, re.findall(r"(?<!\S)(?:file://)?(/\S+)", value)):
            # An index of files links to what is beside it.
            shown = path if path.is_file() else path.parent
            volumes.add(f"{shown}:/host{shown}:ro")
        lines.append(f"{key} = " + re.sub(r"(?<!\S)(file://)?(/\S+)", r"\1/host\2", value))
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return [option for volume in sorted(volumes) for option in ("--volume", volume)]


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    """A store with the base alone."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} missing: apt install {' '.join(_TOOLS)}")
    if os.geteuid() != 0:
        pytest.skip("only root can make a Debian root here")
    images = Images(tmp_path_factory.mktemp("images"))
    images.make_base()
    yield images
    images.podman("rmi", "--all", "--force")
