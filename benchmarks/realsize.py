"""A policy of Qwen3-0.6B's size through everything: `python -m benchmarks.realsize [--json] [--only PART...]`.

The policy has random weights and the entropy of a trained one (`benchmarks.sizing.policy`). `--layers 2` (187 million
parameters) is the short form; the whole takes some 15 minutes of two cores and 20 GiB. `--device cuda` has the same on
a GPU, for which `--run benchmarks/data/realsize-gpu.toml` has larger groups, and `--size 4B` a larger policy.

**swarm**: the run of `benchmarks/data/realsize.toml`, each role a process as an operator starts it: first publish,
relay, a worker with torch, verification, one GRPO step, its delta, a group of the second policy, a newcomer with vLLM
where that is installed, an audit. For each role `*_peak_over_policy` is the largest resident size (VmHWM, those of its
children added) over the policy's bytes, a worker's KV cache left out, and `disk_copies_*` what its folder takes when
all is done over the same; the verifier may hold one policy (`--policy-memory`). `delta_end_to_end_s` is from the end
of the training step to when the worker begins to draw under the second policy. The floors of stages are bytes over the
disk's or the memory's bandwidth and operations over the rate of matrix products, measured in the same run.

**verify**: `verify_share_of_matmul_peak`, what the products of a prefill would take over what verification takes;
and `honest_deviation`, how far the groups' projected states are off, relative to a state's root mean square.

**engines**: by torch and, where it is installed, vLLM, tokens a second with proofs, how far honest states are off (as
`honest_deviation`), the largest of other figures, and groups that the run's limits reject; the same of groups that a
cheat draws with weights of 8 bits. Only where it is asked for.

**step**: `step_share_of_matmul_peak`, the time that a GRPO step's useful operations would take at the rate of one large
product of their dtype over the step's, with as many threads, and `step_vs_trl`, the seconds of TRL's GRPOTrainer for
the same policy and batch over ours, in turn; of `--step-layers` layers, with which both fit into memory together.

**head**, **memory**, **checkpoints**: the figures of these benchmarks that belong here.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.peers import FOLDER, PeerUnavailable
from benchmarks.report import make_parser, report, say, usable_cores
from benchmarks.sizing import engines, policy, step, tables, verification
from benchmarks.sizing.machine import Bandwidth, bandwidth, matmul_rate
from benchmarks.sizing.swarm import RealSwarm, rules
from benchmarks.train import TRL, trl_python
from coordinator.training.packing import ROW_TOKENS

RUN_TOML: Final = Path(__file__).parent / "data" / "realsize.toml"
OTHERS: Final = {
    "head": ("chunked_head_extra_gib",),
    "memory": ("publish_extra_tensors", "fsdp_rank_peak_over_share", "fsdp_step_peak_over_share"),
    "checkpoints": ("checkpoint_stall_share",),
}
"""Figures of other benchmarks, by their names."""
PARTS: Final = ("swarm", "verify", "step", *OTHERS)
ENGINES: Final = "engines"
"""A part for a GPU: a CPU's figures flatter, since both sides round alike."""
KEYS: Final = {
    "swarm": tables.KEYS,
    "verify": ("verify_share_of_matmul_peak",),
    "step": ("step_share_of_matmul_peak", "step_vs_trl"),
    **OTHERS,
}
STEP_LAYERS: Final = 8
SHELF: Final = 1.1
"""A verifier's `--policy-memory` in policies: it holds one, where by default it takes half of what is free."""
OTHER_SECONDS: Final = 900

Findings = tuple[dict[str, Any], dict[str, str], dict[str, Any]]
"""Figures, notes, and sections of rows."""


def swarm(options: argparse.Namespace, folder: Path) -> Findings:
    """Run the swarm."""
    model = folder / "model"
    in_child(policy.write_folder, model, device=options.device, **shape(options))
    say("swarm: the model's folder is written")
    floors = in_child(measure_machine, folder, options.threads, options.device)
    text = rules(options.run, model)
    size = tables.Size.of(policy.architecture(**shape(options)))
    run = RealSwarm(
        folder / "run",
        text,
        device=options.device,
        threads=options.threads,
        patience_s=options.patience,
        policy_memory_gib=SHELF * size.policy_bytes / 2**30,
    )
    has_vllm = find_spec("vllm") is not None
    found = run.run(vllm=has_vllm)
    figures, notes = tables.figures(found, size, run.swarm.spec)
    if not has_vllm:
        notes["vllm"] = "is not installed: no worker of that engine"
    stages = tables.stages(found, size, run.swarm.spec, *floors)
    return figures, notes, {"roles": tables.roles(found, size, run.swarm.spec), "stages": stages}


def verify(options: argparse.Namespace, folder: Path) -> Findings:
    """Verify honest groups."""
    path = folder / "verify.safetensors"
    in_child(policy.write_file, path, device=options.device, **shape(options))
    task = verification.VerifyTask(
        path, options.run.read_text(), groups=options.rounds, threads=options.threads, device=options.device
    )
    return in_child(verification.measure, task), {}, {}


def draw(options: argparse.Namespace, folder: Path) -> Findings:
    """Draw and measure honest groups by each engine."""
    path = folder / "engines.safetensors"
    in_child(policy.write_file, path, device=options.device, **shape(options))
    installed = ("torch", "vllm") if find_spec("vllm") is not None else ("torch",)
    task = engines.EnginesTask(
        path,
        options.run.read_text(),
        engines=installed,
        groups=options.groups,
        threads=options.threads,
        device=options.device,
    )
    return in_child(engines.measure_engines, task), {}, {}


def train(options: argparse.Namespace, folder: Path) -> Findings:
    """Take GRPO steps, beside TRL's."""
    notes: dict[str, str] = {}
    python = None
    try:
        python = None if options.no_peer else options.trl_python or trl_python(options.peer_folder)
    except PeerUnavailable as error:
        notes["step_vs_trl"] = str(error)
    path = folder / "step.safetensors"
    in_child(policy.write_file, path, device=options.device, **(shape(options) | {"layers": options.step_layers}))
    task = step.StepTask(
        path,
        options.run.read_text(),
        prompt=options.prompt,
        rounds=options.rounds,
        threads=options.threads,
        groups=options.groups,
        row_tokens=options.row_tokens,
        device=options.device,
    )
    try:
        return in_child(step.measure, task, python), notes, {}
    except PeerUnavailable as error:
        notes["step_vs_trl"] = str(error)
        return in_child(step.measure, task, None), notes, {}


def other(name: str) -> Findings:
    """Run another benchmark; return the figures of it that belong here."""
    if find_spec(f"benchmarks.{name}") is None:
        return {}, dict.fromkeys(OTHERS[name], f"there is no benchmarks.{name}"), {}
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=OTHER_SECONDS, check=False)
    if ended.returncode:
        return {}, dict.fromkeys(OTHERS[name], f"benchmarks.{name} ended with {ended.returncode}"), {}
    found = json.loads(ended.stdout.splitlines()[-1])
    notes = {key: found["notes"].get(key, "") for key in OTHERS[name] if found["figures"].get(key) is None}
    return {key: found["figures"].get(key) for key in OTHERS[name]}, notes, {}


def shape(options: argparse.Namespace) -> dict[str, Any]:
    """Return what of the options a policy is made of."""
    return {"size": options.size, "layers": options.layers, "vocabulary": options.vocabulary}


def measure_machine(folder: Path, threads: int, device: str) -> tuple[Bandwidth, dict[str, float]]:
    """Return bytes per second, and the operations per second of products by dtype."""
    torch.set_num_threads(threads)
    rates = {name: matmul_rate(getattr(torch, name), device=device) for name in ("bfloat16", "float32")}
    return bandwidth(folder, device=device), rates


def in_child(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call in a process of its own, whose memory is free afterwards."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(call, *arguments, **named).result()


@contextmanager
def working_folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True)
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


def measure(options: argparse.Namespace, folder: Path) -> Findings:
    """Go through the parts that were asked for; what was not is null."""
    figures: dict[str, Any] = {key: None for keys in KEYS.values() for key in keys}
    notes, sections = {}, {}
    for part in (*PARTS, ENGINES):
        if part not in options.only:
            notes |= dict.fromkeys(KEYS.get(part, ()), f"{part} was not asked for")
            continue
        say(f"{part} begins")
        own = {"swarm": swarm, "verify": verify, "step": train, ENGINES: draw}.get(part)
        found = other(part) if own is None else own(options, folder)
        figures |= found[0]
        notes |= found[1]
        sections |= found[2]
    notes |= {key: "not measured" for key, value in figures.items() if value is None and key not in notes}
    return figures, notes, sections


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=(*PARTS, ENGINES), default=PARTS, metavar="PART", help=", ".join((*PARTS, ENGINES))
    )
    parser.add_argument("--run", type=Path, default=RUN_TOML, help=f"its run.toml ({RUN_TOML.name})")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of trainer, verifier, worker and auditor"
    )
    parser.add_argument("--size", choices=tuple(policy.SIZES), default=policy.SIZE, help="of Qwen3's models")
    parser.add_argument("--layers", type=int, help="(the size's own)")
    parser.add_argument(
        "--step-layers", type=int, default=STEP_LAYERS, help="of the policy that is trained beside TRL's"
    )
    parser.add_argument("--vocabulary", type=int, default=policy.VOCABULARY)
    parser.add_argument("--prompt", type=int, default=76, help="tokens of a prompt in step")
    parser.add_argument("--groups", type=int, default=4, help="of a batch in step, and of each engine's in engines")
    parser.add_argument("--row-tokens", type=int, default=ROW_TOKENS, help="that ours packs into a row in step")
    parser.add_argument("--rounds", type=int, default=2, help="timed steps, and verified groups")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of torch in each process")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds to wait for each event of the swarm")
    parser.add_argument("--no-peer", action="store_true", help=f"measure without TRL {TRL}")
    parser.add_argument("--trl-python", type=Path, help=f"an interpreter that has TRL {TRL}")
    parser.add_argument("--peer-folder", type=Path, default=FOLDER, help="where to build and keep it (build/peers)")
    parser.add_argument("--out", type=Path, help="work in this new folder, and keep it")
    options = parser.parse_args()
    with working_folder(options.out) as folder:
        figures, notes, sections = measure(options, folder)
    report("realsize", options, figures, notes, **sections)


if __name__ == "__main__":
    main()
