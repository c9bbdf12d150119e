"""A policy as one safetensors file: weights, configuration and tokenizer (docs/protocol.md, section 11).

    tensors        the state dict; a weight that several modules share is stored once, under its first name
    __metadata__   "format": "pt", "swarmproof": "policy/1",
                   "config": the model's configuration, JSON; only the fields its own class declares
                   "tokenizer": tokenizer.json; "tokenizer_config": {"eos_token", "pad_token", "unk_token"}

A file comes from a stranger and is data, never code: only the families in `node.policy.config` are built, from this
machine's transformers; a configuration names no kernel, repository or class. Sizes are checked before allocation, so
reading takes about as much memory as the file's size. Whether a loaded policy is the run's is up to the manifest.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

from node.policy.config import ATTENTION, DTYPES, FAMILIES, parse_config, render_config
from node.policy.errors import MalformedPolicy, UnreadablePolicy
from node.policy.weights import MAX_HEADER_BYTES

FORMAT = "policy/1"
MAX_CHARACTER_TOKENS = 16
"""A character has at most four bytes, each of which may be a token."""

_METADATA = frozenset({"format", "swarmproof", "config", "tokenizer", "tokenizer_config"})


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokenizer's end, padding and unknown marks."""

    eos_token: str
    pad_token: str | None = None
    unk_token: str | None = None


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


@dataclass(frozen=True)
class Policy(Blueprint):
    """A loaded model, with what is needed to feed and read it."""

    model: PreTrainedModel

    def logits(self, states: Tensor) -> Tensor:
        """Compute logits [tokens, vocabulary], float32, of final hidden states [tokens, hidden].

        Products of the stored values are summed in float32 and never rounded to the model's dtype (docs/protocol.md,
        section 4), so that two kernels hardly ever disagree about a token.
        """
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if states.is_cuda and states.dtype != torch.float32:
            return torch.mm(states, head.weight.t(), out_dtype=torch.float32)
        return functional.linear(states.float(), self._wide_head)

    def in_float32(self) -> Policy:
        """Copy the policy to compute in float32, with the same weights."""
        return replace(self, model=copy.deepcopy(self.model).float())  # type: ignore[no-untyped-call]

    @functools.cached_property
    def _wide_head(self) -> Tensor:
        """Output embedding [vocabulary, hidden] in float32: a copy, unless the model is float32."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight: Tensor = head.weight.detach()
        return weight.float()


def render_prompt(policy: Blueprint, text: str) -> list[int]:
    """Tokenize a prompt, with the special tokens of the tokenizer's post-processor.

    Raises MalformedPolicy if the tokenizer fails.
    """
    with tokenizer_errors():
        ids: list[int] = policy.tokenizer(text)["input_ids"]
        return ids


def render_reply(policy: Blueprint, text: str) -> list[int]:
    """Tokenize an environment's reply: like a prompt, but without special tokens, which begin or end a sequence.

    Raises MalformedPolicy if the tokenizer fails.
    """
    with tokenizer_errors():
        ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
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
    with tokenizer_errors():
        stream = DecodeStream(skip_special_tokens=False)
        for token in ids:
            # A stream re-decodes all tokens it has not emitted: unbounded for tokens that never form a character.
            if pending_tokens >= MAX_CHARACTER_TOKENS:
                stream, pending_tokens = DecodeStream(skip_special_tokens=False), 0
            text = stream.step(backend, token) if 0 <= token < policy.vocabulary else None
            texts.append(text or "")
            pending_tokens = 0 if text else pending_tokens + 1
    return texts


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write `path` atomically; equal input gives equal bytes. Streams with one tensor in memory at a time.

    Raises ValueError for a model whose family or dtypes `load_policy` would refuse, and OSError.
    """
    tensors = dict(sorted(unique_tensors(model).items()))
    if model.config.model_type not in FAMILIES:
        raise ValueError(f"{model.config.model_type} models cannot be saved as a policy")
    if {tensor.dtype for tensor in tensors.values()} != {model.dtype} or str(model.dtype)[6:] not in DTYPES.values():
        raise ValueError("a policy's tensors must share one dtype: float32, bfloat16 or float16")
    header = _header(tensors, _metadata(model, tokenizer))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in tensors.values():
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def load_policy(path: Path, *, dtype: torch.dtype | None) -> Policy:
    """Build the policy in `path` on the CPU, in `dtype` (None: the file's own), in evaluation mode.

    Raises MalformedPolicy for a faulty file, and UnreadablePolicy for a faulty disk.
    """
    with _open_policy(path) as file:
        blueprint, skeleton = _read_blueprint(file)
        model: Any = skeleton
        dtype = dtype or skeleton.dtype
        _load_weights(
            model.to(dtype), {name: _read_finite(file, name).to(dtype, copy=True) for name in unique_tensors(skeleton)}
        )
        _probe(model)
        return Policy(blueprint.config, blueprint.tokenizer, blueprint.eos_ids, blueprint.parameters, model)


def inspect_policy(path: Path) -> Blueprint:
    """Validate `path` for an engine that loads the weights itself: like `load_policy`, one tensor in memory at a time.

    There is no forward pass; non-finite weights are `broken_model` here too. Raises as `load_policy`.
    """
    with _open_policy(path) as file:
        blueprint, skeleton = _read_blueprint(file)
        probe_shapes(skeleton)
        for name in unique_tensors(skeleton):
            _read_finite(file, name)
        return blueprint


def _read_finite(file: Any, name: str) -> Tensor:
    """Read a tensor and require finite values, which a probe of two tokens would not fully check."""
    tensor: Tensor = file.get_tensor(name)
    if not bool(tensor.isfinite().all()):
        raise MalformedPolicy(f"{name} has values that are not finite", code="broken_model")
    return tensor


@contextlib.contextmanager
def _open_policy(path: Path) -> Iterator[Any]:
    try:
        _check_file(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise MalformedPolicy(f"is not a safetensors file: {error}", code="not_safetensors") from error
    except OSError as error:
        raise UnreadablePolicy(f"cannot read {path}: {error}") from error


def _read_blueprint(file: Any) -> tuple[Blueprint, PreTrainedModel]:
    """Read and validate all but the weights; also return the model without memory for them, in the file's dtype."""
    metadata = file.metadata() or {}
    if set(metadata) != _METADATA or metadata["swarmproof"] != FORMAT:
        raise MalformedPolicy(f"its metadata is not that of {FORMAT}", code="wrong_metadata")
    shapes, stored = _declared_tensors(file)
    config = parse_config(metadata["config"], tensors=len(shapes))
    if config.dtype != stored:
        raise MalformedPolicy(f"holds {stored}, but its configuration says {config.dtype}", code="wrong_tensors")
    tokenizer = parse_tokenizer(metadata["tokenizer"], metadata["tokenizer_config"], vocabulary=config.vocab_size)
    skeleton = build_skeleton(config, dtype=stored)
    _check_shapes({name: tuple(tensor.shape) for name, tensor in unique_tensors(skeleton).items()}, shapes)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return Blueprint(config, tokenizer, eos_ids_of(config, tokenizer), parameters), skeleton


def unique_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict, shared weights once."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name] for name in first.values()}


def _metadata(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    text, marks = render_tokenizer(tokenizer)
    return {
        "config": render_config(model.config, dtype=str(model.dtype)[6:]),
        "format": "pt",
        "tokenizer": text,
        "tokenizer_config": marks,
        "swarmproof": FORMAT,
    }


def render_tokenizer(tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """Render a tokenizer for a policy file: its tokenizer.json, and its marks as JSON."""
    # Padding and truncation are state of an earlier call, not part of the tokenizer.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    marks = {name: getattr(tokenizer, name) for name in TokenizerConfig.__struct_fields__}
    return (
        json.dumps(backend, ensure_ascii=False, separators=(",", ":")),
        json.dumps(marks, ensure_ascii=False, sort_keys=True),
    )


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Build the safetensors header; that package's own metadata order varies between calls."""
    names = {str(getattr(torch, dtype)): name for name, dtype in DTYPES.items()}
    entries: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": names[str(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise UnreadablePolicy(f"{path} is not a file")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > MAX_HEADER_BYTES:
        raise MalformedPolicy(
            f"its header declares {size} bytes, the limit is {MAX_HEADER_BYTES}", code="oversized_header"
        )


def _declared_tensors(file: Any) -> tuple[dict[str, tuple[int, ...]], torch.dtype]:
    """Return the shapes and the single dtype declared by the header."""
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    dtypes = {part.get_dtype() for part in slices.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise MalformedPolicy(
            f"tensors must have one dtype of {sorted(DTYPES)}, not {sorted(dtypes)}", code="wrong_tensors"
        )
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    return shapes, getattr(torch, DTYPES[dtypes.pop()])


def parse_tokenizer(text: str, marks: str, *, vocabulary: int) -> PreTrainedTokenizerFast:
    """Build the tokenizer of a policy of `vocabulary` logits; raises MalformedPolicy."""
    with tokenizer_errors():
        config = msgspec.json.decode(marks, type=TokenizerConfig)
        backend = Tokenizer.from_str(text)
        entries = backend.get_vocab(with_added_tokens=True)
        most = max(entries.values(), default=-1)
        if most >= vocabulary:
            raise MalformedPolicy(
                f"its tokenizer has ids up to {most}, outside the model's vocabulary of {vocabulary}",
                code="bad_tokenizer",
            )
        named = {name: mark for name, mark in msgspec.structs.asdict(config).items() if mark is not None}
        for name in sorted(named.keys() - {name for name, mark in named.items() if mark in entries}):
            raise MalformedPolicy(
                f"its tokenizer has no entry for its {name} {named[name][:100]!r}", code="bad_tokenizer"
            )
        return PreTrainedTokenizerFast(tokenizer_object=backend, **named)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Convert any exception of a policy's tokenizer to MalformedPolicy."""
    try:
        yield
    except MalformedPolicy:
        raise
    except Exception as error:
        raise MalformedPolicy(f"its tokenizer is refused: {error}", code="bad_tokenizer") from error
    except BaseException as error:
        # A Rust panic is not an Exception, its class cannot be imported, and it would end the process.
        if type(error).__name__ != "PanicException":
            raise
        raise MalformedPolicy("its tokenizer makes the library panic", code="bad_tokenizer") from error


def eos_ids_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Return the end marks: the configuration's and the tokenizer's. Raises MalformedPolicy."""
    declared = config.eos_token_id
    ids = {*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id} - {None}
    if not all(isinstance(token, int) and token < config.vocab_size for token in ids):
        raise MalformedPolicy("an end mark is not in the model's vocabulary", code="bad_config")
    return frozenset(ids)


def build_skeleton(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model without memory for its weights, from this machine's classes only."""
    build: Any = AutoModelForCausalLM.from_config
    kernel = {"attn_implementation": "sdpa"} if config.model_type in ATTENTION else {}
    try:
        with torch.device("meta"):
            model: PreTrainedModel = build(config, dtype=dtype, **kernel)
    except Exception as error:
        raise MalformedPolicy(f"no model has its configuration: {error}", code="bad_config") from error
    return model


def _check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    for name in sorted(expected.keys() ^ found.keys()):
        problem = "lacks" if name in expected else "has an unexpected"
        raise MalformedPolicy(f"{problem} tensor {name[:200]!r}", code="wrong_tensors")
    for name, shape in expected.items():
        if found[name] != shape:
            raise MalformedPolicy(f"{name} has shape {found[name]}, not {shape}", code="wrong_tensors")


def _load_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Assign the weights, and compute the rotary frequencies, which no file carries."""
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    if model.config.model_type in ATTENTION:
        base: Any = model.base_model
        base.rotary_emb = type(base.rotary_emb)(config=model.config)
    model.train(False)


def probe_shapes(skeleton: PreTrainedModel) -> None:
    """Run a forward pass on meta tensors, which reveals e.g. head counts that do not divide."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    # Masks and positions are given, since computing them reads values; a recurrence would read given positions.
    mask = torch.zeros(1, 1, 2, 2, dtype=skeleton.dtype, device="meta")
    given = {"attention_mask": mask, "position_ids": ids} if skeleton.config.model_type in ATTENTION else {}
    try:
        with torch.inference_mode():
            skeleton(input_ids=ids, use_cache=False, **given)
    except Exception as error:
        raise MalformedPolicy(f"its forward pass fails: {error}", code="broken_model") from error


def _probe(model: PreTrainedModel) -> None:
    """Run one forward pass, which reveals head counts that do not divide and non-finite results.

    On the last token, then the first: the first is often padding, whose zeros would hide what the layers hold.
    """
    ids = torch.tensor([[model.config.vocab_size - 1, 0]])
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
        finite = bool(logits.isfinite().all())
    except Exception as error:
        raise MalformedPolicy(f"its forward pass fails: {error}", code="broken_model") from error
    if not finite:
        raise MalformedPolicy("its logits are not finite", code="broken_model")
