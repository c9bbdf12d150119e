"""The images of deploy/images, built by buildah and run: no registry is asked, a fresh Debian stands for their base.

What an operator would see first: a RUN step that fails, a program that its user may not start or that lacks a package,
a folder in which it may not write.
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
from ports import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3400)]

CONTAINERFILE = ROOT / "deploy" / "images" / "Containerfile"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOADS = {
    "relay": "import node.relay.daemon, libp2p",
    "worker": "import node.worker.daemon, node.engines.torch, libp2p, numba",
    "operator": "import coordinator.app, coordinator.training.trainer, libp2p, boto3, psycopg",
}


class Builder:
    """buildah, with a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._global = ["buildah", "--root", str(folder / "store"), "--runroot", str(folder / "run")]

    def do(self, *arguments: str, input_: str | None = None) -> str:
        done = subprocess.run(
            [*self._global, *arguments], input=input_, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert done.returncode == 0, f"{' '.join(arguments)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def run(self, container: str, *command: str) -> str:
        """What a command prints as the image's user."""
        return self.do("run", "--isolation", "chroot", container, "--", *command)


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


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    """One that has an image `base`."""
    if missing := [tool for tool in ("buildah", "mmdebstrap") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} missing: apt install buildah mmdebstrap")
    if os.geteuid() != 0:
        pytest.skip("only root can make a Debian root here")
    builder = Builder(tmp_path_factory.mktemp("images"))
    root = builder.folder / "root.tar"
    made = subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", root], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no Debian can be had here: {made.stderr.decode()[-300:]}")
    container = builder.do("from", "scratch")
    builder.do("add", container, str(root), "/")
    builder.do("config", "--env", f"PATH={PATH}", container)
    builder.do("commit", "--rm", container, "base")
    yield builder
    builder.do("rmi", "--all", "--force")


@pytest.mark.parametrize("target", LOADS)
def test_an_image_is_built_and_its_user_starts_the_program(builder: Builder, target: str) -> None:
    arguments = ["--build-arg", "BASE=localhost/base", "--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
    options = ["--isolation", "chroot", "--layers", "--format", "docker", *pip_settings(builder.folder)]
    builder.do("build", *options, *arguments, "--target", target, "-t", target, "-f", str(CONTAINERFILE), ".")
    container = builder.do("from", target)
    assert builder.run(container, "id", "-u") == "10001"
    assert "version" in builder.run(container, "swarmproof", "--version")
    builder.run(container, "python3", "-c", LOADS[target])
    builder.run(container, "sh", "-c", "touch data/a state/a && ! touch /opt/swarmproof/a 2> /dev/null")
    builder.run(container, "bwrap", "--version")
    hint = "from node.runtime.extras import install_hint; print(install_hint('wandb'))"
    assert re.fullmatch(
        r"build the image with --build-arg EXTRAS=\S+,wandb", builder.run(container, "python3", "-c", hint)
    )
    assert (
        builder.run(container, "sh", "-c", "find / -xdev -name '*.key' -not -path '/proc/*' 2> /dev/null || true") == ""
    )
    if target == "operator":
        check_that_a_coordinator_serves(builder, container)


def check_that_a_coordinator_serves(builder: Builder, container: str) -> None:
    """Until the image's own health check says so."""
    (check,) = re.findall(r'(?m)^HEALTHCHECK .* CMD \["python3", "-c", "(.*)"\]$', CONTAINERFILE.read_text())
    port = free_port()
    script = f"""
        cd state
        swarmproof init --name image --environment arithmetic > /dev/null
        swarmproof coordinator --run run.toml --key run.key --data ../data --uncalibrated --no-peer --port {port} &
        for try in $(seq 300); do python3 -c "{check}" 2> /dev/null && served=yes && break; sleep 1; done
        kill $! && wait $! && test "$served" = yes
    """
    builder.run(container, "env", f"HEALTH_URL=http://127.0.0.1:{port}/health", "sh", "-c", script)
