"""vLLM settings of a machine, and whether a policy fits.

Imports nothing of vLLM, so that a command line or a test can check settings anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from node.engines.base import DoesNotFit, WrongEngine
from node.policy.attention import layer_windows
from node.policy.families import ATTENTION_FAMILIES, LONGROPE, engines_of
from node.policy.file import Blueprint
from node.protocol.run import RunSpec

GIB = 2**30

WORKING_BYTES = GIB
"""Beyond weights and cache: activations, the logits of a batch, and the runtime itself."""

CPU_BLOCK_TOKENS = 128
"""vLLM's cache block size on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """Settings of one engine on one machine.

    `gpu_memory_utilization` is the share of each device's memory to use, on a CPU of what is free at the start;
    `kv_cache_gib` sets the cache size instead. `max_model_len` (tokens, prompt included) defaults to the run's longest
    completion; `max_num_seqs` limits completions decoded together, and `max_num_batched_tokens` the tokens of a step
    (None: vLLM's choice). `cpu_threads` applies without a GPU: None leaves it to vLLM, which binds threads to cores and
    must do so only once per machine. An engine that produces nothing for `stall_seconds` counts as dead.
    """

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    enforce_eager: bool = False
    cpu_threads: int | None = None
    start_seconds: float = 900.0
    stall_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What to request of vLLM. `kv_cache_bytes` None lets vLLM measure what is left, as it does on a GPU."""

    max_model_len: int
    kv_cache_bytes: int | None


def make_plan(
    blueprint: Blueprint, *, spec: RunSpec, settings: VllmSettings, memory_bytes: int, on_cpu: bool
) -> MemoryPlan:
    """Plan how to hold `blueprint` in `memory_bytes` of each device (on a CPU: free at this moment).

    Raises DoesNotFit, whose message says what is too large and what to do about it.
    """
    check_family(blueprint)
    length = _length(blueprint, spec=spec, settings=settings)
    parts = settings.tensor_parallel_size
    _check_parts(blueprint, parts=parts)
    itemsize = getattr(torch, spec.model.dtype).itemsize
    weights = blueprint.parameters * itemsize // parts
    per_token = cache_bytes_per_token(blueprint, itemsize=itemsize) // parts
    blocks = -(-length // CPU_BLOCK_TOKENS) if on_cpu else None
    one = per_token * (blocks * CPU_BLOCK_TOKENS if blocks else length)
    budget = int(memory_bytes * settings.gpu_memory_utilization)
    positions = positions_bytes(blueprint)
    if positions > budget:
        raise DoesNotFit(
            f"vLLM keeps a table of the policy's positions, which takes {_gib(positions)} GiB, more than the "
            f"{_gib(budget)} GiB that it may use: the run's operator has to lower max_position_embeddings, or what "
            "multiplies it."
        )
    working = WORKING_BYTES + positions
    if settings.kv_cache_gib is not None:
        wanted = int(settings.kv_cache_gib * GIB)
        if wanted < one:
            raise DoesNotFit(
                f"A cache of {_gib(wanted)} GiB (--kv-cache-gib) does not hold one completion of {length} tokens, "
                f"which takes {_gib(one)} GiB."
            )
    else:
        # Two extra blocks: vLLM reserves one for itself.
        wanted = one * settings.max_num_seqs + 2 * per_token * CPU_BLOCK_TOKENS
    if weights + one + working > budget:
        where = "of this machine's free memory" if on_cpu else "of each GPU's memory"
        raise DoesNotFit(
            f"The policy takes {_gib(weights)} GiB in {spec.model.dtype}, one completion of {length} tokens "
            f"{_gib(one)} GiB and the engine about {_gib(working)} GiB, more than the {_gib(budget)} GiB that "
            f"--gpu-memory-utilization {settings.gpu_memory_utilization:g} allows {where}: raise it, free memory, "
            "use more GPUs (--tensor-parallel-size), or join another run."
        )
    if on_cpu or settings.kv_cache_gib is not None:
        return MemoryPlan(max_model_len=length, kv_cache_bytes=min(wanted, budget - weights - working))
    return MemoryPlan(max_model_len=length, kv_cache_bytes=None)


def check_family(blueprint: Blueprint) -> None:
    """Raise WrongEngine for a policy that vLLM has no model of, or one that was not seen to compute the same."""
    config = blueprint.config
    family = config.model_type
    if "vllm" not in engines_of(family):
        raise WrongEngine(f"vLLM does not serve {family} policies; use --engine torch.")
    row = ATTENTION_FAMILIES[family]
    for name, allowed in row.vllm_fixed.items():
        if (value := getattr(config, name)) not in allowed:
            raise WrongEngine(f"vLLM serves no {family} policy whose {name} is {value}; use --engine torch.")
    if config.rope_parameters.get("rope_type") == LONGROPE:
        raise WrongEngine(f"vLLM serves no {family} policy whose positions are {LONGROPE}; use --engine torch.")
    if row.is_even_in_vllm and len(set(layer_windows(config))) > 1:
        raise WrongEngine(f"vLLM serves no {family} policy with a window in some layers alone; use --engine torch.")


def cache_bytes_per_token(blueprint: Blueprint, *, itemsize: int) -> int:
    """Return the bytes of one token's keys and values over all layers."""
    config: Any = blueprint.config
    if (rank := getattr(config, "kv_lora_rank", None)) is not None:
        latent: int = config.num_hidden_layers * (rank + config.qk_rope_head_dim) * itemsize
        return latent
    size: int = 2 * config.num_hidden_layers * config.num_key_value_heads * _head_size(config) * itemsize
    return size


def positions_bytes(blueprint: Blueprint) -> int:
    """Return the bytes vLLM needs while it builds its rotary tables, one for each kind of layer that has its own."""
    config: Any = blueprint.config
    kinds = [each for each in config.rope_parameters.values() if isinstance(each, dict)] or [config.rope_parameters]
    rows = 0.0
    for rope in kinds:
        if rope["rope_type"] == "yarn":
            rows += rope["original_max_position_embeddings"] * rope["factor"]
        else:
            rows += config.max_position_embeddings * (rope["factor"] if rope["rope_type"] == "linear" else 1)
    # Angles, their cosines and their sines, half a head wide each, and a head's width of both: float32.
    return int(min(rows * _head_size(config) * 10.0, 2.0**60))


def _head_size(config: Any) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _length(blueprint: Blueprint, *, spec: RunSpec, settings: VllmSettings) -> int:
    needed = spec.sampling.most_tokens
    terms = "sampling.max_prompt_tokens + max_new_tokens"
    if spec.sampling.reply_tokens:
        terms += " + max_reply_tokens"
    positions = int(getattr(blueprint.config, "max_position_embeddings", needed))
    if needed > positions:
        raise DoesNotFit(
            f"The run asks for {needed} tokens ({terms}), but the policy has "
            f"positions for {positions}: its operator has to change one of them."
        )
    if settings.max_model_len is None:
        return needed
    if settings.max_model_len < needed:
        raise DoesNotFit(
            f"--max-model-len {settings.max_model_len} is too short for this run: with its prompt a completion takes "
            f"up to {needed} tokens."
        )
    return min(settings.max_model_len, positions)


def _check_parts(blueprint: Blueprint, *, parts: int) -> None:
    config: Any = blueprint.config
    if config.num_attention_heads % parts or config.hidden_size % parts:
        raise DoesNotFit(
            f"The policy's {config.num_attention_heads} attention heads do not divide among {parts} GPUs "
            "(--tensor-parallel-size)."
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}" if size >= GIB // 10 else f"{size / GIB:.3f}"
