"""deploy/images and deploy/kubernetes against the program: an operator starts them as they are.

What needs no engine of containers. A flag that is gone, a probe of another port, a folder that nobody mounted would
show on the operator's machine first, and a key that a process did not need would show there too late.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import parameters, variables
from locations import ROOT

from node.commands.click_ext import ENVIRONMENT
from node.keys.identity import create_key, load_key, node_id

IMAGES, KUBERNETES = ROOT / "deploy" / "images", ROOT / "deploy" / "kubernetes"
CONTAINERFILE = (IMAGES / "Containerfile").read_text()
COMPOSE = yaml.safe_load((IMAGES / "compose.yaml").read_text())
OURS = {name: one for name, one in COMPOSE["services"].items() if one["image"].startswith("swarmproof-")}
PODS = {
    one["metadata"]["name"]: one["spec"]["template"]["spec"]
    for path in KUBERNETES.glob("*.yaml")
    for one in yaml.safe_load_all(path.read_text())
    if one["kind"] in {"Deployment", "StatefulSet"} and path.name != "hardened.yaml"
}
SETTINGS = dict(line.split("=", 1) for line in (KUBERNETES / "settings.env").read_text().splitlines() if line[0] != "#")
GIVEN = {"RUN_NAME": "192.0.2.1", "RUN_ID": "ab" * 32, "RUN_HOME": "/srv/run"}
USER = 10001


def filled_in(text: str) -> str:
    """As Compose fills in variables."""
    return re.sub(r"\$\{(\w+):\?\}", lambda found: GIVEN[found[1]], text)


def container(pod: str) -> dict[str, Any]:
    (only,) = PODS[pod]["containers"]
    return only


def with_a_run_file(arguments: list[str], folder: Path) -> list[str]:
    (folder / "run.toml").touch()
    return [part.replace("/etc/swarmproof", str(folder)) for part in arguments]


def written(arguments: list[str]) -> set[str]:
    """The folders that a command line says it writes to."""
    return {value for flag, value in itertools.pairwise(arguments) if flag in {"--data", "--state"}}


def port_of(arguments: list[str], path: str) -> int:
    """The port on which a process answers GET of `path`."""
    flag = {"/health": "--port", "/metrics": "--metrics-port"}[path]
    return int(arguments[arguments.index(flag) + 1])


def defaults_of(argument: str) -> list[str]:
    return re.findall(rf"(?m)^ARG {argument}=(\S+)$", CONTAINERFILE)


def stage(name: str) -> str:
    return re.search(rf"(?ms)^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", CONTAINERFILE)[1]


@pytest.mark.parametrize("service", OURS)
def test_the_command_line_takes_what_compose_gives_it(service: str, tmp_path: Path) -> None:
    assert parameters([filled_in(part) for part in with_a_run_file(OURS[service]["command"], tmp_path)])


@pytest.mark.parametrize("pod", PODS)
def test_the_command_line_takes_what_kubernetes_gives_it(
    pod: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    command = container(pod)["args"][0]
    own = {name for name in SETTINGS if name.startswith(f"{ENVIRONMENT}_{command.upper()}_")}
    assert own <= variables(command), "the process would end with `unknown_setting`"
    assert parameters([part.replace("$(POD_NAME)", pod) for part in with_a_run_file(container(pod)["args"], tmp_path)])


def test_every_setting_is_somebodys() -> None:
    commands = {container(pod)["args"][0].upper() for pod in PODS}
    ours = {name for name in SETTINGS if name.startswith(ENVIRONMENT)}
    assert {name.split("_")[1] for name in ours} <= commands


@pytest.mark.parametrize("service", OURS)
def test_a_service_has_volumes_for_what_it_writes_and_nothing_else_is_writable(service: str) -> None:
    one = OURS[service]
    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    places = {volume.split(":")[1] for volume in one.get("volumes", ())}
    places |= {tmpfs.split(":")[0] for tmpfs in one["tmpfs"]}
    assert written(one["command"]) <= places
    # The image's volumes: what is not named here would be a new one at each start, and be left behind.
    assert set(json.loads(re.search(r"(?m)^VOLUME (.*)$", CONTAINERFILE)[1])) <= places
    assert {volume.split(":")[0] for volume in one.get("volumes", ())} <= COMPOSE["volumes"].keys()


def test_what_is_not_ours_is_hardened_as_well() -> None:
    for name in COMPOSE["services"].keys() - OURS.keys():
        one = COMPOSE["services"][name]
        assert (one["read_only"], one["cap_drop"]) == (True, ["ALL"])
        assert one["user"] not in {"0", "0:0", "root"}
        assert re.fullmatch(r"\S+:\d[\w.-]*", one["image"]), "another version tomorrow"


def test_the_database_is_reached_from_inside_alone() -> None:
    assert COMPOSE["networks"]["inside"]["internal"] is True
    assert COMPOSE["services"]["postgresql"]["networks"] == ["inside"]
    assert "ports" not in COMPOSE["services"]["postgresql"]
    outside = [name for name in ("relay", "worker") if "inside" in OURS[name].get("networks", ())]
    assert not outside, "those whom the operator need not trust"


def test_the_processes_are_no_superuser_of_the_database() -> None:
    one = COMPOSE["services"]["postgresql"]
    assert "POSTGRES_USER" not in one["environment"], "the image makes it a superuser"
    (script,) = one["configs"]
    assert script["target"].startswith("/docker-entrypoint-initdb.d/"), "the image would not run it"
    assert (IMAGES / COMPOSE["configs"][script["source"]]["file"]).is_file()


@pytest.mark.parametrize("service", OURS)
def test_the_health_check_of_a_service_asks_a_port_that_it_listens_on(service: str) -> None:
    one = OURS[service]
    target = one["build"]["target"]
    url = one.get("environment", {}).get("HEALTH_URL") or re.search(r"HEALTH_URL=(\S+)", stage(target))[1]
    port, path = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/\w+)", url).groups()
    assert int(port) == port_of(one["command"], path)
    for published in one.get("ports", ()):
        inside = published.split(":")[1]
        assert inside in one["command"], "nobody listens there"


@pytest.mark.parametrize("pod", PODS)
def test_probes_and_services_of_a_pod_ask_a_port_that_it_listens_on(pod: str) -> None:
    one = container(pod)
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert {"startupProbe", "livenessProbe"} <= one.keys()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in one:
            asked = one[probe]["httpGet"]
            assert ports[asked["port"]] == port_of(one["args"], asked["path"])
    if "metrics" in ports:
        assert one["args"][one["args"].index("--metrics-host") + 1] == "0.0.0.0"


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_mounts_what_it_writes(pod: str) -> None:
    places = {mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    assert written(container(pod)["args"]) <= places
    mounted = {mount["name"] for mount in container(pod)["volumeMounts"]}
    assert {volume["name"] for volume in PODS[pod].get("volumes", ())} <= mounted


def test_the_runs_key_is_given_to_those_alone_who_sign() -> None:
    signing = {"coordinator", "trainer"}
    assert {name for name, one in OURS.items() if "run.key" in one.get("secrets", ())} == signing
    assert {pod for pod in PODS if "run-key" in json.dumps(PODS[pod])} == signing
    for one in (*OURS.values(), *map(container, PODS)):
        arguments = one.get("command") or one["args"]
        assert "--key" not in arguments or arguments[0] in signing


def test_the_images_are_built_of_what_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert defaults_of("TORCH") == re.findall(r"(?m)^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text())
    for target in ("relay", "worker", "operator"):
        (built,) = re.findall(r"(?m)^ARG EXTRAS=(\S+)$", stage(f"build-{target}"))
        (said,) = re.findall(r"(?m)^ARG EXTRAS=(\S+)$", stage(target))
        assert built == said, "`SWARMPROOF_IMAGE`, of which a hint is made, would be wrong"
        assert set(built.split(",")) <= extras.keys()
    assert {one["build"]["target"] for one in OURS.values()} == {"relay", "worker", "operator"}


def test_all_mean_one_user() -> None:
    hardened = yaml.safe_load((KUBERNETES / "hardened.yaml").read_text())["spec"]["template"]["spec"]
    assert re.findall(r"(?m)^USER (\d+):", CONTAINERFILE) == [str(USER)], "a later stage would be root"
    assert hardened["securityContext"]["runAsUser"] == hardened["securityContext"]["fsGroup"] == USER
    assert f"keep run.key {USER}" in (IMAGES / "secrets.sh").read_text()


def test_the_build_sees_no_more_than_it_needs() -> None:
    """What is not sent to a builder cannot get into an image."""
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    shown = [line[1:] for line in ignored if line.startswith("!")]
    assert "*" in ignored
    packages = ("toploc", "shardcast", "node", "coordinator")
    assert set(shown) == {
        "LICENSE",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
        *(f"{name}/**" for name in packages),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_each_secret_is_readable_by_its_process_alone(tmp_path: Path) -> None:
    key = create_key(tmp_path / "run.key")
    subprocess.run(["sh", IMAGES / "secrets.sh", tmp_path], check=True, timeout=60)
    secrets = tmp_path / "secrets"
    assert {path.name for path in secrets.iterdir()} == COMPOSE["secrets"].keys()
    for name, one in COMPOSE["services"].items():
        uid = int(one.get("user", f"{USER}:").split(":")[0])
        for secret in one.get("secrets", ()):
            found = (secrets / secret).stat()
            assert (found.st_uid, oct(found.st_mode & 0o777)) == (uid, "0o400"), f"{secret} for {name}"
    assert node_id(load_key(secrets / "run.key")) == node_id(key)
    (identity,) = json.loads((secrets / "s3.json").read_text())["identities"]
    (credentials,) = identity["credentials"]
    assert credentials["secretKey"] in (secrets / "s3-credentials").read_text()
    assert (secrets / "pgpass").read_text().endswith(f":swarmproof:{(secrets / 'postgres-password').read_text()}")
    again = subprocess.run(["sh", IMAGES / "secrets.sh", tmp_path], capture_output=True, timeout=60, check=False)
    assert again.returncode != 0, "a second one would lock the database's processes out"


def test_kustomize_gives_each_pod_what_all_have() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    made = subprocess.run(
        ["kubectl", "kustomize", KUBERNETES], capture_output=True, text=True, timeout=120, check=False
    )
    assert made.returncode == 0, made.stderr
    objects = list(yaml.safe_load_all(made.stdout))
    (settings,) = (one for one in objects if one["kind"] == "ConfigMap")
    pods = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in objects if "template" in one.get("spec", {})
    }
    assert pods.keys() == PODS.keys()
    for name, pod in pods.items():
        (one,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert {"configMapRef": {"name": settings["metadata"]["name"]}} in one["envFrom"], name
        assert {"name": "tmp", "mountPath": "/tmp"} in one["volumeMounts"]
        named = {volume["name"] for volume in pod["volumes"]} | {"state"}
        assert {mount["name"] for mount in one["volumeMounts"]} <= named


def test_the_overlay_on_the_page_gives_the_run_its_settings(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    page = (ROOT / "docs" / "images.md").read_text()
    (overlay,) = re.findall(r"(?ms)^```yaml\n(.*?)^```", page)
    base = os.path.relpath(KUBERNETES, tmp_path)
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../swarmproof/deploy/kubernetes", base))
    (tmp_path / "settings.env").write_text("SWARMPROOF_RELAY_RUN_ID=" + "ab" * 32)
    (tmp_path / "run.toml").write_text("name = 'mine'")
    made = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr
    objects = list(yaml.safe_load_all(made.stdout))
    maps = {one["metadata"]["name"]: one["data"] for one in objects if one["kind"] == "ConfigMap"}
    (run,) = (name for name, data in maps.items() if "run.toml" in data)
    (settings,) = (data for name, data in maps.items() if name.startswith("settings"))
    assert settings == SETTINGS | {"SWARMPROOF_RELAY_RUN_ID": "ab" * 32}
    (coordinator,) = (
        one for one in objects if one["kind"] == "Deployment" and one["metadata"]["name"] == "coordinator"
    )
    assert {"configMap": {"name": run}, "name": "run"} in coordinator["spec"]["template"]["spec"]["volumes"]
    assert {one["metadata"]["namespace"] for one in objects} == {"my-run"}


def test_the_page_names_variables_and_arguments_that_there_are() -> None:
    page = (ROOT / "docs" / "images.md").read_text()
    named = set(re.findall(rf"{ENVIRONMENT}_[A-Z_]+", page))
    assert named
    assert named <= set().union(*(variables(one["command"][0]) for one in OURS.values()))
    arguments = set(re.findall(r"(?m)^ARG (\w+)", CONTAINERFILE))
    assert set(re.findall(r"(?m)^\| `([A-Z_]+)` \|", page)) == arguments
    assert set(re.findall(r"--build-arg (\w+)=", page)) <= arguments
