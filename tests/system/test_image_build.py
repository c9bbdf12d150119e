"""The images of deploy/images, built and run.

What an operator would see first: a RUN step that fails, a program that its user may not start or that lacks a package,
a folder in which it may not write; and what a contributor would, whose worker runs and earns nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from built_images import Images
from locations import ROOT
from ports import free_port
from swarm import running, small_spec
from waiting import until

from coordinator.lab.processes.local_http import get_json

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
    made = run("sh", "-c", "cat /opt/swarmproof/lib/python3*/site-packages/fastecdsa-*.dist-info/WHEEL")
    (setuptools,) = re.findall(r"(?m)^setuptools==(\S+)$", (ROOT / "constraints.txt").read_text())
    assert f"Generator: setuptools ({setuptools})" in made, "what is built there depends on the day"
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


def test_a_worker_of_its_image_is_admitted_and_ends_when_told(
    images: Images, tmp_path: Path, tiny_policy_path: Path
) -> None:
    """As docs/images.md starts one, but in this machine's network and without --init, which asks for catatonit."""
    port = free_port()
    options = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
    options += [
        "--network",
        "host",
        "--env",
        f"HEALTH_URL=http://127.0.0.1:{port}/metrics",
        "--env",
        "OMP_NUM_THREADS=1",
    ]
    options += ["--sdnotify", "ignore", "--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096"]
    options += ["--volume", "worker:/var/lib/swarmproof/state"]
    with running(tmp_path / "run", tiny_policy_path, spec=small_spec()) as swarm:
        arguments = ["--coordinator", swarm.url, "--run-id", swarm.home.run_id, "--metrics-port", str(port)]
        worker = images.podman("run", "--detach", *options, images.build("worker"), "worker", *arguments)
        until(
            lambda: any(one["admitted"] for one in (get_json(f"{swarm.url}/v1/status", seconds=60.0) or {})["nodes"]),
            seconds=300,
            what=lambda: images.podman("logs", worker),
        )
        images.podman("healthcheck", "run", worker)
        images.podman("stop", "--time", "150", worker)
    assert images.podman("inspect", "--format", "{{.State.ExitCode}}", worker) == "0"
