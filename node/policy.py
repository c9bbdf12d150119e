"""A policy as one safetensors file: weights, configuration and tokenizer (docs/protocol.md, section 11).

    tensors        the state dict; a weight that several modules share is stored once, under its first name
    __metadata__   "format": "pt", "veriswarm": "policy/1",
                   "config": the model's configuration, JSON; only the fields its own class declares
                   "tokenizer": tokenizer.json; "tokenizer_config": {"eos_token", "pad_token", "unk_token"}

A file comes from a stranger and is data, never code: only the families in `node.policy_config` are built, from this
machine's transformers; a configuration names no kernel, no repository and no class. Sizes are compared before memory
is taken, so a file makes a reader allocate about as much as it weighs itself. What a loaded policy is worth, or
whether it is the run's, is for the manifest to say.
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

from node.policy_config import ATTENTION, DTYPES, FAMILIES, parse_config, render_config
from node.policy_errors import MalformedPolicy, UnreadablePolicy

FORMAT = "policy/1"
MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own limit; a tokenizer.json takes most of it (tens of MB for large vocabularies)."""
MAX_CHARACTER_TOKENS = 16
"""A character has at most four bytes, each of which may be a token."""

_METADATA = frozenset({"format", "veriswarm", "config", "tokenizer", "tokenizer_config"})


class TokenizerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of the tokenizer's entries end a text, pad it, and stand for what it does not know."""

    eos_token: str
    pad_token: str | None = None
    unk_token: str | None = None


@dataclass(frozen=True)
class Blueprint:
    """A policy without its weights: what is needed to feed and read one that some engine holds.

    `vocabulary` counts logits, `hidden` the last norm's width, `parameters` the stored weights. `config` is
    checked: it names no code, and `dtype` in it is the file's.
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
    """A model in this process, with what is needed to feed and read it."""

    model: PreTrainedModel

    def logits(self, states: Tensor) -> Tensor:
        """The logits [tokens, vocabulary], float32, of final hidden states [tokens, hidden].

        Products of the stored values are summed up in float32 and never rounded to the model's dtype
        (docs/protocol.md, section 4): two kernels then hardly ever disagree about a token.
        """
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if states.is_cuda and states.dtype != torch.float32:
            return torch.mm(states, head.weight.t(), out_dtype=torch.float32)
        return functional.linear(states.float(), self._wide_head)

    def in_float32(self) -> Policy:
        """A copy that computes in float32, with the same weights."""
        return replace(self, model=copy.deepcopy(self.model).float())  # type: ignore[no-untyped-call]

    @functools.cached_property
    def _wide_head(self) -> Tensor:
        """The output embedding [vocabulary, hidden] in float32: a copy, unless the model is in it."""
        head: Any = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        weight: Tensor = head.weight.detach()
        return weight.float()


def render_prompt(policy: Blueprint, text: str) -> list[int]:
    """The token ids of a prompt, with the special tokens that the tokenizer's own post-processor adds.

    Raises MalformedPolicy where the tokenizer fails at it.
    """
    with _tokenizing():
        ids: list[int] = policy.tokenizer(text)["input_ids"]
        return ids


def render_reply(policy: Blueprint, text: str) -> list[int]:
    """The token ids of what an environment says after a turn: as a prompt, but without the post-processor's tokens,
    which begin or end a sequence. Raises MalformedPolicy where the tokenizer fails at it.
    """
    with _tokenizing():
        ids: list[int] = policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def render_completion(policy: Blueprint, ids: list[int]) -> str:
    """The text of a completion without its end mark; ids that the tokenizer has no entry for are dropped.

    Raises MalformedPolicy where the tokenizer fails at it.
    """
    kept = [token for token in ids if token not in policy.eos_ids]
    with _tokenizing():
        text: str = policy.tokenizer.backend_tokenizer.decode(kept, skip_special_tokens=False)
        return text


def render_tokens(policy: Blueprint, ids: list[int]) -> list[str]:
    """The text that each token of a completion adds, end marks included; "" for one that only begins a character, which
    the next one completes, and for ids that the tokenizer has no entry for.

    Raises MalformedPolicy where the tokenizer fails at it.
    """
    backend, found, waiting = policy.tokenizer.backend_tokenizer, list[str](), 0
    with _tokenizing():
        stream = DecodeStream(skip_special_tokens=False)
        for token in ids:
            # A stream takes all that it has not given back along: of tokens that never make a character, ever more.
            if waiting >= MAX_CHARACTER_TOKENS:
                stream, waiting = DecodeStream(skip_special_tokens=False), 0
            text = stream.step(backend, token) if 0 <= token < policy.vocabulary else None
            found.append(text or "")
            waiting = 0 if text else waiting + 1
    return found


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write `path` at once or not at all; equal input makes equal bytes. Streams, one tensor in memory at a time.

    Raises ValueError for a model that `load_policy` would refuse for its family or dtypes, and OSError.
    """
    tensors = dict(sorted(_stored(model).items()))
    if model.config.model_type not in FAMILIES:
        raise ValueError(f"a {model.config.model_type} model does not travel")
    if {tensor.dtype for tensor in tensors.values()} != {model.dtype} or str(model.dtype)[6:] not in DTYPES.values():
        raise ValueError("a policy's tensors have one dtype: float32, bfloat16 or float16")
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

    Raises MalformedPolicy for whatever is wrong with the file and UnreadablePolicy where the disk is at fault.
    """
    with _opened(path) as file:
        blueprint, skeleton = _read_blueprint(file)
        model: Any = skeleton
        dtype = dtype or skeleton.dtype
        _fill(model.to(dtype), {name: _finite(file, name).to(dtype, copy=True) for name in _stored(skeleton)})
        _probe(model)
        return Policy(blueprint.config, blueprint.tokenizer, blueprint.eos_ids, blueprint.parameters, model)


def inspect_policy(path: Path) -> Blueprint:
    """What `path` holds, for an engine that loads the weights itself: as `load_policy`, one tensor in memory at a time.

    There is no forward pass; a weight that is not finite is refused as `broken_model`, as there.
    Raises as `load_policy`.
    """
    with _opened(path) as file:
        blueprint, skeleton = _read_blueprint(file)
        _probe_shapes(skeleton)
        for name in _stored(skeleton):
            _finite(file, name)
        return blueprint


def _finite(file: Any, name: str) -> Tensor:
    """A tensor of the file, every number of which is one: a probe of two tokens does not meet each of them."""
    tensor: Tensor = file.get_tensor(name)
    if not bool(tensor.isfinite().all()):
        raise MalformedPolicy(f"{name} has values that are not finite", code="broken_model")
    return tensor


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        _check_file(path)
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise MalformedPolicy(f"not a safetensors file: {error}", code="not_safetensors") from error
    except OSError as error:
        raise UnreadablePolicy(f"cannot read {path}: {error}") from error


def _read_blueprint(file: Any) -> tuple[Blueprint, PreTrainedModel]:
    """Everything but the weights, checked, and the model without memory for them, in the file's own dtype."""
    metadata = file.metadata() or {}
    if set(metadata) != _METADATA or metadata["veriswarm"] != FORMAT:
        raise MalformedPolicy(f"its metadata is not that of {FORMAT}", code="wrong_metadata")
    shapes, stored = _declared(file)
    config = parse_config(metadata["config"], tensors=len(shapes))
    if config.dtype != stored:
        raise MalformedPolicy(f"holds {stored}, but its configuration says {config.dtype}", code="wrong_tensors")
    tokenizer = _parse_tokenizer(metadata["tokenizer"], metadata["tokenizer_config"], vocabulary=config.vocab_size)
    skeleton = _skeleton(config, dtype=stored)
    _check_shapes({name: tuple(tensor.shape) for name, tensor in _stored(skeleton).items()}, shapes)
    parameters = sum(math.prod(shape) for shape in shapes.values())
    return Blueprint(config, tokenizer, _eos_ids(config, tokenizer), parameters), skeleton


def _stored(model: PreTrainedModel) -> dict[str, Tensor]:
    """The state dict, shared weights once."""
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    return {name: state[name] for name in first.values()}


def _metadata(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> dict[str, str]:
    # Padding and truncation are how some earlier call used the tokenizer, not what it is.
    backend = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    marks = {name: getattr(tokenizer, name) for name in TokenizerConfig.__struct_fields__}
    return {
        "config": render_config(model),
        "format": "pt",
        "tokenizer": json.dumps(backend, ensure_ascii=False, separators=(",", ":")),
        "tokenizer_config": json.dumps(marks, ensure_ascii=False, sort_keys=True),
        "veriswarm": FORMAT,
    }


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The safetensors header. Written here because that package's own order of metadata varies between calls."""
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
        raise MalformedPolicy(f"its header claims {size} bytes, {MAX_HEADER_BYTES} are read", code="oversized_header")


def _declared(file: Any) -> tuple[dict[str, tuple[int, ...]], torch.dtype]:
    """The shapes and the one dtype that the header declares; nothing is read yet."""
    slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    dtypes = {part.get_dtype() for part in slices.values()}
    if len(dtypes) != 1 or not dtypes <= DTYPES.keys():
        raise MalformedPolicy(f"tensors have one dtype of {sorted(DTYPES)}, not {sorted(dtypes)}", code="wrong_tensors")
    shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
    return shapes, getattr(torch, DTYPES[dtypes.pop()])


def _parse_tokenizer(text: str, marks: str, *, vocabulary: int) -> PreTrainedTokenizerFast:
    with _tokenizing():
        config = msgspec.json.decode(marks, type=TokenizerConfig)
        backend = Tokenizer.from_str(text)
        entries = backend.get_vocab(with_added_tokens=True)
        if max(entries.values(), default=-1) >= vocabulary:
            raise MalformedPolicy("its tokenizer has ids that the model has not", code="bad_tokenizer")
        named = {name: mark for name, mark in msgspec.structs.asdict(config).items() if mark is not None}
        if not named.keys() >= {"eos_token"} or not set(named.values()) <= entries.keys():
            raise MalformedPolicy("its tokenizer has no entry for an end or padding mark", code="bad_tokenizer")
        return PreTrainedTokenizerFast(tokenizer_object=backend, **named)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _tokenizing() -> Iterator[None]:
    """Whatever a policy's tokenizer does to the library that runs it, as MalformedPolicy."""
    try:
        yield
    except MalformedPolicy:
        raise
    except Exception as error:
        raise MalformedPolicy(f"its tokenizer is refused: {error}", code="bad_tokenizer") from error
    except BaseException as error:
        # A panic of Rust code is no Exception, and its class can be imported from nowhere. It would end the process.
        if type(error).__name__ != "PanicException":
            raise
        raise MalformedPolicy("its tokenizer makes the library panic", code="bad_tokenizer") from error


def _eos_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    declared = config.eos_token_id
    ids = {*(declared if isinstance(declared, list) else [declared]), tokenizer.eos_token_id} - {None}
    if not all(isinstance(token, int) and token < config.vocab_size for token in ids):
        raise MalformedPolicy("an end mark is not in the model's vocabulary", code="bad_config")
    return frozenset(ids)


def _skeleton(config: PreTrainedConfig, *, dtype: torch.dtype) -> PreTrainedModel:
    """The model without memory for its weights, from this machine's classes alone."""
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
        what = "lacks" if name in expected else "has an unexpected"
        raise MalformedPolicy(f"{what} tensor {name[:200]!r}", code="wrong_tensors")
    for name, shape in expected.items():
        if found[name] != shape:
            raise MalformedPolicy(f"{name} has shape {found[name]}, not {shape}", code="wrong_tensors")


def _fill(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> None:
    """Give the skeleton its weights, and compute what no file carries: the rotary frequencies."""
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    if model.config.model_type in ATTENTION:
        base: Any = model.base_model
        base.rotary_emb = type(base.rotary_emb)(config=model.config)
    model.train(False)


def _probe_shapes(skeleton: PreTrainedModel) -> None:
    """A forward pass without numbers: what does not multiply, such as head counts that do not divide, shows up."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    # Masks and positions are given because making them looks at numbers; to be told positions, a recurrence would.
    mask = torch.zeros(1, 1, 2, 2, dtype=skeleton.dtype, device="meta")
    given = {"attention_mask": mask, "position_ids": ids} if skeleton.config.model_type in ATTENTION else {}
    try:
        with torch.inference_mode():
            skeleton(input_ids=ids, use_cache=False, **given)
    except Exception as error:
        raise MalformedPolicy(f"it does not run: {error}", code="broken_model") from error


def _probe(model: PreTrainedModel) -> None:
    """One forward pass: head counts that do not divide, or weights that are not finite, show up here.

    Of the last token, then the first: the first is often padding, whose zeros would hide what the layers hold.
    """
    ids = torch.tensor([[model.config.vocab_size - 1, 0]])
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits
        finite = bool(logits.isfinite().all())
    except Exception as error:
        raise MalformedPolicy(f"it does not run: {error}", code="broken_model") from error
    if not finite:
        raise MalformedPolicy("its logits are not finite", code="broken_model")
