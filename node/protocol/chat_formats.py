"""The chat formats that `sampling.chat` of run.toml gives by name (docs/chat.md).

`plain` is for a policy that no chat was ever shown to, `chatml` for one that knows the marks of Qwen's models, and
`llama3` is the format of Meta's first Llama 3 models, which had no tools.
"""

from __future__ import annotations

from typing import Final

from node.protocol.chat import AssistantForms, CallFormat, ChatFormat, Opening, Openings, Pieces, ResultFormat, ToolList

_RESULT: Final = "tool_response"
_PLAIN_TOLD: Final = "These functions can be called:\n"
_PLAIN_HOW: Final = (
    '\nTo call one, write <tool_call>{"name": "its name", "arguments": {}}</tool_call> and end your turn.'
)
# Word for word what the templates of Qwen2.5 and Qwen3 tell.
_QWEN_TOLD: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    "signatures within <tools></tools> XML tags:\n<tools>\n"
)
_QWEN_HOW: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def _with_tools(
    system: str, user: str, assistant: str, end: str, *, content: str, told: str, how: str, line: str, tools: ToolList
) -> ChatFormat:
    """Build a format whose tools are told in the system message, called in marks, and answered as a user.

    `told` and `how` stand around the list of tools, `line` around the JSON of a call, in its marks.
    """
    called: Pieces = (assistant, "calls", end)
    said: Pieces = (assistant, content, end)
    both: Pieces = (assistant, content, "\n", "calls", end)
    result, result_end = f"<{_RESULT}>\n", f"\n</{_RESULT}>"
    return ChatFormat(
        openings=Openings(
            plain=Opening(head=("",)),
            system=Opening(head=(system, "system", end)),
            tools=Opening(head=(system + told, "tools", how + end)),
            both=Opening(head=(system, "system", f"\n\n{told}", "tools", how + end)),
        ),
        user=(user, "content", end),
        # Reasoning that is given apart is left out.
        early=AssistantForms(
            said=said, called=called, both=both, thought_said=said, thought_called=called, thought_both=both
        ),
        late=AssistantForms(called=called, both=both, thought_called=called, thought_both=both),
        generation=assistant.rstrip(" "),
        after_turn=end.removeprefix("<|im_end|>"),
        calls=CallFormat(
            call=(f'<tool_call>{line}{{"name": "', "name", '", "arguments": ', "arguments", f"}}{line}</tool_call>"),
            between="\n",
        ),
        # Results that follow each other are one message.
        results=ResultFormat(
            first=(user + result, "content", ""),
            next=(f"{result_end}\n{result}", "content", ""),
            end=result_end + end,
        ),
        tools=tools,
        marks=(f"</{_RESULT}>", f"<{_RESULT}>", *(("<|im_end|>", "<|im_start|>") if "<|im_end|>" in end else ())),
        special_tokens=True,
    )


def _llama3() -> ChatFormat:
    def message(role: str) -> str:
        return f"<|start_header_id|>{role}<|end_header_id|>\n\n"

    begin, end = "<|begin_of_text|>", "<|eot_id|>"
    said: Pieces = (message("assistant"), "content:strip", end)
    return ChatFormat(
        openings=Openings(
            plain=Opening(head=(begin,)),
            system=Opening(head=(begin + message("system"), "system:strip", end)),
        ),
        user=(message("user"), "content:strip", end),
        early=AssistantForms(said=said, thought_said=said),
        late=AssistantForms(),
        generation=message("assistant"),
        after_turn="",
        marks=("<|begin_of_text|>", "<|end_header_id|>", "<|eot_id|>", "<|start_header_id|>"),
    )


PLAIN: Final = _with_tools(
    "System: ",
    "User: ",
    "Assistant: ",
    "\n\n",
    content="content:strip",
    told=_PLAIN_TOLD,
    how=_PLAIN_HOW,
    line="",
    tools=ToolList(subject="function", sort_keys=True),
)
CHATML: Final = _with_tools(
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    "<|im_start|>assistant\n",
    "<|im_end|>\n",
    content="content",
    told=_QWEN_TOLD,
    how=_QWEN_HOW,
    line="\n",
    tools=ToolList(),
)
CHAT_FORMATS: Final = {"plain": PLAIN, "chatml": CHATML, "llama3": _llama3()}
