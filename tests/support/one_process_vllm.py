"""vLLM with one of its two model runners in this process, beside which our worker extension draws and reads.

On a GPU both run as ever, compiled and with CUDA graphs. On a CPU the V2 runner, which is made of Triton kernels, has
no back end on PyPI but an interpreter, which runs the same kernels in NumPy, slowly: vLLM asks for no more than that
such a back end says it is there. A program: a folder, a runner and what is wanted as one JSON object on standard input,
answered likewise.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import types

import msgspec
import torch

from node.protocol.run import ProofSpec

MAX_MODEL_LEN = 128


def start(folder, *, runner, hidden, vocabulary, proofs, temperature, parallel=1):
    """Start vLLM on the policy in `folder`, with blocks for some of the requests at a time."""
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": {"v1": "0", "v2": "1"}[runner],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "TRITON_F32_DEFAULT": "ieee",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if runner == "v2" and not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
        backends = __import__("triton.backends").backends.backends
        driver = types.SimpleNamespace(is_active=lambda: False)
        backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    vllm = __import__("vllm")
    llm = vllm.LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        hf_overrides={"head_dtype": "float32"},
        enforce_eager=not on_gpu,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        # Prompts are read in parts, and some completions have to wait for others' blocks.
        max_num_batched_tokens=32,
        block_size=32,
        num_gpu_blocks_override=10,
        kv_cache_memory_bytes=2**26,
        gpu_memory_utilization=0.1 if on_gpu else 0.9,
        tensor_parallel_size=parallel,
        worker_extension_cls="node.engines.vllm_worker.ProvingWorker",
        logits_processors=["node.engines.vllm_worker:ForcedSampling"],
        disable_log_stats=True,
    )
    worker = __import__("node.engines.vllm_worker").engines.vllm_worker
    installation = worker.Installation(
        hidden=hidden, vocabulary=vocabulary, proofs=proofs, temperature=temperature, version=0
    )
    llm.collective_rpc("swarmproof_install", args=(msgspec.msgpack.encode(installation),))
    return llm


def generate(llm, prompts, ours, *, tokens):
    """Have `prompts` read, and `tokens` drawn of each, under what is `ours` of its parameters."""
    vllm = __import__("vllm")
    parameters = [
        vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args={"swarmproof": each}
        )
        for each in ours
    ]
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)


def main():
    """Draw what is wanted, read it as a verifier does, and print both."""
    wanted = json.loads(sys.stdin.read())
    proofs = msgspec.convert(wanted["proofs"], ProofSpec)
    temperature, tokens = wanted["temperature"], wanted["tokens"]
    llm = start(
        wanted["folder"],
        runner=wanted["runner"],
        hidden=wanted["hidden"],
        vocabulary=wanted["vocabulary"],
        proofs=proofs,
        temperature=temperature,
        parallel=wanted["parallel"],
    )
    prompts, seeds = wanted["prompts"], wanted["seeds"]
    ours = [{"name": f"r{row}", "seed": seed, "position": 0} for row, seed in enumerate(seeds)]
    generate(llm, prompts, ours, tokens=tokens)
    recorded = llm.collective_rpc("swarmproof_take", args=([[each["name"], tokens] for each in ours],))[0]
    drawn = msgspec.msgpack.decode(recorded)
    spans = []
    for row, (prompt, one) in enumerate(zip(prompts, drawn, strict=True)):
        span = {
            "row": row,
            "seed": bytes.fromhex(seeds[row]),
            "context_ids": prompt,
            "position": 0,
            "token_ids": one["tokens"],
            "proofs": one["proofs"],
            "first_proof": 0,
        }
        spans.append([f"m{row}", span])
    for name, span in spans:
        llm.reset_prefix_cache()  # a verifier's engine has none
        read = {"name": name, "first_row": len(span["context_ids"]) - 1}
        generate(llm, [span["context_ids"] + span["token_ids"][:-1]], [read], tokens=1)
    asked = msgspec.msgpack.encode([spans, temperature, wanted["proofs"]])
    measured = msgspec.msgpack.decode(llm.collective_rpc("swarmproof_measure", args=(asked,))[0])
    figures = [{name: each[name] for name in ("margins", "exponent_mismatches")} for each in measured]
    answer = {"recorded": base64.b64encode(recorded).decode(), "measured": figures}
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
