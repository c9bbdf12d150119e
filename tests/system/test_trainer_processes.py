"""Several trainer processes: the same training as by one, and a run that cannot tell them apart."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from locations import ROOT
from ports import free_port
from trainers import GROUPS, KEY, STEPS, admit, finished_steps, outcome_of, run_in, spec_with, train_to_the_end
from waiting import until
from zygote import Zygote, forking

from benchmarks.modelling.families import small_model
from coordinator.run.home import Home
from coordinator.training.checkpoint import checkpoints
from coordinator.training.teacher import TEACHER
from node.policy.families import TINY_HIDDEN
from node.policy.file import load_policy, save_policy
from node.policy.models.tiny import MAKERS
from node.policy.models.tiny_llama import make_tokenizer

LAUNCH = (
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--master-addr",
    "127.0.0.1",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
)
LORA = {"lora": {"rank": 3, "alpha": 6.0}}
TERMS = {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}


LAUNCH_SECONDS = 400.0
IMPORTED = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support")))


class Ranks:
    """Processes that are called together, and stay for further calls: importing takes each longer than most of these.

    One more than there are so far is started where a call asks for it.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []

    def call(self, processes: int, *told: object) -> None:
        """Have the first `processes` of them make a call; after one that fails all are ended."""
        while len(self._started) < processes:
            self._started.append(self._start(len(self._started)))
        called = self._started[:processes]
        world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for each in called:
            each.stdin.write(json.dumps([*told, world]).encode() + b"\n")
            each.stdin.flush()
        left = set(called)

        def is_over() -> bool:
            left.difference_update([each for each in left if each.stdout.read()])
            return not left or any(each.poll() is not None for each in called)

        try:
            until(is_over, seconds=LAUNCH_SECONDS)
            assert [each.poll() for each in called] == [None] * processes
        except AssertionError:
            self.end()
            raise

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1", "PYTHONPATH": IMPORTED}
        own["PYTHONFAULTHANDLER"] = "1"
        started = subprocess.Popen(
            [sys.executable, "-m", "launched"],
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        os.set_blocking(started.stdout.fileno(), False)
        return started

    def end(self) -> None:
        for each in self._started:
            with each:
                each.kill()
        self._started.clear()


RANKS = Ranks()


@pytest.fixture(autouse=True, scope="module")
def _ranks() -> Iterator[None]:
    yield
    RANKS.end()


def launch(function: str, state: Path, processes: int, *, module: str = "trainers", **arguments: object) -> None:
    """Have each of `processes` processes call a function of a module of tests/support; one alone is this process."""
    if processes == 1:
        getattr(importlib.import_module(module), function)(state, **arguments)
    else:
        RANKS.call(processes, module, function, str(state), arguments)


def launched(state: Path, processes: int, **arguments: object) -> list[dict[str, float]]:
    """The curve after `processes` processes went on with the training in `state`."""
    launch("learn", state, processes, **arguments)
    curve: list[dict[str, float]] = json.loads((state / "curve.json").read_text())
    return curve


def beginning(folder: Path, family: str = "tiny") -> Path:
    folder.mkdir()
    for seed, name in ((1, "policy-0.safetensors"), (2, TEACHER)):
        model = MAKERS[family](seed) if family in MAKERS else small_model(family, seed=seed, hidden_size=TINY_HIDDEN)
        save_policy(model, make_tokenizer(), folder / name)
    return folder


def weights(state: Path) -> list[torch.Tensor]:
    return list(load_policy(state / "last.safetensors", dtype=torch.float32).model.parameters())


def close(one: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    assert len(one) == len(other)
    for left, right in zip(one, other, strict=True):
        assert left == pytest.approx(right, rel=2e-4, abs=2e-5)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("recipe", "sizes", "atol", "family"),
    [
        ({}, (2, 4), 1e-5, "tiny"),
        # Inside Muon there is bfloat16, which rounds each of 8 updates of about 2e-4 to one part in 256.
        ({"optimizer": "muon"}, (2,), 5e-5, "tiny"),
        # One weight of a thousand has next to no gradient, which Adam divides by itself: 1.1e-5 by some CPUs' kernels.
        ({**TERMS, "recompute": True}, (2,), 3e-5, "goldfinch"),
        ({}, (2,), 1e-5, "frame-action"),
        ({**TERMS, **LORA, "recompute": True}, (2,), 1e-5, "tiny"),
        ({"teacher": {"folder": "big", "coefficient": 0.5}}, (2,), 1e-5, "tiny"),
        pytest.param(
            {"kl_coefficient": 0.1, "entropy_coefficient": 0.01}, (2,), 1e-5, "tiny", marks=pytest.mark.nightly
        ),
        pytest.param({}, (2,), 1e-5, "finch", marks=pytest.mark.nightly),
        ({}, (3,), 1e-5, "glm4_moe"),
    ],
    ids=["plain", "muon", "recurrent", "frames", "lora", "teacher", "terms", "finch", "experts"],
)
def test_several_processes_have_the_loss_curve_of_one(
    tmp_path: Path, recipe: dict[str, object], sizes: tuple[int, ...], atol: float, family: str
) -> None:
    """Whoever adds machines must get the same policy sooner, and no other one."""
    alone = launched(beginning(tmp_path / "1", family), 1, steps=4, **recipe)
    for processes in sizes:
        state = beginning(tmp_path / str(processes), family)
        close(alone, launched(state, processes, steps=4, **recipe))
        for left, right in zip(weights(tmp_path / "1"), weights(state), strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=atol)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["tiny", "finch", "gemma2", "glm4_moe"])
def test_a_shared_vocabulary_has_the_gradients_of_a_whole_one(tmp_path: Path, family: str) -> None:
    """Of a tied head and one of its own, over 128 ids that three do not divide evenly: each id is one process's.
    Gemma scales what it looks up, and caps its logits.

    An id between two processes, or a token that a longer row of another process leaves out, would be learnt by nobody.
    """
    launch("compare_gradients", beginning(tmp_path / "state", family), 3, module="sharing")


@pytest.mark.timeout(300)
def test_autocast_keeps_no_whole_copy_of_the_layers_in_any_process_and_log_probabilities_are_as_good(
    tmp_path: Path,
) -> None:
    """Two bytes of each parameter on each GPU would end a large model's trainer, however many share it."""
    launch("compare_autocast", beginning(tmp_path / "state"), 2, module="sharing")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("numbers", [(2, 1, 2), pytest.param((4, 2, 1), marks=pytest.mark.nightly)])
def test_a_checkpoint_is_resumed_by_another_number_of_processes(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """So many write it, and others go on: a machine that breaks must not end a run."""
    whole = launched(beginning(tmp_path / "whole"), 1, steps=6)
    state = beginning(tmp_path / "parts")
    for processes in numbers:
        curve = launched(state, processes, steps=2)
    close(whole, curve)
    assert len(checkpoints(state / "checkpoints")) == 3


@pytest.fixture(scope="module")
def curve_of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The curve of three steps by two processes."""
    return launched(beginning(tmp_path_factory.mktemp("two") / "whole"), 2, steps=3)


@pytest.mark.timeout(600)
def test_a_flipped_bit_in_two_processes_newest_checkpoint_is_found_by_both_and_they_go_on_from_the_one_before(
    tmp_path: Path, curve_of_two: list[dict[str, float]]
) -> None:
    """A process that stops or waits alone would hang the others; one that goes on would train on it unnoticed."""
    whole = curve_of_two
    state = beginning(tmp_path / "damaged")
    launched(state, 2, steps=2)
    path = checkpoints(state / "checkpoints")[-1]
    part = max(path.glob("*.safetensors"))  # of the second process
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    curve = launched(state, 2, steps=2)
    assert (state / "checkpoints" / "checkpoint-00000002.damaged").is_dir()
    assert curve == [whole[0], whole[1], whole[1], whole[2]]


@pytest.mark.timeout(600)
def test_a_disk_that_is_full_for_one_process_is_said_in_all_and_the_step_is_trained_again(
    tmp_path: Path, curve_of_two: list[dict[str, float]]
) -> None:
    """One that goes on with an update that the others do not make would train another policy, or wait for ever."""
    state = beginning(tmp_path / "full")
    assert launched(state, 2, steps=3, full_disk=True) == curve_of_two
    assert len(checkpoints(state / "checkpoints")) == 3


@contextmanager
def command(folder: Path, *, processes: int, options: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """`swarmproof trainer` of the run in `folder`, in so many processes; what it says goes to `folder`/log."""
    key = folder / "run.key"
    key.touch(mode=0o600)
    key.write_text(KEY.private_bytes_raw().hex() + "\n")
    start = [*LAUNCH, "--nproc-per-node", str(processes)] if processes > 1 else [sys.executable]
    places = ("--data", str(folder / "data"), "--key", str(key), "--state", str(folder), "--port", "0")
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*start, "-m", "node.cli", "trainer", *places, *options],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and all its processes; torchrun gives each of them a session."""
    with suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def wait_for_steps(home: Home, steps: int, process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until so many steps are published."""
    deadline = time.monotonic() + 240
    while finished_steps(home) < steps:
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
        time.sleep(0.1)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("processes", "recipe"),
    [
        (1, {}),
        (1, {**LORA, "kl_coefficient": 0.1}),
        pytest.param(2, {}, marks=pytest.mark.nightly),
        pytest.param(2, LORA, marks=pytest.mark.nightly),
    ],
    ids=["one", "one-lora", "two", "two-lora"],
)
def test_killed_between_checkpoints_it_goes_on_to_the_policies_of_an_undisturbed_run(
    tmp_path: Path, processes: int, recipe: dict[str, object], zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two policies are out and in no checkpoint: others in their place would be a second history, which is fraud."""
    if processes == 1:  # those that train together are started as ever
        monkeypatch.setattr(subprocess, "Popen", forking(zygote))
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    spec = spec_with(**recipe)
    with run_in(undisturbed, spec) as home, command(undisturbed, processes=processes) as process:
        wait_for_steps(home, STEPS, process, undisturbed)
        wanted = outcome_of(home)
    rarely = ("--checkpoint-every", str(STEPS))
    with run_in(killed, spec, steps=range(STEPS - 1)) as home:
        with command(killed, processes=processes, options=rarely) as process:
            wait_for_steps(home, STEPS - 1, process, killed)
            kill(process)
        assert checkpoints(killed / "checkpoints") == []
        admit(home, range(STEPS - 1, STEPS))
        with command(killed, processes=processes, options=rarely) as process:
            wait_for_steps(home, STEPS, process, killed)
        assert outcome_of(home) == wanted
    assert f"training {STEPS - 1} steps again" in (killed / "log").read_text()
    assert [path.name for path in checkpoints(killed / "checkpoints")] == [f"checkpoint-{STEPS:08d}"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", ["tiny", "goldfinch"])
def test_any_number_of_processes_publishes_the_bytes_of_one_even_after_a_full_disk(tmp_path: Path, family: str) -> None:
    """The log names the file's digest: a replay by other processes must make it again, and a disk fails in the middle.

    The others are in the middle of gathering then, and would wait for ever.
    """
    published = []
    for processes in (1, 3):
        state = beginning(tmp_path / str(processes), family)
        launch("publish", state, processes)
        published.append([(state / f"published-{dtype}").read_bytes() for dtype in ("bfloat16", "float32")])
    assert published[0] == published[1]
    assert published[0][1] == (state / "policy-0.safetensors").read_bytes()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [1, 3])
def test_any_number_of_processes_merges_adapters_to_the_bytes_of_one(tmp_path: Path, rank: int) -> None:
    """Whoever goes on with a checkpoint on other machines must publish what the log would have named.

    Of a rank of 3 or less, the last of several processes hold no row of A; two train here, and four and one go on.
    """
    recipe, published = {"lora": {"rank": rank, "alpha": 2.0 * rank}, "learning_rate": 1e-2}, []
    state = beginning(tmp_path / "state")
    first = (state / "policy-0.safetensors").read_bytes()
    for processes, steps in ((2, 1), (4, 0), (1, 0)):
        launch("publish_newest", state, processes, steps=steps, **recipe)
        published.append([(state / f"published-{dtype}").read_bytes() for dtype in ("bfloat16", "float32")])
    assert published[0] == published[1] == published[2]
    assert published[0][1] != first


@pytest.mark.timeout(300)
def test_a_weight_that_is_not_finite_in_one_processs_share_is_refused_by_all_alike(tmp_path: Path) -> None:
    """Each reads its own part alone; one that stops while the others go on would leave them waiting for it."""
    model = MAKERS["tiny"](1)
    model.get_input_embeddings().weight.data[-1, -1] = torch.nan  # in the last process's rows
    (tmp_path / "state").mkdir()
    save_policy(model, make_tokenizer(), tmp_path / "state" / "policy-0.safetensors")
    launch("refuse", tmp_path / "state", 3)
    said = {(tmp_path / "state" / f"refusal-{rank}").read_text() for rank in range(3)}
    assert said == {"broken_model: model.embed_tokens.weight has values that are not finite"}


@pytest.mark.timeout(300)
def test_a_run_is_trained_by_two_processes_as_by_one_and_ends_at_a_signal(tmp_path: Path) -> None:
    """The command itself, under torchrun: a policy each step, from the same groups, and a clean end."""
    with run_in(tmp_path / "one") as home:
        train_to_the_end(home, tmp_path / "one")
        wanted = outcome_of(home)
    folder = tmp_path / "two"
    with run_in(folder) as home:
        with command(folder, processes=2) as torchrun:
            wait_for_steps(home, STEPS, torchrun, folder)
            torchrun.send_signal(signal.SIGTERM)
            torchrun.wait(60)
        policies, batches = outcome_of(home)
    assert batches == wanted[1]
    assert len(batches) == STEPS
    assert sum(len(used) for _, used in batches) == GROUPS * STEPS
    assert policies[0] == wanted[0][0], "the first policy is the same bits"
    assert len(set(policies)) == STEPS + 1
    assert "Traceback" not in (folder / "log").read_text().split("Sending process")[0]
