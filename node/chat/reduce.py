"""Reduce a chat template, a program, to a chat format, which is data, by looking at what it writes.

The template is rendered for a few conversations whose texts are known, and what stands between these texts becomes the
format. Then made-up conversations of all kinds are rendered by both, and the first difference refuses the template. It
runs on the operator's machine alone, in a process with limits (`node.chat.reduction_process`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, Literal

import msgspec

from node.chat.conversation import Message, ToolCall
from node.chat.errors import Irreducible
from node.chat.pieces import to_json
from node.chat.probing import Cut, common_prefix, common_suffix, cut, odd_text
from node.chat.render import Tool, list_tools, write_calls
from node.chat.samples import conversations
from node.protocol.chat import AssistantForms, CallFormat, ChatFormat, Opening, Openings, Pieces, ResultFormat, ToolList

Template = Callable[[Sequence[Message], Sequence[Tool], bool], str]
"""From messages, tools, and whether to begin the assistant's turn, to text; raises for what the template refuses."""

COMPARED: Final = 200
"""Conversations on which template and format have to agree."""

U1, U2, U3 = (odd_text(f"USER{at}") for at in (1, 2, 3))
A1, A2 = (odd_text(f"SAID{at}") for at in (1, 2))
SYSTEM, REASONING = odd_text("SYSTEM"), odd_text("REASON")
R1, R2 = (odd_text(f"RESULT{at}") for at in (1, 2))
NAMES, RESULT_IDS, RESULT_NAMES = ("fnUNO", "fnDUE"), ("resUNO001", "resDUE002"), ("toUNO", "toDUE")
CALL_IDS: Final = ("callUNO01", "callDUE02")
ARGUMENTS: Final = ({"kaUNO": "vaUNO", "kbUNO": "vbUNO"}, {"kaDUE": "vaDUE", "kbDUE": "vbDUE"})
NAMES_OF_TOOLS: Final = ("toolUNO", "toolDUE")
_SUBJECTS: Final[tuple[Literal["tool", "function"], ...]] = ("tool", "function")  # a tool holds its function's JSON
PROBE_TOOLS: Final[tuple[Tool, ...]] = tuple(
    {"type": "function", "function": {"name": name, "description": f'x "{name}" é', "parameters": {"type": "object"}}}
    for name in NAMES_OF_TOOLS
)
_TOOL_LISTS: Final = tuple(
    ToolList(subject=subject, indent=indent, sort_keys=sort_keys, raw_strings=raw_strings)
    for raw_strings in (False, True)
    for subject in _SUBJECTS
    for indent in ((0,) if raw_strings else (0, 2, 4))
    for sort_keys in ((False,) if raw_strings else (False, True))
)
_USER_END: Final = "the end of a user's message"
_SAID_END: Final = "the end of an assistant's message"
_OPENING: Final = {"system": "system", "tools": "tools", "u1": "content", "u2": "content", "u3": "content"}


def reduce_template(template: Template, *, end_marks: Sequence[str], added_tokens: Sequence[str]) -> ChatFormat:
    """Return the format that writes what `template` writes; raise Irreducible with the reason.

    `end_marks` are the texts of the tokens that end the policy's turn, `added_tokens` those of all that its tokenizer
    takes as one, wherever they stand.
    """
    try:
        chat = _Reduction(template).reduce(end_marks=end_marks, added_tokens=added_tokens)
    except (msgspec.ValidationError, ValueError) as error:
        raise Irreducible(f"what it writes is no format: {error}") from error
    for messages, tools, text in conversations(chat, COMPARED):
        written = _attempt(template, messages, tools)
        if written != text:
            raise Irreducible(_difference(written, text, messages))
    return chat


def _attempt(
    template: Template, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = True
) -> str | None:
    """Render; None where the template raises."""
    try:
        return template(messages, tools, generation)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001  (a template may raise anything)
        return None


def _difference(written: str | None, text: str, messages: Sequence[Message]) -> str:
    roles = ", ".join(str(message["role"]) for message in messages)
    if written is None:
        return f"it raises for a conversation of {roles}, which its data can express"
    at = len(common_prefix([written, text]))
    return (
        f"for a conversation of {roles} it writes {written[max(at - 20, 0) : at + 40]!r} at character {at}, "
        f"where its data says {text[max(at - 20, 0) : at + 40]!r}"
    )


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _said(content: str, reasoning: str = "", calls: int = 0, ids: Sequence[str] = CALL_IDS) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"id": ids[at], "type": "function", "function": {"name": NAMES[at], "arguments": ARGUMENTS[at]}}
            for at in range(calls)
        ]
    return message


def _result(at: int) -> Message:
    content = (R1, R2)[at]
    return {"role": "tool", "tool_call_id": RESULT_IDS[at], "name": RESULT_NAMES[at], "content": content}


class _Reduction:
    """One template; each step uses what the earlier ones found."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self.generation = self.said_before = self.after = ""
        self.user: Pieces = ("",)
        self.calls: CallFormat | None = None
        self.late = AssistantForms()
        self.tools: ToolList | None = None

    def reduce(self, *, end_marks: Sequence[str], added_tokens: Sequence[str]) -> ChatFormat:
        self._find_frames()
        self.calls = self._find_calls()
        early = self._forms(late=False)
        self.late = self._forms(late=True)
        results = self._find_results()
        self.tools = self._find_tools()
        plain = self._opening(system=False, tools=())
        if plain is None:
            raise Irreducible("it writes no conversation of users and assistants")
        tools = PROBE_TOOLS if self.tools else ()
        ends = [self.after.index(mark) + len(mark) for mark in end_marks if mark in self.after]
        chat = ChatFormat(
            openings=Openings(
                plain=plain,
                system=self._opening(system=True, tools=()),
                tools=self._opening(system=False, tools=tools) if tools else None,
                both=self._opening(system=True, tools=tools) if tools else None,
            ),
            user=self.user,
            early=early,
            late=self.late,
            generation=self.generation,
            after_turn=self.after[min(ends, default=0) :],
            calls=self.calls,
            results=results,
            tools=self.tools,
            splits_thoughts=self._splits_thoughts(),
            alternates=self._try([_user(U1), _user(U2)]) is None,
        )
        written = msgspec.json.encode(chat).decode()
        marks = {mark for mark in added_tokens if to_json(mark)[1:-1] in written} | set(end_marks)
        # Nothing can break a single character, and a token of white space alone frames nothing.
        breakable = sorted(mark for mark in marks if len(mark) > 1 and not mark.isspace())
        return msgspec.convert(msgspec.to_builtins(chat) | {"marks": breakable}, ChatFormat)

    def _try(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generation: bool = True) -> str | None:
        return _attempt(self._template, messages, tools, generation=generation)

    def _cut(self, messages: Sequence[Message], values: Mapping[str, str], *, generation: bool = True) -> Cut:
        text = self._try(messages, generation=generation)
        if text is None:
            raise Irreducible(f"it raises for a conversation of {', '.join(str(each['role']) for each in messages)}")
        return cut(text, values)

    def _find_frames(self) -> None:
        """Find the forms of plain messages, and what begins the assistant's turn."""
        bare = self._cut([_user(U1)], {"u1": U1}, generation=False).between("u1", None).only_text("a user's message")
        asked = self._cut([_user(U1)], {"u1": U1}).between("u1", None)
        self.generation = asked.without(prefix=bare, what=_USER_END).only_text("the assistant's turn")
        ended = self._cut([_user(U1), _said(A1)], {"u1": U1, "said": A1}, generation=False)
        self.after = ended.between("said", None).only_text("an assistant's message")
        talk = self._cut([_user(U1), _said(A1), _user(U2)], {"u1": U1, "said": A1, "u2": U2})
        user_after = talk.between("u2", None).without(suffix=self.generation, what=_USER_END).only_text(_USER_END)
        self.said_before = talk.between("u1", "said").without(prefix=user_after, what=_USER_END).only_text(_USER_END)
        user_before = talk.between("said", "u2").without(prefix=self.after, what=_SAID_END).only_text(_SAID_END)
        self.user = (user_before, talk.slot("u2", "content"), user_after)

    def _find_calls(self) -> CallFormat | None:
        """Find how calls are written; None where the template refuses or drops them."""
        one = self._calling("", 1)
        if one is None:
            return None
        both, two = self._calling(A1, 1), self._calling("", 2)
        argument = None if one.has("arguments0") else _argument(one)
        one, both, two = (None if each is None else _as_one(each, argument) for each in (one, both, two))
        assert one is not None
        befores = [one.parts[0], *([both.parts[0]] if both else [])]
        start, tail, between = (common_suffix(befores) if both else ""), "", None
        if two is not None:
            gap = two.between(two.labels("0")[-1], two.labels("1")[0]).only_text("what parts calls")
            start = common_suffix([gap, *befores])
            gap = gap[: len(gap) - len(start)]
            tail = common_prefix([gap, two.parts[-1]])
            between = gap[len(tail) :]
        strict = self._try([_user(U1), _said("", calls=1, ids=("eightIDs",))], generation=False) is None
        return CallFormat(
            call=(start, *one.named({"name0": "name", "arguments0": "arguments", "id0": "id"})[1:-1], tail),
            between=between,
            argument=argument,
            id_length=len(CALL_IDS[0]) if strict else 0,
        )

    def _calling(self, content: str, calls: int) -> Cut | None:
        """Return an assistant's message with calls, from its text, or else from its beginning, to its end."""
        text = self._try([_user(U1), _said(content, calls=calls)], generation=False)
        if text is None or any(name not in text for name in NAMES[:calls]):
            return None
        values = {"u1": U1, "said": content}
        for at in range(calls):
            values |= {f"name{at}": NAMES[at], f"id{at}": CALL_IDS[at]}
            if (written := to_json(ARGUMENTS[at])) in text:
                values[f"arguments{at}"] = written
            else:
                values |= {part + str(at): part for pair in ARGUMENTS[at].items() for part in pair}
        found = cut(text, values)
        if not content:
            return found.between("u1", None).without(prefix=self.user[2], what=_USER_END)
        return found.between("said", None) if found.has("said") else None

    def _forms(self, *, late: bool) -> AssistantForms:
        """Find the forms of assistant's messages; those after the last user's message all have calls."""
        return AssistantForms(
            said=None if late else self._form(A1, "", 0, late=late),
            called=self._form("", "", 1, late=late),
            both=self._form(A1, "", 1, late=late),
            thought_said=None if late else self._form(A1, REASONING, 0, late=late),
            thought_called=self._form("", REASONING, 1, late=late),
            thought_both=self._form(A1, REASONING, 1, late=late),
        )

    def _form(self, content: str, reasoning: str, calls: int, *, late: bool) -> Pieces | None:
        """Find one form; None where the template refuses it, or leaves text or calls out."""
        if calls and self.calls is None:
            return None
        said = _said(content, reasoning, calls)
        ended = self._try([_user(U1), said], generation=False)
        text = self._try([_user(U1), said, *([_result(0)] if calls else []), *([] if late else [_user(U2)])])
        if ended is None or text is None:
            return None
        values = {"u1": U1, "said": content, "reasoning": reasoning, "calls": self._written(calls)}
        found, after = cut(text, values), cut(ended, values).parts[-1]
        if (content and not found.has("said")) or (calls and not found.has("calls")):
            return None
        form = found.between("u1", None).without(prefix=self.user[2], what=_USER_END)
        if not form.parts[-1].startswith(after):
            raise Irreducible(f"{_SAID_END} differs from one conversation to another")
        return (*form.named({"said": "content", "reasoning": "reasoning", "calls": "calls"})[:-1], after)

    def _written(self, calls: int) -> str:
        """Write the first `calls` calls by the format found."""
        made = [ToolCall(NAMES[at], ARGUMENTS[at], CALL_IDS[at]) for at in range(calls)]
        return write_calls(made, self.calls) if made else ""

    def _find_results(self) -> ResultFormat | None:
        """Find how tools' messages are written; None where the template refuses or drops them."""
        if self.calls is None or self.late.called is None:
            return None
        calls = 1 if self.calls.between is None else 2
        for results in (2, 1):
            text = self._try([_user(U1), _said("", calls=calls), *(_result(at) for at in range(results))])
            if text is None:
                continue
            values = {"calls": self._written(calls)}
            for at in range(results):
                values |= {f"content{at}": (R1, R2)[at], f"id{at}": RESULT_IDS[at], f"name{at}": RESULT_NAMES[at]}
            found = cut(text, values).between("calls", None)
            if not found.has(f"content{results - 1}"):
                return None
            found = found.without(prefix=self.late.called[-1], suffix=self.generation, what=_SAID_END)
            forms = []
            for at, label in enumerate([None, *found.labels("0")[-1:]][:results]):
                own = found.labels(str(at))
                lead = found.between(label, own[-1])
                named = {f"{name}{at}": name for name in ("content", "id", "name")}
                forms.append((*lead.named(named), found.slot(own[-1], named[own[-1]]), ""))
            return ResultFormat(first=forms[0], next=forms[-1], end=found.parts[-1])
        return None

    def _find_tools(self) -> ToolList | None:
        """Find how definitions of tools are listed; None where the template leaves them out."""
        one, two = self._try([_user(U1)], PROBE_TOOLS[:1]), self._try([_user(U1)], PROBE_TOOLS)
        if one is None or two is None:
            return None
        for listed in _TOOL_LISTS:
            first, second = (list_tools([tool], listed) for tool in PROBE_TOOLS)
            if first in one:
                parts = cut(two, {"first": first, "second": second})
                between = parts.between("first", "second").only_text("what parts tools")
                return msgspec.structs.replace(listed, between=between)
        if NAMES_OF_TOOLS[0] in one:
            raise Irreducible("it lists tools otherwise than as JSON of their definitions")
        return None

    def _opening(self, *, system: bool, tools: Sequence[Tool]) -> Opening | None:
        """Find the beginning of conversations of one kind; None where the template has no place for it."""
        lead = [{"role": "system", "content": SYSTEM}] if system else []
        text = self._try([*lead, _user(U1), _said(A1), _user(U2), _said(A2), _user(U3)], tools)
        if text is None:
            return None
        values = {"system": SYSTEM, "tools": list_tools(tools, self.tools or ToolList())}
        found = cut(text, values | {"u1": U1, "a1": A1, "u2": U2, "a2": A2, "u3": U3})
        if (system and not found.has("system")) or (tools and not found.has("tools")):
            return None
        head, first = found.between(None, "u1"), None
        behind = found.between("u1", "a1").without(suffix=self.said_before, what=_USER_END)
        if head.parts[-1].endswith(self.user[0]) and behind.parts == self.user[2:]:
            head = head.without(suffix=self.user[0], what=_USER_END)
        else:
            first = (*head.named(_OPENING), found.slot("u1", "content"), *behind.named(_OPENING))
            head = Cut(("",))
        if found.between("a1", "u2").parts != (self.after + self.user[0],):
            raise Irreducible("a user's message between others differs from one conversation to another")
        final = Cut((*found.between("a2", "u3").parts, found.slot("u3", "u3"), *found.between("u3", None).parts))
        final = final.without(prefix=self.after, suffix=self.generation, what=_SAID_END)
        return Opening(
            head=head.named(_OPENING),
            first=first,
            last=self._other_than_user(self._last(lead, tools, values)),
            final=self._other_than_user(final),
        )

    def _last(self, lead: Sequence[Message], tools: Sequence[Tool], values: Mapping[str, str]) -> Cut | None:
        """Find the form of the last user's message where a call follows it."""
        if self.late.called is None:
            return None
        text = self._try([*lead, _user(U1), _said(A1), _user(U2), _said("", calls=1), _result(0)], tools)
        if text is None:
            return None
        found = cut(text, {**values, "a1": A1, "u2": U2, "calls": self._written(1)})
        between = found.between("a1", "calls")
        return between.without(prefix=self.after, suffix=self.late.called[0], what=_SAID_END)

    def _other_than_user(self, form: Cut | None) -> Pieces | None:
        pieces = None if form is None else form.named(_OPENING)
        return None if pieces == self.user else pieces

    def _splits_thoughts(self) -> bool:
        """Tell whether reasoning in an assistant's text is taken apart from it."""
        within = "<think>\nwhyWHY\n</think>\n\nsoSO"
        text = self._try([_user(U1), _said(within), _user(U2)])
        if text is None or within in text:
            return False
        if text != self._try([_user(U1), _said("soSO", "whyWHY"), _user(U2)]):
            raise Irreducible("it takes reasoning apart from an assistant's text by a rule of its own")
        return True


def _argument(one: Cut) -> Pieces:
    """Find how each argument is written where they are no JSON object."""
    labels = [label + "0" for label in ("kaUNO", "vaUNO", "kbUNO", "vbUNO")]
    if not all(map(one.has, labels)):
        raise Irreducible("a call's arguments are neither a JSON object nor written one by one")
    before = one.between(one.label_before(labels[0]), labels[0]).only_text("a call")
    first, gap, second = (one.between(here, there).only_text("a call's argument") for here, there in pairwise(labels))
    if first != second:
        raise Irreducible("a call's arguments are written in different ways")
    lead = common_suffix([before, gap])
    return (lead, "key", first, "value", gap[: len(gap) - len(lead)])


def _as_one(found: Cut, argument: Pieces | None) -> Cut:
    """Make one slot of the arguments that are written one by one."""
    if argument is None:
        return found
    parts = list(found.parts)
    while (at := next((at for at, part in enumerate(parts) if part.startswith(("kaUNO", "kaDUE"))), None)) is not None:
        opening = parts[at - 1].removesuffix(argument[0])
        parts[at - 1 : at + 8] = [opening, f"arguments{parts[at][-1]}", parts[at + 7].removeprefix(argument[4])]
    return Cut(parts)
