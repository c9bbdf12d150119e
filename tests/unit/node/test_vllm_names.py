"""Every name of vLLM that our code reads, as far as the installed version's source has it.

vLLM promises few of them. A version that renames one fails here, with the name, and not in the middle of a completion
on somebody's GPU; the source is parsed and not imported, so that this also tells of a wheel that cannot be installed
(`PYTHONPATH=folder-of-the-unpacked-wheel`). What they mean is held by `tests/system/test_vllm_*.py`.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

NAMES = {
    # node/engines/vllm_runners.py: the V1 runner
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner": """sample_tokens execute_model_state requests input_batch discard_request_mask query_start_loc
            reload_weights get_model device""",
        "ExecuteModelState": "scheduler_output hidden_states sample_hidden_states",
    },
    "v1/worker/gpu_input_batch.py": {
        "InputBatch": "req_ids num_reqs num_computed_tokens_cpu",
        "CachedRequestState": "sampling_params num_tokens num_prompt_tokens",
    },
    "v1/core/sched/output.py": {
        "SchedulerOutput": "scheduled_cached_reqs num_scheduled_tokens",
        "CachedRequestData": "resumed_req_ids",
    },
    "v1/utils.py": {"CpuGpuBuffer": "np"},
    # the V2 runner
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner": "sample_tokens execute_model_state req_states vllm_config reload_weights get_model device",
        "ExecuteModelState": "input_batch hidden_states",
    },
    "v1/worker/gpu/input_batch.py": {
        "InputBatch": """num_reqs idx_mapping_np num_scheduled_tokens num_computed_tokens_np prefill_len_np
            query_start_loc_np logits_indices""",
    },
    "v1/worker/gpu/states.py": {"RequestState": "prompt_len"},
    # node/engines/vllm_worker.py
    "v1/sample/logits_processor/interface.py": {
        "LogitsProcessor": "__init__ validate_params is_argmax_invariant update_state apply",
    },
    "v1/worker/gpu/sample/logits_processor/interface.py": {
        "LogitsProcessor": "__init__ validate_params add_request apply",
    },
    "model_executor/layers/vocab_parallel_embedding.py": {
        "ParallelLMHead": "",
        "VocabParallelEmbedding": "quant_method",
    },
    "v1/worker/worker_base.py": {"WorkerBase": "model_runner rank"},
    # node/engines/vllm_host.py and node/engines/vllm_processes.py
    "config/vllm.py": {"VllmConfig": "use_v2_model_runner"},
    "engine/arg_utils.py": {
        "EngineArgs": """model skip_tokenizer_init dtype hf_overrides generation_config max_model_len max_num_seqs
            max_num_batched_tokens tensor_parallel_size gpu_memory_utilization kv_cache_memory_bytes enforce_eager
            enable_prefix_caching stream_interval worker_extension_cls logits_processors disable_log_stats
            use_tqdm_on_load""",
    },
    "v1/engine/async_llm.py": {
        "AsyncLLM": """from_engine_args generate collective_rpc pause_generation resume_generation shutdown
            engine_core output_handler output_processor errored dead_error""",
    },
    "v1/engine/output_processor.py": {"OutputProcessor": "propagate_error"},
    "v1/engine/core_client.py": {"BackgroundResources": "engine_manager output_queue_task"},
    "v1/engine/utils.py": {"CoreEngineProcManager": "processes"},
    "platforms/interface.py": {"Platform": "is_cpu get_device_total_memory"},
    # node/engines/vllm.py and node/engines/vllm_prefill.py
    "sampling_params.py": {
        "SamplingParams": "temperature max_tokens stop_token_ids ignore_eos detokenize output_kind extra_args",
        "RequestOutputKind": "DELTA FINAL_ONLY",
    },
}


def members(found: ast.ClassDef) -> set[str]:
    """Names that a class defines, annotates or assigns, in its body or on `self`."""
    names = set()
    for node in ast.walk(found):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


@pytest.mark.parametrize("file", NAMES)
def test_vllm_still_has_the_names_that_are_read(file: str) -> None:
    (folder,) = find_spec("vllm").submodule_search_locations
    tree = ast.parse((Path(folder) / file).read_text())
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for name, wanted in NAMES[file].items():
        assert name in classes, f"vLLM's {file} has no {name}"
        assert set(wanted.split()) <= members(classes[name]), name
