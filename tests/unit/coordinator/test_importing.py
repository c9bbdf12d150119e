"""Published RWKV weights become a folder that a run begins with, and a file that lies does nothing else.

What would break for whom: an operator who trains another model than was published, or gives it other tokens than it
was trained with; and whoever opens a stranger's checkpoint.
"""

from __future__ import annotations

import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from benchmarks.modelling.rwkv_package import package_logits, save_published
from coordinator.commands.importing import packaged_vocabulary
from coordinator.importing import state_pickle, torch_file
from coordinator.importing.errors import BadVocabulary, UnreadableCheckpoint, UnsupportedWeights
from coordinator.importing.rwkv import describe, import_rwkv
from coordinator.importing.state_pickle import MAX_PICKLE_BYTES, read_state
from coordinator.importing.torch_file import read_tensors
from coordinator.importing.world import read_vocabulary, world_tokenizer
from node.cli import main
from node.policy.file import load_policy, render_completion, render_prompt, render_tokens, write_policy
from node.policy.folder import open_folder
from node.policy.models import RECURRENT
from node.policy.weights import StoredTensor

WORDS = [b"the", b" the", b"  ", "è".encode() + b"\xe4", b"\xe4\xb8", "世界".encode(), b"==", b"====", b"'\\"]
RANKS = {"eagle": {}, "finch": {"shift_rank": 3, "decay_rank": 5}}


def vocabulary_file(path: Path, tokens: list[bytes]) -> Path:
    """Write the World vocabulary's form: literals of str where the bytes are UTF-8, else of bytes."""
    lines = []
    for number, token in enumerate(tokens, 1):
        try:
            literal = repr(token.decode())
        except UnicodeDecodeError:
            literal = repr(token)
        lines.append(f"{number} {literal} {len(token)}\n")
    path.write_text("".join(lines))
    return path


def published(path: Path, family: str, **save: Any) -> Any:
    """Save a model of random weights in `path` as its authors would, and return it."""
    config = RECURRENT[family].config_class(
        vocab_size=300, hidden_size=128, num_hidden_layers=2, intermediate_size=96, **RANKS[family]
    )
    torch.manual_seed(0)
    model = RECURRENT[family](config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape) * 0.1)
    save_published(model, path, **save)
    return model


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    return vocabulary_file(tmp_path / "vocabulary.txt", [*(bytes([byte]) for byte in range(256)), *WORDS])


@pytest.mark.parametrize("family", ["eagle", "finch"])
def test_a_published_model_is_the_same_one_in_the_folder(family: str, tmp_path: Path, vocabulary: Path) -> None:
    """By the command, as the operator would; the folder becomes a policy file as a run's first one does."""
    model, folder = published(tmp_path / "model.pth", family), tmp_path / "folder"
    arguments = ["import", "rwkv", str(tmp_path / "model.pth"), "-o", str(folder), "--vocabulary", str(vocabulary)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert f"({family}) of 2 layers, 128 hidden units" in result.output
    write_policy(open_folder(folder).source(), tmp_path / "policy", dtype=torch.float32)
    policy = load_policy(tmp_path / "policy", dtype=None)
    assert policy.eos_ids == {0}
    for name, weight in model.state_dict().items():
        assert torch.allclose(policy.model.state_dict()[name], weight, rtol=0, atol=1e-7), name
    text = "the==== è世界  'a"
    ids = render_prompt(policy, text)
    assert ids == longest_matches(read_vocabulary(vocabulary, size=300), text.encode())
    assert render_completion(policy, [*ids, 0]) == "".join(render_tokens(policy, ids)) == text
    batch: Any = {"input_ids": torch.tensor([ids])}
    with torch.inference_mode():
        assert (policy.model(**batch).logits - model(**batch).logits).abs().max() <= 1e-5


def test_weights_of_16_bits_stay_bit_for_bit(tmp_path: Path, vocabulary: Path) -> None:
    model = published(tmp_path / "model.pth", "finch", dtype=torch.bfloat16)
    assert import_rwkv(tmp_path / "model.pth", vocabulary, tmp_path / "folder").dtype == torch.bfloat16
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", local_files_only=True)
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.bfloat16()), name


@pytest.mark.system
@pytest.mark.parametrize("family", ["eagle", "finch"])
@torch.inference_mode()
def test_the_authors_package_computes_what_the_folder_does(family: str, tmp_path: Path, vocabulary: Path) -> None:
    model = published(tmp_path / "model.pth", family)
    import_rwkv(tmp_path / "model.pth", vocabulary, tmp_path / "folder")
    found: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "folder", local_files_only=True).eval()
    ids = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(1))
    assert (package_logits(model, ids.tolist()) - found(input_ids=ids).logits).abs().max() <= 1e-3


def fake(shapes: dict[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(Path("x"), "F32", shape, 0) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        ({"blocks.0.att.time_decay": (64,)}, "RWKV-4 model"),
        ({"blocks.0.att.time_decay": (2,), "blocks.0.att.ln_x.weight": (128,)}, r"RWKV-5\.0 model"),
        ({"blocks.0.att.time_decay": (2, 1), "blocks.0.att.gate.weight": (128, 128)}, r"RWKV-5\.1 model"),
        ({"blocks.0.att.r_k": (2, 64)}, r"RWKV-7 model, and RWKV-5\.2 \(eagle\) and RWKV-6 \(finch\) are"),
        ({"h.0.attn.weight": (64, 64)}, "not those of an RWKV"),
        ({"blocks.0.att.time_maa_x": (1, 1, 64)}, "lacks a tensor 'emb.weight'"),
        (
            {"x.time_maa_x": (64,), "emb.weight": (300, 64), "blocks.0.att.time_faaaa": (2, 32)},
            "heads of 32, and a policy has heads of 64",
        ),
    ],
)
def test_another_version_is_named(shapes: dict[str, tuple[int, ...]], sentence: str) -> None:
    with pytest.raises(UnsupportedWeights, match=sentence):
        describe(fake(shapes))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda state: state.pop("blocks.1.att.gate.weight"), r"lacks tensor 'blocks\.1\.att\.gate\.weight'"),
        (lambda state: state.update({"blocks.0.att.time_state": torch.ones(2)}), "has tensor 'blocks.0.att.time_state"),
        (lambda state: state.update({"blocks.1.att.key.weight": torch.ones(128, 64)}), r"shape \[128, 64\]"),
    ],
)
def test_a_tensor_too_few_too_many_or_misshapen_is_named(
    change: Callable[[dict[str, Any]], object], sentence: str, tmp_path: Path, vocabulary: Path
) -> None:
    path = tmp_path / "model.pth"
    published(path, "finch")
    state = torch.load(path, weights_only=True)  # noqa: TID251  (made above)
    change(state)
    torch.save(state, path)  # noqa: TID251
    with pytest.raises(UnsupportedWeights, match=sentence):
        import_rwkv(path, vocabulary, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def string(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def tensor(key: str = "0", *, numbers: int = 6, shape: Any = (2, 3), strides: Any = (3, 1), offset: int = 0) -> bytes:
    """What torch.save pickles of a float32 tensor, by hand."""

    def integer(value: int) -> bytes:
        return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)

    def several(values: Any) -> bytes:
        return b"(" + b"".join(map(integer, values)) + b"t"

    storage = (
        b"(" + string("storage") + b"ctorch\nFloatStorage\n" + string(key) + string("cpu") + integer(numbers) + b"tQ"
    )
    described = storage + integer(offset) + several(shape) + several(strides) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + described + b"tR"


def state(**tensors: bytes) -> bytes:
    return b"\x80\x02}(" + b"".join(string(name) + value for name, value in tensors.items()) + b"u."


def archive(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED, **records: bytes) -> Path:
    """Zip a pickle and records; a name of two parts has _ between them."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("model/data.pkl", pickled)
        for name, content in records.items():
            file.writestr(f"model/{name.replace('_', '/')}", content)
    return path


SIX = struct.pack("<6f", *range(6))


def test_what_torch_saves_is_read_where_it_lies(tmp_path: Path) -> None:
    """A module's state dict has attributes, and two parts of one tensor share its storage."""
    module = torch.nn.Linear(2, 3)
    whole = torch.arange(6.0)
    torch.save(module.state_dict(), tmp_path / "module.pth")  # noqa: TID251
    torch.save({"a": whole[:2], "b": whole[2:].view(2, 2)}, tmp_path / "parts.pth")  # noqa: TID251
    by_hand = archive(tmp_path / "by_hand.pth", state(w=tensor()), data_0=SIX, byteorder=b"little")
    for path, expected in (
        (tmp_path / "module.pth", dict(module.state_dict())),
        (tmp_path / "parts.pth", {"a": whole[:2], "b": whole[2:].view(2, 2)}),
        (by_hand, {"w": whole.view(2, 3)}),
    ):
        found = read_tensors(path)
        assert found.keys() == expected.keys()
        for name, stored in found.items():
            values = torch.frombuffer(
                bytearray(path.read_bytes()), dtype=torch.float32, offset=stored.start, count=stored.count
            )
            assert torch.equal(values.view(stored.shape), expected[name])


COMMAND = string("touch hacked")
REFUSED: dict[str, dict[str, bytes]] = {
    "it names": {
        "os.system": b"\x80\x02cos\nsystem\n(" + COMMAND + b"tR.",
        "another name of it": b"\x80\x02cposix\nsystem\n" + COMMAND + b"\x85R.",
        "eval": b"\x80\x02cbuiltins\neval\n" + COMMAND + b"\x85R.",
        "a new object": b"\x80\x02cos\nsystem\n" + COMMAND + b"\x85\x81.",
    },
    "it has the instruction": {
        "protocol 4's global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + COMMAND + b"\x85R.",
        "an instance": b"(S'touch hacked'\nios\nsystem\n.",
        "an extension": b"\x82\x01.",
    },
    "does not fit what is before it": {
        "a call of a dtype": b"\x80\x02ctorch\nFloatStorage\n" + COMMAND + b"\x85R.",
        "a call of a string": b"\x80\x02" + COMMAND + b")R.",
        "a call with a dictionary": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}R.",
        "a filled OrderedDict": b"\x80\x02ccollections\nOrderedDict\n}\x85R.",
        "a tensor's attribute": b"\x80\x02" + tensor() + b"}b.",
        "an empty stack": b"\x80\x02R.",
        "no mark": b"\x80\x02}u.",
        "an unset memo": b"\x80\x02h\x05.",
        "a number for a name": b"\x80\x02}K\x01" + tensor() + b"s.",
        "a negative offset": state(w=tensor(offset=-1)),
        "a shape of 2**62": state(w=tensor(shape=(2**62,), strides=(1,))),
        "nine dimensions": state(w=tensor(shape=(1,) * 9, strides=(1,) * 9)),
        "a string for a storage": state(w=tensor().replace(b"ctorch\nFloatStorage\n", string("x"))),
    },
    "it is damaged": {"nothing": b"", "no end": b"\x80\x02}", "a cut": state(w=tensor())[:-20]},
    "it is not a dictionary": {"a tensor": b"\x80\x02" + tensor() + b".", "two": b"\x80\x02}" + state(w=tensor())[2:]},
    "is not a tensor": {
        "a dictionary in itself": b"\x80\x02}q\x00" + string("w") + b"h\x00s.",
        "deep tuples": b"\x80\x02}" + string("w") + b")" + b"\x85" * 20_000 + b"s.",
        "a long name": state(**{"w" * 201: tensor()}),
    },
    "it has 0 tensors": {"an empty one": b"\x80\x02}."},
    "it has 3 tensors": {"more than are read": state(u=tensor(), v=tensor(), w=tensor())},
    "bytes, and at most": {"a million tensors": state(w=tensor()) + b"." * MAX_PICKLE_BYTES},
}


def test_a_pickle_does_nothing_but_describe_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has one fault, without which it is read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(state_pickle, "MAX_TENSORS", 2)
    assert read_state(state(w=tensor(), v=tensor("1"))).keys() == {"w", "v"}
    for sentence, cases in REFUSED.items():
        for name, pickled in cases.items():
            with pytest.raises(UnreadableCheckpoint) as caught:
                read_state(pickled)
            assert sentence in str(caught.value), name
    assert not list(tmp_path.iterdir())


def test_numbers_lie_where_the_pickle_says_or_the_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_file, "MAX_RECORDS", 5)
    two = {"data_0": SIX, "data_1": SIX}
    cases: dict[str, tuple[bytes, dict[str, Any]]] = {
        "is compressed": (state(w=tensor()), {"data_0": SIX * 1000, "compression": zipfile.ZIP_DEFLATED}),
        "which the zip lacks": (state(w=tensor("1")), {"data_0": SIX}),
        "'../../etc/passwd', which the zip lacks": (state(w=tensor("../../etc/passwd")), {"data_0": SIX}),
        "has 24 bytes": (state(w=tensor(numbers=7)), two),
        "more than its storage": (state(w=tensor(offset=1)), two),
        "has no numbers": (state(w=tensor(shape=(0, 3))), two),
        "not contiguous": (state(w=tensor(strides=(1, 2))), two),
        "is not contiguous": (state(w=tensor(strides=(1,))), two),
        "its tensors overlap": (state(w=tensor(), v=tensor(shape=(1,), strides=(1,), offset=5)), two),
        "not little-endian": (state(w=tensor()), {"data_0": SIX, "byteorder": b"big"}),
        "data.pkl' has": (state(w=tensor()) + b"." * MAX_PICKLE_BYTES, {"data_0": SIX}),
        "its zip has 6 records": (b"", {f"data_{index}": b"" for index in range(5)}),
    }
    for sentence, (pickled, records) in cases.items():
        path = archive(tmp_path / "model.pth", pickled, **records)
        with pytest.raises(UnreadableCheckpoint) as caught:
            read_tensors(path)
        assert sentence in str(caught.value)


def test_a_zip_that_is_cut_off_damaged_or_none_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "model.pth", state(w=tensor()), data_0=SIX)
    whole = path.read_bytes()
    legacy = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    damaged = [whole[: len(whole) * eighths // 8] for eighths in range(8)]
    damaged += [
        whole.replace(SIX, SIX[::-1]),
        whole + b"\x00",
        b"\x00" + whole,
        legacy,
        whole.replace(b"PK\x03\x04", b"PK\x03\x05"),
    ]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UnreadableCheckpoint, match=r"zip|checksum"):
            read_tensors(path)


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    """One within another would make a file of any size of a small one."""
    name = b"model/data/1"
    inner = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, 24, 24, len(name), 0) + name + SIX
    numbers = len(inner) // 4
    pickled = state(w=tensor(numbers=numbers, shape=(1,), strides=(1,)), v=tensor("1"))
    path = archive(tmp_path / "model.pth", pickled, data_0=inner[: numbers * 4], data_1=SIX)
    content = bytearray(path.read_bytes())
    listed = content.rindex(name) - 46
    struct.pack_into("<L", content, listed + 42, content.index(inner[:42]))
    path.write_bytes(content)
    with pytest.raises(UnreadableCheckpoint, match="its records overlap"):
        read_tensors(path)


def longest_matches(vocabulary: dict[bytes, int], data: bytes) -> list[int]:
    """The World tokenizer by its definition."""
    longest, at, found = max(map(len, vocabulary)), 0, []
    while at < len(data):
        size = next(size for size in range(longest, 0, -1) if data[at : at + size] in vocabulary)
        found.append(vocabulary[data[at : at + size]])
        at += size
    return found


def test_tokens_are_the_longest_ones_over_bytes(tmp_path: Path) -> None:
    """Also where a token ends within a character, or is a part of another one, or looks like an expression."""
    draw = random.Random(0)
    characters = "abc é世界🎉\n\\^$.|?*+()[]{}&&~~##--'\"\u0300\u2028\x85\x00ß"
    source = "".join(draw.choices(characters, k=4000)).encode()
    starts = [draw.randrange(len(source) - 12) for _ in range(800)]
    several = {source[start : start + draw.randint(2, 12)] for start in starts} | {b"a" * 100}
    tokens = [*(bytes([byte]) for byte in range(256)), *sorted(several)]
    vocabulary = read_vocabulary(vocabulary_file(tmp_path / "v.txt", tokens), size=len(tokens) + 1)
    assert vocabulary == {token: number for number, token in enumerate(tokens, 1)}
    tokenizer = world_tokenizer(vocabulary)
    for given in (source.decode(), "a" * 50_000, "".join(map(chr, range(1, 0xD800, 9))), " <s> the", "aaaab" * 40):
        ids = tokenizer(given)["input_ids"]
        assert ids == longest_matches(vocabulary, given.encode())
        assert tokenizer.decode(ids) == given
    assert tokenizer("")["input_ids"] == []


@pytest.mark.system
def test_the_authors_package_has_the_same_tokens_of_a_text_in_many_languages() -> None:
    """Of 1.7 MB: English, every script, and what the vocabulary itself is made of, in any order."""
    from pydoc_data.topics import topics

    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    path, draw = packaged_vocabulary(), random.Random(0)
    theirs = TRIE_TOKENIZER(str(path))
    vocabulary = read_vocabulary(path, size=65536)
    assert vocabulary == theirs.token2idx
    ours = world_tokenizer(vocabulary)
    mixed = b"".join(draw.choices(list(vocabulary), k=150_000)).decode(errors="ignore")
    scripts = "".join(
        chr(draw.randrange(start, start + 128)) * draw.randint(1, 3)
        for start in range(0, 0xD700, 128)
        for _ in range(150)
    )
    for given in ("".join(topics.values()), mixed, scripts, "".join(map(chr, range(0x1F000, 0x1FB00)))):
        assert ours(given)["input_ids"] == theirs.encode(given)


@pytest.mark.parametrize(
    ("tokens", "line", "sentence"),
    [
        (range(256), "300 'ab' 2", "outside the model's vocabulary of 300"),
        (range(256), "258 'ab' 3", "line 257 is not an id"),
        (range(256), "258 'é' 1", "line 257 is not an id"),
        (range(256), "258 __import__('os') 2", "line 257 is not an id"),
        (range(256), "258 '' + open('x') + '' 2", "line 257 is not an id"),
        (range(256), "258 'a', 'b' 2", "line 257 is not an id"),
        (range(256), "258 '" + "a" * 300 + "' 300", "line 257 is not an id"),
        (range(256), "0 'ab' 2", "taken"),
        (range(256), "258 'a' 1", "taken"),
        (range(256), "256 'ab' 2", "an id has two tokens"),
        (range(255), "258 'ab' 2", "or a byte none"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(tokens: range, line: str, sentence: str, tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path / "v.txt", [bytes([byte]) for byte in tokens])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(BadVocabulary, match=sentence):
        read_vocabulary(path, size=300)
