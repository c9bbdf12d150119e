"""Policy files: the safetensors header, the configuration, the tokenizer, and what is done with them.

Whoever holds a run's key may be an attacker of those who join the run.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from benchmarks.fuzzing.mutation import (
    EDGES,
    MAX_INPUT_BYTES,
    Pairs,
    Raw,
    bytes_mutator,
    edit_tree,
    json_mutator,
    mixed,
    parse_json,
    scramble,
    write_json,
)
from benchmarks.fuzzing.target import Harness, Mutator, Target
from node.doctor.policy import read_footprint
from node.errors import ConfigError
from node.policy.config import parse_config
from node.policy.errors import MalformedPolicy
from node.policy.file import Blueprint, inspect_policy, load_policy, render_completion, render_prompt, save_policy

VOCABULARY = 24
MARKS = ("<pad>", "<eos>", "<unk>")
TEXT = "Q:12+3=?\nA: é\u202e\x00 <eos>" + 40 * "1" + "!"
BACKTRACKING = r"(1+)+$"
"""A pattern that takes exponential time on TEXT; the library gives up on it in its own way."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": [1, 3],
    "sliding_window": None,
}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
)
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
_FRAMES: dict[str, Any] = {
    "frame_size": 8,
    "cell_size": 8,
    "convolution_size": 8,
    "num_attention_heads": 2,
    "rows": 4,
    "columns": 8,
    "codepoints": 8,
    "foregrounds": 3,
    "backgrounds": 2,
    "token_codepoints": [*range(8)],
}
_RANKS = {"shift_rank": 1, "decay_rank": 1}
RECURRENT: dict[str, dict[str, Any]] = {
    "eagle": {"hidden_size": 64},
    "finch": {"hidden_size": 64, **_RANKS},
    "goldfinch": {"hidden_size": 64, "num_hidden_layers": 3, "value_rank": 1, "adapt_rank": 1, **_RANKS},
    "frame_action": _FRAMES,
}
"""Families of `node.policy.models`, and the sizes that they have otherwise; a head of RWKV is 64 wide."""


def _finished(backend: Tokenizer) -> PreTrainedTokenizerFast:
    wrap: Any = PreTrainedTokenizerFast
    pad, eos, unk = MARKS
    tokenizer: PreTrainedTokenizerFast = wrap(tokenizer_object=backend, pad_token=pad, eos_token=eos, unk_token=unk)
    return tokenizer


def _word_level() -> Tokenizer:
    vocabulary = {text: index for index, text in enumerate((*MARKS, *"0123456789+=Q:A?"))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=MARKS[2]))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    backend.decoder = decoders.Fuse()
    return backend


def _byte_pairs() -> Tokenizer:
    pieces = [*MARKS, *"12QA+=", "12", "Q:", ":", "Ġ", "Ċ"]
    merges = [("1", "2"), ("Q", ":")]
    backend = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, merges, unk_token=MARKS[2]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    return backend


def _unigram() -> Tokenizer:
    pieces = [*((mark, 0.0) for mark in MARKS), *((piece, -float(at)) for at, piece in enumerate("12QA+=▁"))]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def _word_piece() -> Tokenizer:
    pieces = [*MARKS, *"12QA+=", "##2", "##:"]
    backend = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(pieces)}, unk_token=MARKS[2]))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("<eos>", 1), ("<pad>", 0))
    backend.decoder = decoders.WordPiece()
    return backend


def _backtracking() -> Tokenizer:
    backend = _word_level()
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(BACKTRACKING), "isolated")
    return backend


TOKENIZERS: tuple[Callable[[], Tokenizer], ...] = (_word_level, _byte_pairs, _unigram, _word_piece)


def policy_bytes(
    family: str = "llama",
    *,
    rope: Mapping[str, Any] = ROPES[0],
    tokenizer: Callable[[], Tokenizer] = _word_level,
    dtype: torch.dtype = torch.float32,
    tied: bool = True,
) -> bytes:
    """Write a policy of a few thousand bytes, or of 100,000 where it is recurrent, as an honest publisher does."""
    config: Any = CONFIG_MAPPING[family]
    build: Any = AutoModelForCausalLM.from_config
    if family in RECURRENT:
        declared = {field.name for field in dataclasses.fields(config)}
        sizes = {name: value for name, value in SIZES.items() if name in declared} | RECURRENT[family]
    else:
        sizes = SIZES | {"rope_parameters": dict(rope), "tie_word_embeddings": tied}
    model = build(config(**sizes), dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy"
        save_policy(model, _finished(tokenizer()), path)
        return path.read_bytes()


# Taking files apart.


def split_file(data: bytes) -> tuple[Pairs, bytes] | None:
    """Return the header as a tree, and the tensors; None for what is no policy."""
    size = int.from_bytes(data[:8], "little")
    header = parse_json(data[8 : 8 + size]) if size <= len(data) else None
    return (header, data[8 + size :]) if isinstance(header, Pairs) else None


def join_file(header: Pairs, tensors: bytes) -> bytes:
    text = write_json(header)
    return len(text).to_bytes(8, "little") + text + tensors


def metadata_of(data: bytes, name: str) -> bytes:
    """Return the text that an honest file has under `name` in its metadata."""
    parts = split_file(data)
    assert parts is not None
    metadata = dict(map(tuple, dict(map(tuple, parts[0]))["__metadata__"]))
    text: str = metadata[name]
    return text.encode()


def _edited_file(rng: Random, corpus: Sequence[bytes], inner: Mapping[str, Mutator]) -> bytes:
    """Edit the header as a tree, a text in its metadata as a tree of its own, or the tensors' bytes."""
    data = rng.choice(corpus)
    parts = split_file(data)
    if parts is None:
        return scramble(rng, data)
    header, tensors = parts
    roll = rng.random()
    try:
        if roll < 0.2:
            tensors = scramble(rng, tensors, tokens=(b"\x00\x00\xc0\x7f", b"\x80\x7f", b"\xff\xff\xff\xff"))
        elif roll < 0.45:
            header = edit_tree(rng, header, edges=EDGES)
        else:
            _edit_text(rng, header, inner)
        return join_file(header, tensors)[:MAX_INPUT_BYTES] if isinstance(header, Pairs) else scramble(rng, data)
    except (RecursionError, UnicodeEncodeError):
        return scramble(rng, data)


def _edit_text(rng: Random, header: Pairs, inner: Mapping[str, Mutator]) -> None:
    for entry in header:
        if entry[0] == "__metadata__" and isinstance(entry[1], Pairs) and entry[1]:
            member = rng.choice(entry[1])
            mutate = inner.get(str(member[0]), json_mutator())
            member[1] = mutate(rng, [str(member[1]).encode("utf-8", "replace")]).decode("utf-8", "replace")


_SIZES = ("0", "1", "2", "3", "7", "16", "4096", "16777216", "16777217", "0.0", "1e-320", "1e300")
NUMBERS = tuple(Raw(text) for text in _SIZES)
OTHERS = tuple(
    Raw(text)
    for text in (
        *('"relu"', '"gelu"', '"silu"', '"full_attention"', '"sliding_attention"', '"qwen3_moe"', "[1,[2]]"),
        *('{"rope_type":"dynamic"}', '["full_attention"]', '[true,1.5,"1"]', '"kernels-community/x"', '{"1":{"2":3}}'),
    )
)
CONFIG_MUTATE = json_mutator((*EDGES, *NUMBERS, *NUMBERS, *OTHERS), sloppy=0.05)


def _seeds() -> list[bytes]:
    families = [policy_bytes(family) for family in FAMILIES]
    tokenizers = [policy_bytes(tokenizer=tokenizer) for tokenizer in TOKENIZERS[1:]]
    ropes = [policy_bytes(rope=rope) for rope in ROPES[1:]]
    recurrent = [policy_bytes(family, dtype=torch.bfloat16) for family in RECURRENT]
    return [*families, *tokenizers, *ropes, policy_bytes(dtype=torch.bfloat16, tied=False), *recurrent]


def _scratch(stack: ExitStack) -> Path:
    """Return a file to write inputs to, in memory where the system offers that."""
    memory = Path("/dev/shm")  # noqa: S108  (a folder of an unguessable name in it)
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None))
    return Path(folder) / "policy"


def use(policy: Blueprint) -> None:
    """Use a tokenizer as a node does, on text and on tokens of any kind."""
    ids = render_prompt(policy, TEXT)
    assert all(isinstance(token, int) and token >= 0 for token in ids)
    text = render_completion(policy, [*range(policy.vocabulary)][:64])
    assert isinstance(text, str)


def _file(stack: ExitStack) -> Harness:
    """Feed a whole file, to an engine that loads the weights itself, and to one that has them loaded."""
    path = _scratch(stack)
    transformers_logging.set_verbosity(logging.CRITICAL)

    def run(data: bytes) -> int:
        path.write_bytes(data)
        blueprint = inspect_policy(path)
        use(blueprint)
        policy = load_policy(path, dtype=torch.float32)
        assert policy.eos_ids == blueprint.eos_ids
        assert policy.parameters == blueprint.parameters == sum(one.numel() for one in policy.model.parameters())
        return policy.vocabulary

    inner = {"config": CONFIG_MUTATE}
    mutate = mixed(
        (8, lambda rng, corpus: _edited_file(rng, corpus, inner)), (1, bytes_mutator(b"\x00" * 8, b"\xff" * 8))
    )
    return Harness(_seeds(), run, (MalformedPolicy,), mutate)


def _config(_: ExitStack) -> Harness:
    """Feed configurations alone, which are cheaper to try."""
    transformers_logging.set_verbosity(logging.CRITICAL)

    def run(data: bytes) -> str:
        config = parse_config(data.decode("utf-8", "replace"), tensors=12)
        assert 1 <= config.num_hidden_layers <= 12
        return str(config.model_type)

    seeds = [metadata_of(data, "config") for data in _seeds()]
    return Harness(seeds, run, (MalformedPolicy,), CONFIG_MUTATE)


def _tokenizer(stack: ExitStack) -> Harness:
    """Feed tokenizers, in a file that is honest otherwise, and use them."""
    path = _scratch(stack)
    transformers_logging.set_verbosity(logging.CRITICAL)
    parts = split_file(policy_bytes())
    assert parts is not None
    header, tensors = parts
    metadata = dict(map(tuple, header))["__metadata__"]
    member = next(member for member in metadata if member[0] == "tokenizer")

    def run(data: bytes) -> None:
        member[1] = data.decode("utf-8", "replace")
        path.write_bytes(join_file(header, tensors))
        use(inspect_policy(path))

    seeds = [metadata_of(policy_bytes(tokenizer=tokenizer), "tokenizer") for tokenizer in TOKENIZERS]
    texts = ("(", BACKTRACKING, "(?=x)*", "\\p{", "[", "$B:1", "<eos>", "▁", "Ġ")
    edges = tuple(Raw(json.dumps(text)) for text in texts)
    hostile = [metadata_of(policy_bytes(tokenizer=_backtracking), "tokenizer")]
    mutate = json_mutator((*EDGES, *edges, *edges), sloppy=0.1)
    return Harness(seeds, run, (MalformedPolicy,), mutate, hostile=hostile)


def _footprint(stack: ExitStack) -> Harness:
    """Feed headers, whose sizes the doctor reads."""
    path = _scratch(stack)

    def run(data: bytes) -> None:
        path.write_bytes(data)
        footprint = read_footprint(path)
        assert footprint.weight_bytes() >= 0
        assert footprint.sequence_bytes(10**6) >= 0

    mutate = mixed((8, lambda rng, corpus: _edited_file(rng, corpus, {})), (1, bytes_mutator(b"\x00" * 8, b"\xff" * 8)))
    return Harness(_seeds(), run, (ConfigError,), mutate)


TARGETS = (
    Target("policy.file", "a run's publisher", 10, _file, cpu_ms=500.0),
    Target("policy.config", "a run's publisher", 40, _config),
    Target("policy.tokenizer", "a run's publisher", 10, _tokenizer, cpu_ms=500.0),
    Target("policy.footprint", "a run's publisher", 30, _footprint),
)
