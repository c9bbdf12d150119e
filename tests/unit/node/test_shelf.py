"""Policies in a verifier's memory: as many as fit, and one that does not fit is judged all the same."""

from __future__ import annotations

import gc
import itertools
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from narrow_run import policy_file, sharp_model
from waiting import eventually

from benchmarks.modelling.policies import random_policy
from node.errors import EngineFailed
from node.policy.file import Policy, inspect_policy
from node.policy.reading import load_once
from node.protocol.run import EnvironmentSpec, LimitsSpec, ModelSpec, RunSpec
from node.verification import prefill as prefills
from node.verification.prefill import OUT_OF_MEMORY, TransformersPrefill, TransformersPrefills
from node.verification.readings import TwoReadings, make_prefills
from node.verification.shelf import MOST_OPEN, PolicyShelf
from node.verification.streamed import StreamedPrefill

PARAMETERS = 410_240
FULL: list[Callable[[], Exception]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: ... Error code 12 (Cannot allocate memory)"),
    MemoryError,
]
"""How a GPU, torch on a CPU and Python say that there is no memory left."""


def run_of(dtype: str) -> RunSpec:
    return RunSpec(
        name="once",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype=dtype),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_file(sharp_model(1), tmp_path_factory.mktemp("policy"))


@pytest.fixture(autouse=True, scope="module")
def _nothing_old_is_collected() -> None:
    """Have the collection after each policy that goes look at what these tests make alone: 0.1 s, and not 0.6 s."""
    gc.collect()
    gc.freeze()


async def test_the_policies_used_last_stay_within_the_memory(path: Path) -> None:
    shelf = PolicyShelf(TransformersPrefills(dtype="float32"), spec=run_of("float32"), memory=2 * 4 * PARAMETERS)
    first = await shelf.load("first", path, version=0)
    await shelf.load("second", path, version=1)
    assert shelf.get("first") is first
    await shelf.load("third", path, version=2)
    assert shelf.get("second") is None, "a policy more than fits"
    assert shelf.get("first") is first
    assert shelf.get("third") is not None


async def test_a_policy_larger_than_the_memory_is_streamed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for memory, kind in (
        (4 * PARAMETERS, TransformersPrefill),
        (4 * PARAMETERS - 1, StreamedPrefill),
        (0, StreamedPrefill),
    ):
        shelf = PolicyShelf(TransformersPrefills(dtype="float32"), spec=run_of("float32"), memory=memory)
        assert isinstance(await shelf.load("one", path, version=7), kind)
    assert "policy 7 takes 0.0 GiB, more than --policy-memory" in caplog.text


def deleted_and_open(folder: Path) -> int:
    """How many files of `folder` this process keeps on disk after their deletion."""
    names = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum(name.startswith(str(folder)) and name.endswith("(deleted)") for name in names)


async def test_streamed_policies_keep_few_deleted_files_on_disk(path: Path, tmp_path: Path) -> None:
    """The broadcast client deletes old versions, of tens of gigabytes each, so that its disk does not fill up."""
    shelf = PolicyShelf(TransformersPrefills(dtype="bfloat16"), spec=run_of("bfloat16"), memory=0)
    for version in range(4):
        brought = shutil.copyfile(path, tmp_path / f"{version}.bin")
        await shelf.load(version, brought, version=version)
        brought.unlink()
    assert [shelf.get(version) is not None for version in range(4)] == [False, False, True, True]
    await eventually(lambda: deleted_and_open(tmp_path) == MOST_OPEN)
    shelf.close_files()
    await eventually(lambda: deleted_and_open(tmp_path) == 0)
    assert shelf.get(3) is None


def test_what_a_policy_takes_is_counted_with_both_readings(path: Path) -> None:
    blueprint = inspect_policy(path)
    assert TransformersPrefills(dtype="float32").memory_of(blueprint) == 4 * PARAMETERS
    assert TransformersPrefills(dtype="bfloat16").memory_of(blueprint) == 2 * PARAMETERS
    spec = RunSpec(
        name="twice",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype="bfloat16"),
        limits=LimitsSpec(readings=2),
    )
    assert make_prefills(spec).memory_of(blueprint) == 6 * PARAMETERS


async def test_a_run_that_is_read_twice_streams_both_readings(path: Path) -> None:
    spec = RunSpec(
        name="twice",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype="bfloat16"),
        limits=LimitsSpec(readings=2),
    )
    prefill = await PolicyShelf(make_prefills(spec), spec=spec, memory=0).load("one", path, version=0)
    assert isinstance(prefill, TwoReadings)
    assert isinstance(prefill.rounded, StreamedPrefill)
    assert isinstance(prefill.exact, StreamedPrefill)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many policies the machine has room for, whatever the verifier was told; none beyond them loads."""
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    most, kinds = [0], itertools.cycle(FULL)

    def load(path: Path, **options: Any) -> Policy:
        policy = load_once(path, **options)
        alive.add(policy.model)
        if len(alive) > most[0]:
            failure = next(kinds)
            raise failure()
        return policy

    def give(policies: int) -> None:
        most[0] = policies

    monkeypatch.setattr(prefills, "load_once", load)
    return give


async def test_memory_that_runs_out_beside_other_policies_costs_those_alone(
    path: Path, room: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A verifier that was given too much --policy-memory, or a neighbour, would end under the work that it claimed."""
    room(2)
    shelf = PolicyShelf(TransformersPrefills(dtype="float32"), spec=run_of("float32"), memory=2**30)
    await shelf.load("first", path, version=0)
    await shelf.load("second", path, version=1)
    third = await shelf.load("third", path, version=2)
    assert isinstance(third, TransformersPrefill)
    assert shelf.get("first") is shelf.get("second") is None
    assert shelf.get("third") is third
    assert "no memory for policy 2 beside others" in caplog.text
    assert isinstance(await shelf.load("fourth", path, version=3), TransformersPrefill)
    assert shelf.get("third") is third, "what failed once is no limit for ever"


async def test_a_policy_for_which_there_is_no_memory_at_all_is_streamed(
    path: Path, room: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    shelf = PolicyShelf(TransformersPrefills(dtype="float32"), spec=run_of("float32"), memory=2**30)
    assert isinstance(await shelf.load("one", path, version=4), StreamedPrefill)
    assert "no memory for policy 4: its layers are read from disk one by one" in caplog.text
    room(1)
    assert isinstance(await shelf.load("two", path, version=5), TransformersPrefill), "later there may be memory"


async def test_a_recurrent_policy_without_memory_fails_with_a_code_and_the_next_one_loads(
    tmp_path: Path, room: Callable[[int], None]
) -> None:
    shelf = PolicyShelf(TransformersPrefills(dtype="float32"), spec=run_of("float32"), memory=2**30)
    recurrent = random_policy("eagle", tmp_path / "policy")
    with pytest.raises(EngineFailed, match="no memory for policy 6") as caught:
        await shelf.load("one", recurrent, version=6)
    assert caught.value.code == OUT_OF_MEMORY
    room(1)
    await shelf.load("one", recurrent, version=6)


async def test_a_second_reading_without_memory_is_streamed_with_the_first(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy in float32 takes twice what the policy takes."""

    def full(_: Policy) -> Policy:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Policy, "in_float32", full)
    spec = RunSpec(
        name="twice",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype="bfloat16"),
        limits=LimitsSpec(readings=2),
    )
    prefill = await PolicyShelf(make_prefills(spec), spec=spec, memory=2**30).load("one", path, version=0)
    assert isinstance(prefill, TwoReadings)
    assert isinstance(prefill.exact, StreamedPrefill)
