"""A policy as one safetensors file: weights, configuration and tokenizer (docs/protocol.md, section 11).

    tensors        the state dict; a weight that several modules share is stored once, under its first name
    __metadata__   "format": "pt", "swarmproof": "policy/1",
                   "config": the model's configuration, JSON; only the fields its own class declares
                   "tokenizer": tokenizer.json; "tokenizer_config": {"eos_token", "pad_token", "unk_token"}

A file comes from a stranger and is data, never code: only the families in `node.policy.config` are built, from this
machine's transformers; a configuration names no kernel, repository or class. Sizes are checked before allocation, and
numbers are cast on their way between file and model, so reading and writing take no memory besides the model's own.
Whether a loaded policy is the run's is up to the manifest.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from node.policy.config import DTYPES, FAMILIES, parse_config, render_config
from node.policy.errors import MalformedPolicy
from node.policy.header import read_header, reading_errors, render_header, stored_dtype, stored_tensors
from node.policy.layout import cast, dtype_of, shapes_of, stored_layout
from node.policy.products import LogitRule, OutputHead
from node.policy.skeleton import build_skeleton, materialise, probe, probe_shapes, unique_tensors
from node.policy.streaming import SeenChunks, are_finite, read_into, read_numbers, write_numbers
from node.policy.tokenizer import eos_ids_of, parse_tokenizer, render_tokenizer, tokenizer_errors
from node.policy.weights import StoredTensor
from shardcast.files import sync_folder

MAX_CHARACTER_TOKENS = 16
"""A character has at most four bytes, each of which may be a token."""


@dataclass(frozen=True)
class Blueprint:
    """A policy without its weights: what is needed to feed and read an engine that holds it.

    `vocabulary` counts logits, `hidden` is the last norm's width, `parameters` counts stored weights. `config` is
    validated: it names no code, and its `dtype` is the file's.
    """

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast
    eos_ids: frozenset[int]
    parameters: int

    @property
    def vocabulary(self) -> int:
        size: int = self.config.vocab_size
        return size

    @property
    def hidden(self) -> int:
        size: int = self.config.hidden_size
        return size

    @property
    def end_mark(self) -> int:
        """The tokenizer's own end mark, one of `eos_ids`."""
        token: int = self.tokenizer.eos_token_id
        return token

    def has_architecture_of(self, other: Blueprint) -> bool:
        """Return whether only weights and tokenizer differ, so that one model can hold either."""
        return bool(self.config.to_dict() == other.config.to_dict())


@dataclass(frozen=True)
class Policy(Blueprint):
    """A loaded model, with what is needed to feed and read it."""

    model: PreTrainedModel

    @property
    def head(self) -> OutputHead:
        """The output head.

        Products of the stored values are summed in float32 and never rounded to the model's dtype (docs/protocol.md,
        section 4), so that two kernels hardly ever disagree about a token.
        """
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return OutputHead(head.weight.detach(), LogitRule.of(self.config))

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits [tokens, vocabulary], float32, of final hidden states [tokens, hidden]."""
        return self.head.logits(states)

    def in_float32(self) -> Policy:
        """Copy the policy to compute in float32, with the same weights."""
        return replace(self, model=copy.deepcopy(self.model).float())  # type: ignore[no-untyped-call]


def render_prompt(policy: Blueprint, text: str, *, special_tokens: bool = True) -> list[int]:
    """Tokenize a prompt, with the special tokens of the tokenizer's post-processor unless the text has its own.

    Raises MalformedPolicy if the tokenizer fails.
    """
    with tokenizer_errors():
        ids: list[int] = policy.tokenizer(text, add_special_tokens=special_tokens)["input_ids"]
        return ids


def render_reply(policy: Blueprint, text: str) -> list[int]:
    """Tokenize an environment's reply: like a prompt, but without special tokens, which begin or end a sequence.

    Raises MalformedPolicy if the tokenizer fails.
    """
    return reply_ids(policy.tokenizer, text)


def reply_ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Do as `render_reply`, for whoever has no more of a policy than its tokenizer."""
    with tokenizer_errors():
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def render_completion(policy: Blueprint, ids: list[int]) -> str:
    """Decode a completion without its end mark; ids unknown to the tokenizer are dropped.

    Raises MalformedPolicy if the tokenizer fails.
    """
    kept = [token for token in ids if token not in policy.eos_ids]
    with tokenizer_errors():
        text: str = policy.tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=False)
        return text


def render_tokens(policy: Blueprint, ids: list[int]) -> list[str]:
    """Return the text that each token of a completion adds, end marks included.

    It is "" for a token that only begins a character, and for ids unknown to the tokenizer. Raises MalformedPolicy if
    the tokenizer fails.
    """
    backend, texts, pending_tokens = policy.tokenizer.backend_tokenizer, list[str](), 0
    vocabulary = policy.vocabulary  # once: transformers takes longer to look it up than a token takes to decode
    with tokenizer_errors():
        stream = DecodeStream(skip_special_tokens=False)
        for token in ids:
            # A stream re-decodes all tokens it has not emitted: unbounded for tokens that never form a character.
            if pending_tokens >= MAX_CHARACTER_TOKENS:
                stream, pending_tokens = DecodeStream(skip_special_tokens=False), 0
            text = stream.step(backend, token) if 0 <= token < vocabulary else None
            texts.append(text or "")
            pending_tokens = 0 if text else pending_tokens + 1
    return texts


@dataclass(frozen=True)
class PolicySource:
    """What a policy file is made of.

    `numbers` are those of the tensors in `shapes`, by sorted name, one tensor after the other, in tensors of any size
    and dtype. They are taken while the file is written, once, and none is kept.
    """

    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerFast
    shapes: Mapping[str, tuple[int, ...]]
    numbers: Iterable[Tensor]

    @staticmethod
    def of_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> PolicySource:
        """Describe a model and its own weights."""
        layout, tensors = stored_layout(model), unique_tensors(model)
        numbers = (tensors[stored.name].reshape(-1)[stored.numbers] for stored in layout.values())
        return PolicySource(model.config, tokenizer, shapes_of(layout), numbers)


class Shards(Protocol):
    """How several processes hold one model together."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def device(self) -> torch.device:
        """Where this process has its part."""

    def shard(self, model: PreTrainedModel) -> None:
        """Share out the parameters of a model on the meta device."""

    def own_part(self, tensor: Tensor) -> tuple[Tensor, int]:
        """Return this process's consecutive numbers of a tensor, flat, and the index of the first."""

    def largest(self, values: Tensor) -> Tensor:
        """Take the maximum of a tensor over all processes."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """One process, which has the whole model on its device."""

    device: torch.device
    size: int = 1

    def shard(self, model: PreTrainedModel) -> None:
        """Leave the model whole."""

    def own_part(self, tensor: Tensor) -> tuple[Tensor, int]:
        return tensor.detach().view(-1), 0

    def largest(self, values: Tensor) -> Tensor:
        return values


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write the policy in `model` to `path`, as `write_policy` does, in its dtype.

    Raises ValueError for a model whose family or dtypes `load_policy` would refuse, and OSError.
    """
    if any(tensor.dtype != dtype_of(name, model.dtype) for name, tensor in unique_tensors(model).items()):
        raise ValueError("a policy's tensors must share one dtype: float32, bfloat16 or float16")
    write_policy(PolicySource.of_model(model, tokenizer), path, dtype=model.dtype)


def write_policy(source: PolicySource, path: Path, *, dtype: torch.dtype) -> None:
    """Write `path` atomically, in `dtype`; equal input gives equal bytes, however the numbers come in pieces.

    Raises ValueError for a family or dtype that `load_policy` would refuse, and OSError.
    """
    if source.config.model_type not in FAMILIES:
        raise ValueError(f"{source.config.model_type} models cannot be saved as a policy")
    if str(dtype)[6:] not in DTYPES.values():
        raise ValueError(f"a policy's dtype is float32, bfloat16 or float16, not {dtype}")
    shapes = dict(sorted(source.shapes.items()))
    tokenizer, marks = render_tokenizer(source.tokenizer)
    config = render_config(source.config, dtype=str(dtype)[6:])
    header = render_header(shapes, dtype, config=config, tokenizer=tokenizer, tokenizer_config=marks)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            counts = {name: math.prod(shape) for name, shape in shapes.items()}
            tensors = ((count, dtype_of(name, dtype)) for name, count in counts.items())
            written = write_numbers(file, source.numbers, tensors=tensors)
            if written != (declared := sum(counts.values())):
                raise ValueError(f"tensors of {declared} numbers cannot be made of {written}")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def load_policy(
    path: Path,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str = "cpu",
    shards: Shards | None = None,
    prepare: Callable[[PreTrainedModel], object] = lambda _: None,
) -> Policy:
    """Build the policy in `path` on `device`, in `dtype` (None: the file's own), in evaluation mode.

    With `shards`, it is shared out as these say, to their devices. Then every process must call this, reads its own
    part alone, and raises MalformedPolicy if any does; several do not try a forward pass, which takes more memory than
    the parts. `prepare` may add parameters to the model while that is on the meta device and whole; they are arbitrary
    afterwards. Raises MalformedPolicy for a faulty file, and UnreadablePolicy for a faulty disk.
    """
    where: Shards = shards or _Whole(torch.device(device))
    with reading_errors(path):
        blueprint, skeleton, stored = _read_blueprint(path)
        model = skeleton if dtype is None else cast(skeleton, dtype)
        if where.size > 1:
            probe_shapes(model)
        prepare(model)
        where.shard(model)
        materialise(model, where.device)
        _read_weights(model, stored, where)
        if where.size == 1:
            probe(model)
        return Policy(blueprint.config, blueprint.tokenizer, blueprint.eos_ids, blueprint.parameters, model)


def refill_policy(policy: Policy, path: Path, blueprint: Blueprint) -> Policy:
    """Fill the model of `policy` with the weights in `path`, so that there is memory for one policy at all times.

    `blueprint` is that of `path`, of the same architecture. Raises as `load_policy`; the weights are a mixture then.
    """
    with reading_errors(path):
        _read_weights(policy.model, stored_tensors(path), _Whole(policy.model.device))
        probe(policy.model)
    return replace(policy, tokenizer=blueprint.tokenizer, eos_ids=blueprint.eos_ids)


def read_blueprint(path: Path) -> Blueprint:
    """Validate all but the numbers of `path`, by its header alone; raises as `load_policy`."""
    with reading_errors(path):
        blueprint, skeleton, _ = _read_blueprint(path)
        probe_shapes(skeleton)
        return blueprint


def inspect_policy(path: Path, *, seen: SeenChunks | None = None) -> Blueprint:
    """Validate `path` for an engine that loads the weights itself: like `load_policy`, a piece in memory at a time.

    There is no forward pass; non-finite weights are `broken_model` here too. Those that were `seen` are not read again.
    Raises as `load_policy`.
    """
    with reading_errors(path):
        blueprint, skeleton, stored = _read_blueprint(path)
        probe_shapes(skeleton)
        for name, tensor in sorted(stored.items()):
            for first, count in [(0, tensor.count)] if seen is None else seen.unseen(tensor):
                for piece in read_numbers(tensor, first=first, count=count):
                    if not are_finite(piece.view(torch.uint8).numpy(), stored_as=tensor.dtype):
                        raise _not_finite(name)
        return blueprint


def _read_weights(model: PreTrainedModel, stored: Mapping[str, StoredTensor], shards: Shards) -> None:
    """Fill a model's weights; every process raises MalformedPolicy if one has found a number that is not finite.

    A probe of two tokens would not find them all.
    """
    layout, tensors = stored_layout(model), unique_tensors(model)
    names, faulty = sorted(stored), -1
    for at, name in enumerate(names):
        part = layout[name]
        own, first = shards.own_part(tensors[part.name])
        begin, end = max(part.first, first), min(part.numbers.stop, first + len(own))
        if begin < end and not read_into(own[begin - first : end - first], stored[name], first=begin - part.first):
            faulty = at
            break
    faulty = int(shards.largest(torch.tensor([faulty])))
    if faulty >= 0:
        raise _not_finite(names[faulty])


def _not_finite(name: str) -> MalformedPolicy:
    return MalformedPolicy(f"{name} has values that are not finite", code="broken_model")


def _read_blueprint(path: Path) -> tuple[Blueprint, PreTrainedModel, dict[str, StoredTensor]]:
    """Read and validate all but the weights.

    Also return the model without memory for them, in the file's dtype, and where the file has them.
    """
    metadata, stored = read_header(path)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    config = parse_config(metadata["config"], tensors=len(shapes))
    dtype = stored_dtype(stored)
    if config.dtype != dtype:
        raise MalformedPolicy(f"holds {dtype}, but its configuration says {config.dtype}", code="wrong_tensors")
    tokenizer = parse_tokenizer(metadata["tokenizer"], metadata["tokenizer_config"], vocabulary=config.vocab_size)
    skeleton = build_skeleton(config, dtype=dtype)
    _check_shapes(shapes_of(stored_layout(skeleton)), shapes)
    parameters = sum(map(math.prod, shapes.values()))
    return Blueprint(config, tokenizer, eos_ids_of(config, tokenizer), parameters), skeleton, stored


def _check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(expected.keys() ^ found.keys()):
        problem = "lacks" if name in expected else "has an unexpected"
        raise MalformedPolicy(f"{problem} tensor {name[:200]!r}", code="wrong_tensors")
    for name, shape in expected.items():
        if found[name] != shape:
            raise MalformedPolicy(f"{name} has shape {found[name]}, not {shape}", code="wrong_tensors")
