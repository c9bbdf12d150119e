"""Choosing an engine: what a contributor says on the command line, in the environment or in a file is what runs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from click.testing import CliRunner
from locations import ROOT

from node import cli
from node.commands import engine_options
from node.engines.torch import TorchEngine
from node.protocol.run import EnvironmentSpec, RunSpec

RUN_ID = "ab" * 32
SPEC = RunSpec(name="test", environments=(EnvironmentSpec("arithmetic"),))


@pytest.fixture
def started(monkeypatch):
    """What the worker command would start with; the worker itself does not run."""
    started = {}

    async def record(settings, *, make_engine, **_):
        started.update(settings=settings, engine=make_engine(SPEC))

    monkeypatch.setattr("node.worker.daemon.run_worker", record)
    return started


@pytest.fixture
def vllm(monkeypatch):
    """Stands for vLLM, which not every machine has: what the engine would be made with."""

    class Engine:
        def __init__(self, spec, settings, *, state):
            self.settings, self.state = settings, state

    module = ModuleType("node.engines.vllm")
    module.VllmEngine = Engine
    monkeypatch.setitem(sys.modules, "node.engines.vllm", module)
    monkeypatch.setattr(engine_options, "find_spec", lambda _: object())


def swarmproof(tmp_path, *arguments, toml="", **environment):
    config = tmp_path / "config.toml"
    config.write_text(
        f'[worker]\ncoordinator = "http://h:1"\nrun-id = "{RUN_ID}"\nstate = "{tmp_path}/s"\nengine = "vllm"\n{toml}\n'
    )
    return CliRunner().invoke(
        cli.main, ["--config", str(config), "worker", *arguments], env=environment, prog_name="swarmproof"
    )


def test_torch_is_what_generates_unless_told_otherwise(started, tmp_path):
    assert swarmproof(tmp_path, "--engine", "torch").exit_code == 0
    assert isinstance(started["engine"], TorchEngine)
    arguments = ["worker", "--coordinator", "http://h", "--run-id", RUN_ID, "--state", str(tmp_path / "s")]
    assert CliRunner().invoke(cli.main, arguments).exit_code == 0
    assert isinstance(started["engine"], TorchEngine)


def test_the_flag_wins_over_the_environment_over_the_file_over_the_default(started, vllm, tmp_path):
    result = swarmproof(
        tmp_path,
        "--max-num-seqs",
        "8",
        toml="max-num-seqs = 16\nmax-model-len = 1024\ngpu_memory_utilization = 0.5\nenforce-eager = true",
        SWARMPROOF_WORKER_MAX_NUM_SEQS="32",
        SWARMPROOF_WORKER_MAX_MODEL_LEN="2048",
        SWARMPROOF_WORKER_KV_CACHE_GIB="1.5",
    )
    assert result.exit_code == 0, result.output
    settings = started["engine"].settings
    assert (settings.max_num_seqs, settings.max_model_len, settings.kv_cache_gib) == (8, 2048, 1.5)
    assert (settings.gpu_memory_utilization, settings.enforce_eager) == (0.5, True)
    assert settings.tensor_parallel_size == 1
    assert started["engine"].state == tmp_path / "s" / "engine"


def test_without_any_setting_the_engines_own_defaults_hold(started, vllm, tmp_path):
    from node.engines.vllm_settings import VllmSettings

    assert swarmproof(tmp_path).exit_code == 0
    assert started["engine"].settings == VllmSettings()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--gpu-memory-utilization", "0"),
        ("--gpu-memory-utilization", "1.1"),
        ("--kv-cache-gib", "0"),
        ("--max-model-len", "0"),
        ("--tensor-parallel-size", "0"),
        ("--max-num-seqs", "none"),
    ],
)
def test_a_setting_out_of_range_is_named(started, vllm, tmp_path, wrong):
    result = swarmproof(tmp_path, *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.output
    assert started == {}


@pytest.mark.parametrize(
    ("given", "toml", "environment"),
    [
        (("--kv-cache-gib", "8"), "", {}),
        (("--enforce-eager",), "", {}),
        (("--no-enforce-eager",), "", {}),
        (("--gpu-memory-utilization", "0.9"), "", {}),
        ((), "max-num-seqs = 16", {}),
        ((), "", {"SWARMPROOF_WORKER_TENSOR_PARALLEL_SIZE": "2"}),
    ],
)
def test_an_option_that_is_vllms_alone_is_refused_with_torch(started, tmp_path, given, toml, environment):
    """Whoever thinks that the cache has 8 GiB finds out when the machine is short of memory."""
    result = swarmproof(tmp_path, "--engine", "torch", *given, toml=toml, **environment)
    assert result.exit_code == 1
    name = given[0].replace("--no-", "--") if given else "--max-num-seqs" if toml else "--tensor-parallel-size"
    assert f"Error: {name} is an option of vLLM's" in result.output
    assert started == {}


@pytest.mark.parametrize(
    "command",
    [
        ("verifier", "--data", "run", "--state", "verifier", "--source", "http://h:1"),
        ("audit", "http://h:1", "--run-id", RUN_ID),
        ("calibrate", "--run", "run.toml"),
        ("problems", "--run", "run.toml"),
        ("evaluate", "--run", "run.toml"),
    ],
)
def test_every_command_with_an_engine_refuses_what_is_another_ones(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run.toml").write_text("")
    result = CliRunner().invoke(cli.main, [*command, "--max-model-len", "100"], prog_name="swarmproof")
    assert "--max-model-len is an option of vLLM's, and --engine torch takes no notice of it" in result.output


def test_a_missing_engine_is_one_sentence_that_says_what_to_install(started, monkeypatch, tmp_path):
    monkeypatch.setattr(engine_options, "find_spec", lambda name: None if name == "vllm" else name)
    result = swarmproof(tmp_path)
    assert result.exit_code == 1
    assert f"pip install -e '{ROOT}[vllm]'" in result.output
    assert "--engine torch" in result.output
    assert [line.partition(":")[0] for line in result.output.splitlines()] == ["Error", "hint"]
    assert started == {}
