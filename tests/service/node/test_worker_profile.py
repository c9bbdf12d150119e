"""What a worker tells a run of itself, and that a machine that cannot tell works all the same."""

from __future__ import annotations

import torch
from msgspec import UNSET
from msgspec.structs import replace

from node.engines.torch import TorchEngine
from node.protocol.reasons import Reason


def telling(swarm):
    """Returns the registrations that the coordinator is sent."""
    registrations = []
    swarm.coordinator.on_registration = lambda _node, sent: registrations.append(sent)
    return registrations


async def test_a_worker_tells_its_nickname_and_what_its_engine_computes_on(swarm):
    registrations = telling(swarm)
    await swarm.work_once(nickname="Zo\u00eb 7")
    assert registrations[0].nickname == "Zo\u00eb 7"
    hardware = registrations[0].hardware
    assert (hardware.device, hardware.engine) == ("CPU", f"torch {torch.__version__}")
    assert hardware.dtype == swarm.spec.model.dtype
    assert swarm.status()["nickname"] == "Zo\u00eb 7"
    assert swarm.status()["hardware"] == str(hardware)


async def test_a_worker_that_keeps_it_back_asks_no_driver(swarm):
    registrations = telling(swarm)
    await swarm.work_once(shows_hardware=False)
    assert (registrations[0].hardware, registrations[0].nickname) == (UNSET, UNSET)
    assert swarm.status()["hardware"] is None


async def test_an_older_coordinator_that_takes_neither_is_worked_for(swarm):
    """A contributor who updates first would be refused without end, for what nothing depends on."""
    registrations = []

    def of_before(_node, sent):
        registrations.append(sent)
        return None if sent == replace(sent, nickname=UNSET, hardware=UNSET) else Reason.BAD_REQUEST

    swarm.coordinator.on_registration = of_before
    await swarm.work_once(nickname="Ada")
    assert [sent.nickname for sent in registrations[:2]] == ["Ada", UNSET]
    assert swarm.coordinator.submissions


async def test_a_driver_that_cannot_tell_keeps_nobody_from_work(swarm):
    class Mute(TorchEngine):
        async def hardware(self):
            raise RuntimeError("NVML: driver/library version mismatch")

    registrations = telling(swarm)
    await swarm.work_once(make_engine=Mute)
    assert registrations[0].hardware is UNSET
    assert swarm.coordinator.submissions
