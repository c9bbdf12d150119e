#!/usr/bin/env bash
# Everything that is tested and measured on a GPU, in one command and at most twenty-five minutes:
#
#   benchmarks/gpu.sh              the tests that need a GPU, then what is measured on one, by vLLM where it is installed
#   benchmarks/gpu.sh --no-gpu     the same parts at the smallest sizes on a CPU: tries this script, measures nothing
#
# One JSON line for each benchmark goes to benchmarks/baselines/gpu-DEVICE.jsonl, or into the folder $OUT; what is
# meant for people goes beside it into gpu-DEVICE.log. A part that fails, or that runs out of its time, stops no other.
# PYTHON names the interpreter (default: .venv/bin/python where there is one, else python3).
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

smallest=no
case "${1-}" in
    "") ;;
    --no-gpu) smallest=yes ;;
    *)
        echo "usage: benchmarks/gpu.sh [--no-gpu]" >&2
        exit 2
        ;;
esac

python=${PYTHON:-}
if [[ -z $python ]]; then
    if [[ -x .venv/bin/python ]]; then python=.venv/bin/python; else python=python3; fi
fi

if [[ $smallest == yes ]]; then
    device=none
else
    device=$("$python" -c 'import torch; print(torch.cuda.get_device_name())' 2>/dev/null) || {
        echo "torch sees no CUDA device; --no-gpu tries this script without one" >&2
        exit 1
    }
fi
name=gpu-$(tr '[:upper:]' '[:lower:]' <<<"$device" | tr -cs '[:alnum:]\n' '-')
if [[ $smallest == yes ]]; then
    folder=${OUT:-$(mktemp -d)}
else
    folder=${OUT:-benchmarks/baselines}
fi
mkdir -p "$folder" || exit 1
lines=$folder/$name.jsonl
log=$folder/$name.log
: >"$lines" || exit 1
: >"$log" || exit 1

summary=()
failed=0

# part SECONDS NAME COMMAND...: a last line of standard output that is JSON is kept.
part() {
    local seconds=$1 title=$2 started=$SECONDS status=0 output last
    shift 2
    echo "== $title" | tee -a "$log"
    output=$(timeout --kill-after=10 "$seconds" "$@" 2>>"$log") || status=$?
    printf '%s\n' "$output" >>"$log"
    last=$(tail -n 1 <<<"$output")
    if [[ $status -eq 0 && $last == "{"* ]]; then
        printf '%s\n' "$last" >>"$lines"
    fi
    case $status in
        0) summary+=("ran      $title ($((SECONDS - started)) s)") ;;
        124 | 137) summary+=("timeout  $title (after $seconds s)") && failed=1 ;;
        *) summary+=("failed   $title (exit status $status, see $log)") && failed=1 ;;
    esac
}

if [[ $smallest == yes ]]; then
    sizes=(--hidden 256 --layers 2 --vocabulary 1000 --tokens 16)
    generate=("${sizes[@]}" --rounds 1 --concurrency 1 8)
    verify=("${generate[@]}")
    honest=("${sizes[@]}" --completions 16 --warm-start 0.01)
    step=(--hidden 64 --layers 1 --rounds 1)
    realsize=(--only swarm --layers 1 --vocabulary 2000)
    draws=(--run benchmarks/data/realsize-gpu.toml --only engines --layers 1 --vocabulary 2000 --groups 1 --threads 1)
    parts=(--only verify step --no-peer --layers 1 --step-layers 1 --vocabulary 2000 --rounds 1)
    rounds=1
else
    # A policy of 1.2 billion weights with a large vocabulary.
    sizes=(--family qwen3 --hidden 1536 --layers 28 --vocabulary 151936)
    generate=("${sizes[@]}" --tokens 256 --rounds 5 --concurrency 1 16 64 256)
    verify=("${sizes[@]}" --tokens 256 --rounds 3)
    honest=(--hidden 1024 --layers 16 --tokens 256)
    # A training step of 0.45 billion weights, by the trainer's options for a GPU.
    step=(--device cuda --family qwen3 --hidden 1024 --layers 28 --vocabulary 65536 --groups 8 --prompt 512
        --completion 1024 --row-tokens 8192 --autocast bfloat16 --recompute --rounds 5)
    realsize=(--device cuda --run benchmarks/data/realsize-gpu.toml --only swarm --patience 240)
    draws=(--device cuda --run benchmarks/data/realsize-gpu.toml --only engines --groups 6)
    parts=(--device cuda --run benchmarks/data/realsize-gpu.toml --only verify step --no-peer
        --step-layers 28 --groups 8 --row-tokens 8192)
    rounds=20
fi

part 120 "the tests that need a GPU" "$python" -m pytest -q -p no:cacheprovider tests/service/test_devices.py \
    tests/unit/node/test_sampling_fast.py tests/unit/node/test_sampling_triton.py tests/unit/toploc/test_sketch.py
part 30 sampling "$python" -m benchmarks.sampling --json --rounds "$rounds"
part 30 toploc "$python" -m benchmarks.toploc --json --no-peer --threads 1 --rounds "$rounds"
part 60 step "$python" -m benchmarks.step --json "${step[@]}"
# Workers, verifier, trainer and audit of one run, each a process, on this one GPU; then its parts alone. vLLM, where it is
# installed, compiles for up to two minutes.
part 400 "a run" "$python" -m benchmarks.realsize --json "${realsize[@]}"
part 150 "a run's parts" "$python" -m benchmarks.realsize --json "${parts[@]}"
part 300 "a run's engines" "$python" -m benchmarks.realsize --json "${draws[@]}"
engine=vllm
if ! "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("vllm") is None)'; then
    engine=torch
    summary+=("         generate, verify and honest by torch, smaller: vLLM is not installed")
    generate+=(--tokens 64 --rounds 1 --concurrency 1 64)
    verify+=(--tokens 64 --rounds 1 --concurrency 16)
    honest+=(--completions 128)
fi
part 150 generate "$python" -m benchmarks.generate --json --engine "$engine" "${generate[@]}"
part 110 verify "$python" -m benchmarks.verify --json --engine "$engine" "${verify[@]}"
part 120 honest "$python" -m benchmarks.honest --json --engine "$engine" "${honest[@]}"

echo
echo "$device:"
printf '  %s\n' "${summary[@]}"
echo "figures: $lines"
exit "$failed"
