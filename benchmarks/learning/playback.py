"""How busy a trainer is whose workers have machines of their own: their work is played back.

On one machine workers take from the trainer the cores that the figure is about. So rollouts are generated beforehand
and delivered by nodes that cost next to nothing, while the real coordinator, verifier and trainer do all of theirs.

A slot's seeds follow from its policy's manifest, so that the manifests have to be known beforehand. The learning rate
is therefore below what the weights can resolve: a step does all of its work and changes no bit, and the origin, which
has published these bytes under all versions already, signs no second manifest for them. What this leaves out of a
publish is the search for changed words; its reading and hashing are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from transformers import AutoModelForCausalLM

from benchmarks.report import say
from benchmarks.warm_start import warmed_up
from coordinator.lab.processes.layout import WORKER_KEY, Swarm, demo_run_toml, lay_out
from coordinator.lab.processes.local_http import get_json
from coordinator.lab.processes.supervisor import Supervisor
from node.client.api import CoordinatorClient
from node.engines.base import requests_for
from node.engines.torch import TorchEngine
from node.environments import load_environment
from node.episodes.expected import expected_of
from node.errors import Refused
from node.keys.identity import load_key
from node.protocol.messages import LeaseRequest, Registration
from node.protocol.reasons import Reason
from node.submission.writer import write_rollouts
from shardcast import Origin

NODES: Final = 8
OPERATOR: Final = ("coordinator", "trainer", "verifier")
NOTHING: Final = 1e-12
"""Of a further layer's and unit's output weights: what they add is no larger than the rounding of what it is added to.
Not 0, which any learning rate would change."""
LEARNING_RATE: Final = "1e-38"
SECONDS: Final = 1200.0
PAUSE_S: Final = 0.1
STALLS: Final = ("checkpoint_stall", "publish_stall")
"""What a step's own seconds hold of waiting."""
INSTANCE: Final = "0" * 32
Slot = tuple[int, int]
"""A policy's version, and the slot's number."""


@dataclass(frozen=True, slots=True)
class PlaybackSettings:
    """A run of `steps` steps of a policy with `layers` layers, whose multilayer perceptrons have `width` units.

    `threads` generate beforehand.
    """

    steps: int
    layers: int
    width: int
    warm_start: float
    threads: int


def save_larger_policy(folder: Path, settings: PlaybackSettings) -> None:
    """Save the warm-started tiny policy with further layers and units that add next to nothing, as a folder.

    It solves the demonstration's problems now and then, as a policy has to for a step to have work; and its products
    take a step's and a verdict's time, as those of a policy that somebody trains do.
    """
    model, tokenizer = warmed_up(settings.warm_start)
    sizes = {"num_hidden_layers": settings.layers, "intermediate_size": settings.width}
    larger: Any = AutoModelForCausalLM.from_config(type(model.config).from_dict(model.config.to_dict() | sizes))
    with torch.no_grad():
        for layer in larger.model.layers:
            layer.self_attn.o_proj.weight.fill_(NOTHING)
            layer.mlp.down_proj.weight.fill_(NOTHING)
        tensors = larger.state_dict()
        for name, weight in model.state_dict().items():
            tensors[name][tuple(map(slice, weight.shape))] = weight
    larger.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def slots_of(swarm: Swarm) -> Counter[int]:
    """Return how many slots of each version are done: half as many again as a step takes, and a start's of the first.

    New slots are of the newest policy alone, so that what is done too late is another version's.
    """
    batch = swarm.spec.batch
    slots = Counter(dict.fromkeys(range(swarm.spec.training.steps), batch.groups_per_step * 3 // 2))
    slots[0] += batch.max_async * batch.groups_per_step
    return slots


def publish_beforehand(swarm: Swarm) -> dict[int, str]:
    """Have the trainer publish policy 0, and publish it under all later versions; return the manifests' digests."""
    first = [command for command in swarm.commands if command.name in OPERATOR[:2]]
    with Supervisor(swarm.folder / "logs", grace_seconds=10.0) as supervisor:
        supervisor.start(first)
        _wait(swarm, supervisor, lambda status: status["head_version"] == 0)
    state = swarm.trainer_state
    origin = Origin(state / "origin", load_key(swarm.folder / "run.key"), swarm.run_id)
    with contextlib.closing(origin):
        for version in range(1, swarm.spec.training.steps + 1):
            origin.publish(state / "policy-0.safetensors", version=version)
        return {held.manifest.version: held.digest for held in origin.store.versions()}


async def generate(swarm: Swarm, manifests: dict[int, str], *, threads: int) -> dict[Slot, Path]:
    """Do the run's slots; return the files to submit."""
    spec, bodies = swarm.spec, dict[Slot, Path]()
    environments = [load_environment(environment) for environment in spec.environments]
    engine = TorchEngine(spec, threads=threads)
    try:
        await engine.load(swarm.trainer_state / "policy-0.safetensors", version=0)
        for version, count in slots_of(swarm).items():
            wanted = [
                expected_of(
                    spec,
                    engine.policy,
                    environments,
                    run_id=swarm.run_id,
                    version=version,
                    manifest_digest=manifests[version],
                    slot=slot,
                )
                for slot in range(count)
            ]
            groups = await asyncio.gather(*(engine.generate(requests_for(one)) for one in wanted))
            for slot, rollouts in enumerate(groups):
                drawn = [msgspec.structs.replace(rollout, segment_versions=[version]) for rollout in rollouts]
                path = bodies[version, slot] = swarm.folder / f"body-{version}-{slot}"
                path.write_bytes(write_rollouts(drawn))
    finally:
        await engine.close()
    return bodies


async def deliver(swarm: Swarm, bodies: dict[Slot, Path], *, name: str, left: Counter[int]) -> None:
    """Be one node until the last step: lease what is `left` of the newest policy's slots, and submit it at once."""
    key = load_key(swarm.folder / name / WORKER_KEY)
    async with CoordinatorClient(swarm.coordinator_url, run_id=swarm.run_id, key=key) as client:
        await client.descriptor()
        await client.register(Registration(software="playback", engine="torch", instance=INSTANCE, name=name))
        head = 0
        while head < swarm.spec.training.steps:
            asked = min(left[head], swarm.spec.batch.max_leases_per_node)
            if asked:
                left[head] -= asked
                reply = await client.lease(LeaseRequest(held_versions=(head,), slots=asked, instance=INSTANCE))
                left[head] += asked - len(reply.leases)
                for lease in reply.leases:
                    if (lease.version, lease.slot) not in bodies:
                        left[lease.version] = 0  # what others were late with was counted twice
                        await client.return_lease(lease.lease_id)
                        continue
                    try:
                        await client.submit(lease, bodies[lease.version, lease.slot])
                    except Refused as refusal:
                        if refusal.code != Reason.EXPIRED_LEASE:
                            raise
                        left[lease.version] += 1  # it was late, and somebody else does it
                head = reply.head_version
            else:
                head = int((await asyncio.to_thread(_status, swarm)).get("head_version", head))
            await asyncio.sleep(PAUSE_S)


def play(swarm: Swarm, bodies: dict[Slot, Path]) -> list[dict[str, float]]:
    """Run the swarm to its last step; return what each step says of itself."""
    steps, left = swarm.spec.training.steps, slots_of(swarm)
    names = [place.name for place in swarm.workers]

    async def deliver_all() -> None:
        await asyncio.gather(*(deliver(swarm, bodies, name=name, left=left) for name in names))

    with Supervisor(swarm.folder / "logs", grace_seconds=10.0) as supervisor:
        supervisor.start(command for command in swarm.commands if command.name in OPERATOR)
        _wait(swarm, supervisor, lambda status: status["head_version"] == 0)
        with asyncio.Runner() as runner:
            runner.run(_until(deliver_all(), supervisor))
        status = _wait(swarm, supervisor, lambda status: status["finished_steps"] == steps)
    return [step["stats"] for step in status["steps"] if step["stats"] is not None]


async def _until(delivering: Any, supervisor: Supervisor) -> None:
    """Deliver, looking after the processes."""
    task = asyncio.create_task(delivering)
    deadline = time.monotonic() + SECONDS
    while not task.done():
        supervisor.poll()
        if time.monotonic() > deadline:
            task.cancel()
            raise TimeoutError(f"not delivered within {SECONDS:.0f} s: {supervisor.log_tail('trainer')}")
        await asyncio.wait({task}, timeout=PAUSE_S)
    await task


def measure_busy(folder: Path, *, max_async: int, settings: PlaybackSettings) -> dict[str, Any]:
    """Return the share of time in which the trainer computed, after its first step, and what it waited for else."""
    initial = folder.with_name(f"{folder.name}-initial")
    save_larger_policy(initial, settings)
    text = demo_run_toml(
        initial=json.dumps(str(initial)), steps=settings.steps, max_async=max_async, learning_rate=LEARNING_RATE
    )
    swarm = lay_out(folder, text, honest=NODES, hostile=(), leaves=0)
    manifests = publish_beforehand(swarm)
    say(f"max_async {max_async}: generating {slots_of(swarm).total()} groups")
    bodies = asyncio.run(generate(swarm, manifests, threads=settings.threads))
    say(f"max_async {max_async}: playing them back")
    known = play(swarm, bodies)[1:]
    total = {name: sum(step[f"{name}_seconds"] for step in known) for name in ("wait", "train", *STALLS)}
    stalled = sum(total[name] for name in STALLS)
    seconds = total["wait"] + total["train"]
    return {
        "max_async": max_async,
        "utilisation": round((total["train"] - stalled) / seconds, 4),
        "waiting_for_groups": round(total["wait"] / seconds, 4),
        "waiting_for_checkpoints": round(total["checkpoint_stall"] / seconds, 4),
        "waiting_for_publications": round(total["publish_stall"] / seconds, 4),
        "step_seconds": round(seconds / len(known), 3),
    }


def _status(swarm: Swarm) -> dict[str, Any]:
    return get_json(f"{swarm.coordinator_url}/v1/status", seconds=5.0) or {}


def _wait(swarm: Swarm, supervisor: Supervisor, condition: Any) -> dict[str, Any]:
    """Look after the processes until the run's status is as wanted, and return it."""
    deadline = time.monotonic() + SECONDS
    while not (status := _status(swarm)) or not condition(status):
        supervisor.poll()
        if time.monotonic() > deadline:
            raise TimeoutError(f"not there within {SECONDS:.0f} s: {supervisor.log_tail('trainer')}")
        time.sleep(PAUSE_S)
    return status
