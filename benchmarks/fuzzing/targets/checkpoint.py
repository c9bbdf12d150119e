"""Published weights and the vocabulary beside them, which an operator downloads and imports."""

from __future__ import annotations

import io
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path

import torch

from benchmarks.fuzzing.mutation import bytes_mutator
from benchmarks.fuzzing.target import Harness, Target
from coordinator.importing.errors import BadVocabulary, ImportFault, UnreadableCheckpoint
from coordinator.importing.rwkv import describe
from coordinator.importing.state_pickle import read_state
from coordinator.importing.torch_file import read_tensors
from coordinator.importing.world import read_vocabulary
from node.policy.models import RECURRENT

FORBIDDEN = (
    b"cos\nsystem\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"}",
    b"(",
    b"t",
    b"R",
    b"b",
    b"q\x00",
    b"h\x00",
    b".",
)
LINES = [f"{number} {bytes([number - 1])!r} 1\n" for number in range(1, 257)]


def _checkpoints() -> list[bytes]:
    """Save a module's state dict, and a Finch's tensors by its published names as far as its sizes are told by them."""
    shapes = {"emb.weight": (300, 64), "blocks.0.att.time_faaaa": (1, 64), "blocks.0.ffn.key.weight": (8, 64)}
    shapes |= {"blocks.0.att.time_maa_w1": (64, 15), "blocks.0.att.time_decay_w1": (64, 5)}
    states = [
        {name: torch.ones(shape).bfloat16() for name, shape in shapes.items()},
        torch.nn.Linear(2, 3).state_dict(),
    ]
    saved = []
    for state in states:
        file = io.BytesIO()
        torch.save(state, file)  # noqa: TID251  (what is published)
        saved.append(file.getvalue())
    return saved


def _pickle(_: ExitStack) -> Harness:
    pickles = [zipfile.ZipFile(io.BytesIO(saved)).read("archive/data.pkl") for saved in _checkpoints()]
    return Harness(pickles, lambda data: str(len(read_state(data))), (UnreadableCheckpoint,), bytes_mutator(*FORBIDDEN))


def _path(stack: ExitStack) -> Path:
    memory = Path("/dev/shm")  # noqa: S108  (a folder of this target's own in it)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None))) / "data"


def _file(stack: ExitStack) -> Harness:
    """Feed a file, whose tensors must lie in it, and what they say of their model, which may be none."""
    path, finch = _path(stack), RECURRENT["finch"].config_class

    def run(data: bytes) -> str:
        path.write_bytes(data)
        stored = read_tensors(path)
        assert all(0 < each.start <= len(data) - each.count * 2 for each in stored.values())
        if "emb.weight" in stored:
            assert isinstance(describe(stored), finch)
        return str(len(stored))

    return Harness(_checkpoints(), run, (ImportFault,), bytes_mutator(b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"))


def _vocabulary(stack: ExitStack) -> Harness:
    path = _path(stack)

    def run(data: bytes) -> str:
        path.write_bytes(data)
        found = read_vocabulary(path, size=1000)
        assert len(set(found.values())) == len(found) >= 256
        return str(len(found))

    seed = "".join([*LINES, "257 ' é' 3\n", "258 b'\\xe4\\xb8' 2\n"]).encode()
    tokens = (b"b'", b"'", b'"', b"\\x", b"\\N{", b"('", b"+", b"\n", b"300")
    return Harness([seed], run, (BadVocabulary,), bytes_mutator(*tokens))


SENDER = "whoever published the weights"
TARGETS = (
    Target("checkpoint.pickle", SENDER, 10, _pickle),
    Target("checkpoint.file", SENDER, 10, _file),
    Target("checkpoint.vocabulary", SENDER, 5, _vocabulary),
)
