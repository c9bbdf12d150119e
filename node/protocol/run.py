"""A run: its identity, rules and descriptor (docs/protocol.md, section 2).

`run.toml` and the wire carry the same values; the operator signs them as a `Descriptor`. The digest of the spec is the
log's first entry, so that the rules cannot change unnoticed.
"""

from __future__ import annotations

import tomllib
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from node.protocol.algorithms import with_algorithm
from node.protocol.chat import ChatFormat
from node.protocol.chat_formats import CHAT_FORMATS
from node.protocol.environment_spec import (
    MAX_KEPT_BYTES,
    DatasetSpec,
    EnvironmentSpec,
    FileSpec,
    LengthSpec,
    PackageSpec,
    ProblemsSpec,
    ThinkingSpec,
    ToolSpec,
)
from node.protocol.limits_spec import HonestSpec, LevelSpec, LimitsSpec, StandingSpec
from node.protocol.membership import MembershipSpec
from node.protocol.spec_types import NonNegativeFloat, Positive, PositiveFloat, Share
from node.protocol.training_spec import LoraSpec, TeacherSpec, TrainingSpec
from shardcast.envelope import open_envelope
from shardcast.errors import Malformed, Stale
from shardcast.wire import Count, Digest, PublicKey, Wire, decode, derive, digest, encode

DESCRIPTOR_DOMAIN = "swarmproof/run"
DESCRIPTOR_VERSION = 2
MAX_DESCRIPTOR_BYTES = 256 * 1024

Url = Annotated[str, Meta(pattern=r"^https?://[^\s]{1,500}\Z")]
PeerAddress = Annotated[str, Meta(pattern=r"^/[!-~]{1,299}\Z")]


class ModelSpec(Wire, frozen=True):
    """The model to train."""

    initial: Annotated[str, Meta(min_length=1, max_length=500)] = "tiny"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


ModelChat = Literal["model", "model/no-think"]
"""The chat template of the folder `model.initial`, before the operator has reduced it."""


class SamplingSpec(Wire, frozen=True):
    """Sampling rules; the noise is the protocol's.

    `max_version_lead`: how many versions past the leased one a completion may go on under, when newer policies
    arrive while it is drawn. Each is a moment that the worker chooses; 0 leaves none. `max_new_tokens` are those of
    all turns together, `max_reply_tokens` those of all that the environment says between them. `chat`: how
    conversations become text; UNSET leaves prompts as they are. In a run that has begun it is data, no ModelChat.
    """

    group_size: Annotated[int, Meta(ge=2, le=1024)] = 8
    temperature: Annotated[float, Meta(gt=0.01, le=10)] = 1.0
    max_prompt_tokens: Positive = 128
    max_new_tokens: Positive = 48
    max_version_lead: Annotated[int, Meta(ge=0, le=16)] = 0
    max_turns: Annotated[int, Meta(ge=1, le=64)] = 1
    max_reply_tokens: Annotated[int, Meta(ge=0, le=2**20)] = 128
    chat: ChatFormat | ModelChat | UnsetType = UNSET

    @property
    def special_tokens(self) -> bool:
        """Whether the tokenizer's own marks are added to a prompt's text."""
        return not isinstance(self.chat, ChatFormat) or self.chat.special_tokens

    @property
    def reply_tokens(self) -> int:
        """The most tokens that environments may add to a rollout."""
        return self.max_reply_tokens if self.max_turns > 1 else 0

    @property
    def most_tokens(self) -> int:
        """The most tokens of a rollout: its prompt, what the model drew, and what an environment said between."""
        return self.max_prompt_tokens + self.max_new_tokens + self.reply_tokens


class ProofSpec(Wire, frozen=True):
    """The activation proof scheme and its size.

    `top_k` is TOPLOC's, `sketch_step` the sketch's: the width of one of its 16 levels, relative to the root mean
    square of a hidden state; about the honest error of one projection.
    """

    scheme: Literal["toploc/1", "sketch/1", "toploc/1+sketch/1"] = "toploc/1+sketch/1"
    chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = 32
    top_k: Annotated[int, Meta(ge=1, le=4096)] = 128
    sketch_step: Annotated[float, Meta(ge=1e-6, le=0.0625)] = 0.02

    @property
    def has_toploc(self) -> bool:
        return self.scheme != "sketch/1"

    @property
    def has_sketch(self) -> bool:
        return self.scheme != "toploc/1"

    @property
    def min_hidden(self) -> int:
        """The smallest hidden size of which these proofs can be made."""
        return max(self.top_k if self.has_toploc else 1, 8 if self.has_sketch else 1)


class PoolsSpec(Wire, frozen=True):
    """Pools of problems by difficulty, as in INTELLECT-3 (technical report, 2025); see `node.protocol.pools`.

    `easy`, `normal` and `hard` are shares of the slots: each by the sum of the three. A problem is easy where the mean
    reward of its last group is `easy_from` or more, hard where it is `hard_to` or less.
    """

    easy: Share = 1
    normal: Share = 8
    hard: Share = 1
    easy_from: Annotated[float, Meta(ge=0, le=1)] = 0.9
    hard_to: Annotated[float, Meta(ge=0, le=1)] = 0.1

    def __post_init__(self) -> None:
        if self.easy + self.normal + self.hard == 0:
            raise ValueError("one of the pools must have a share")
        if self.hard_to >= self.easy_from:
            raise ValueError("hard_to must be below easy_from")


class BatchSpec(Wire, frozen=True):
    """How much work is in flight; with `only_signal`, no step takes groups whose rewards are all equal.

    A step that has its groups waits `gap_seconds` for missing slots whose last chance it is, and as long again for each
    further `most_gaps` of them.
    """

    groups_per_step: Positive = 16
    only_signal: bool = False
    max_async: Annotated[int, Meta(ge=0, le=64)] = 2
    gap_seconds: NonNegativeFloat = 30.0
    gap_share: Annotated[float, Meta(gt=0, le=1)] = 0.05
    lease_seconds: PositiveFloat = 60.0
    max_leases_per_node: Positive = 8
    rejection_backoff_seconds: NonNegativeFloat = 0.5
    rejection_backoff_max_seconds: NonNegativeFloat = 60.0
    pools: PoolsSpec | UnsetType = UNSET

    @property
    def most_gaps(self) -> int:
        """How many slots a step may lack after one `gap_seconds`."""
        return max(1, int(self.gap_share * self.groups_per_step))

    def gap_wait_seconds(self, missing: int) -> float:
        """Return how long a step that has its groups waits for `missing` others."""
        return self.gap_seconds * -(-missing // self.most_gaps)


class BroadcastSpec(Wire, frozen=True):
    """Rules of the broadcast."""

    keep_versions: Positive = 8


class RunSpec(Wire, frozen=True):
    """Everything that defines a run; see docs/run-toml.md for each key."""

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    environments: Annotated[tuple[EnvironmentSpec, ...], Meta(min_length=1, max_length=100)]
    seed: Count = 0
    model: ModelSpec = ModelSpec()
    sampling: SamplingSpec = SamplingSpec()
    proofs: ProofSpec = ProofSpec()
    batch: BatchSpec = BatchSpec()
    limits: LimitsSpec = LimitsSpec()
    standing: StandingSpec = StandingSpec()
    membership: MembershipSpec | UnsetType = UNSET
    training: TrainingSpec = TrainingSpec()
    broadcast: BroadcastSpec = BroadcastSpec()

    def __post_init__(self) -> None:
        """Refuse settings that contradict each other; msgspec turns the ValueError into its own error."""
        if self.broadcast.keep_versions < self.batch.max_async + 2:
            raise ValueError("broadcast.keep_versions must be at least batch.max_async + 2, or workers lose policies")
        finite = [one.problems for one in self.environments if isinstance(one.problems, ProblemsSpec)]
        if sum(len(one.kept or b"") for one in finite) > MAX_KEPT_BYTES:
            raise ValueError(f"environments.problems.kept are at most {MAX_KEPT_BYTES} bytes together")
        if isinstance(self.batch.pools, PoolsSpec) and not finite:
            raise ValueError("batch.pools needs an environment with environments.problems")

    def sampling_in(self, environment: int) -> SamplingSpec:
        """Return the sampling rules of the problems of `environments[environment]`."""
        sampling, own = self.sampling, self.environments[environment]
        prompt, new = own.max_prompt_tokens, own.max_new_tokens
        most_prompt = sampling.max_prompt_tokens if isinstance(prompt, UnsetType) else prompt
        most_new = sampling.max_new_tokens if isinstance(new, UnsetType) else new
        return msgspec.structs.replace(
            sampling,
            max_prompt_tokens=min(most_prompt, sampling.max_prompt_tokens),
            max_new_tokens=min(most_new, sampling.max_new_tokens),
        )

    @property
    def most_pieces(self) -> int:
        """The most pieces of a completion, which proof chunks do not go beyond (`node.protocol.turns.pieces`)."""
        thinks = any(isinstance(one.thinking, ThinkingSpec) for one in self.environments)
        return self.sampling.max_version_lead + self.sampling.max_turns * (2 if thinks else 1)

    @property
    def datasets(self) -> tuple[DatasetSpec, ...]:
        """The files of prompts, each once."""
        named = (one.dataset for one in self.environments)
        return tuple(dict.fromkeys(one for one in named if isinstance(one, DatasetSpec)))

    @property
    def files(self) -> tuple[FileSpec, ...]:
        """The files that the environments need and every node has, each once: datasets, and locks of packages."""
        packages = (one.package for one in self.environments)
        locks = (one.lock for one in packages if isinstance(one, PackageSpec))
        return (*self.datasets, *dict.fromkeys(locks))

    @property
    def has_packages(self) -> bool:
        """Whether nodes may lack an environment."""
        return any(isinstance(one.package, PackageSpec) for one in self.environments)

    @property
    def answers(self) -> tuple[FileSpec, ...]:
        """The files of answers that the operator keeps, each once."""
        return tuple(dict.fromkeys(one.answers for one in self.datasets if isinstance(one.answers, FileSpec)))

    @property
    def dataset_files(self) -> tuple[FileSpec, ...]:
        """All files, as the operator has them."""
        return (*self.files, *self.answers)

    @property
    def digest(self) -> str:
        """BLAKE3 of the canonical encoding; the log's first entry names it."""
        return digest(encode(self))


class PolicyHead(Wire, frozen=True):
    """The newest policy, as the run's key names it."""

    version: Count
    manifest_digest: Digest


class Descriptor(Wire, frozen=True):
    """The signed, versioned description of a run, verified against its id.

    The run's key signs each `version` once: the higher one holds, and two of one version are an equivocation.
    `endpoints`: URLs of coordinators. `peers`: multiaddrs of peers to begin with, each ending in /p2p/<peer id>.
    `revoked`: keys that the operator wants nobody to deal with any more, whatever it signed for them before.
    """

    run_id: Digest
    version: Count
    spec: RunSpec
    endpoints: Annotated[tuple[Url, ...], Meta(max_length=16)]
    relays: Annotated[tuple[Url, ...], Meta(max_length=256)]
    peers: Annotated[tuple[PeerAddress, ...], Meta(max_length=32)]
    head: PolicyHead | None
    revoked: Annotated[tuple[PublicKey, ...], Meta(max_length=256)]
    issued_at: Count
    expires_at: Count


def run_id_of(public_key: bytes) -> str:
    """Return the run's id: a digest of the run's Ed25519 public key (32 bytes)."""
    return derive("swarmproof/1 run id", public_key).hex()


def open_descriptor(data: bytes, *, run_id: str, now: float) -> tuple[Descriptor, bytes]:
    """Return the descriptor in `data` and the run's public key, if it really is run `run_id`'s and current."""
    opened = open_envelope(
        data, domain=DESCRIPTOR_DOMAIN, versions=(DESCRIPTOR_VERSION,), max_payload_bytes=MAX_DESCRIPTOR_BYTES
    )
    if run_id_of(opened.signer) != run_id:
        raise Malformed("signed by the key of another run", code="wrong_run")
    descriptor = decode(Descriptor, opened.payload, max_bytes=MAX_DESCRIPTOR_BYTES)
    if descriptor.run_id != run_id:
        raise Malformed("describes another run", code="wrong_run")
    if now >= descriptor.expires_at:
        raise Stale("this run descriptor has expired", code="expired")
    return descriptor, opened.signer


def parse_run_toml(text: str) -> RunSpec:
    """Read a run.toml; raise Malformed with the key that is wrong."""
    try:
        raw: dict[str, Any] = tomllib.loads(text)
        _name_chat(raw.get("sampling"))
        spec = msgspec.convert(with_algorithm(raw), RunSpec)
        _check_lengths(spec)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise Malformed(f"run.toml: {error}", code="bad_run_toml") from error
    return spec


def _name_chat(sampling: object) -> None:
    """Put the data of a chat format in the place of its name."""
    if not isinstance(sampling, dict) or not isinstance(name := sampling.get("chat"), str):
        return
    if name == "none":
        del sampling["chat"]
    elif name in CHAT_FORMATS:
        sampling["chat"] = msgspec.to_builtins(CHAT_FORMATS[name])
    elif name not in get_args(ModelChat):
        raise ValueError(f"sampling.chat is one of: {', '.join(('none', *get_args(ModelChat), *CHAT_FORMATS))}")


def _check_lengths(spec: RunSpec) -> None:
    """Check lengths in tokens and turns; not in RunSpec, because a challenge's spec has fewer than its run's."""
    for number, environment in enumerate(spec.environments):
        sampling = spec.sampling_in(number)
        for key in ("max_prompt_tokens", "max_new_tokens"):
            if getattr(environment, key) not in (UNSET, getattr(sampling, key)):
                raise ValueError(f"environments.{key} is at most sampling.{key}")
        if environment.length and max(environment.length.targets) > sampling.max_new_tokens:
            raise ValueError("environments.length.targets are at most max_new_tokens: no rollout is longer")
        thinking = environment.thinking
        if isinstance(thinking, ThinkingSpec) and thinking.tokens + 1 >= sampling.max_new_tokens:
            raise ValueError(
                "environments.thinking.tokens must be below max_new_tokens, with room for thinking.end: an answer "
                "needs some as well"
            )
        if isinstance(environment.tool, ToolSpec) and sampling.max_turns == 1:
            raise ValueError("environments.tool needs sampling.max_turns of 2 or more: a call is a turn of its own")


__all__ = [
    "BatchSpec",
    "BroadcastSpec",
    "DatasetSpec",
    "Descriptor",
    "EnvironmentSpec",
    "FileSpec",
    "HonestSpec",
    "LengthSpec",
    "LevelSpec",
    "LimitsSpec",
    "LoraSpec",
    "ModelChat",
    "ModelSpec",
    "PeerAddress",
    "PolicyHead",
    "PoolsSpec",
    "ProblemsSpec",
    "ProofSpec",
    "PublicKey",
    "RunSpec",
    "SamplingSpec",
    "StandingSpec",
    "TeacherSpec",
    "ThinkingSpec",
    "ToolSpec",
    "TrainingSpec",
    "open_descriptor",
    "parse_run_toml",
    "run_id_of",
]
