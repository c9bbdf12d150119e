"""The run.toml that `swarmproof init` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.errors import BadConfiguration, UnfitModel
from coordinator.run.definition import render_environments
from node.environments import load_environment
from node.protocol.run import EnvironmentSpec, parse_run_toml
from shardcast.errors import Malformed

_TINY = """\
# docs/run-toml.md explains every key. Calibrate the limits before you start: `swarmproof calibrate --help`.
name = {name}

[model]
initial = {model:<22}# a tiny policy, to try things out; a folder's path makes it a real model

{environments}

[sampling]
group_size = 8                  # completions of each problem
max_new_tokens = 48

[batch]
groups_per_step = 32            # problems of each training step

[training]
steps = 1000
learning_rate = 0.0001
"""


def new_run_toml(name: str, model: Path | str, *, environments: Sequence[str], gpus: str | None) -> str:
    """Return the text of a run.toml: for a model's folder (Path) as planned for `gpus`, else for a tiny policy's name.

    Raises BadConfiguration, UnfitModel for a model with which no run can begin or that does not fit, and
    EnvironmentFault for an environment that is not here.
    """
    specs = tuple(EnvironmentSpec(name=one) for one in environments)
    for spec in specs:
        load_environment(spec)
    if isinstance(model, str):
        text = _TINY.format(name=json.dumps(name), model=json.dumps(model), environments=render_environments(specs))
    else:
        text = _planned(name, model, specs, gpus=gpus or "")
    try:
        parse_run_toml(text)
    except Malformed as error:
        raise BadConfiguration(f"no run can be called {name!r} or have these environments: {error}") from error
    return text


def _planned(name: str, model: Path, environments: tuple[EnvironmentSpec, ...], *, gpus: str) -> str:
    # These import torch, which no tiny policy's file needs.
    from coordinator.planning.amounts import parse_cards, parse_rate
    from coordinator.planning.plan import Machines, make_plan
    from coordinator.planning.proposal import first_spec, render_run_toml
    from coordinator.planning.shape import read_shape

    cards = parse_cards(gpus)
    shape = read_shape(model)
    if not shape.runs_here:
        raise UnfitModel(f"{model} is of the family {shape.family}, which this release cannot run")
    spec = first_spec(shape, initial=str(model.absolute()), context=None, group_size=None)
    link = parse_rate("1Gbit")
    machines = Machines(
        cards=cards, verifier_cards=None, workers=4, worker_cards=cards, relays=2, uplink=link, downlink=link
    )
    spec = msgspec.structs.replace(spec, name=name, environments=environments)
    plan = make_plan(shape, spec, machines, is_given=False)
    if not plan.fits:
        raise UnfitModel(
            f"{model} does not fit {cards}: `swarmproof plan --model {model} --gpus {gpus}` says what is missing"
        )
    return render_run_toml(plan)
