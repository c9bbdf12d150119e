"""Policies in a verifier's memory: as many as fit, and one that does not fit is judged all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from narrow_run import policy_file, sharp_model

from node.policy.file import inspect_policy
from node.protocol.run import EnvironmentSpec, LimitsSpec, ModelSpec, RunSpec
from node.verification.prefill import TransformersPrefill, TransformersPrefills
from node.verification.readings import TwoReadings, make_prefills
from node.verification.shelf import MOST_POLICIES, PolicyShelf
from node.verification.streamed import StreamedPrefill

PARAMETERS = 410_240


def run_of(dtype: str) -> RunSpec:
    return RunSpec(
        name="once",
        environments=(EnvironmentSpec(name="arithmetic"),),
        model=ModelSpec(dtype=dtype),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return policy_file(sharp_model(1), tmp_path_factory.mktemp("policy"))


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


async def test_a_streamed_policy_drives_no_other_out(path: Path) -> None:
    """It takes no memory that they could have."""
    shelf = PolicyShelf(TransformersPrefills(dtype="bfloat16"), spec=run_of("bfloat16"), memory=0)
    for key in range(MOST_POLICIES):
        await shelf.load(key, path, version=key)
    assert shelf.get(0) is not None
    await shelf.load("more", path, version=8)
    assert shelf.get(0) is not None
    assert shelf.get(1) is None, "files are kept for a few alone"


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
