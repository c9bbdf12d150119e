"""The GPU's kernel of forced sampling, most of it on machines without one: it must choose what a CPU chooses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from locations import ROOT
from sampling_cases import edge_words, problem

from node.sampling.forced import appraise, choose

INTERPRETED = """
import sys
import numpy as np
import torch
import triton
import triton.language as tl
from node.sampling import forced as sampling
from node.protocol.sampling import table_index
from node.sampling.cuda import peaks, table_entry

@triton.jit
def entries(words, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    word = tl.load(words + at).to(tl.uint32, bitcast=True)
    tl.store(out + at, table_entry(word).to(tl.int32))

words = np.load(sys.argv[1])
padded = np.zeros(2**18, np.uint32)
padded[: len(words)] = words
out = torch.zeros(2**18, dtype=torch.int32)
entries[(1,)](torch.from_numpy(padded.view(np.int32)), out, COUNT=2**18)
assert (out.numpy() == table_index(padded.astype(np.uint64))).all(), "an entry differs"

generator = np.random.default_rng(1)
for rows, vocabulary in ((1, 1), (3, 3), (3, 2047), (3, 2049), (1, 152064)):
    logits = torch.from_numpy(generator.normal(0, 3, (rows, vocabulary)).astype(np.float32))
    logits[:, 1 : vocabulary : 3] = -torch.inf
    seeds = generator.integers(0, 2**32, (rows, 4)).astype(np.uint32)
    positions = generator.integers(0, 2**32, rows).astype(np.uint32)
    found, expected = (find(logits, seeds, positions, 0.7) for find in (peaks, sampling.reference_peaks))
    assert found.tokens.equal(expected.tokens), vocabulary
    assert found.scores.equal(expected.scores), vocabulary
    assert found.largest.equal(expected.largest), vocabulary
    torch.testing.assert_close(found.exponentials, expected.exponentials)

seeds, positions = np.arange(4, dtype=np.uint32)[None], np.zeros(1, np.uint32)
noise = sampling.gumbel_noise([seeds.astype("<u4").tobytes()], [0], vocabulary=5000)
ties = torch.from_numpy(np.float32(64) - noise)
for _ in range(3):
    token = int(peaks(ties, seeds, positions, 1.0).tokens[0])
    assert token == int((ties + torch.from_numpy(noise)).argmax()), "a tie"
    ties[0, :token + 2048] = -torch.inf

sampling._backend = lambda _: peaks
np.seterr(invalid="ignore")
for bad in (float("nan"), -float("nan"), float("inf")):
    for at in (0, 2048, 4999):
        logits = torch.zeros(3, 5000)
        logits[0, :2048] = -torch.inf
        logits[1, at] = bad
        choice = sampling.choose(logits, [bytes(16)] * 3, [0, 1, 2], temperature=1.0)
        assert choice.logprobs.isfinite().tolist() == [True, False, True], (bad, at)
        assert 0 <= int(choice.tokens[1]) < 5000
print("equal")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from node.sampling.cuda import QUADS, _blocks

kinds = ["*fp32", "*i32", "*i32", "*fp32", "*fp32", "*i32", "*fp32", "*fp32", "i32", "fp32", "constexpr"]
source = ASTSource(fn=_blocks, signature=dict(zip(_blocks.arg_names, kinds)), constexprs={"QUADS": QUADS})
built = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"enable_fp_fusion": False})
print(built.asm["ptx"])
"""

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def run_script(tmp_path, text, *arguments, **environment):
    """What a Python process of its own prints: Triton reads its settings once, and a kernel's source from a file."""
    script = tmp_path / "script.py"
    script.write_text(text)
    settings = {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache"), **environment}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script), *map(str, arguments)],
        env=os.environ | settings,
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.system
@needs_triton
def test_the_gpus_kernel_is_the_definition_in_tritons_interpreter(tmp_path):
    np.save(tmp_path / "words.npy", edge_words())
    assert run_script(tmp_path, INTERPRETED, tmp_path / "words.npy", TRITON_INTERPRET="1").endswith("equal\n")


@pytest.mark.system
@needs_triton
def test_the_gpus_kernel_divides_and_adds_in_two_roundings(tmp_path):
    """The interpreter knows nothing of instructions, so look at them: no compilation needs a GPU."""
    assembly = run_script(tmp_path, COMPILED)
    assert "div.rn.f32" in assembly
    assert not [line for line in assembly.splitlines() if "fma." in line or "div.full" in line or "rcp." in line]


@pytest.mark.service  # Triton compiles by other programs
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("vocabulary", [1, 5, 2_049, 152_064])
def test_a_gpu_chooses_what_the_cpu_chooses(vocabulary):
    logits, seeds, positions = problem(9, vocabulary)
    given = torch.arange(9) * 7919 % vocabulary
    for temperature in (1.0, 0.7):
        here, there = (choose(at, seeds, positions, temperature=temperature) for at in (logits, logits.cuda()))
        assert there.tokens.is_cuda
        assert there.tokens.cpu().equal(here.tokens)
        torch.testing.assert_close(there.logprobs.cpu(), here.logprobs, rtol=1e-5, atol=1e-5)
        _, margins = appraise([logits], given, seeds, positions, temperature=temperature)
        assert (
            appraise([logits.cuda()], given.cuda(), seeds, positions, temperature=temperature)[1].cpu().equal(margins)
        )
