"""Hostile input for every endpoint, made by schemathesis from the coordinator's own OpenAPI document.

The operator's command serves a run in one process, schemathesis asks from another: values that fit the document and
values that do not, most of them signed. No answer may be a 5xx, or one that the document does not describe, or say
anything of the inside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from locations import ROOT

from benchmarks.loading.coordinator import Served, serving
from node.protocol.endpoints import ENDPOINTS

NO_LIMIT = "10000000"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
    "unsupported_method",
    "tells_nothing_of_the_inside",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--requests-per-minute", NO_LIMIT, "--node-requests-per-minute", NO_LIMIT)
    with serving(tmp_path_factory.mktemp("run"), *flags) as served:
        yield served


def fuzz(served: Served, folder: Path, *, seed: int, examples: int) -> str:
    """What schemathesis says; fails the test if it found something."""
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{served.port}/openapi.json"]
    options = {
        "--checks": ",".join(CHECKS),
        "--phases": "examples,coverage,fuzzing",
        "--mode": "all",
        "--max-examples": str(examples),
        "--seed": str(seed),
        "--generation-database": "none",
        "--warnings": "off",
        "--request-timeout": "20",
    }
    flags = ["--continue-on-failure", "--no-color", *(part for option in options.items() for part in option)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT / "tests" / "support"), str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "SCHEMATHESIS_HOOKS": "openapi_hooks",
        "SWARMPROOF_FUZZED_RUN": served.home.run_id,
        "SWARMPROOF_FUZZED_SEED": str(seed),
    }
    ran = subprocess.run(
        [*command, *flags], cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stdout[-30000:] + ran.stderr[-2000:]
    return ran.stdout


def test_hostile_input_finds_no_fault_and_no_lie_in_the_document(served: Served, tmp_path: Path) -> None:
    said = fuzz(served, tmp_path, seed=1, examples=50)
    assert "No issues found" in said
    assert f"Selected: {len(ENDPOINTS)}/{len(ENDPOINTS)}" in said, said


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, 3])
def test_much_hostile_input_finds_no_fault_and_no_lie_in_the_document(
    served: Served, tmp_path: Path, seed: int
) -> None:
    fuzz(served, tmp_path, seed=seed, examples=150)


def test_the_document_says_how_requests_are_signed(served: Served) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{served.port}/openapi.json", timeout=10) as answer:
        document = json.load(answer)
    signed = {
        (method, path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if operation.get("security")
    }
    assert signed == {
        ("post", "/v1/nodes"),
        ("post", "/v1/relays"),
        ("post", "/v1/leases"),
        ("post", "/v1/leases/{lease_id}/return"),
        ("put", "/v1/submissions/{lease_id}"),
        ("post", "/v1/uploads/{lease_id}"),
        ("put", "/v1/submissions/{lease_id}/{sha256}"),
    }
    refused = document["paths"]["/v1/leases"]["post"]["responses"]
    assert {"200", "400", "401", "403", "409", "413", "422", "429", "500"} == set(refused)
    assert "banned" in refused["403"]["description"]
    assert "key_in_use" in refused["409"]["description"]
