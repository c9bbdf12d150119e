"""The images of deploy/images, built and run.

What an operator would see first: a RUN step that fails, a program that its user may not start or that lacks a package,
a folder in which it may not write.
"""

from __future__ import annotations

import re

import pytest
from built_images import Images

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3400)]

LOADS = {
    "relay": "import node.relay.daemon, libp2p",
    "worker": "import node.worker.daemon, node.engines.torch, libp2p, numba",
    "operator": "import coordinator.app, coordinator.training.trainer, libp2p, boto3, psycopg",
}


@pytest.mark.parametrize("target", LOADS)
def test_an_image_is_built_and_its_user_starts_the_program(images: Images, target: str) -> None:
    container = images.buildah("from", images.build(target))

    def run(*command: str) -> str:
        return images.buildah("run", "--isolation", "chroot", container, "--", *command)

    assert run("id", "-u") == "10001"
    assert "version" in run("swarmproof", "--version")
    run("python3", "-c", LOADS[target])
    run("sh", "-c", "touch data/a state/a && ! touch /opt/swarmproof/a 2> /dev/null")
    run("bwrap", "--version")
    hint = run("python3", "-c", "from node.runtime.extras import install_hint; print(install_hint('wandb'))")
    assert re.fullmatch(r"build the image with --build-arg EXTRAS=\S+,wandb", hint)
    assert not run(
        "sh",
        "-c",
        "find / -xdev -name '*.key' -not -path '*/site-packages/*' -not -path '/proc/*' 2> /dev/null || true",
    )
