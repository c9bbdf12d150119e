"""The chat formats that `sampling.chat` of run.toml gives by name (docs/chat.md).

`plain` is for a policy that no chat was ever shown to, `chatml` for one that knows the marks of Qwen's models, and
`llama3` is the format of Meta's first Llama 3 models, which had no tools.
"""

from __future__ import annotations

from typing import Final

from node.protocol.chat import AssistantForms, CallFormat, ChatFormat, Opening, Openings, Pieces, ResultFormat, ToolList

_TOLD: Final = "These functions can be called:\n"
_HOW: Final = '\nTo call one, write <tool_call>{"name": "its name", "arguments": {}}</tool_call> and end your turn.'
_RESULT: Final = "tool_response"
_CALL: Final = CallFormat(
    call=('<tool_call>{"name": "', "name", '", "arguments": ', "arguments", "}</tool_call>"), between="\n"
)


def _with_tools(system: str, user: str, assistant: str, end: str, *, content: str) -> ChatFormat:
    """Build a format whose tools are told in the system message, called in marks, and answered as a user."""
    called: Pieces = (assistant, "calls", end)
    said: Pieces = (assistant, content, end)
    both: Pieces = (assistant, content, "\n", "calls", end)
    answer, answer_end = f"{user}<{_RESULT}>\n", f"\n</{_RESULT}>{end}"
    return ChatFormat(
        openings=Openings(
            plain=Opening(head=("",)),
            system=Opening(head=(system, "system", end)),
            tools=Opening(head=(system + _TOLD, "tools", _HOW + end)),
            both=Opening(head=(system, "system", f"\n\n{_TOLD}", "tools", _HOW + end)),
        ),
        user=(user, "content", end),
        # Reasoning that is given apart is left out.
        early=AssistantForms(
            said=said, called=called, both=both, thought_said=said, thought_called=called, thought_both=both
        ),
        late=AssistantForms(called=called, both=both, thought_called=called, thought_both=both),
        generation=assistant.rstrip(" "),
        after_turn=end.removeprefix("<|im_end|>"),
        calls=_CALL,
        results=ResultFormat(first=(answer, "content", ""), next=(answer_end + answer, "content", ""), end=answer_end),
        tools=ToolList(subject="function", sort_keys=True),
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


PLAIN: Final = _with_tools("System: ", "User: ", "Assistant: ", "\n\n", content="content:strip")
CHATML: Final = _with_tools(
    "<|im_start|>system\n", "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n", content="content"
)
CHAT_FORMATS: Final = {"plain": PLAIN, "chatml": CHATML, "llama3": _llama3()}
