"""Messages between a node and the process of an environment: a JSON object a line, each way, one query at a time.

The process (`node.environments.guest`) holds code of somebody else's and works on completions of strangers, so what it
answers is read within the limits below, and anything else is garbage. It knows these messages as plain dictionaries.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from node.chat.conversation import MAX_CALLS, MAX_MESSAGES
from node.protocol.environment_spec import Argument

PROTOCOL: Final = 1
MAX_LINE_BYTES: Final = 16 * 1024 * 1024
MAX_TOOLS: Final = 128
MAX_NESTING: Final = 32
MAX_SAFE_INTEGER: Final = 2**53

Kind = Literal["plain", "verifiers", "reasoning_gym"]
FaultCode = Literal[
    "bad_arguments",
    "environment_failed",
    "environment_missing",
    "needs_bound",
    "needs_network",
    "package_missing",
    "refused_environment",
]
"""What a process may say is wrong; see `load_isolated`."""

_Text = Annotated[str, Meta(max_length=4 * 1024 * 1024)]
_Name = Annotated[str, Meta(max_length=256)]


class GuestMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages; a field that the other side does not know is an error."""


class CalledTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a tool; `arguments` is JSON as the policy wrote it, which may be none."""

    id: _Name
    name: _Text
    arguments: _Text


class TurnMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A turn of the policy, where the environment speaks messages."""

    content: _Text
    tool_calls: tuple[CalledTool, ...] = ()


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message of a prompt or of a reply; its text alone, for images and sounds have no place in a run."""

    role: Literal["system", "user", "assistant", "tool"]
    content: _Text
    tool_calls: Annotated[tuple[CalledTool, ...], Meta(max_length=MAX_CALLS)] = ()
    tool_call_id: _Name = ""
    name: _Name = ""

    def as_openai(self) -> dict[str, Any]:
        """Return the message in the form of OpenAI's API, which `node.chat` reads."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        optional = {"tool_calls": calls, "tool_call_id": self.tool_call_id, "name": self.name}
        return {"role": self.role, "content": self.content} | {key: value for key, value in optional.items() if value}


Messages = Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_MESSAGES)]


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the policy may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: _Text
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        _check_json(self.parameters)


# -- queries


class Load(GuestMessage, frozen=True, kw_only=True, tag="load"):
    """Load the environment `target`; answered by Loaded.

    `target` is an entry point, a module or a dataset, by `kind`. `bound`: how many problems are drawn from, where the
    run says it; an environment without end needs that.
    """

    protocol: int = PROTOCOL
    kind: Kind
    target: str
    arguments: dict[str, Argument]
    bound: int | None = None


class ProblemQuery(GuestMessage, frozen=True, kw_only=True, tag="problem"):
    """Answered by ProblemAnswer."""

    index: int


class ReplyQuery(GuestMessage, frozen=True, kw_only=True, tag="reply"):
    """What follows the last of `turns`; answered by ReplyAnswer."""

    index: int
    turns: tuple[str | TurnMessage, ...]


class RewardQuery(GuestMessage, frozen=True, kw_only=True, tag="reward"):
    """The reward of all `turns`; answered by RewardAnswer."""

    index: int
    turns: tuple[str | TurnMessage, ...]


# -- answers


class Versions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions of Python, of the package that the kind is named after, and of the environment's own; for the log."""

    python: _Name
    package: _Name | None = None
    environment: _Name | None = None


class Loaded(GuestMessage, frozen=True, kw_only=True, tag="loaded"):
    """The environment: how many problems there are (None: every index has one), and how it is spoken to.

    `digest` is that of the problems, where they are counted: another process that loads the same has the same.
    """

    protocol: int
    problems: Annotated[int, Meta(ge=1, le=2**32)] | None
    several_turns: bool
    speaks: Literal["text", "messages"]
    tools: Annotated[tuple[Tool, ...], Meta(max_length=MAX_TOOLS)] = ()
    versions: Versions
    digest: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")] | None = None


class ProblemAnswer(GuestMessage, frozen=True, kw_only=True, tag="problem"):
    """A problem as text, as messages, or as both; messages alone where the environment speaks messages."""

    prompt: _Text = ""
    messages: Messages = ()


class ReplyAnswer(GuestMessage, frozen=True, kw_only=True, tag="reply"):
    """A reply as text or as messages; neither ends the rollout."""

    text: _Text | None = None
    messages: Messages | None = None


class RewardAnswer(GuestMessage, frozen=True, kw_only=True, tag="reward"):
    """A reward in [0, 1]."""

    reward: Annotated[float, Meta(ge=0, le=1)]


class Fault(GuestMessage, frozen=True, kw_only=True, tag="fault"):
    """A query without an answer; `code` and `detail` become an EnvironmentFault's."""

    code: FaultCode
    detail: Annotated[str, Meta(max_length=2000)]


Query = Load | ProblemQuery | ReplyQuery | RewardQuery
Answer = Loaded | ProblemAnswer | ReplyAnswer | RewardAnswer | Fault
A = TypeVar("A", Loaded, ProblemAnswer, ReplyAnswer, RewardAnswer)

_encoder = msgspec.json.Encoder()
_decode = msgspec.json.Decoder(Answer).decode


class Garbage(Exception):
    """A line that is no answer of this protocol."""


def encode_query(query: Query) -> bytes:
    """Return the line of a query, with its line feed; half a surrogate pair, which has no encoding, becomes `?`."""
    try:
        return _encoder.encode(query) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(_encodable(msgspec.to_builtins(query))) + b"\n"


def decode_answer(line: bytes, expected: type[A]) -> A | Fault:
    """Return the answer in a line; raises Garbage."""
    try:
        answer = _decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Garbage(str(error)[:200]) from error
    if isinstance(answer, expected | Fault):
        return answer
    raise Garbage(f"{type(answer).__name__} where {expected.__name__} was expected")


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def _check_json(value: Any, depth: int = 0) -> None:
    """Raise ValueError for what other readers of the same JSON may take differently, or cannot take."""
    if depth > MAX_NESTING:
        raise ValueError(f"nested deeper than {MAX_NESTING}")
    if isinstance(value, dict):
        for each in value.values():
            _check_json(each, depth + 1)
    elif isinstance(value, list):
        for each in value:
            _check_json(each, depth + 1)
    elif isinstance(value, float | int) and not abs(value) <= MAX_SAFE_INTEGER:  # nor is NaN
        raise ValueError("a number beyond 2**53")
